"""The console's Content-Security-Policy header, from settings.SECURE_CSP (Django 6 brings this built in)."""

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings


def content_security_policy(get_response):
    """Set the policy on every response that does not carry one; async when the stack is."""
    policy = "; ".join(f"{directive} {value}" for directive, value in settings.SECURE_CSP.items())

    if iscoroutinefunction(get_response):

        async def middleware(request):
            response = await get_response(request)
            response.headers.setdefault("Content-Security-Policy", policy)
            return response

        return markcoroutinefunction(middleware)

    def middleware(request):
        response = get_response(request)
        response.headers.setdefault("Content-Security-Policy", policy)
        return response

    return middleware


content_security_policy.sync_capable = True
content_security_policy.async_capable = True
