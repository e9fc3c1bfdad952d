"""What every request and response that Django serves passes: no NUL comes in, and a Content-Security-Policy goes out."""

import logging
import re
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin

from controlplane.console.pages.errors.views import unavailable
from controlplane.database import ERRORS, outage
from controlplane.gateway.errors import invalid

logger = logging.getLogger(__name__)

NUL_IN_JSON = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
NO_NUL = "The request holds a NUL character (U+0000), which no text here may have."


@sync_and_async_middleware
def refuse_nul(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Refuse requests with a NUL in their address, form or JSON body: PostgreSQL fails each query with one."""
    if iscoroutinefunction(get_response):

        async def asynchronous(request: HttpRequest) -> HttpResponseBase:
            return _refusal(request) or await get_response(request)

        return markcoroutinefunction(asynchronous)
    return lambda request: _refusal(request) or get_response(request)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    holds = "\0" in request.path or "%00" in request.META.get("QUERY_STRING", "")
    if request.method not in ("GET", "HEAD") and request.content_type != "multipart/form-data":
        form = request.content_type == "application/x-www-form-urlencoded"
        holds |= NUL_IN_JSON.search(request.body) is not None  # of a form too, as which curl sends JSON by default
        holds |= form and b"%00" in request.body
    if not holds:
        return None
    if request.path.startswith(("/api/", "/v1/")):
        return JsonResponse({"error": invalid(NO_NUL).fields() | {"field": None}}, status=400)
    return HttpResponse(NO_NUL, status=400, content_type="text/plain")


class DatabaseOutage(MiddlewareMixin):
    """Answer 503 with a sentence where a page or an action failed for what the database cannot do at present."""

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        if not isinstance(error, ERRORS) or not (why := outage(error)):
            return None
        logger.error("%s %s: %s", request.method, request.path, error)
        return unavailable(request, why)


@sync_and_async_middleware
def content_security_policy(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Set the policy on every response that does not carry one; async when the stack is."""
    policy = "; ".join(f"{directive} {value}" for directive, value in settings.SECURE_CSP.items())

    if iscoroutinefunction(get_response):

        async def asynchronous(request: HttpRequest) -> HttpResponseBase:
            response: HttpResponseBase = await get_response(request)
            response.headers.setdefault("Content-Security-Policy", policy)
            return response

        return markcoroutinefunction(asynchronous)

    def synchronous(request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = get_response(request)
        response.headers.setdefault("Content-Security-Policy", policy)
        return response

    return synchronous
