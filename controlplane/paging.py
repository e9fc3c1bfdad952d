"""Pages of rows, newest first, by cursor: for lists of the REST API and of the console."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from django.db.models import Model, QuerySet

Row = TypeVar("Row", bound=Model)
PAGE_SIZE = 50
MAX_PAGE_SIZE = 500


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """*next_cursor* is passed back for the next, older page; None on the last one."""

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
