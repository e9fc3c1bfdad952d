"""Events: the list and the page of one event."""

import json

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.lists import list_view
from controlplane.console.selectors.events import event_row, event_title, subject_href
from controlplane.events.selectors import visible_events
from controlplane.resources.events import EVENTS

events = list_view(EVENTS, lambda rows: [event_row(row) for row in rows])


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
