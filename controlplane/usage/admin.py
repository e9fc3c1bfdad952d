"""Admin of usage: read-only, and careful with a table that grows without end."""

from django.contrib import admin

from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet.models import Model, Price, SloClass
from controlplane.gateway.admin import name_filter
from controlplane.usage.models import InstanceHour, UsageHour


@admin.register(UsageHour)
class UsageHourAdmin(ReadOnlyAdmin[UsageHour]):
    list_display = ["hour", "tenant", "api_key", "model", "slo_class", "requests", "prompt_tokens", "output_tokens",
                    "gpu_s", "cost_usd", "charged_usd"]  # fmt: skip
    list_filter = [
        "hour",
        "tenant",
        name_filter("model", Model.objects.all),
        name_filter("slo_class", SloClass.objects.all),
    ]
    list_select_related = ["tenant", "api_key"]


@admin.register(InstanceHour)
class InstanceHourAdmin(ReadOnlyAdmin[InstanceHour]):
    list_display = ["hour", "instance", "model", "gpu_type", "slo_class", "work", "gpu_s", "cost_usd", "charged_usd"]
    list_filter = ["hour", "work"]
    search_fields = ["instance"]


@admin.register(Price)
class PriceAdmin(ReadOnlyAdmin[Price]):
    """A price changes on the page of its GPU type or SLO class, or with a date by `/api/prices`."""

    list_display = ["of", "name", "amount", "from_at", "reason", "created_by", "created_at"]
    list_filter = ["of", "name"]
