"""Events: one stream with filters, a permalink for each, paged by cursor."""

import json
from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.filters import choice, number, view_of
from controlplane.console.live.hub import hub
from controlplane.console.live.views import live_context
from controlplane.console.selectors.events import event_row, event_title, subject_href
from controlplane.console.tables import Columns, table
from controlplane.events.models import Severity
from controlplane.events.selectors import event_kinds, filter_events, visible_events
from controlplane.exports import ROW_LIMIT
from controlplane.paging import page_of

SINCE_H = (1, 24, 168)
COLUMNS: Columns = {
    "Event": "pk",
    "At (UTC)": "at",
    "Kind": "kind",
    "Severity": "severity",
    "Actor": "actor",
    "Subject type": "subject_type",
    "Subject id": "subject_id",
    "Subject": "subject",
    "Reason": "reason",
    "Before (JSON)": "before",
    "After (JSON)": "after",
    "Inputs (JSON)": "inputs",
}


@require_safe
@fleet_role(Role.VIEWER)
def events(request: HttpRequest) -> HttpResponseBase:
    query = request.GET
    kinds = event_kinds()
    hours = number(query, "hours")
    hours = hours if hours in SINCE_H else None
    filters: dict[str, Any] = {
        "kind": choice(query, "kind", kinds),
        "severity": choice(query, "severity", Severity.values),
        "actor": query.get("actor", "").strip()[:120],
        "text": query.get("q", "").strip()[:120],
    }
    since = timezone.now() - timedelta(hours=hours) if hours else None
    rows = filter_events(visible_events(request.user), **filters, since=since)
    if query.get("format") == "csv":
        limited = rows.order_by("-pk")[:ROW_LIMIT]
        return table(COLUMNS, limited.iterator(chunk_size=1000)).csv("events")
    cursor = number(query, "before")
    page = page_of(rows, cursor)
    filtered = any(filters.values()) or hours is not None
    follows = cursor is None and not filtered  # the newest page, unfiltered, grows while it is open
    context = {
        **live_context(hub.state(), view_of(request, ()), "overview,events"),
        "rows": [event_row(row) for row in page.rows],
        "next_cursor": page.next_cursor,
        "cursor": cursor,
        "kinds": kinds,
        "severities": Severity.choices,
        "filters": filters,
        "filtered": filtered,
        "follows": follows,
        "hours": hours,
        "since_hours": SINCE_H,
        "row_limit": ROW_LIMIT,
    }
    return render(request, "console/events/events.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def event(request: HttpRequest, pk: int) -> HttpResponse:
    row = get_object_or_404(visible_events(request.user), pk=pk)
    keys = sorted({*row.before, *row.after})
    changes = [
        {
            "key": key,
            "before": row.before.get(key),
            "after": row.after.get(key),
            "had": key in row.before,
            "has": key in row.after,
        }
        for key in keys
    ]
    context = {
        "event": row,
        "title": event_title(row),
        "changes": changes,
        "inputs": json.dumps(row.inputs, indent=2, sort_keys=True) if row.inputs else "",
        "subject_href": subject_href(row),
        "older": visible_events(request.user)
        .filter(pk__lt=row.pk)
        .order_by("-pk")
        .values_list("pk", flat=True)
        .first(),
        "newer": visible_events(request.user).filter(pk__gt=row.pk).order_by("pk").values_list("pk", flat=True).first(),
    }
    return render(request, "console/events/event.html", context)
