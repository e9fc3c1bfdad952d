"""Django's admin from declarations: rows of a kind are written by `inventory.services`, as `/api` does.

The operations of a resource are actions. What is only read is on pages, in REST and in files, and not here.
"""

from collections.abc import Sequence
from typing import Any, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import BooleanField, DateTimeField, Field, Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from controlplane.accounts.admin_site import RoleAdmin
from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.events import since
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import Kind
from controlplane.resources.forms import KindForm
from controlplane.resources.resource import Operation, Resource

CONFIRMED = "confirmed"
LISTED = 9
"""Columns of a list."""
TEXTS = ("CharField", "SlugField")
FILTERED = (BooleanField, DateTimeField)


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=255,
        widget=forms.TextInput(attrs={"class": "vTextField", "autofocus": True}),
        help_text="Kept with the event.",
    )


def action_of(operation: Operation) -> Any:
    """Return the admin action of *operation*: it asks for a reason on its own page, then carries it out for each row."""

    @admin.action(description=f"{operation.verb.capitalize()} (asks for a reason)", permissions=[operation.least])
    def run(model_admin: admin.ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse | None:
        form = ReasonForm(request.POST if CONFIRMED in request.POST else None)
        if not form.is_valid():
            context = model_admin.admin_site.each_context(request) | {
                "opts": model_admin.model._meta,
                "title": f"{operation.verb.capitalize()} {model_admin.model._meta.verbose_name_plural}",
                "operation": operation,
                "rows": rows,
                "form": form,
                "checkbox": ACTION_CHECKBOX_NAME,
                "confirmed": CONFIRMED,
            }
            return TemplateResponse(request, "admin/reason.html", context)
        for row in rows:
            try:
                done = operation.carry_out(row, user_of(request), form.cleaned_data["reason"])
                model_admin.message_user(request, done if isinstance(done, str) else f"{row}: {operation.verb} is done")
            except ValueError as error:
                model_admin.message_user(request, str(error), messages.ERROR)
        return None

    run.__name__ = operation.verb
    return run


class KindAdmin(RoleAdmin[Any]):
    """Rows of a kind, created, changed and deleted by admins."""

    kind: Kind
    form = KindForm
    change_form_template = "admin/checked_form.html"

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        names = dict.fromkeys((*self.kind.key, *self.kind.fixed, *self.kind.fields))
        if obj is None or not self.kind.secret:
            return list(names)
        hidden = () if self.has_change_permission(request, obj) else self.kind.secret
        return [*(name for name in names if name not in hidden), "hidden"]

    @admin.display(description="set, and not shown")
    def hidden(self, row: Any) -> str:
        """Name what is secret of *row*, without its values."""
        values = {name: getattr(row, name) for name in sorted(self.kind.secret)}
        names = [
            each for name, value in values.items() if value for each in (value if isinstance(value, dict) else [name])
        ]
        return ", ".join(names) or "none"

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return (*self.kind.key, *self.kind.fixed, "hidden") if obj is not None else ("hidden",)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.kind.deletable and super().has_delete_permission(request, obj)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **more: Any) -> Any:
        form = super().get_form(request, obj, change=change, **more)
        given = {"kind": self.kind, "user": user_of(request), "read_at": request.POST.get(since.FIELD, "")}
        make: Any = type(form)
        return make(form.__name__, (form,), given)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any
    ) -> HttpResponse:
        drawn_after = context["original"] and str(since.newest())
        return super().render_change_form(request, context | {"drawn_after": drawn_after}, *args, **more)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """The form has saved it."""

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Return what Django shows before a deletion, with the services' refusals as what stands in its way."""
        to_delete, counts, _, protected = super().get_deleted_objects(objs, request)
        return to_delete, counts, set(), protected or [text for row in objs for text in self._refusals(row, request)]

    def _refusals(self, row: Any, request: HttpRequest) -> list[str]:
        try:
            with transaction.atomic():
                services.delete(self.kind, row, user_of(request))
                transaction.set_rollback(True)
        except ValidationError as error:
            return list(error.messages)
        return []

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        services.delete(self.kind, obj, user_of(request))

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        for row in queryset:
            self.delete_model(request, row)


def register(
    of: Kind | Resource,
    *columns: str,
    base: type[KindAdmin] = KindAdmin,
    operations: Sequence[Operation] = (),
    related: Sequence[str] = (),
    view_role: Role = Role.VIEWER,
) -> None:
    """Add the admin of a kind, with the operations of its resource. Its list has *columns*, by default the first fields."""
    kind = cast(Kind, of.kind if isinstance(of, Resource) else of)
    operations = of.operations if isinstance(of, Resource) and not operations else operations
    fields: dict[str, Field[Any, Any]] = {field.name: field for field in kind.model._meta.concrete_fields}
    names = [name for name in dict.fromkeys((*kind.key, *kind.fixed, *kind.fields)) if name not in kind.secret]
    own = [name for name in names if name in fields]
    by = [f"{name}__{kind.by.get(name, 'name')}" for name in own if fields[name].is_relation]
    texts = [name for name in own if fields[name].get_internal_type() in TEXTS and not fields[name].choices]
    options = {
        "kind": kind,
        "view_role": view_role,
        "search_fields": [*texts, *by],
        "autocomplete_fields": [name for name in kind.named if name in names and name != "api_key"],
    } | listed(
        kind.model,
        related,
        *(columns or [name for name in own if fields[name].get_internal_type() != "JSONField"][:LISTED]),
    )
    _add(kind.model, base, options, operations)


def listed(model: type[Model], related: Sequence[str], *columns: str) -> dict[str, Any]:
    """Return the options of a list: filters by what has few values and by times."""
    fields: dict[str, Field[Any, Any]] = {field.name: field for field in model._meta.concrete_fields}
    own = {name: fields[name] for name in columns if name in fields}
    return {
        "list_display": columns,
        "list_select_related": [*related, *(name for name, field in own.items() if field.is_relation)] or False,
        "list_filter": [
            name for name, field in own.items() if field.choices or field.is_relation or type(field) in FILTERED
        ],
    }


def _add(
    model: type[Model], base: type[RoleAdmin[Any]], options: dict[str, Any], operations: Sequence[Operation]
) -> None:
    actions = [action_of(each) for each in operations if each.admin]
    admin.site.register(model, type(f"{model.__name__}Admin", (base,), options | {"actions": actions}))
