"""What pages fetch while they are open: the snapshot (for browsers without a websocket) and redrawn charts."""

import hashlib
from typing import Any

import orjson
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET

from controlplane.accounts.models import Role
from controlplane.console import dashboards, deltas, selectors
from controlplane.console.access import fleet_role, may
from controlplane.console.context import freshness
from controlplane.console.filters import View, view_of
from controlplane.console.hub import hub
from controlplane.console.state import OPERATORS_TOPICS, TOPICS, LiveState
from controlplane.fleet.selectors import instances


def live_context(state: LiveState, view: View, topics: str) -> dict[str, Any]:
    """What the head of a live page needs: filters, the badge, and what its connection subscribes to."""
    return {
        "live": state,
        "freshness": freshness(state),
        "view": view,
        "topics": topics,
        "newest_event_id": selectors.newest_event_id() if "events" in topics else "",
    }


def json_response(request: HttpRequest, data: Any) -> HttpResponse:
    """*data* with an ETag; 304 when the browser has it already."""
    body = orjson.dumps(data)
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers=headers)
    return HttpResponse(body, content_type="application/json", headers=headers)


@require_GET
@fleet_role(Role.VIEWER)
def snapshot(request: HttpRequest) -> HttpResponse:
    """`GET /console/api/snapshot?topics=overview,instances`: the message `snapshot` of the live connection."""
    topics = [topic for topic in request.GET.get("topics", "overview").split(",") if topic in TOPICS]
    if not OPERATORS_TOPICS.isdisjoint(topics) and not may(request, Role.OPERATOR):
        raise PermissionDenied("This needs the role operator over the fleet.")
    return json_response(request, deltas.snapshot(hub.state().project(topics)))


@require_GET
@fleet_role(Role.VIEWER)
def charts(request: HttpRequest) -> HttpResponse:
    """`GET /console/api/charts?charts=ttft,kv&…`: figures of the overview, or with `instance=NAME` of one instance."""
    state = hub.state()
    view = view_of(request, selectors.model_names())
    wanted = set(request.GET.get("charts", "").split(","))
    name = request.GET.get("instance")
    answer: dict[str, Any] = {}
    if name:
        drawn = dashboards.instance(state, view, get_object_or_404(instances(), name=name))
    else:
        drawn = dashboards.overview(state, view)
        answer["sparks"] = dashboards.sparks(state, view)
    answer["charts"] = {chart.key: chart.payload() for chart in drawn if chart.key in wanted}
    return json_response(request, answer)
