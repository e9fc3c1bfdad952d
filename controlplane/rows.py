"""Rows for lists: filtered, searched, newest of each kind, and cursor pagination."""

from dataclasses import dataclass
from datetime import date
from functools import reduce
from operator import or_
from typing import Annotated, Any, Generic, TypeVar

from django.db.models import Max, Model, Q, QuerySet
from pydantic import AfterValidator, AwareDatetime

Row = TypeVar("Row", bound=Model)
Date = TypeVar("Date", bound=date)
PAGE_SIZE = 50
MAX_PAGE_SIZE = 500
MAX_WORDS = 12
"""Of a search; further ones are ignored."""


def within(at: Date) -> Date:
    """Return *at*. Raise ValueError outside of 1970 to 2199: other zones and periods would have no date at the ends."""
    if not 1970 <= at.year < 2200:
        raise ValueError("give a time of the years 1970 to 2199")
    return at


Instant = Annotated[AwareDatetime, AfterValidator(within)]
"""A time that a caller gives, with its offset."""


def narrowed(rows: QuerySet[Row], **lookups: Any) -> QuerySet[Row]:
    """Return *rows* that match all *lookups*; empty values are ignored."""
    return rows.filter(**{name: value for name, value in lookups.items() if value not in (None, "")})


def containing(rows: QuerySet[Row], text: str, *fields: str) -> QuerySet[Row]:
    """Return *rows* that have each word of *text* in one of *fields*, ignoring case."""
    for word in text.split()[:MAX_WORDS]:
        rows = rows.filter(reduce(or_, (Q(**{f"{field}__icontains": word}) for field in fields)))
    return rows


def newest_of_each(rows: QuerySet[Row], *by: str) -> QuerySet[Row]:
    """Return the row with the highest key for each value of *by*."""
    newest = rows.order_by().values(*by).annotate(newest=Max("pk")).values_list("newest", flat=True)
    return rows.filter(pk__in=list(newest))


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """One page of rows. *next_cursor* requests the next page; None on the last one."""

    rows: list[Row]
    next_cursor: int | None


def page_of(rows: QuerySet[Row], cursor: int | None = None, size: int = PAGE_SIZE) -> Page[Row]:
    """Return the page of *rows* older than *cursor*, or the newest page without one.

    A cursor is the key of a page's last row, and keys only grow: pages neither repeat nor skip rows when new ones arrive.
    """
    size = max(1, min(size, MAX_PAGE_SIZE))
    if cursor is not None:
        rows = rows.filter(pk__lt=cursor)
    page = list(rows.order_by("-pk")[: size + 1])
    return Page(page[:size], page[size - 1].pk if len(page) > size else None)


def sorted_page_of(rows: QuerySet[Row], field: str, descending: bool, cursor: int | None = None) -> Page[Row]:
    """Return the page of *rows* by *field* after the first *cursor* rows; rows without a value are left out.

    New rows may shift the following pages, which may then repeat or skip a row.
    """
    start, end = cursor or 0, (cursor or 0) + PAGE_SIZE
    order = [f"-{field}" if descending else field, "-pk"]
    page = list(rows.filter(**{f"{field}__isnull": False}).order_by(*order)[start : end + 1])
    return Page(page[:PAGE_SIZE], end if len(page) > PAGE_SIZE else None)
