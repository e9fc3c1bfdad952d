"""Lists of rows, newest first: a page of them by cursor, or all that fit as CSV."""

from collections.abc import Callable
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render

from controlplane.console.filters import number
from controlplane.console.tables import Columns, table
from controlplane.exports import ROW_LIMIT

PAGE_SIZE = 50


def list_page(
    request: HttpRequest,
    template: str,
    rows: QuerySet[Any],
    columns: Columns,
    name: str,
    context: dict[str, Any],
    show: Callable[[Any], Any] = lambda row: row,
) -> HttpResponseBase:
    """The page of *rows* after the cursor, each as *show* makes it, or with `?format=csv` the file *name*.

    Rows that arrive meanwhile neither repeat nor skip anything.
    """
    rows = rows.order_by("-pk")
    if request.GET.get("format") == "csv":
        return table(columns, rows[:ROW_LIMIT].iterator(chunk_size=1000)).csv(name)
    cursor = number(request.GET.get("before", ""))
    if cursor is not None:
        rows = rows.filter(pk__lt=cursor)
    page = list(rows[: PAGE_SIZE + 1])
    return render(
        request,
        template,
        {
            "rows": [show(row) for row in page[:PAGE_SIZE]],
            "cursor": cursor,
            "next_cursor": page[PAGE_SIZE - 1].pk if len(page) > PAGE_SIZE else None,
            "row_limit": ROW_LIMIT,
            **context,
        },
    )
