"""`/api`: the inventory. Rows are validated as in the admin and in fleet files.

Each kind has `GET` and `POST /api/KIND`, `PATCH /api/KIND/NAME` and, where rows may be deleted, `DELETE /api/KIND/NAME`.
Bodies refer to other rows by name; deployments have no name and use their number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from ninja import Field, Router, Status
from pydantic import BaseModel, create_model

from controlplane.accounts.models import Role, Tenant
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.routers import accounts
from controlplane.api.routers.fleet import instances
from controlplane.api.schemas import ActionIn, Described, Items, Reason, RowSchema, Strict
from controlplane.fleet import selectors
from controlplane.fleet import services as fleet
from controlplane.fleet.inventory import kinds, services
from controlplane.fleet.inventory.kinds import Kind
from controlplane.fleet.models import (
    Deployment,
    Device,
    GpuType,
    Model,
    Node,
    Region,
    RegionLatency,
    SloClass,
    SloKind,
)
from scheduling.policy import COLUMNS

router = Router(auth=VIEWERS, tags=["Inventory"])


class MessageOut(Described):
    message: str
    """Result in one sentence."""


class RegionOut(RowSchema):
    class Meta:
        model = Region
        fields = ("name", "title", "active", "cordoned")


class RegionLatencyOut(RowSchema):
    class Meta:
        model = RegionLatency
        fields = ("origin", "target", "latency_ms")


class GpuTypeOut(RowSchema):
    class Meta:
        model = GpuType
        fields = ("name", "title", "memory_bytes", "on_demand_usd_per_hour", "spot_usd_per_hour", "price_source")

    device: Device


class NodeOut(RowSchema):
    class Meta:
        model = Node
        fields = ("name", "region", "gpu_type", "gpu_count", "address", "active", "cordoned")

    gpus_used: int


class ModelOut(RowSchema):
    class Meta:
        model = Model
        fields = ("name", "title", "source", "weights_bytes", "kv_bytes_per_token", "context_tokens", "architecture",
                  "length_model", "active")  # fmt: skip


class SloClassOut(RowSchema):
    class Meta:
        model = SloClass
        fields = ("name", "title", "service_tier", "ttft_target_ms", "itl_target_ms", "e2e_target_ms", "percentile",
                  "deadline_s", "price_factor", "priority", "on_reclaim")  # fmt: skip

    kind: SloKind


class DeploymentOut(RowSchema):
    class Meta:
        model = Deployment
        fields = ("id", "model", "region", "gpu_type", "tensor_parallel", "min_instances", "max_instances",
                  "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", *COLUMNS,
                  "vllm_args", "active")  # fmt: skip

    instances_total: int
    """Instances that are not stopped."""
    instances_ready: int
    expected_kv_tokens: int
    environment: dict[str, str]
    secret_names: list[str]
    """Environment variables whose values are hidden."""
    has_api_key: bool

    @staticmethod
    def resolve_secret_names(row: Any) -> list[str]:
        return sorted(row.secrets)

    @staticmethod
    def resolve_has_api_key(row: Any) -> bool:
        return bool(row.api_key)


@dataclass(frozen=True, slots=True)
class Resource:
    """Inventory *kind* at *path*; *rows* are prefetched for the schema *out*."""

    kind: Kind
    path: str
    word: str  # in operation names
    out: type[BaseModel]
    rows: Callable[[], QuerySet[models.Model]]
    about_list: str = ""
    router: Router = router
    """Router with the list operation of the same path, since one router must hold all operations of a path."""


RESOURCES = (
    Resource(kinds.REGION, "regions", "region", RegionOut, Region.objects.all),
    Resource(kinds.GPU_TYPE, "gpu-types", "gpu_type", GpuTypeOut, GpuType.objects.all),
    Resource(
        kinds.NODE,
        "nodes",
        "node",
        NodeOut,
        selectors.nodes,
        "Machines, and how many of their GPUs instances have.",
    ),
    Resource(
        kinds.MODEL,
        "models",
        "model",
        ModelOut,
        Model.objects.all,
        "Models of the inventory. Tenants find the models that they can ask for in `/v1/models`.",
    ),
    Resource(kinds.SLO_CLASS, "slo-classes", "slo_class", SloClassOut, SloClass.objects.all),
    Resource(
        kinds.TENANT,
        "tenants",
        "tenant",
        accounts.TenantOut,
        lambda: Tenant.objects.select_related("default_slo_class").prefetch_related("slo_classes"),
        router=accounts.router,
    ),
    Resource(
        kinds.INSTANCE,
        "instances",
        "instance",
        instances.InstanceOut,
        selectors.instances,
        router=instances.router,
    ),
)


class Reasoned(BaseModel):
    """Common fields of request bodies."""

    reason: str


def with_reason(schema: type[BaseModel]) -> type[BaseModel]:
    reason = (str, Field("", max_length=255, description="Kept with the event."))
    return create_model(schema.__name__, __base__=schema, reason=reason)


def given(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True, exclude={"reason"})


@router.get("/deployments", response=Items[DeploymentOut])
def list_deployments(request: ApiRequest, model: str = "", region: str = "") -> dict[str, Any]:
    return {"items": list(selectors.deployments(model=model, region=region))}


def add_list(resource: Resource) -> None:
    def rows(request: ApiRequest) -> dict[str, Any]:
        return {"items": list(resource.rows())}

    rows.__name__, rows.__doc__ = f"list_{resource.path.replace('-', '_')}", resource.about_list
    router.get(f"/{resource.path}", response=Items[resource.out])(rows)  # type: ignore[name-defined]


def add_operations(resource: Resource) -> None:
    """Add operations that create, change and delete rows of one kind, named after what they do."""
    kind, title = resource.kind, resource.kind.title
    every, one = f"/{resource.path}", f"/{resource.path}/{{name}}"

    def described(
        verb: str, text: str, **schemas: type[BaseModel]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def describe(function: Callable[..., Any]) -> Callable[..., Any]:
            function.__name__, function.__doc__ = f"{verb}_{resource.word}", f"{text} Needs the role admin."
            function.__annotations__ |= schemas
            return function

        return describe

    started = " It is started, or looked for at its address." if kind is kinds.INSTANCE else ""

    @resource.router.post(every, response={201: resource.out}, auth=VIEWERS)
    @described("create", f"A new {title}.{started}", body=with_reason(kind.create))
    def create(request: ApiRequest, body: Reasoned) -> Status[models.Model]:
        user = request.auth.require(Role.ADMIN)
        row = services.create(kind, given(body), user, body.reason)
        return Status(201, resource.rows().get(pk=row.pk))

    @resource.router.patch(one, response=resource.out, auth=VIEWERS)
    @described("change", "Only what is given changes.", body=with_reason(kind.change))
    def change(request: ApiRequest, name: str, body: Reasoned) -> models.Model:
        user = request.auth.require(Role.ADMIN)
        row = get_object_or_404(kind.model, name=name)
        services.change(kind, row, given(body), user, body.reason)
        return resource.rows().get(pk=row.pk)

    if not kind.deletable:
        return

    @resource.router.delete(one, response={204: None}, auth=VIEWERS)
    @described("delete", "Refused while other rows refer to it.")
    def delete(request: ApiRequest, name: str, reason: str = Reason) -> Status[None]:
        user = request.auth.require(Role.ADMIN)
        services.delete(kind, get_object_or_404(kind.model, name=name), user, reason)
        return Status(204, None)


for each in RESOURCES:
    if each.router is router:
        add_list(each)
    add_operations(each)

if TYPE_CHECKING:  # the other fields are generated from the rows
    NewDeployment = Reasoned
    DeploymentChange = Reasoned
else:
    NewDeployment, DeploymentChange = with_reason(kinds.DEPLOYMENT.create), with_reason(kinds.DEPLOYMENT.change)


@router.post("/deployments", response={201: DeploymentOut})
def create_deployment(request: ApiRequest, body: NewDeployment) -> Status[Deployment]:
    """Create a deployment. Its instances are created automatically. Requires the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = services.create(kinds.DEPLOYMENT, given(body), user, body.reason)
    return Status(201, selectors.deployments().get(pk=row.pk))


