"""Rows made, changed and deleted by admins in a dialog of their list, at `?edit=12` or `?edit=new`."""

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.forms import ModelForm
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import may
from controlplane.console.lists import viewer_of
from controlplane.events import since
from controlplane.fleet.inventory import services
from controlplane.resources.filters import number
from controlplane.resources.forms import ReasonedForm, dialog_form
from controlplane.resources.resource import Resource

NEW = "new"


@dataclass(frozen=True, slots=True)
class Editing:
    """The dialog: *row* is None for a new one."""

    form: ModelForm[Any]
    row: Any
    noun: str
    address: str
    drawn_after: str
    deletable: bool


def edit(request: HttpRequest, resource: Resource, base: Any = ReasonedForm) -> Editing | HttpResponse | None:
    """Return the dialog that the address asks for, or after it the redirect to the list; None where none is asked for.

    Rows of a kind are saved by the inventory's services. Without a kind, rows are only made: *base* saves them itself.
    """
    key, kind = request.GET.get("edit", ""), resource.kind
    if not key:
        if request.method == "POST":
            raise Http404("Nothing is edited here.")
        return None
    if not may(request, Role.ADMIN):
        raise PermissionDenied("This needs the role admin over the fleet.")
    drawn_after, read_at = str(since.newest()), request.POST.get(since.FIELD, "")
    rows: Any = resource.rows(viewer_of(request))
    row = get_object_or_404(rows, pk=number(key)) if key != NEW and kind is not None else None
    query = request.GET.copy()
    address = f"{request.path}?{query.urlencode()}#edit"
    query.pop("edit")
    back = f"{request.path}?{query.urlencode()}" if query else request.path
    if kind is None:
        made: Any = type(base.__name__, (base,), {"user": user_of(request)})
    else:
        made = dialog_form(kind, row, user_of(request), read_at, base)
    if kind is not None and row is not None and "delete" in request.POST:
        try:
            services.delete(kind, row, user_of(request), request.POST.get("reason", ""), read_at=read_at)
            messages.success(request, f"{row} is deleted.")
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
        return redirect(back)
    form = made(request.POST if request.method == "POST" else None, instance=row)
    if form.is_bound:
        with transaction.atomic():
            if form.is_valid():
                messages.success(request, f"{form.instance} is saved.")
                return redirect(back)
            transaction.set_rollback(True)
    return Editing(form, row, resource.noun, address, drawn_after, kind is not None and kind.deletable)
