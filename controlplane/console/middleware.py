"""The console's Content-Security-Policy header, from settings.SECURE_CSP (Django 6 brings this built in)."""

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware


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
