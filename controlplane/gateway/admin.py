"""Admin of the request ledger and the minute rows: read-only, and careful with tables that grow without end."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet.models import Model, Region, SloClass
from controlplane.gateway.models import LedgerRow, MinuteRow


def name_filter(field: str, names: Callable[[], QuerySet[Any]]) -> type[admin.SimpleListFilter]:
    """A filter on the text column *field* by the names in the inventory, not by a scan for all values that occur."""

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
    list_display = [
        "arrived_at",
        "request_id",
        "tenant",
        "model",
        "region",
        "slo_class",
        "outcome",
        "status_code",
        "prompt_tokens",
        "output_tokens",
        "ttft",
        "slo_met",
    ]
    list_filter = ["outcome", "arrived_at", *SERIES_FILTERS, "tenant", "slo_met"]
    list_select_related = ["tenant"]
    search_fields = ["=request_id", "=instance", "=run"]
    search_help_text = "A whole request id, instance or run"
    fieldsets = [
        (None, {"fields": ["request_id", "arrived_at", "tenant", "api_key", "model", "slo_class", "streamed"]}),
        (
            "Outcome",
            {
                "fields": [
                    *("outcome", "status_code", "error_code", "error_message", "slo_met"),
                    *("unserved", "retry", "repeated", "attempts"),
                ]
            },
        ),
        (
            "Tokens",
            {"fields": ["prompt_tokens", "output_tokens", "predicted_prompt_tokens", "predicted_output_tokens"]},
        ),
        ("Times (milliseconds)", {"fields": ["queue_ms", "ttft_ms", "itl_ms", "e2e_ms"]}),
        ("Placement", {"fields": ["region", "own_region", "instance", "trace"]}),
        ("Application", {"fields": ["application", "run", "unit"]}),
    ]

    @admin.display(description="TTFT (ms)", ordering="ttft_ms")
    def ttft(self, row: LedgerRow) -> str:
        return f"{row.ttft_ms:.0f}" if row.ttft_ms is not None else "-"


@admin.register(MinuteRow)
class MinuteRowAdmin(ReadOnlyAdmin[MinuteRow]):
    list_display = [
        "minute",
        "model",
        "region",
        "own_region",
        "slo_class",
        "requests",
        "failed",
        "slo_met",
        "slo_judged",
        "prompt_tokens",
        "output_tokens",
        "unserved",
        "repeated",
        "generated",
    ]
    list_filter = ["minute", *SERIES_FILTERS, "generated"]
