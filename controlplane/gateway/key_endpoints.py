"""Endpoints below `/v1` that Django serves: callers have a key, and errors come in OpenAI's shape."""

import logging
from collections.abc import Callable
from functools import wraps

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.decorators.csrf import csrf_exempt

from controlplane.accounts.models import ApiKey, hash_secret
from controlplane.database import ERRORS, outage
from controlplane.gateway.errors import ApiError, invalid_key, unavailable

logger = logging.getLogger(__name__)


def key_of(request: HttpRequest) -> ApiKey:
    """The API key that *request* came with. Raises ApiError 401."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise invalid_key("No API key was sent. Send `Authorization: Bearer <key>`.")
    key = ApiKey.objects.select_related("tenant").filter(sha256=hash_secret(secret.strip())).first()
    if key is None or not key.usable or not key.tenant.active:
        raise invalid_key("This API key is unknown or has been revoked.")
    return key


def endpoint(**methods: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """A view that calls the function of the request's method with the key; errors come in OpenAI's shape."""

    @csrf_exempt
    def view(request: HttpRequest, **parameters: str) -> HttpResponseBase:
        try:
            serve = methods.get(request.method or "")
            if serve is None:
                allowed = ", ".join(methods)
                raise ApiError(
                    405,
                    f"{request.path} takes {allowed}, not {request.method}.",
                    code="method_not_allowed",
                    headers=((b"allow", allowed.encode()),),
                )
            return serve(request, key_of(request), **parameters)
        except ApiError as error:
            return _answer(error)
        except ERRORS as error:
            if not (why := outage(error)):
                raise
            logger.error("%s %s: the database does not serve it: %s", request.method, request.path, error)
            return _answer(unavailable(why, code="database_unavailable", retry_after_s=2.0))

    return wraps(next(iter(methods.values())))(view)


def _answer(error: ApiError) -> HttpResponse:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return HttpResponse(error.body(), status=error.status, headers=headers)
