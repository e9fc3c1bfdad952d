"""Admin actions that ask for a reason on their own page before they act."""

from collections.abc import Callable
from typing import TypeVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from controlplane.accounts.models import User
from controlplane.accounts.requests import user_of

CONFIRMED = "confirmed"

Row = TypeVar("Row", bound=Model)
AdminAction = Callable[[admin.ModelAdmin[Row], HttpRequest, QuerySet[Row]], HttpResponse | None]


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=255,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text="Kept with the event.",
    )


def reason_action(
    verb: str,
    button: str,
    title: str,
    question: str,
    act: Callable[[Row, User, str], str],
    permission: str = "operate",
) -> "AdminAction[Row]":
    """Return the admin action *verb*: it asks for a reason, then calls *act* for each selected row.

    *act* takes the row, the user and the reason, and says what happened; a ValueError's text is shown as the refusal. The
    page posts to the same action again with the reason.
    """

    @admin.action(description=f"{button} (asks for a reason)", permissions=[permission])
    def run(model_admin: admin.ModelAdmin[Row], request: HttpRequest, rows: QuerySet[Row]) -> HttpResponse | None:
        form = ReasonForm(request.POST if CONFIRMED in request.POST else None)
        if not form.is_valid():
            context = {
                **model_admin.admin_site.each_context(request),
                "opts": model_admin.model._meta,
                "title": title,
                "question": question,
                "button": button,
                "verb": verb,
                "rows": rows,
                "form": form,
                "checkbox": ACTION_CHECKBOX_NAME,
                "confirmed": CONFIRMED,
            }
            return TemplateResponse(request, "admin/reason.html", context)
        for row in rows:
            try:
                model_admin.message_user(request, act(row, user_of(request), form.cleaned_data["reason"]))
            except ValueError as error:
                model_admin.message_user(request, str(error), messages.ERROR)
        return None

    run.__name__ = verb
    return run
