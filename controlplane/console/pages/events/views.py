"""Events: one stream with filters, a permalink for each, paged by cursor."""

import json

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.lists import list_page
from controlplane.console.live.hub import hub
from controlplane.console.live.views import live_context
from controlplane.console.selectors.event_steps import folded
from controlplane.console.selectors.events import event_title, subject_href
from controlplane.events.models import Severity
from controlplane.events.selectors import event_kinds, filter_events, visible_events
from controlplane.resources.filters import Filters, Hidden, Search, Select, every, last_hours, number
from controlplane.resources.tables import Columns

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
    filters = Filters(
        request.GET,
        Search("q", "Search in subject, reason, kind and actor", length=120),
        Select("kind", "Kind", every("kinds", event_kinds())),
        Select("severity", "Severity", every("severities", Severity.choices)),
        Select("hours", "When", [("", "Any time"), *last_hours(1, 24, 168)]),
        Hidden("actor"),
    )
    rows = filter_events(
        visible_events(request.user),
        kind=filters["kind"],
        severity=filters["severity"],
        actor=filters["actor"],
        text=filters["q"],
        since=filters.since,
    )
    context = {
        **live_context(hub.state(), "events"),
        "filters": filters,
        # The newest page, unfiltered, grows while it is open.
        "follows": number(request.GET.get("before", "")) is None and not filters.narrow,
    }
    return list_page(request, "console/events/events.html", rows, COLUMNS, "events", context, folded)


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
