"""Operators' actions: carried out with a reason, and answered by a message on the page of the form."""

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme

from controlplane.fleet.lifecycle.states import ActionError


def act_with_reason(request: HttpRequest, act: Callable[[str], str], unchanged: str) -> None:
    """Run *act* with the form's reason; it returns a sentence on the result or raises ActionError.

    *unchanged* is the message if the reason is missing.
    """
    reason = " ".join(request.POST.get("reason", "").split())[:255]
    if not reason:
        messages.error(request, f"{unchanged}: give a reason, which is kept with the event.")
        return
    try:
        messages.success(request, act(reason))
    except ActionError as refusal:
        messages.error(request, f"{str(refusal).rstrip('.')}.")


def back(request: HttpRequest, name: str, *args: Any) -> HttpResponse:
    """Redirect to the form's page if it is one of ours, else to the page *name*."""
    target = request.POST.get("next", "")
    if target and url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure()):
        return redirect(target)
    return redirect(name, *args)