@router.patch("/deployments/{int:deployment_id}", response=DeploymentOut)
def change_deployment(request: ApiRequest, deployment_id: int, body: DeploymentChange) -> Deployment:
    """Change the given fields. The gateway applies bounds and policies within a second; instances keep their engine settings
    until they restart: `POST /api/deployments/ID/rollout`. Requires the role admin.
    """
    user = request.auth.require(Role.ADMIN)
    row = get_object_or_404(Deployment, pk=deployment_id)
    changes = {
        name: value
        for name, value in given(body).items()
        if value is not None or Deployment._meta.get_field(name).null  # null is a value only for nullable fields
    }
    services.change(kinds.DEPLOYMENT, row, changes, user, body.reason)
    return selectors.deployments().get(pk=row.pk)


@router.delete("/deployments/{int:deployment_id}", response={204: None})
def delete_deployment(request: ApiRequest, deployment_id: int, reason: str = Reason) -> Status[None]:
    """Delete a deployment. Refused while it has instances. Requires the role admin."""
    user = request.auth.require(Role.ADMIN)
    services.delete(kinds.DEPLOYMENT, get_object_or_404(Deployment, pk=deployment_id), user, reason)
    return Status(204, None)


@router.post("/deployments/{int:deployment_id}/undeploy", response=MessageOut)
def undeploy(request: ApiRequest, deployment_id: int, body: ActionIn) -> dict[str, str]:
    """Take a deployment out of service and stop its instances, aborting running requests. Its history stays. Requires
    the role admin.
    """
    user, row = request.auth.require(Role.ADMIN), get_object_or_404(Deployment, pk=deployment_id)
    return {"message": fleet.undeploy(row, user, body.reason)}


@router.post("/models/{name}/retire", response=MessageOut)
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


@router.get("/region-latencies", response=Items[RegionLatencyOut])
def list_region_latencies(request: ApiRequest) -> dict[str, Any]:
    """List latencies between regions; requests whose own region is full spill to the nearest."""
    return {"items": list(RegionLatency.objects.select_related("origin", "target"))}


@router.put("/region-latencies/{origin}/{target}", response=RegionLatencyOut)
def put_region_latency(request: ApiRequest, origin: str, target: str, body: LatencyIn) -> RegionLatency:
    """Set the latency between two regions. The gateway applies it within a second. Requires the role admin."""
    user, kind = request.auth.require(Role.ADMIN), kinds.REGION_LATENCY
    key, values = {"origin": origin, "target": target}, {"latency_ms": body.latency_ms}
    known = kind.find(key)
    row: RegionLatency = (
        services.change(kind, known, values, user, body.reason)
        if known
        else services.create(kind, key | values, user, body.reason)
    )
    return row


@router.delete("/region-latencies/{origin}/{target}", response={204: None})
def delete_region_latency(request: ApiRequest, origin: str, target: str, reason: str = Reason) -> Status[None]:
    """Reset the latency between two regions to the default. Requires the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = get_object_or_404(RegionLatency, origin__name=origin, target__name=target)
    services.delete(kinds.REGION_LATENCY, row, user, reason)
    return Status(204, None)
