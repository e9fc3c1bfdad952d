"""Events: the list and the page of one event."""

import json
from functools import partial
from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import carried_out
from controlplane.console.lists import list_page
from controlplane.console.selectors.events import event_row, event_title, subject_href
from controlplane.events.models import Event
from controlplane.events.selectors import kind_in_words, visible_events
from controlplane.resources.events import EVENTS
from controlplane.resources.undo import can_be_undone, undo_of

FOLDED: Final = {"plan.in_force"}
"""Kinds that come each minute."""


def folded(rows: list[Event]) -> list[dict[str, Any]]:
    """Return *rows* for the list; of those of each minute the newest stands for all of its page."""
    shown: list[dict[str, Any]] = []
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.kind in FOLDED and row.kind in first:
            first[row.kind]["more"] += 1
            continue
        shown.append(event_row(row) | {"more": 0, "undo": can_be_undone(row.kind)})
        first.setdefault(row.kind, shown[-1])
    return shown


@require_safe
@fleet_role(Role.VIEWER)
def events(request: HttpRequest) -> HttpResponseBase:
    unfolded = bool(request.GET.get("kind"))
    show = (lambda rows: [event_row(row) for row in rows]) if unfolded else folded
    return list_page(request, EVENTS, show)


@require_POST
@fleet_role(Role.VIEWER)
def undo(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Take the way back of an event, by the role that it needs."""
    row = get_object_or_404(visible_events(request.user), pk=pk)
    way = undo_of(row, partial(may, request))
    if way is None:
        raise PermissionDenied("This event cannot be undone: it is over, or it needs another role.")
    page = reverse("console:event", args=[pk])
    return carried_out(request, lambda form: way.carry_out(form.user, form.reason), lambda: page, "Nothing was undone")


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
        "kind": kind_in_words(row.kind),
        "undo": undo_of(row, partial(may, request)),
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
