"""`/api`: the inventory. Rows are validated as in the admin and in fleet files.

Bodies refer to other rows by name; deployments have no name and use their number.
"""

from typing import TYPE_CHECKING, Any

from ninja import Field, Router

from controlplane.accounts.models import Role
from controlplane.api import conditions
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.conditions import IfMatch
from controlplane.api.names import NAME
from controlplane.api.resources import add_list, mount, schema_of
from controlplane.api.routers import accounts
from controlplane.api.routers.fleet import instances
from controlplane.api.schemas import Items, Strict
from controlplane.fleet.inventory import services
from controlplane.fleet.models import Adapter, Model, WeightedTarget
from controlplane.resources.applications import UNIT_BACKENDS
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import (
    ADAPTERS,
    DEPLOYMENTS,
    GPU_TYPES,
    MODELS,
    NODES,
    REGIONS,
    SLO_CLASSES,
    TARGET_COMPARISONS,
    WEIGHTED_TARGETS,
)
from controlplane.resources.keys import TENANTS

router = Router(auth=VIEWERS, tags=["Inventory"])

for resource, name, about in (
    (REGIONS, "RegionOut", "List regions."),
    (GPU_TYPES, "GpuTypeOut", "List GPU types with their prices."),
    (NODES, "NodeOut", "Machines, and how many of their GPUs instances have."),
    (
        MODELS,
        "ModelOut",
        "Models of the inventory. Tenants find the models that they can ask for in `/v1/models`.",
    ),
    (ADAPTERS, "AdapterOut", "List LoRA adapters, which tenants ask for as for models."),
    (SLO_CLASSES, "SloClassOut", "List SLO classes."),
    (
        UNIT_BACKENDS,
        "UnitBackendOut",
        "List backends of units that are no LLM, which their platforms warm by a webhook.",
    ),
    (DEPLOYMENTS, "DeploymentOut", "List deployments with their policy."),
):
    mount(router, resource, schema_of(resource, name), about)
mount(accounts.router, TENANTS, accounts.TenantOut)
mount(instances.router, INSTANCES, instances.InstanceOut, gets=False)
TargetOut = schema_of(WEIGHTED_TARGETS, "WeightedTargetOut")
add_list(
    router,
    WEIGHTED_TARGETS,
    TargetOut,
    "Public names whose requests are shared among models, and the weight of each.",
    paged=False,
)
add_list(
    router,
    TARGET_COMPARISONS,
    schema_of(TARGET_COMPARISONS, "TargetComparisonOut"),
    "Weighted targets of each public name, compared over the last day: latencies, output lengths and errors.",
    paged=False,
)


if TYPE_CHECKING:
    TargetsOut = Items[Any]
else:
    TargetsOut = Items[TargetOut]


def targets_of(name: str) -> list[WeightedTarget]:
    """Every target that *name* may have, by its name: one that was added or taken away since is a change too."""
    names = [*Model.objects.values_list("name", flat=True), *Adapter.objects.values_list("name", flat=True)]
    return [WeightedTarget(name=name, target=target) for target in names]


class WeightsIn(Strict):
    targets: dict[str, float] = Field(
        description="Weight of each model or adapter; those left out end, and without any the name does."
    )
    reason: str = Field("", max_length=255, description="Kept with the event.")


@router.get(f"/weighted-targets/{NAME}", response=TargetsOut)
def get_weighted_targets(request: ApiRequest, name: str) -> dict[str, Any]:
    """The targets of one public name, with the `ETag` of all of them; none where it is not shared."""
    conditions.tag(request, *targets_of(name))
    return {"items": list(WeightedTarget.objects.filter(name=name))}


@router.put(f"/weighted-targets/{NAME}", response=TargetsOut)
def put_weighted_targets(request: ApiRequest, name: str, body: WeightsIn, if_match: str = IfMatch) -> dict[str, Any]:
    """Share the requests that ask for a public name among models by weight. A conversation stays with its target as long as
    that has its weight. The gateway follows within a second. Requires the role admin.
    """
    user = request.auth.require(Role.ADMIN)
    list(WeightedTarget.objects.select_for_update().filter(name=name))
    conditions.check(if_match, *targets_of(name), fields=("weight", "active", "name", "target"))
    services.share(name, body.targets, user, body.reason)
    return {"items": list(WeightedTarget.objects.filter(name=name))}
