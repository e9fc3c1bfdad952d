"""What the form of an operator's action gives: the reason, and the page to come back to."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme


def reason_of(request: HttpRequest) -> str:
    return " ".join(request.POST.get("reason", "").split())[:255]


def back(request: HttpRequest, name: str, *args: Any) -> HttpResponse:
    """To the page that the form was on, if it is one of ours, else to the page *name*."""
    target = request.POST.get("next", "")
    if target and url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure()):
        return redirect(target)
    return redirect(name, *args)
