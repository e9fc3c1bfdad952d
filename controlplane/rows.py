"""Rows as lists show them: narrowed by filters, searched, the newest of each kind, and in pages by cursor."""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar

from django.db.models import Max, Model, Q, QuerySet

Row = TypeVar("Row", bound=Model)
PAGE_SIZE = 50
MAX_PAGE_SIZE = 500


def narrowed(rows: QuerySet[Row], **lookups: Any) -> QuerySet[Row]:
    """Those of *rows* that fit all of *lookups*; an empty value does not narrow."""
    return rows.filter(**{name: value for name, value in lookups.items() if value not in (None, "")})


def containing(rows: QuerySet[Row], text: str, *fields: str) -> QuerySet[Row]:
    """Those of *rows* that have each word of *text* in one of *fields*, in whatever case."""
    for word in text.split():
        rows = rows.filter(reduce(or_, (Q(**{f"{field}__icontains": word}) for field in fields)))
    return rows


def newest_of_each(rows: QuerySet[Row], *by: str) -> QuerySet[Row]:
    """The row with the highest key of each value of *by*."""
    newest = rows.order_by().values(*by).annotate(newest=Max("pk")).values_list("newest", flat=True)
    return rows.filter(pk__in=list(newest))


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """*next_cursor* is passed back for the next page; None on the last one."""

    rows: list[Row]
    next_cursor: int | None


def page_of(rows: QuerySet[Row], cursor: int | None = None, size: int = PAGE_SIZE) -> Page[Row]:
    """The page of *rows* older than *cursor*, from the newest without one.

    A cursor is the key of a page's last row, and keys only grow: pages neither repeat nor skip while new rows arrive.
    """
    size = max(1, min(size, MAX_PAGE_SIZE))
    if cursor is not None:
        rows = rows.filter(pk__lt=cursor)
    page = list(rows.order_by("-pk")[: size + 1])
    return Page(page[:size], page[size - 1].pk if len(page) > size else None)


def sorted_page_of(
    rows: QuerySet[Row], field: str, descending: bool, cursor: int | None = None, size: int = PAGE_SIZE
) -> Page[Row]:
    """The page of *rows* by *field* after the first *cursor* of them; rows without a value are left out.

    Rows that arrive meanwhile may shift what follows: a page may then repeat a row or skip one.
    """
    start, size = cursor or 0, max(1, min(size, MAX_PAGE_SIZE))
    order = [f"-{field}" if descending else field, "-pk"]
    page = list(rows.filter(**{f"{field}__isnull": False}).order_by(*order)[start : start + size + 1])
    return Page(page[:size], start + size if len(page) > size else None)
