"""`/api`: the inventory, and what operators do to it."""

from typing import Any, TypedDict, cast

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django_stubs_ext import WithAnnotations
from ninja import Router, Status
from ninja.params.functions import Query as QueryParam

from controlplane.accounts.models import Role
from controlplane.api.callers import PEOPLE, ApiRequest
from controlplane.api.schemas import (
    ActionIn,
    ActionOut,
    DeploymentOut,
    Described,
    GpuTypeOut,
    InstanceDetail,
    InstanceOut,
    Items,
    ModelOut,
    RegionOut,
    SloClassOut,
)
from controlplane.fleet import selectors, services
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import Action, InstanceState
from controlplane.fleet.models import GpuType, Instance, Model, Region, SloClass
from controlplane.fleet.rollouts import revisions

router = Router(auth=PEOPLE)


class Compared(TypedDict):
    outdated: tuple[str, ...]


class LogOut(Described):
    lines: list[str]
    """The last ones, oldest first; none if the log is not on the machine that answers."""
    file: str
    """Where the log is, on the machine whose worker started the server; "" for a server that is no process of ours."""
    error: str
    """The error that ended the server, if it has ended by one."""


@router.get("/instances", response=Items[InstanceOut], tags=["Instances"])
def list_instances(
    request: ApiRequest,
    model: str = "",
    region: str = "",
    gpu_type: str = "",
    state: InstanceState | None = None,
    q: str = "",
) -> dict[str, Any]:
    """Instances by name. `q` is looked for in name, address and model. Live load is in `/api/summary`."""
    request.auth.require(Role.VIEWER)
    rows = list(selectors.instances(model=model, region=region, gpu_type=gpu_type, state=state or "", text=q))
    differ = revisions.outdated(rows)
    for row in rows:
        cast("WithAnnotations[Instance, Compared]", row).outdated = differ.get(row.pk, ())
    return {"items": rows}


@router.get("/instances/{name}", response=InstanceDetail, tags=["Instances"])
def get_instance(request: ApiRequest, name: str) -> Instance:
    request.auth.require(Role.VIEWER)
    return get_object_or_404(selectors.instances(), name=name)


@router.get("/instances/{name}/log", response=LogOut, tags=["Instances"])
def get_instance_log(request: ApiRequest, name: str, lines: int = QueryParam(200, ge=1, le=2000)) -> dict[str, Any]:
    """The end of its server's log. It may hold what tenants sent, so it needs the role operator."""
    request.auth.require(Role.OPERATOR)
    row = get_object_or_404(selectors.instances(), name=name)
    failed = row.state == InstanceState.FAILED
    return {
        "lines": engine_logs.last_lines(row, lines),
        "file": str(engine_logs.path_of(row) or ""),
        "error": engine_logs.root_error(row) if failed else "",
    }


@router.post("/instances/{name}/{action}", response={202: ActionOut}, tags=["Instances"])
def act_on_instance(request: ApiRequest, name: str, action: Action, body: ActionIn) -> Status[dict[str, Any]]:
    """Drain, resume, start, stop, sleep or wake. 409 when the instance's state does not allow it.

    What a worker must do goes on after this answer: watch `state`, or the commands of the instance.
    """
    user = request.auth.require(Role.OPERATOR)
    row = get_object_or_404(selectors.instances(), name=name)
    message = services.act(action, row, user, body.reason)
    return Status(202, {"message": message, "instance": row})


@router.get("/regions", response=Items[RegionOut], tags=["Inventory"])
def list_regions(request: ApiRequest) -> dict[str, Any]:
    return _items(request, Region.objects.all())


@router.get("/gpu-types", response=Items[GpuTypeOut], tags=["Inventory"])
def list_gpu_types(request: ApiRequest) -> dict[str, Any]:
    return _items(request, GpuType.objects.all())


@router.get("/models", response=Items[ModelOut], tags=["Inventory"])
def list_models(request: ApiRequest) -> dict[str, Any]:
    """Models of the inventory. Tenants find the models that they can ask for in `/v1/models`."""
    return _items(request, Model.objects.all())


@router.get("/slo-classes", response=Items[SloClassOut], tags=["Inventory"])
def list_slo_classes(request: ApiRequest) -> dict[str, Any]:
    return _items(request, SloClass.objects.all())


@router.get("/deployments", response=Items[DeploymentOut], tags=["Inventory"])
def list_deployments(request: ApiRequest, model: str = "", region: str = "") -> dict[str, Any]:
    return _items(request, selectors.deployments(model=model, region=region))


def _items(request: ApiRequest, rows: QuerySet[Any]) -> dict[str, Any]:
    request.auth.require(Role.VIEWER)
    return {"items": list(rows)}
