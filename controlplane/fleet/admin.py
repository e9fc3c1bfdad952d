"""Admin of the inventory."""

from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest

from controlplane.fleet.inventory.kinds import (
    ADAPTER,
    DEPLOYMENT,
    GPU_TYPE,
    INSTANCE,
    MODEL,
    NODE,
    PROFILE,
    REGION,
    SCHEDULE,
    SLO_CLASS,
    SWAP_GROUP,
    WEIGHTED_TARGET,
)
from controlplane.fleet.models import Launcher
from controlplane.resources.admin import KindAdmin, register
from controlplane.resources.forms import KindForm

PLACE = ("deployment__model", "deployment__region", "deployment__gpu_type")


class InstanceForm(KindForm):
    def values(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        of = named["deployment"]
        place = {"model": of.model.name, "region": of.region.name, "gpu_type": of.gpu_type.name}
        return {name: value for name, value in named.items() if name != "deployment"} | place


class InstanceAdmin(KindAdmin):
    """States are not edited: actions keep their rules."""

    form = InstanceForm
    autocomplete_fields = ["deployment", "node"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        given = ["name", "deployment", "launcher", "node", "url", "kv_events"]
        if obj is None:
            return given
        measured = ["state", "state_changed_at", "state_reason", "held", "kv_capacity_tokens", "process_id", "failures"]
        return [*given, "host", *measured, "swap_group", "created_at"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        if obj is None:
            return []
        editable = {"node"}
        if obj.launcher == Launcher.EXTERNAL:
            editable |= {"url", "kv_events"}
        if obj.launcher == Launcher.PROCESS:
            editable.add("host")  # of a process whose machine is gone for good
        return [name for name in self.get_fields(request, obj) if name not in editable]


for each in (
    REGION,
    GPU_TYPE,
    MODEL,
    ADAPTER,
    SLO_CLASS,
    WEIGHTED_TARGET,
    SWAP_GROUP,
    SCHEDULE,
    PROFILE,
):
    register(each)
register(NODE, "name", "region", "gpu_type", "gpu_count", "address", "active", "cordoned")
register(DEPLOYMENT, "model", "region", "gpu_type", "tensor_parallel", "min_instances", "max_instances", "active")
register(
    INSTANCE,
    *("name", "state", "deployment", "node", "launcher", "state_changed_at"),
    base=InstanceAdmin,
    related=PLACE,
)
