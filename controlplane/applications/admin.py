"""Admin of backends of units that are no LLM."""

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.forms import CharField, ModelForm, PasswordInput

from controlplane.applications.models import UnitBackend
from controlplane.fleet.admin.base import InventoryAdmin


class UnitBackendForm(ModelForm[UnitBackend]):
    """Form of a backend; an empty secret keeps the stored one."""

    secret = CharField(max_length=200, required=False, widget=PasswordInput(attrs={"autocomplete": "new-password"}))

    def clean_secret(self) -> str:
        secret: str = self.cleaned_data["secret"] or self.initial.get("secret", "")
        if not secret:
            raise ValidationError("It signs what is sent.")
        return secret


@admin.register(UnitBackend)
class UnitBackendAdmin(InventoryAdmin[UnitBackend]):
    form = UnitBackendForm
    list_display = ["name", "kind", "url", "keep_alive_s", "active"]
    list_filter = ["kind", "active"]
    search_fields = ["name", "url"]
