"""`/api`: creating, changing and deleting rows of the inventory, by the rules of the admin and of fleet files.

Each kind has `POST /api/KIND`, `PATCH /api/KIND/NAME` and, where its rows may go, `DELETE /api/KIND/NAME`. Other rows
are named in a body by their names. A deployment has no name, so it goes by its number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from ninja import Field, Router, Status
from ninja.params.functions import Query as QueryParam
from pydantic import BaseModel, create_model

from controlplane.accounts.models import Role, Tenant
from controlplane.api import accounts
from controlplane.api.callers import PEOPLE, ApiRequest
from controlplane.api.fleet import router
from controlplane.api.schemas import (
    DeploymentOut,
    GpuTypeOut,
    InstanceOut,
    Items,
    ModelOut,
    NodeOut,
    RegionOut,
    SloClassOut,
    TenantOut,
)
from controlplane.fleet import selectors
from controlplane.fleet.inventory import kinds, services
from controlplane.fleet.inventory.kinds import Kind
from controlplane.fleet.models import Deployment, GpuType, Model, Region, SloClass

__all__ = ["router"]  # of `fleet.py`, with the operations that are added here

Reason = QueryParam("", max_length=255, description="Kept with the event.")


@dataclass(frozen=True, slots=True)
class Resource:
    """A *kind* under its *path*; *rows* are as the answer *out* needs them."""

    kind: Kind
    path: str
    word: str  # of the operations' names
    out: type[BaseModel]
    rows: Callable[[], QuerySet[models.Model]]
    tag: str = "Inventory"
    router: Router = router
    """That which has the list, since one router has all operations of a path."""


RESOURCES = (
    Resource(kinds.REGION, "regions", "region", RegionOut, Region.objects.all),
    Resource(kinds.GPU_TYPE, "gpu-types", "gpu_type", GpuTypeOut, GpuType.objects.all),
    Resource(kinds.NODE, "nodes", "node", NodeOut, selectors.nodes),
    Resource(kinds.MODEL, "models", "model", ModelOut, Model.objects.all),
    Resource(kinds.SLO_CLASS, "slo-classes", "slo_class", SloClassOut, SloClass.objects.all),
    Resource(
        kinds.TENANT,
        "tenants",
        "tenant",
        TenantOut,
        lambda: Tenant.objects.select_related("default_slo_class").prefetch_related("slo_classes"),
        tag="Tenants",
        router=accounts.router,
    ),
    Resource(kinds.INSTANCE, "instances", "instance", InstanceOut, selectors.instances, tag="Instances"),
)


class Reasoned(BaseModel):
    """What every body has, whatever else."""

    reason: str


def with_reason(schema: type[BaseModel]) -> type[BaseModel]:
    reason = (str, Field("", max_length=255, description="Kept with the event."))
    return create_model(schema.__name__, __base__=schema, reason=reason)


def given(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True, exclude={"reason"})


@router.get("/nodes", response=Items[NodeOut], tags=["Inventory"])
def list_nodes(request: ApiRequest) -> dict[str, Any]:
    """Machines, and how many of their GPUs instances have."""
    request.auth.require(Role.VIEWER)
    return {"items": list(selectors.nodes())}


def add_operations(resource: Resource) -> None:
    """Create, change and delete rows of one kind. Functions are named, as everywhere in `/api`, after what they do."""
    kind, title = resource.kind, resource.kind.title
    every, one = f"/{resource.path}", f"/{resource.path}/{{name}}"
    common: dict[str, Any] = {"tags": [resource.tag], "auth": PEOPLE}

    def described(
        verb: str, text: str, **schemas: type[BaseModel]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def describe(function: Callable[..., Any]) -> Callable[..., Any]:
            function.__name__, function.__doc__ = f"{verb}_{resource.word}", f"{text} Needs the role admin."
            function.__annotations__ |= schemas
            return function

        return describe

    started = " It is started, or looked for at its address." if kind is kinds.INSTANCE else ""

    @resource.router.post(every, response={201: resource.out}, **common)
    @described("create", f"A new {title}.{started}", body=with_reason(kind.create))
    def create(request: ApiRequest, body: Reasoned) -> Status[models.Model]:
        user = request.auth.require(Role.ADMIN)
        row = services.create(kind, given(body), user, body.reason)
        return Status(201, resource.rows().get(pk=row.pk))

    @resource.router.patch(one, response=resource.out, **common)
    @described("change", "Only what is given changes.", body=with_reason(kind.change))
    def change(request: ApiRequest, name: str, body: Reasoned) -> models.Model:
        user = request.auth.require(Role.ADMIN)
        row = get_object_or_404(kind.model, name=name)
        services.change(kind, row, given(body), user, body.reason)
        return resource.rows().get(pk=row.pk)

    if not kind.deletable:
        return

    @resource.router.delete(one, response={204: None}, **common)
    @described("delete", "Refused while other rows refer to it.")
    def delete(request: ApiRequest, name: str, reason: str = Reason) -> Status[None]:
        user = request.auth.require(Role.ADMIN)
        services.delete(kind, get_object_or_404(kind.model, name=name), user, reason)
        return Status(204, None)


for each in RESOURCES:
    add_operations(each)

if TYPE_CHECKING:  # their other fields are made from the rows
    NewDeployment = Reasoned
    DeploymentChange = Reasoned
else:
    NewDeployment, DeploymentChange = with_reason(kinds.DEPLOYMENT.create), with_reason(kinds.DEPLOYMENT.change)


@router.post("/deployments", response={201: DeploymentOut}, tags=["Inventory"])
def create_deployment(request: ApiRequest, body: NewDeployment) -> Status[Deployment]:
    """A new deployment. Its instances are created on their own. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = services.create(kinds.DEPLOYMENT, given(body), user, body.reason)
    return Status(201, selectors.deployments().get(pk=row.pk))


@router.patch("/deployments/{int:deployment_id}", response=DeploymentOut, tags=["Inventory"])
def change_deployment(request: ApiRequest, deployment_id: int, body: DeploymentChange) -> Deployment:
    """Only what is given changes. The gateway follows bounds and policies within a second; instances keep the settings
    of their engine until they start again: `POST /api/deployments/ID/rollout`. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    row = get_object_or_404(Deployment, pk=deployment_id)
    changes = {
        name: value
        for name, value in given(body).items()
        if value is not None or Deployment._meta.get_field(name).null  # whose null says something
    }
    services.change(kinds.DEPLOYMENT, row, changes, user, body.reason)
    return selectors.deployments().get(pk=row.pk)


@router.delete("/deployments/{int:deployment_id}", response={204: None}, tags=["Inventory"])
def delete_deployment(request: ApiRequest, deployment_id: int, reason: str = Reason) -> Status[None]:
    """Refused while it has instances. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    services.delete(kinds.DEPLOYMENT, get_object_or_404(Deployment, pk=deployment_id), user, reason)
    return Status(204, None)
