"""Django's admin from declarations: rows of a kind are written by `inventory.services`, as `/api` does, others are shown.

The operations of a resource are actions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import BooleanField, DateTimeField, Field, Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from controlplane.accounts.admin_site import RoleAdmin, Row
from controlplane.accounts.models import Role, User
from controlplane.accounts.requests import NotedRequest, user_of
from controlplane.events import since
from controlplane.events.audit import record_change, record_creation, record_deletion, snapshot
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import Kind
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


class ReadOnlyAdmin(RoleAdmin[Row]):
    """Rows that only Pilothouse itself writes."""

    show_full_result_count = False  # these tables grow without end: no second count of all rows on every page

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return False


class AuditedAdmin(RoleAdmin[Row]):
    """Every row created, changed or deleted here is an event with before and after."""

    def save_model(self, request: HttpRequest, obj: Row, form: forms.ModelForm[Row], change: bool) -> None:
        if change:
            cast(NotedRequest, request).audit_before = snapshot(type(obj)._default_manager.get(pk=obj.pk))
        super().save_model(request, obj, form, change)

    def save_related(self, request: HttpRequest, form: forms.ModelForm[Row], formsets: Any, change: bool) -> None:
        super().save_related(request, form, formsets, change)
        row = type(form.instance)._default_manager.get(pk=form.instance.pk)
        if change:
            record_change(row, cast(NotedRequest, request).audit_before, user_of(request))
        else:
            record_creation(row, user_of(request))

    def delete_model(self, request: HttpRequest, obj: Row) -> None:
        record_deletion(obj, user_of(request))
        super().delete_model(request, obj)

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Row]) -> None:
        for row in queryset:
            self.delete_model(request, row)


def _shown(show: Callable[[Any], Any], value: Any) -> Any:
    """Return *value* for its field; nothing for none."""
    return "" if value is None else show(value)


class KindForm(forms.ModelForm[Any]):
    """Form of a row; the services check it, while its instance stays as it was read."""

    kind: ClassVar[Kind]
    user: ClassVar[User]
    read_at: ClassVar[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in self.kind.optional & self.fields.keys():
            self.fields[name].required = False
        for name in self.kind.secret & self.fields.keys():
            field: Any = self.fields[name]
            self.initial[name], field.required = None, False
            field.help_text += " An empty field keeps what is set; - or {} removes it."
            if isinstance(field, forms.JSONField):
                field.prepare_value = partial(_shown, field.prepare_value)  # type: ignore[method-assign]
            else:
                field.widget = forms.PasswordInput(attrs={"autocomplete": "new-password"})

    def _post_clean(self) -> None:
        if self.errors:
            return
        values = {name: self._named(name) for name in self.cleaned_data if name in self.fields}
        try:
            if self.instance.pk:
                changes = {name: values[name] for name in self.changed_data if name in values}
                self.instance = services.change(self.kind, self.instance, changes, self.user, read_at=self.read_at)
            else:
                left_out = self.kind.secret | self.kind.optional
                values = {name: value for name, value in values.items() if name not in left_out or value is not None}
                self.instance = services.create(self.kind, self.values(values), self.user)
        except ValidationError as error:
            named = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
            for name, texts in named.items():
                self.add_error(name if name in self.fields else None, texts)
        except ValueError as error:
            self.add_error(None, str(error))

    def values(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a new row."""
        return named

    def _named(self, name: str) -> Any:
        value, by = self.cleaned_data[name], self.kind.by.get(name, "name")
        if name in self.kind.secret and value == "-":
            return ""
        if isinstance(value, QuerySet):
            return [getattr(row, by) for row in value]
        return getattr(value, by) if isinstance(value, Model) and name in self.kind.named else value

    def _save_m2m(self) -> None:
        """The services have saved it."""


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
        "search_fields": [*texts, *by],
        "autocomplete_fields": [name for name in kind.named if name in names],
    } | listed(
        kind.model,
        related,
        *(columns or [name for name in own if fields[name].get_internal_type() != "JSONField"][:LISTED]),
    )
    _add(kind.model, base, options, operations)


def show(
    model: type[Model],
    *columns: str,
    search: Sequence[str] = (),
    exclude: Sequence[str] = (),
    operations: Sequence[Operation] = (),
    related: Sequence[str] = (),
    view_role: Role = Role.VIEWER,
) -> None:
    """Add the admin of rows that are only shown, with *columns* in its list."""
    options = {"search_fields": search, "exclude": exclude, "view_role": view_role} | listed(model, related, *columns)
    _add(model, ReadOnlyAdmin, options, operations)


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
