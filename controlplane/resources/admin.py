"""Django's admin from declarations: rows of a kind are written by `inventory.services`, as `/api` does.

What is only read, and what has a dialog in the console, is not here; operations are on the pages of their rows.
"""

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import BooleanField, DateTimeField, Field, Model, QuerySet
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.admin_site import RoleAdmin
from controlplane.accounts.requests import user_of
from controlplane.events import since
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import Kind
from controlplane.resources.forms import KindForm

LISTED = 9
"""Columns of a list."""
TEXTS = ("CharField", "SlugField")
FILTERED = (BooleanField, DateTimeField)


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


def register(kind: Kind, *columns: str, base: type[KindAdmin] = KindAdmin, related: Sequence[str] = ()) -> None:
    """Add the admin of *kind*. Its list has *columns*, by default the first fields."""
    fields: dict[str, Field[Any, Any]] = {field.name: field for field in kind.model._meta.concrete_fields}
    names = [name for name in dict.fromkeys((*kind.key, *kind.fixed, *kind.fields)) if name not in kind.secret]
    own = [name for name in names if name in fields]
    by = [f"{name}__{kind.by.get(name, 'name')}" for name in own if fields[name].is_relation]
    texts = [name for name in own if fields[name].get_internal_type() in TEXTS and not fields[name].choices]
    options = {
        "kind": kind,
        "search_fields": [*texts, *by],
        "autocomplete_fields": [name for name in kind.named if name in names and name != "api_key"],
    } | listed(
        kind.model,
        related,
        *(columns or [name for name in own if fields[name].get_internal_type() != "JSONField"][:LISTED]),
    )
    admin.site.register(kind.model, type(f"{kind.model.__name__}Admin", (base,), options))


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
