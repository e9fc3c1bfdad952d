"""Hands a new secret from the form that created it to the page that shows it once.

A form answers with a redirect, so that reloading its page makes nothing new. Between the two the session holds the secret
under a one-time pad that is in a cookie of that page alone: neither of them gives it away, and it is in no URL.
"""

import secrets

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

NAME = "shown_once"  # of the cookie, and in the session
LIFETIME_S = 120
HELD = 4  # pages of one session that may wait at a time


def redirect_with(request: HttpRequest, path: str, secret: str) -> HttpResponse:
    """Redirect to *path*, whose view may `take` *secret* once."""
    pad = secrets.token_bytes(len(secret.encode()))
    held = request.session.get(NAME, {}) | {path: _xor(secret.encode(), pad).hex()}
    request.session[NAME] = dict(list(held.items())[-HELD:])
    response = HttpResponseRedirect(path)
    response.set_cookie(
        NAME,
        pad.hex(),
        max_age=LIFETIME_S,
        path=path,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Strict",
    )
    return response


def take(request: HttpRequest) -> str | None:
    """Return the secret for this page; None if it was taken, or is not for this browser."""
    held = dict(request.session.get(NAME, {}))
    if request.method != "GET" or request.path not in held:
        return None
    covered = bytes.fromhex(held.pop(request.path))
    request.session[NAME] = held
    try:
        return _xor(covered, bytes.fromhex(request.COOKIES.get(NAME, ""))).decode()
    except ValueError:  # another browser, or the cookie is out of date
        return None


def forget(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Return *response* with no-store; after the secret was shown, its pad cookie is deleted."""
    if request.method == "GET":
        response.delete_cookie(NAME, path=request.path, samesite="Strict")
    response.headers["Cache-Control"] = "no-store"
    return response


def _xor(data: bytes, pad: bytes) -> bytes:
    """Raises ValueError if they differ in length."""
    return bytes(one ^ other for one, other in zip(data, pad, strict=True))
