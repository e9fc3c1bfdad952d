"""Operators' actions: a form posts a reason, a service carries it out, and a message answers on the page of the form."""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import wraps
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from controlplane.accounts.models import Role, User
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import View, fleet_role, signed_in
from controlplane.events import since
from controlplane.fleet.lifecycle.states import ActionError

Rows = type[Model] | QuerySet[Any] | Callable[[HttpRequest], QuerySet[Any]] | None
Page = str | Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class ActionForm:
    """Posted form of an action: who asks, why, and its fields."""

    user: User
    reason: str
    fields: QueryDict

    def check(self, *rows: Model, fields: Collection[str], given: str = "") -> None:
        """Raise ValidationError if another changed *fields* of *rows* since the form was drawn (`events.since`)."""
        since.check(self.fields.get(since.FIELD, ""), *rows, fields=fields, given=given)


def action(
    least: Role | None,
    rows: Rows = None,
    *,
    page: Page,
    key: str = "pk",
    among: Container[str] = (),
    unchanged: str = "{row} was left as it is",
    needs_reason: bool = True,
) -> Callable[[Callable[..., str]], View]:
    """Return a decorator that makes a POST view of a function of (form, row, further arguments of the address).

    The function returns a sentence on the result, or raises ActionError or ValidationError. *least* is the role over the
    fleet (None: any signed-in user), *rows* has the row that the argument *key* of the address names (None: the address
    names none, and the function gets no row), and *among* are the words allowed at the end of the address. *page* names
    the page after it, or returns its address for the row. *unchanged* is the message if the reason is missing, a format
    of `row` and the further arguments.
    """

    def decorate(carry_out: Callable[..., str]) -> View:
        @require_POST
        @(signed_in if least is None else fleet_role(least))
        @wraps(carry_out)
        def view(request: HttpRequest, **address: Any) -> HttpResponse:
            if among and (word := list(address.values())[-1]) not in among:
                raise Http404(f"There is no action {word}.")
            known: Any = rows(request) if callable(rows) and not isinstance(rows, type) else rows
            row = None if known is None else get_object_or_404(known, **{key: address.pop(key)})
            subject = () if row is None else (row,)
            return carried_out(
                request,
                lambda form: carry_out(form, *subject, **address),
                lambda: page if isinstance(page, str) else page(row),
                unchanged.format(row=row, **address) if needs_reason else "",
            )

        return view

    return decorate


def carried_out(
    request: HttpRequest, carry_out: Callable[[ActionForm], str], page: Callable[[], str], unchanged: str
) -> HttpResponse:
    """Carry out what the form posts and redirect to its page with a message: the result, or why it was refused.

    *page* names the page after it, as it is then. *unchanged* begins the message if the reason is missing; if it is empty,
    no reason is needed.
    """
    form = ActionForm(user_of(request), " ".join(request.POST.get("reason", "").split())[:255], request.POST)
    try:
        if unchanged and not form.reason:
            raise ActionError(f"{unchanged}: give a reason, which is kept with the event")
        messages.success(request, carry_out(form))
    except ValidationError as refusal:
        messages.error(request, f"{' '.join(refusal.messages).rstrip('.')}.")
    except ActionError as refusal:
        messages.error(request, f"{str(refusal).rstrip('.')}.")
    return back(request, page())


def back(request: HttpRequest, page: str) -> HttpResponse:
    """Redirect to the form's page if it is one of ours, else to *page*, a name or an address."""
    target = request.POST.get("next", "")
    if target and url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure()):
        return redirect(target)
    return redirect(page)
