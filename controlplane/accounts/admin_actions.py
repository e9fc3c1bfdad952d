"""Admin actions that ask for a reason on a page of their own before they act."""

from typing import Generic, TypeVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

CONFIRMED = "confirmed"

Row = TypeVar("Row", bound=Model)


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=255,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text="Kept with the event, for whoever asks later.",
    )


class ReasonAction(Generic[Row]):
    """Ask for a reason, then call `act` for each chosen row. Subclasses say what is done.

    Called as a Django admin action; the page posts to the same action again with the reason.
    """

    verb: str  # the action's name in the model admin
    title: str
    question: str
    button: str

    def __init__(self, model_admin: admin.ModelAdmin[Row]) -> None:
        self.model_admin = model_admin

    def act(self, request: HttpRequest, row: Row, reason: str) -> str:
        """Do it to *row* and say what happened; a ValueError's text is shown as the refusal."""
        raise NotImplementedError

    def __call__(self, request: HttpRequest, rows: QuerySet[Row]) -> HttpResponse | None:
        form = ReasonForm(request.POST if CONFIRMED in request.POST else None)
        if not form.is_valid():
            context = {
                **self.model_admin.admin_site.each_context(request),
                "opts": self.model_admin.model._meta,
                "title": self.title,
                "question": self.question,
                "button": self.button,
                "verb": self.verb,
                "rows": rows,
                "form": form,
                "checkbox": ACTION_CHECKBOX_NAME,
                "confirmed": CONFIRMED,
            }
            return TemplateResponse(request, "admin/reason.html", context)
        for row in rows:
            try:
                self.model_admin.message_user(request, self.act(request, row, form.cleaned_data["reason"]))
            except ValueError as error:
                self.model_admin.message_user(request, str(error), messages.ERROR)
        return None
