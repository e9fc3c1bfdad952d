"""Shared by live pages: their context, charts redrawn alone, and the snapshot for browsers without a websocket."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import orjson
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.charts.spec import Chart
from controlplane.console.context import freshness
from controlplane.console.live.fragments import OPERATORS_TOPICS, drawn_by_page, is_topic
from controlplane.console.live.hub import hub
from controlplane.console.live.state import LiveState


def live_context(state: LiveState, topics: str) -> dict[str, Any]:
    """Context of a live page's head: the badge, and the topics of its connection."""
    return {
        "live": state,
        "freshness": freshness(state),
        "topics": topics,
        "drawn": json.dumps(drawn_by_page(state, filter(None, topics.split(",")))),
    }


def json_response(request: HttpRequest, data: Any) -> HttpResponse:
    """*data* with an ETag; 304 when the browser has it already."""
    body = orjson.dumps(data)
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers=headers)
    return HttpResponse(body, content_type="application/json", headers=headers)


def redrawn(request: HttpRequest, charts: Iterable[Chart], **more: Any) -> HttpResponse:
    """Those of *charts* that `?charts=KEY,KEY` names, as JSON."""
    wanted = set(request.GET.get("charts", "").split(","))
    return json_response(request, {"charts": {one.key: one.payload() for one in charts if one.key in wanted}, **more})


@require_GET
@fleet_role(Role.VIEWER)
def snapshot(request: HttpRequest) -> HttpResponse:
    """`GET /console/api/snapshot?topics=instances`: the message `state` of the live connection, with all fragments."""
    topics = [topic for topic in request.GET.get("topics", "").split(",") if topic and is_topic(topic)]
    if not OPERATORS_TOPICS.isdisjoint(topics) and not may(request, Role.OPERATOR):
        raise PermissionDenied("This needs the role operator over the fleet.")
    hub.state()
    state, html, drawn = hub.draw(topics)
    message = {"t": "state", "ts": state.ts, "source": state.source.value, "html": html, "drawn": drawn}
    return json_response(request, message)
