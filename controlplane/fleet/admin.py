"""Admin of the inventory. States of instances are not edited: actions ask the services, which keep the rules."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from django.contrib import admin
from django.db import transaction
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django_stubs_ext import WithAnnotations

from controlplane.accounts.admin_actions import ReasonAction
from controlplane.accounts.admin_site import Row, has_role
from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.events.admin import AuditedAdmin, ReadOnlyAdmin
from controlplane.fleet import services
from controlplane.fleet.forms import DeploymentForm, InstanceForm, LanguageModelForm
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    InstanceCommand,
    Launcher,
    Node,
    PerformanceProfile,
    Region,
    Rollout,
    SloClass,
)
from controlplane.fleet.models import Model as LanguageModel
from controlplane.fleet.models.hardware import NodeQuerySet
from controlplane.fleet.states import Action, InstanceState

if TYPE_CHECKING:
    from django.contrib.admin.options import _FieldsetSpec

GIB = 2**30
Deleted = tuple[list[str], dict[str, int], set[str], list[str]]
"""What `get_deleted_objects` answers: rows, counts by kind, kinds that may not be deleted, rows in the way."""


class InventoryAdmin(AuditedAdmin[Row]):
    """Every change is felt by the gateways at once."""

    def after_write(self, request: HttpRequest, row: Row, *, created: bool) -> None:
        transaction.on_commit(services.nudge)


class RegionCounts(TypedDict):
    nodes_count: int
    deployments_count: int


@admin.register(Region)
class RegionAdmin(InventoryAdmin[Region]):
    list_display = ["name", "title", "nodes", "deployments", "active"]
    list_filter = ["active"]
    search_fields = ["name", "title"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Region]:
        counts = {name: Count(name, distinct=True) for name in ("nodes", "deployments")}
        return super().get_queryset(request).annotate(**{f"{name}_count": count for name, count in counts.items()})

    @admin.display(ordering="nodes_count")
    def nodes(self, region: "WithAnnotations[Region, RegionCounts]") -> int:
        return region.nodes_count

    @admin.display(ordering="deployments_count")
    def deployments(self, region: "WithAnnotations[Region, RegionCounts]") -> int:
        return region.deployments_count


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
    list_display = ["name", "region", "gpu_type", "gpu_count", "gpus_used", "address", "active"]
    list_filter = ["region", "gpu_type", "active"]
    list_select_related = ["region", "gpu_type"]
    ordering = ["name"]  # grouped by the count of GPUs, rows lose the order of the model
    search_fields = ["name", "address"]
    autocomplete_fields = ["region", "gpu_type"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        return cast(NodeQuerySet, super().get_queryset(request)).with_gpus_used()

    @admin.display(description="GPUs used", ordering="gpus_used")
    def gpus_used(self, node: "WithAnnotations[Node, NodeCounts]") -> int:
        return node.gpus_used


@admin.register(LanguageModel)
class ModelAdmin(InventoryAdmin[LanguageModel]):
    form = LanguageModelForm
    list_display = ["name", "title", "weights", "kv_per_token", "context_tokens", "source", "active"]
    list_filter = ["active"]
    search_fields = ["name", "title", "source"]
    fieldsets = [
        (None, {"fields": ["name", "title", "source", "active"]}),
        (
            "Size",
            {
                "fields": ["weights_bytes", "kv_bytes_per_token", "context_tokens"],
                "description": "An empty field is read from the config.json of the source.",
            },
        ),
    ]

    @admin.display(ordering="weights_bytes")
    def weights(self, model: LanguageModel) -> str:
        return f"{model.weights_bytes / 1e9:.1f} GB"

    @admin.display(description="KV per token", ordering="kv_bytes_per_token")
    def kv_per_token(self, model: LanguageModel) -> str:
        return f"{model.kv_bytes_per_token / 1024:.0f} KiB"


@admin.register(PerformanceProfile)
class PerformanceProfileAdmin(InventoryAdmin[PerformanceProfile]):
    list_display = ["model", "gpu_type", "tensor_parallel", "example", "prefill_error", "decode_error"]
    list_filter = ["model", "gpu_type", "tensor_parallel"]
    list_select_related = ["model", "gpu_type"]
    search_fields = ["model__name", "gpu_type__name", "source"]
    autocomplete_fields = ["model", "gpu_type"]
    readonly_fields = ["example", "created_at"]
    fieldsets = [
        (None, {"fields": ["model", "gpu_type", "tensor_parallel", "example"]}),
        (
            "Prefill of p prompt tokens: max(t0, a + b·p + c·p²)",
            {
                "fields": ["prefill_t0_s", "prefill_a_s", "prefill_b_s_per_token", "prefill_c_s_per_token2"],
                "description": "In seconds.",
            },
        ),
        (
            "Decode step: a + b·sequences + c·context tokens",
            {
                "fields": ["decode_a_s", "decode_b_s_per_sequence", "decode_c_s_per_token"],
                "description": "In seconds; one step gives one token to every sequence.",
            },
        ),
        ("Evidence", {"fields": ["source", "prefill_error_pct", "decode_error_pct", "created_at"]}),
    ]

    @admin.display(description="1,024 tokens in / a token at 32 sequences")
    def example(self, row: PerformanceProfile) -> str:
        if not row.pk:
            return "-"
        profile = row.coefficients()
        prefill_ms = 1e3 * profile.step_time_s(1024, 0, 0)
        decode_ms = 1e3 * profile.step_time_s(0, 32, 32 * 1024)
        return f"{prefill_ms:.0f} ms / {decode_ms:.1f} ms"

    @admin.display(description="prefill error", ordering="prefill_error_pct", empty_value="not known")
    def prefill_error(self, row: PerformanceProfile) -> str | None:
        return f"{row.prefill_error_pct:.1f} %" if row.prefill_error_pct is not None else None

    @admin.display(description="decode error", ordering="decode_error_pct", empty_value="not known")
    def decode_error(self, row: PerformanceProfile) -> str | None:
        return f"{row.decode_error_pct:.1f} %" if row.decode_error_pct is not None else None


class InstanceCounts(TypedDict):
    ready_count: int
    all_count: int


@admin.register(Deployment)
class DeploymentAdmin(InventoryAdmin[Deployment]):
    list_display = [
        "model",
        "region",
        "gpu_type",
        "tensor_parallel",
        "min_instances",
        "max_instances",
        "ready",
        "routing_policy",
        "queue_bound",
        "active",
    ]
    list_display_links = ["model"]
    list_filter = ["region", "model", "gpu_type", "routing_policy", "active"]
    list_select_related = ["model", "region", "gpu_type"]
    search_fields = ["model__name", "model__title", "region__name", "region__title", "gpu_type__name"]
    autocomplete_fields = ["model", "region", "gpu_type"]
    readonly_fields = ["kv_cache", "secret_names"]
    form = DeploymentForm
    fieldsets = [
        (None, {"fields": ["model", "region", "active"]}),
        ("Hardware", {"fields": ["gpu_type", "tensor_parallel", "gpu_memory_utilization", "kv_cache"]}),
        ("Instances", {"fields": [("min_instances", "max_instances")]}),
        ("Engine", {"fields": ["max_num_seqs", "max_num_batched_tokens", "vllm_args", "environment"]}),
        (
            "Secrets",
            {
                "fields": ["secret_names", "secrets", "api_key", "forget_api_key"],
                "description": "They are passed to servers and never shown again. An empty field keeps what is there.",
            },
        ),
        (
            "Requests",
            {
                "fields": [
                    "routing_policy",
                    "ordering_policy",
                    "ordering_stretch",
                    "requests_ahead_limit",
                    "queue_bound",
                ]
            },
        ),
    ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Deployment]:
        return (
            super()
            .get_queryset(request)
            .annotate(
                ready_count=Count("instances", filter=Q(instances__state=InstanceState.READY)),
                all_count=Count("instances", filter=~Q(instances__state=InstanceState.STOPPED)),
            )
        )

    def get_deleted_objects(self, objs: Sequence[Deployment] | QuerySet[Deployment], request: HttpRequest) -> Deleted:
        to_delete, counts, permissions, protected = super().get_deleted_objects(objs, request)
        return to_delete, counts, permissions - {"rollout"}, protected  # what was done to it goes with it

    @admin.display(description="ready", ordering="ready_count")
    def ready(self, deployment: "WithAnnotations[Deployment, InstanceCounts]") -> str:
        return f"{deployment.ready_count} of {deployment.all_count}"

    @admin.display(description="set", empty_value="none")
    def secret_names(self, deployment: Deployment) -> str:
        return ", ".join([*sorted(deployment.secrets), *(["API key"] if deployment.api_key else [])])

    @admin.display(description="KV cache of an instance")
    def kv_cache(self, deployment: Deployment) -> str:
        if not deployment.pk:
            return "known after saving"
        return f"about {deployment.expected_kv_tokens:,} tokens, from memory, utilisation and weights"


class OperatorAction(ReasonAction[Instance]):
    """One of `fleet.states.Action`, through `fleet.services.act`."""

    def __init__(self, model_admin: admin.ModelAdmin[Instance], action: Action, question: str) -> None:
        super().__init__(model_admin)
        self.action, self.verb = action, str(action)
        self.title, self.question, self.button = f"{action.label} instances", question, action.label

    def act(self, request: HttpRequest, row: Instance, reason: str) -> str:
        return services.act(self.action, row, user_of(request), reason)


def operator_action(
    action: Action, question: str
) -> Callable[[admin.ModelAdmin[Instance], HttpRequest, QuerySet[Instance]], HttpResponse | None]:
    """An admin action that asks for a reason and then does *action*."""

    @admin.action(description=f"{action.label} (asks for a reason)", permissions=["operate"])
    def run(
        model_admin: admin.ModelAdmin[Instance], request: HttpRequest, rows: QuerySet[Instance]
    ) -> HttpResponse | None:
        return OperatorAction(model_admin, action, question)(request, rows)

    run.__name__ = str(action)
    return run


@admin.register(Instance)
class InstanceAdmin(InventoryAdmin[Instance]):
    form = InstanceForm
    list_display = ["name", "state_mark", "model_name", "region", "hardware", "node", "launcher", "state_changed_at"]
    list_filter = ["state", "deployment__region", "deployment__model", "deployment__gpu_type", "launcher"]
    list_select_related = ["deployment__model", "deployment__region", "deployment__gpu_type", "node"]
    search_fields = ["name", "url", "deployment__model__name", "node__name"]
    autocomplete_fields = ["deployment", "node"]
    readonly_fields = [
        "state_mark",
        "state_changed_at",
        "state_reason",
        "kv_capacity_tokens",
        "process_id",
        "failures",
        "created_at",
        "changed_at",
    ]
    actions = [
        operator_action(Action.DRAIN, "They finish what they run and are given nothing new."),
        operator_action(Action.RESUME, "They are given requests again."),
        operator_action(Action.START, "Their servers are started; they are ready when they answer."),
        operator_action(
            Action.STOP, "Their servers are stopped and running requests are cut. Drain first to spare them."
        ),
        operator_action(Action.SLEEP, "They finish what they run, then put their weights aside."),
        operator_action(Action.WAKE, "They take their weights back and are ready when they answer."),
    ]
    fieldsets = [
        (None, {"fields": ["name", "deployment", "node"]}),
        ("Server", {"fields": ["launcher", "url", "host", "process_id", "kv_capacity_tokens"]}),
        (
            "State",
            {"fields": ["state_mark", "state_changed_at", "state_reason", "failures", "created_at", "changed_at"]},
        ),
    ]

    def get_readonly_fields(self, request: HttpRequest, obj: Instance | None = None) -> list[str]:
        if obj is None:
            return list(self.readonly_fields)
        fixed = ["name", "deployment", "launcher"]  # what a running server was started with
        if obj.launcher != Launcher.EXTERNAL:
            fixed.append("url")
        if obj.launcher != Launcher.PROCESS:
            fixed.append("host")  # of a process it may be set anew, when its machine is gone for good
        return [*self.readonly_fields, *fixed]

    def get_fieldsets(self, request: HttpRequest, obj: Instance | None = None) -> "_FieldsetSpec":
        shown = super().get_fieldsets(request, obj)
        if obj is not None:
            return shown
        return [
            shown[0],
            (
                "Server",
                {
                    "fields": ["launcher", "url"],
                    "description": "With a launcher, Pilothouse starts the server as soon as this row is saved and fills "
                    "in its address. Without one, give the address of the server that you have started.",
                },
            ),
        ]

    @admin.display(description="state", ordering="state")
    def state_mark(self, instance: Instance) -> str:
        return format_html('<span class="state state-{}">{}</span>', instance.state, instance.get_state_display())

    @admin.display(description="model", ordering="deployment__model__name")
    def model_name(self, instance: Instance) -> str:
        return instance.deployment.model.name

    @admin.display(ordering="deployment__region__name")
    def region(self, instance: Instance) -> str:
        return instance.deployment.region.title

    @admin.display(description="GPUs", ordering="deployment__gpu_type__name")
    def hardware(self, instance: Instance) -> str:
        return f"{instance.deployment.tensor_parallel} x {instance.deployment.gpu_type.title}"

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.OPERATOR)

    def get_deleted_objects(self, objs: Sequence[Instance] | QuerySet[Instance], request: HttpRequest) -> Deleted:
        """Only stopped instances are deleted: behind the others there may be a server that nobody would stop any more."""
        to_delete, counts, permissions, protected = super().get_deleted_objects(objs, request)
        alive = [f"{row} is {row.state}: stop it first" for row in objs if row.state != InstanceState.STOPPED]
        return to_delete, counts, permissions - {"instance command"}, [*protected, *alive]

    def after_write(self, request: HttpRequest, row: Instance, *, created: bool) -> None:
        if created:
            services.start(row, user_of(request), "registered in the admin")
        super().after_write(request, row, created=created)


@admin.register(InstanceCommand)
class InstanceCommandAdmin(ReadOnlyAdmin[InstanceCommand]):
    list_display = ["created_at", "instance", "verb", "state", "actor", "reason", "error"]
    list_filter = ["state", "verb", "created_at"]
    list_select_related = ["instance"]
    search_fields = ["instance__name", "actor", "reason", "error"]


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyAdmin[Rollout]):
    list_display = ["started_at", "deployment", "state", "up_to_date", "total", "actor", "reason", "message"]
    list_filter = ["state", "started_at"]
    list_select_related = ["deployment__model", "deployment__region", "deployment__gpu_type"]
    search_fields = ["deployment__model__name", "actor", "reason", "message"]


@admin.register(SloClass)
class SloClassAdmin(InventoryAdmin[SloClass]):
    list_display = [
        "name",
        "title",
        "kind",
        "service_tier",
        "ttft_target_ms",
        "itl_target_ms",
        "percentile",
        "deadline",
        "priority",
        "price_factor",
    ]
    list_filter = ["kind"]
    search_fields = ["name", "title", "service_tier"]
    fieldsets = [
        (None, {"fields": ["name", "title", "kind", "service_tier"]}),
        (
            "Promise",
            {"fields": ["ttft_target_ms", "itl_target_ms", "e2e_target_ms", "percentile", "deadline_s"]},
        ),
        ("Worth", {"fields": ["priority", "weight", "price_factor"]}),
    ]

    @admin.display(ordering="deadline_s")
    def deadline(self, slo_class: SloClass) -> str:
        seconds = slo_class.deadline_s
        if seconds is None:
            return "-"
        return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds} s"
