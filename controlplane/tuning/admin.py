"""Admin of settings: a row overrides the default."""

from typing import Any

from django.contrib import admin
from django.db.models import Field, QuerySet
from django.forms import ChoiceField, ModelForm
from django.http import HttpRequest

from controlplane.accounts.requests import user_of
from controlplane.events.admin import CheckedAdmin
from controlplane.tunable import Tunable
from controlplane.tuning import services
from controlplane.tuning.models import Setting


@admin.register(Setting)
class SettingAdmin(CheckedAdmin[Setting]):
    """Changed and deleted through the services, so that each change is an event."""

    list_display = ["name", "model", "value", "changed_at", "changed_by"]
    list_filter = ["model", "changed_at"]
    list_select_related = ["model"]
    search_fields = ["name", "model__name", "changed_by"]
    fields = ["name", "model", "value"]

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name == "name":
            return ChoiceField(choices=[(name, name) for name in Tunable.model_fields])
        return super().formfield_for_dbfield(db_field, request, **kwargs)

    def get_readonly_fields(self, request: HttpRequest, obj: Setting | None = None) -> list[str]:
        return ["name", "model"] if obj else []

    def checked_fields(self, row: Setting, form: ModelForm[Setting]) -> list[str]:
        return [row.name]

    def save_model(self, request: HttpRequest, obj: Setting, form: ModelForm[Setting], change: bool) -> None:
        obj.pk = services.change(obj.name, obj.value, user_of(request), model=obj.model).pk

    def delete_model(self, request: HttpRequest, obj: Setting) -> None:
        services.reset(obj, user_of(request))

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Setting]) -> None:
        for row in queryset:
            services.reset(row, user_of(request))
