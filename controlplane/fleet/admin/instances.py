"""Admin of instances. Their states are not edited: actions ask the services, which keep the rules."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from controlplane.accounts.admin_actions import AdminAction, reason_action
from controlplane.accounts.requests import user_of
from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet import services
from controlplane.fleet.admin.base import Deleted, InventoryAdmin
from controlplane.fleet.admin.forms import InstanceForm
from controlplane.fleet.lifecycle.states import Action, InstanceState
from controlplane.fleet.models import (
    Instance,
    InstanceCommand,
    Launcher,
    Rollout,
    Swap,
    SwapGroup,
)

if TYPE_CHECKING:
    from django.contrib.admin.options import _FieldsetSpec


def operator_action(action: Action, question: str) -> "AdminAction[Instance]":
    """Return the admin action that calls `fleet.services.act` with a reason."""
    return reason_action(
        str(action), action.label, f"{action.label} instances", question, partial(services.act, action)
    )


@admin.register(Instance)
class InstanceAdmin(InventoryAdmin[Instance]):
    form = InstanceForm
    list_display = ["name", "state_mark", "model_name", "region", "hardware", "node", "launcher", "state_changed_at"]
    list_filter = ["state", "deployment__region", "deployment__model", "deployment__gpu_type", "launcher"]
    list_select_related = ["deployment__model", "deployment__region", "deployment__gpu_type", "node", "swap_group"]
    search_fields = ["name", "url", "deployment__model__name", "node__name"]
    autocomplete_fields = ["deployment", "node"]
    readonly_fields = [
        "state_mark",
        "state_changed_at",
        "state_reason",
        "held",
        "kv_capacity_tokens",
        "process_id",
        "failures",
        "swap_group",
        "created_at",
        "changed_at",
    ]
    actions = [
        operator_action(Action.DRAIN, "They finish what they run and are given nothing new."),
        operator_action(Action.RESUME, "They are given requests again."),
        operator_action(Action.START, "Their servers are started; they are ready when they answer."),
        operator_action(
            Action.STOP,
            "Their servers are stopped and running requests are cut. Drain first to spare them. They are held: only Start "
            "brings them back.",
        ),
        operator_action(Action.SLEEP, "They finish what they run, then put their weights aside."),
        operator_action(Action.WAKE, "They take their weights back and are ready when they answer."),
        operator_action(Action.RECLAIM, "Their opportunistic requests are evicted, then they serve their model again."),
    ]
    fieldsets = [
        (None, {"fields": ["name", "deployment", "node", "swap_group"]}),
        ("Server", {"fields": ["launcher", "url", "kv_events", "host", "process_id", "kv_capacity_tokens"]}),
        (
            "State",
            {
                "fields": [
                    "state_mark",
                    "state_changed_at",
                    "state_reason",
                    "held",
                    "failures",
                    "created_at",
                    "changed_at",
                ]
            },
        ),
    ]

    def get_readonly_fields(self, request: HttpRequest, obj: Instance | None = None) -> list[str]:
        if obj is None:
            return list(self.readonly_fields)
        fixed = ["name", "deployment", "launcher"]  # what a running server was started with
        if obj.launcher != Launcher.EXTERNAL:
            fixed += ["url", "kv_events"]
        if obj.launcher != Launcher.PROCESS:
            fixed.append("host")  # editable for a process whose machine is gone for good
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
                    "fields": ["launcher", "url", "kv_events"],
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

    def get_deleted_objects(self, objs: Sequence[Instance] | QuerySet[Instance], request: HttpRequest) -> Deleted:
        """Only stopped instances are deleted: others may have a server that would keep running unmanaged."""
        to_delete, counts, permissions, protected = super().get_deleted_objects(objs, request)
        alive = [f"{row} is {row.state}: stop it first" for row in objs if row.state != InstanceState.STOPPED]
        return to_delete, counts, permissions - {"instance command", "swap"}, [*protected, *alive]

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


@admin.register(SwapGroup)
class SwapGroupAdmin(InventoryAdmin[SwapGroup]):
    list_display = ["name", "cpu_memory_bytes", "created_at"]
    search_fields = ["name"]


@admin.register(Swap)
class SwapAdmin(ReadOnlyAdmin[Swap]):
    list_display = [
        "started_at", "group", "instance", "state", "tier", "sleep_tier", "drain_s", "sleep_s", "load_s", "actor", "message",
    ]  # fmt: skip
    list_filter = ["state", "tier", "started_at"]
    list_select_related = ["group", "instance"]
    search_fields = ["group__name", "instance__name", "actor", "reason", "message"]


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyAdmin[Rollout]):
    list_display = ["started_at", "deployment", "state", "up_to_date", "total", "actor", "reason", "message"]
    list_filter = ["state", "started_at"]
    list_select_related = ["deployment__model", "deployment__region", "deployment__gpu_type"]
    search_fields = ["deployment__model__name", "actor", "reason", "message"]
