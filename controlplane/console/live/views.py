"""Shared by live pages: their context, and charts redrawn alone."""

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse

from controlplane.console.charts.spec import Chart
from controlplane.console.context import freshness
from controlplane.console.live.fragments import drawn_by_page
from controlplane.console.live.state import LiveState


def live_context(state: LiveState, topics: str) -> dict[str, Any]:
    """Context of a live page's head: the badge, and the topics of its connection."""
    return {
        "live": state,
        "freshness": freshness(state),
        "topics": topics,
        "drawn": drawn_by_page(state, filter(None, topics.split(","))),
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


def of_charts(
    request: HttpRequest, charts: Iterable[Chart], file: str = "{}", **more: Any
) -> HttpResponse | StreamingHttpResponse | None:
    """The answer where the address of a page asks for *charts* alone: as they are now (`?charts=KEY,KEY`), or the data of
    one as a file (`?format=csv&table=KEY`), its name by *file*.
    """
    if "charts" in request.GET:
        return redrawn(request, charts, **more)
    if request.GET.get("format") == "csv":
        return next((one.csv(file.format(one.key)) for one in charts if one.key == request.GET.get("table")), None)
    return None
