"""Admin of backends of units that are no LLM."""

from django.contrib import admin

from controlplane.applications.models import UnitBackend
from controlplane.fleet.admin.base import InventoryAdmin


@admin.register(UnitBackend)
class UnitBackendAdmin(InventoryAdmin[UnitBackend]):
    list_display = ["name", "kind", "image", "command", "capacity", "keep_alive_s", "active"]
    list_filter = ["kind", "active"]
    search_fields = ["name", "image", "command"]
