"""Admin of models, their performance profiles, deployments and SLO classes."""

from collections.abc import Sequence
from typing import TypedDict

from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django_stubs_ext import WithAnnotations

from controlplane.accounts.admin_actions import reason_action
from controlplane.fleet import services
from controlplane.fleet.admin.base import Deleted, InventoryAdmin
from controlplane.fleet.admin.forms import DeploymentForm, LanguageModelForm
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Adapter, Deployment, PerformanceProfile, SloClass, WeightedTarget
from controlplane.fleet.models import Model as LanguageModel
from scheduling.policy import COLUMNS


@admin.register(LanguageModel)
class ModelAdmin(InventoryAdmin[LanguageModel]):
    form = LanguageModelForm
    list_display = [
        "name",
        "title",
        "weights",
        "kv_per_token",
        "context_tokens",
        "task",
        "length_model",
        "source",
        "active",
    ]
    list_filter = ["active", "task", "length_model"]
    actions = [
        reason_action(
            "retire", "Retire", "Retire models", "They are undeployed and offered no more; their history stays.",
            services.retire, "change",
        )
    ]  # fmt: skip
    search_fields = ["name", "title", "source"]
    fieldsets = [
        (None, {"fields": ["name", "title", "source", "task", "active"]}),
        (
            "Size",
            {
                "fields": ["weights_bytes", "kv_bytes_per_token", "context_tokens", "architecture"],
                "description": "An empty field is read from the config.json of the source.",
            },
        ),
        ("Output lengths", {"fields": ["length_model"]}),
        ("Fallback", {"fields": ["fallback", "fallback_wait_s"]}),
    ]

    @admin.display(ordering="weights_bytes")
    def weights(self, model: LanguageModel) -> str:
        return f"{model.weights_bytes / 1e9:.1f} GB"

    @admin.display(description="KV per token", ordering="kv_bytes_per_token")
    def kv_per_token(self, model: LanguageModel) -> str:
        return f"{model.kv_bytes_per_token / 1024:.0f} KiB"


@admin.register(WeightedTarget)
class WeightedTargetAdmin(InventoryAdmin[WeightedTarget]):
    list_display = ["name", "target", "weight", "active"]
    list_filter = ["name", "active"]
    search_fields = ["name", "target"]


@admin.register(Adapter)
class AdapterAdmin(InventoryAdmin[Adapter]):
    list_display = ["name", "base", "tenant", "source", "rank", "active"]
    list_filter = ["base", "tenant", "active"]
    list_select_related = ["base", "tenant"]
    search_fields = ["name", "base__name", "source"]
    autocomplete_fields = ["base", "tenant"]


@admin.register(PerformanceProfile)
class PerformanceProfileAdmin(InventoryAdmin[PerformanceProfile]):
    list_display = ["model", "gpu_type", "tensor_parallel", "example", "prefill_error", "decode_error", "estimated"]
    list_filter = ["model", "gpu_type", "tensor_parallel", "estimated"]
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
        (
            "API server process",
            {
                "fields": ["front_end_requests_per_s", "front_end_tokens_per_s"],
                "description": "It reads requests and writes tokens; a step takes at least as long as that.",
            },
        ),
        ("Evidence", {"fields": ["source", "estimated", "prefill_error_pct", "decode_error_pct", "created_at"]}),
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
        return f"{row.prefill_error_pct:.1f}%" if row.prefill_error_pct is not None else None

    @admin.display(description="decode error", ordering="decode_error_pct", empty_value="not known")
    def decode_error(self, row: PerformanceProfile) -> str | None:
        return f"{row.decode_error_pct:.1f}%" if row.decode_error_pct is not None else None


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
        *COLUMNS,
        "active",
    ]
    list_display_links = ["model"]
    list_filter = ["region", "model", "gpu_type", "routing_policy", "active"]
    list_select_related = ["model", "region", "gpu_type"]
    search_fields = ["model__name", "model__title", "region__name", "region__title", "gpu_type__name"]
    autocomplete_fields = ["model", "region", "gpu_type"]
    readonly_fields = ["kv_cache", "secret_names"]
    actions = [
        reason_action(
            "undeploy", "Undeploy", "Undeploy", "Their instances stop and what they run is cut; their history stays.",
            services.undeploy, "change",
        )
    ]  # fmt: skip
    form = DeploymentForm
    fieldsets = [
        (None, {"fields": ["model", "region", "active"]}),
        ("Hardware", {"fields": ["gpu_type", "tensor_parallel", "gpu_memory_utilization", "kv_cache"]}),
        ("Instances", {"fields": [("min_instances", "max_instances")]}),
        (
            "Engine",
            {
                "fields": [
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    ("max_loras", "max_cpu_loras"),
                    "vllm_args",
                    "environment",
                ]
            },
        ),
        (
            "Secrets",
            {
                "fields": ["secret_names", "secrets", "api_key", "forget_api_key"],
                "description": "They are passed to servers and never shown again. An empty field keeps what is there.",
            },
        ),
        ("Requests", {"fields": [*COLUMNS]}),
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
        ("At the door", {"fields": ["if_unreachable", "degrades_to"]}),
        ("Worth", {"fields": ["priority", "price_factor", "on_reclaim"]}),
    ]

    @admin.display(ordering="deadline_s")
    def deadline(self, slo_class: SloClass) -> str:
        seconds = slo_class.deadline_s
        if seconds is None:
            return "-"
        return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds} s"
