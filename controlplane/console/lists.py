"""Page of a resource: rows sorted or newest first, by cursor; or all matching rows as CSV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render

from controlplane.accounts.models import Role, Tenant, User
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import may
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context
from controlplane.resources.filters import Filters, number
from controlplane.resources.resource import Resource
from controlplane.resources.tables import ROW_LIMIT


@dataclass(frozen=True, slots=True)
class PageViewer:
    """Viewer of a page, as resources expect it."""

    person: User
    sees_fleet: bool

    def tenants(self) -> QuerySet[Tenant]:
        return visible_tenants(self.person)


def viewer_of(request: HttpRequest) -> PageViewer:
    return PageViewer(cast(User, request.user), may(request, Role.VIEWER))


def list_page(
    request: HttpRequest,
    resource: Resource,
    show: Callable[[list[Any]], Sequence[Any]] = list,
    status: int = 200,
    known: Sequence[Any] | None = None,
    fold: tuple[Callable[[list[Any], Filters], Sequence[Any]], Sequence[str]] | None = None,
    **more: Any,
) -> HttpResponseBase:
    """Return the page of *resource* after the cursor, rows rendered by *show*; with `?format=csv`, the file.

    *known* replace the rows of the resource where the page has newer ones; *fold* arranges those of a page that is not
    sorted, in these of its columns; *more* is additional template context.
    """
    viewer, folded = viewer_of(request), False
    filters, rows = resource.listed(viewer, request.GET, known)
    if resource.whole:
        rows = resource.arranged(list(show(list(rows))), filters)
    if request.GET.get("format") == "csv":
        return resource.csv(rows, viewer.sees_fleet)
    cursor = None if resource.whole else number(request.GET.get("before", ""))
    if isinstance(rows, QuerySet):
        page = resource.page_of(rows, filters, cursor)
        shown, next_cursor = show(page.rows), page.next_cursor
    else:
        folded = fold is not None and not filters.order.field
        shown, next_cursor = fold[0](list(rows), filters) if fold and folded else rows[: resource.whole], None
    live = (
        resource.live if viewer.sees_fleet else ""
    )  # the live connection is the fleet's; other pages are redrawn by time
    context = {
        **(live_context(feed.state(), live) if live else {}),
        "layout": "console/live_page.html" if live else "console/page.html",
        "resource": resource,
        "filters": filters,
        "columns": resource.named(*fold[1]) if fold and folded else resource.page_columns(viewer),
        "rows": shown,
        "total": len(rows) if resource.whole else None,
        "is_cut": resource.whole and not folded and len(rows) > resource.whole,
        "cursor": cursor,
        "next_cursor": next_cursor,
        "is_sorted": bool(filters.order.field),
        "row_limit": ROW_LIMIT,
        # Only the newest, unfiltered page grows while open.
        "follows": cursor is None and not filters.narrow and not resource.whole,
        **more,
    }
    return render(request, resource.template, context, status=status)
