"""`/api`: the inventory. Rows are validated as in the admin and in fleet files.

Each kind has `GET` and `POST /api/KIND`, `PATCH /api/KIND/NAME` and, where rows may be deleted, `DELETE /api/KIND/NAME`.
Bodies refer to other rows by name; deployments have no name and use their number.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.db import models
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from ninja import Field, Router, Status
from pydantic import BaseModel, create_model

from controlplane.accounts.models import Role
from controlplane.api import conditions
from controlplane.api.callers import VIEWERS, ApiRequest, Caller
from controlplane.api.conditions import IfMatch
from controlplane.api.names import NAME
from controlplane.api.resources import add_list, schema_of
from controlplane.api.routers import accounts
from controlplane.api.routers.fleet import instances
from controlplane.api.schemas import ActionIn, Described, Items, Reason, Strict
from controlplane.applications.models import UnitBackend
from controlplane.fleet import selectors
from controlplane.fleet import services as fleet
from controlplane.fleet.inventory import kinds, services
from controlplane.fleet.inventory.kinds import Kind
from controlplane.fleet.models import Adapter, Deployment, Model, Node, Region, RegionLatency, WeightedTarget
from controlplane.resources.applications import UNIT_BACKENDS
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import (
    ADAPTERS,
    DEPLOYMENTS,
    GPU_TYPES,
    MODELS,
    NODES,
    REGION_LATENCIES,
    REGIONS,
    SLO_CLASSES,
    TARGET_COMPARISONS,
    WEIGHTED_TARGETS,
)
from controlplane.resources.keys import TENANTS
from controlplane.resources.resource import Resource

router = Router(auth=VIEWERS, tags=["Inventory"])
ADMIN = Caller(fleet_role=Role.ADMIN)
"""Reads rows that were just written."""


class MessageOut(Described):
    message: str
    """Result in one sentence."""


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of *resource* that admins create, change and delete as *kind*; *out* is the schema of one."""

    kind: Kind
    resource: Resource
    out: Any
    router: Router = router
    """Router with the list operation of the same path, since one router must hold all operations of a path."""

    @property
    def rows(self) -> QuerySet[models.Model]:
        return cast("QuerySet[models.Model]", self.resource.rows(ADMIN))


def listed(kind: Kind, resource: Resource, name: str, about: str) -> Written:
    """Add the list of *resource*, whose rows are described by the schema *name*."""
    out = schema_of(resource, name)
    add_list(router, resource, out, about, paged=False)
    return Written(kind, resource, out)


WRITTEN = (
    listed(kinds.REGION, REGIONS, "RegionOut", "List regions."),
    listed(kinds.GPU_TYPE, GPU_TYPES, "GpuTypeOut", "List GPU types with their prices."),
    listed(kinds.NODE, NODES, "NodeOut", "Machines, and how many of their GPUs instances have."),
    listed(
        kinds.MODEL,
        MODELS,
        "ModelOut",
        "Models of the inventory. Tenants find the models that they can ask for in `/v1/models`.",
    ),
    listed(kinds.ADAPTER, ADAPTERS, "AdapterOut", "List LoRA adapters, which tenants ask for as for models."),
    listed(kinds.SLO_CLASS, SLO_CLASSES, "SloClassOut", "List SLO classes."),
    listed(
        Kind("unit-backends", UnitBackend, secret=frozenset({"secret"})),
        UNIT_BACKENDS,
        "UnitBackendOut",
        "List backends of units that are no LLM, which their platforms warm by a webhook.",
    ),
    Written(kinds.TENANT, TENANTS, accounts.TenantOut, accounts.router),
    Written(kinds.INSTANCE, INSTANCES, instances.InstanceOut, instances.router),
)
DeploymentOut = listed(kinds.DEPLOYMENT, DEPLOYMENTS, "DeploymentOut", "List deployments with their policy.").out
RegionLatencyOut = listed(
    kinds.REGION_LATENCY,
    REGION_LATENCIES,
    "RegionLatencyOut",
    "List latencies between regions; requests whose own region is full spill to the nearest.",
).out
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


class Reasoned(BaseModel):
    """Common fields of request bodies."""

    reason: str


def with_reason(schema: type[BaseModel]) -> type[BaseModel]:
    reason = (str, Field("", max_length=255, description="Kept with the event."))
    return create_model(schema.__name__, __base__=schema, reason=reason)


def given(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True, exclude={"reason"})


