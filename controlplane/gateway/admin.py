"""Admin of the request ledger and the minute rows: read-only, and sparing with tables that grow without bound."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet.models import Model, Region, SloClass
from controlplane.gateway.models import SUMS, LedgerRow, MinuteRow
from controlplane.resources.requests import REQUESTS


def name_filter(field: str, names: Callable[[], QuerySet[Any]]) -> type[admin.SimpleListFilter]:
    """Return a filter on the text column *field* by the names in the inventory, not by a scan for all its values."""

    class NameFilter(admin.SimpleListFilter):
        title = field.replace("_", " ").replace("slo", "SLO")
        parameter_name = field

        def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> list[tuple[str, str]]:
            return [(name, name) for name in names().order_by("name").values_list("name", flat=True)]

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            return queryset.filter(**{field: self.value()}) if self.value() else queryset

    return NameFilter


SERIES_FILTERS = [
    name_filter("model", Model.objects.all),
    name_filter("region", Region.objects.all),
    name_filter("slo_class", SloClass.objects.all),
]


@admin.register(LedgerRow)
class LedgerRowAdmin(ReadOnlyAdmin[LedgerRow]):
    list_display = REQUESTS.stored("arrived_at", *REQUESTS.page)
    list_filter = ["outcome", "arrived_at", *SERIES_FILTERS, "tenant", "slo_met"]
    list_select_related = ["tenant"]
    search_fields = ["=request_id", "=instance", "=run"]
    search_help_text = "A whole request id, instance or run"


@admin.register(MinuteRow)
class MinuteRowAdmin(ReadOnlyAdmin[MinuteRow]):
    list_display = [
        "minute",
        "model",
        "region",
        "own_region",
        "slo_class",
        *SUMS[:6],
        "unserved",
        "generated",
    ]
    list_filter = ["minute", *SERIES_FILTERS, "generated"]
