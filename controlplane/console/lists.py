"""Lists of rows, newest first or sorted: a page of them by cursor, or all that fit as CSV."""

from collections.abc import Callable
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render

from controlplane.resources.filters import Order, number
from controlplane.resources.tables import ROW_LIMIT, Columns, table
from controlplane.rows import page_of, sorted_page_of


def list_page(
    request: HttpRequest,
    template: str,
    rows: QuerySet[Any],
    columns: Columns,
    name: str,
    context: dict[str, Any],
    show: Callable[[list[Any]], list[Any]] = list,
    order: Order | None = None,
) -> HttpResponseBase:
    """The page of *rows* after the cursor, as *show* makes them, or with `?format=csv` the file *name*.

    Newest first; by *order*, where its field is one.
    """
    if request.GET.get("format") == "csv":
        return table(columns, rows.order_by("-pk")[:ROW_LIMIT].iterator(chunk_size=1000)).csv(name)
    cursor = number(request.GET.get("before", ""))
    page = (
        sorted_page_of(rows, order.field, order.descending, cursor) if order and order.field else page_of(rows, cursor)
    )
    listed = {
        "is_sorted": bool(order and order.field),
        "rows": show(page.rows),
        "cursor": cursor,
        "next_cursor": page.next_cursor,
        "row_limit": ROW_LIMIT,
    }
    return render(request, template, listed | context)