def add_operations(written: Written) -> None:
    """Add operations that create, change and delete rows of one kind, named after what they do."""
    kind, title = written.kind, written.kind.title
    word = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.model.__name__).lower()  # `gpu_type`
    slug = isinstance(kind.model._meta.get_field("name"), models.SlugField)
    every, one = f"/{written.resource.name}", f"/{written.resource.name}/{'{name}' if slug else NAME}"

    def described(
        verb: str, text: str, needs: str = " Needs the role admin.", **schemas: type[BaseModel]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def describe(function: Callable[..., Any]) -> Callable[..., Any]:
            function.__name__, function.__doc__ = f"{verb}_{word}", f"{text}{needs}"
            function.__annotations__ |= schemas
            return function

        return describe

    started = " It is started, or looked for at its address." if kind is kinds.INSTANCE else ""

    @written.router.post(every, response={201: written.out}, auth=VIEWERS)
    @described("create", f"A new {title}.{started}", body=with_reason(kind.create))
    def create(request: ApiRequest, body: Reasoned) -> Status[models.Model]:
        user = request.auth.require(Role.ADMIN)
        row = services.create(kind, given(body), user, body.reason)
        return Status(201, written.rows.get(pk=row.pk))

    if kind is not kinds.INSTANCE:

        @written.router.get(one, response=written.out, auth=VIEWERS)
        @described("get", f"One {title}, with its `ETag`.", needs="")
        def get(request: ApiRequest, name: str) -> models.Model:
            return cast(models.Model, conditions.read(request, written.rows, name=name))

    @written.router.patch(one, response=written.out, auth=VIEWERS)
    @described("change", "Only what is given changes.", body=with_reason(kind.change))
    def change(request: ApiRequest, name: str, body: Reasoned, if_match: str = IfMatch) -> models.Model:
        user = request.auth.require(Role.ADMIN)
        row = get_object_or_404(kind.model, name=name)
        conditions.check(request, if_match, row)
        services.change(kind, row, given(body), user, body.reason)
        return written.rows.get(pk=row.pk)

    if not kind.deletable:
        return

    @written.router.delete(one, response={204: None}, auth=VIEWERS)
    @described("delete", "Refused while other rows refer to it.")
    def delete(request: ApiRequest, name: str, reason: str = Reason, if_match: str = IfMatch) -> Status[None]:
        user = request.auth.require(Role.ADMIN)
        row = get_object_or_404(kind.model, name=name)
        conditions.check(request, if_match, row)
        services.delete(kind, row, user, reason)
        return Status(204, None)


for each in WRITTEN:
    add_operations(each)

if TYPE_CHECKING:  # the other fields are generated from the rows
    NewDeployment = Reasoned
    DeploymentChange = Reasoned
else:
    NewDeployment, DeploymentChange = with_reason(kinds.DEPLOYMENT.create), with_reason(kinds.DEPLOYMENT.change)


FIELDS = frozenset(field.name for field in Deployment._meta.get_fields())


@router.post("/deployments", response={201: DeploymentOut})
def create_deployment(request: ApiRequest, body: NewDeployment) -> Status[Deployment]:
    """Create a deployment. Its instances are created automatically. Requires the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = services.create(kinds.DEPLOYMENT, given(body), user, body.reason)
    return Status(201, selectors.deployments().get(pk=row.pk))


@router.get("/deployments/{int:deployment_id}", response=DeploymentOut)
def get_deployment(request: ApiRequest, deployment_id: int) -> Deployment:
    """One deployment, with its `ETag`."""
    return cast(Deployment, conditions.read(request, selectors.deployments(), pk=deployment_id))


@router.patch("/deployments/{int:deployment_id}", response=DeploymentOut)
def change_deployment(
    request: ApiRequest, deployment_id: int, body: DeploymentChange, if_match: str = IfMatch
) -> Deployment:
    """Change the given fields. The gateway applies bounds and policies within a second; instances keep their engine settings
    until they restart: `POST /api/deployments/ID/rollout`. Requires the role admin.
    """
    user = request.auth.require(Role.ADMIN)
    row = get_object_or_404(Deployment, pk=deployment_id)
    conditions.check(request, if_match, row, fields=FIELDS)
    changes = {
        name: value
        for name, value in given(body).items()
        if value is not None or Deployment._meta.get_field(name).null  # null is a value only for nullable fields
    }
    services.change(kinds.DEPLOYMENT, row, changes, user, body.reason)
    return selectors.deployments().get(pk=row.pk)


@router.delete("/deployments/{int:deployment_id}", response={204: None})
def delete_deployment(
    request: ApiRequest, deployment_id: int, reason: str = Reason, if_match: str = IfMatch
) -> Status[None]:
    """Delete a deployment. Refused while it has instances. Requires the role admin."""
    user, row = request.auth.require(Role.ADMIN), get_object_or_404(Deployment, pk=deployment_id)
    conditions.check(request, if_match, row, fields=FIELDS)
    services.delete(kinds.DEPLOYMENT, row, user, reason)
    return Status(204, None)


@router.post("/deployments/{int:deployment_id}/undeploy", response=MessageOut)
def undeploy(request: ApiRequest, deployment_id: int, body: ActionIn) -> dict[str, str]:
    """Take a deployment out of service and stop its instances, aborting running requests. Its history stays. Requires
    the role admin.
    """
    user, row = request.auth.require(Role.ADMIN), get_object_or_404(Deployment, pk=deployment_id)
    return {"message": fleet.undeploy(row, user, body.reason)}


@router.post(f"/models/{NAME}/retire", response=MessageOut)
def retire_model(request: ApiRequest, name: str, body: ActionIn) -> dict[str, str]:
    """Undeploy a model everywhere and stop offering it. Its history stays. Requires the role admin."""
    user, row = request.auth.require(Role.ADMIN), get_object_or_404(Model, name=name)
    return {"message": fleet.retire(row, user, body.reason)}


def add_cordon(path: str, word: str, model: type[Node] | type[Region]) -> None:
    def operation(verb: str, act: Callable[[Any, Any, str], str], about: str) -> None:
        def carry_out(request: ApiRequest, name: str, body: ActionIn) -> dict[str, str]:
            user, row = request.auth.require(Role.OPERATOR), get_object_or_404(model, name=name)
            return {"message": act(row, user, body.reason)}

        carry_out.__name__, carry_out.__doc__ = f"{verb}_{word}", about
        router.post(f"/{path}/{{name}}/{verb}", response=MessageOut)(carry_out)

    operation("cordon", fleet.cordon, "Nothing new is started there; running instances stay. 409 if it is cordoned.")
    operation("uncordon", fleet.uncordon, "Instances may be started there again. 409 if it is not cordoned.")


add_cordon("nodes", "node", Node)
add_cordon("regions", "region", Region)


class LatencyIn(Strict):
    latency_ms: float = Field(ge=0, description="One way; the same back unless that is given too.")
    reason: str = Field("", max_length=255, description="Kept with the event.")


@router.get("/region-latencies/{origin}/{target}", response=RegionLatencyOut)
def get_region_latency(request: ApiRequest, origin: str, target: str) -> RegionLatency:
    """The latency between two regions, with its `ETag`; 404 where none was set."""
    rows = REGION_LATENCIES.rows(ADMIN)
    return cast(RegionLatency, conditions.read(request, rows, origin__name=origin, target__name=target))


@router.put("/region-latencies/{origin}/{target}", response=RegionLatencyOut)
def put_region_latency(
    request: ApiRequest, origin: str, target: str, body: LatencyIn, if_match: str = IfMatch
) -> RegionLatency:
    """Set the latency between two regions. The gateway applies it within a second. Requires the role admin."""
    user, kind = request.auth.require(Role.ADMIN), kinds.REGION_LATENCY
    key, values = {"origin": origin, "target": target}, {"latency_ms": body.latency_ms}
    known = kind.find(key)
    conditions.check(request, if_match, *filter(None, [known]))
    row: RegionLatency = (
        services.change(kind, known, values, user, body.reason)
        if known
        else services.create(kind, key | values, user, body.reason)
    )
    request.changed = (row,)
    return row


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
    conditions.check(request, if_match, *targets_of(name))
    services.share(name, body.targets, user, body.reason)
    return {"items": list(WeightedTarget.objects.filter(name=name))}


@router.delete("/region-latencies/{origin}/{target}", response={204: None})
def delete_region_latency(
    request: ApiRequest, origin: str, target: str, reason: str = Reason, if_match: str = IfMatch
) -> Status[None]:
    """Reset the latency between two regions to the default. Requires the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = get_object_or_404(RegionLatency, origin__name=origin, target__name=target)
    conditions.check(request, if_match, row)
    services.delete(kinds.REGION_LATENCY, row, user, reason)
    return Status(204, None)
