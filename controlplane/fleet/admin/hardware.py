"""Admin of regions, GPU types and nodes."""

from typing import Any, TypedDict, cast

from django.contrib import admin
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django_stubs_ext import WithAnnotations

from controlplane.accounts.admin_actions import AdminAction, reason_action
from controlplane.fleet import services
from controlplane.fleet.admin.base import InventoryAdmin
from controlplane.fleet.models import GpuType, Node, Region, RegionLatency, Weights
from controlplane.fleet.models.instances import NodeQuerySet

GIB = 2**30
CORDONS: "list[AdminAction[Any]]" = [
    reason_action(
        "cordon", "Cordon", "Cordon", "Nothing new is started there; running instances stay.", services.cordon
    ),
    reason_action("uncordon", "Uncordon", "Uncordon", "Instances may be started there again.", services.uncordon),
]


class RegionCounts(TypedDict):
    nodes_count: int
    deployments_count: int


@admin.register(Region)
class RegionAdmin(InventoryAdmin[Region]):
    list_display = ["name", "title", "nodes", "deployments", "active", "cordoned"]
    list_filter = ["active"]
    search_fields = ["name", "title"]
    readonly_fields = ["cordoned"]
    actions = CORDONS

    def get_queryset(self, request: HttpRequest) -> QuerySet[Region]:
        counts = {name: Count(name, distinct=True) for name in ("nodes", "deployments")}
        return super().get_queryset(request).annotate(**{f"{name}_count": count for name, count in counts.items()})

    @admin.display(ordering="nodes_count")
    def nodes(self, region: "WithAnnotations[Region, RegionCounts]") -> int:
        return region.nodes_count

    @admin.display(ordering="deployments_count")
    def deployments(self, region: "WithAnnotations[Region, RegionCounts]") -> int:
        return region.deployments_count


@admin.register(RegionLatency)
class RegionLatencyAdmin(InventoryAdmin[RegionLatency]):
    list_display = ["__str__", "latency_ms"]
    list_select_related = ["origin", "target"]
    autocomplete_fields = ["origin", "target"]
    search_fields = ["origin__name", "target__name"]


@admin.register(Weights)
class WeightsAdmin(InventoryAdmin[Weights]):
    list_display = ["__str__", "state", "since", "ready_at", "actor"]
    list_filter = ["state", "region"]
    list_select_related = ["model", "region"]
    autocomplete_fields = ["model", "region"]
    search_fields = ["model__name", "region__name"]


@admin.register(GpuType)
class GpuTypeAdmin(InventoryAdmin[GpuType]):
    list_display = ["name", "title", "memory", "on_demand", "spot", "price_source"]
    search_fields = ["name", "title"]
    fieldsets = [
        (None, {"fields": ["name", "title", "device"]}),
        ("Memory", {"fields": ["memory_bytes", "memory"]}),
        (
            "Price (US dollars per GPU hour)",
            {"fields": ["on_demand_usd_per_hour", "spot_usd_per_hour", "price_source"]},
        ),
    ]
    readonly_fields = ["memory"]

    @admin.display(ordering="memory_bytes")
    def memory(self, gpu_type: GpuType) -> str:
        return f"{gpu_type.memory_bytes / GIB:.1f} GiB" if gpu_type.memory_bytes else "-"

    @admin.display(description="on demand ($/h)", ordering="on_demand_usd_per_hour")
    def on_demand(self, gpu_type: GpuType) -> str:
        return f"{gpu_type.on_demand_usd_per_hour:.2f}"

    @admin.display(description="spot ($/h)", ordering="spot_usd_per_hour", empty_value="not known")
    def spot(self, gpu_type: GpuType) -> str | None:
        return f"{gpu_type.spot_usd_per_hour:.2f}" if gpu_type.spot_usd_per_hour is not None else None


class NodeCounts(TypedDict):
    gpus_used: int


@admin.register(Node)
class NodeAdmin(InventoryAdmin[Node]):
    list_display = ["name", "region", "gpu_type", "gpu_count", "gpus_used", "address", "active", "cordoned"]
    list_filter = ["region", "gpu_type", "active"]
    readonly_fields = ["cordoned"]
    actions = CORDONS
    list_select_related = ["region", "gpu_type"]
    ordering = ["name"]  # grouped by the count of GPUs, rows lose the order of the model
    search_fields = ["name", "address"]
    autocomplete_fields = ["region", "gpu_type"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        return cast(NodeQuerySet, super().get_queryset(request)).with_gpus_used()

    @admin.display(description="GPUs used", ordering="gpus_used")
    def gpus_used(self, node: "WithAnnotations[Node, NodeCounts]") -> int:
        return node.gpus_used
