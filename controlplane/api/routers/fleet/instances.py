"""`/api`: instances, operator actions and rollouts of changed deployments."""

from typing import Any, TypedDict, cast

from django.shortcuts import get_object_or_404
from django_stubs_ext import WithAnnotations
from ninja import Field, Router, Status
from ninja.params.functions import Query as QueryParam

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.schemas import ActionIn, Described, Items, Reason, RowSchema
from controlplane.fleet import selectors, services
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import Action, InstanceState
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Rollout,
    RolloutState,
    Tier,
)
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.rollouts import selectors as rollout_selectors
from controlplane.fleet.rollouts import services as rollouts

router = Router(auth=VIEWERS, tags=["Instances"])


class InstanceOut(RowSchema):
    class Meta:
        model = Instance
        fields = ("name", "url", "state_reason", "state_changed_at", "startup", "kv_capacity_tokens", "host", "failures",
                  "held", "created_at")  # fmt: skip

    model: str = Field(alias="deployment.model.name")
    region: str = Field(alias="deployment.region.name")
    gpu_type: str = Field(alias="deployment.gpu_type.name")
    tensor_parallel: int = Field(alias="deployment.tensor_parallel")
    node: str | None
    launcher: Launcher
    state: InstanceState
    tier: Tier
    """Where the weights are."""
    swap_group: str | None
    """Instances that share its GPUs: `/api/swap-groups`."""
    outdated: list[str] = Field(default_factory=list)
    """Engine settings of the deployment that differ from those it was started with."""

    @staticmethod
    def resolve_outdated(row: Any) -> list[str]:
        return list(row.outdated if hasattr(row, "outdated") else revisions.outdated([row]).get(row.pk, ()))

    @staticmethod
    def resolve_swap_group(row: Any) -> str | None:
        return row.swap_group.name if row.swap_group else None

    @staticmethod
    def resolve_node(row: Any) -> str | None:
        return row.node.name if row.node else None


class CommandOut(RowSchema):
    class Meta:
        model = InstanceCommand
        fields = ("id", "actor", "reason", "error", "created_at", "finished_at")

    verb: CommandVerb
    state: CommandState


class InstanceDetail(InstanceOut):
    possible_actions: list[Action]
    """Actions allowed in its state."""
    commands: list[CommandOut]
    """Newest ten commands."""
    engine: dict[str, Any]
    """Measured server: version, arguments, KV cache in tokens and blocks, memory in bytes."""

    @staticmethod
    def resolve_possible_actions(row: Any) -> list[Action]:
        return selectors.possible_actions(row)

    @staticmethod
    def resolve_commands(row: Any) -> list[Any]:
        return selectors.recent_commands(row)


class ActionOut(Described):
    message: str
    """Result in one sentence."""
    instance: InstanceOut


class LogOut(Described):
    lines: list[str]
    """Last lines, oldest first; empty if the log is on another machine."""
    file: str
    """Path of the log on the worker's machine; empty for a server that Pilothouse did not start."""
    error: str
    """Error that ended the server, if any."""


class RolloutOut(RowSchema):
    class Meta:
        model = Rollout
        fields = ("id", "actor", "reason", "total", "up_to_date", "message", "started_at", "ended_at")

    state: RolloutState


class RolloutStatus(Described):
    total: int
    """Running instances started by Pilothouse."""
    up_to_date: int
    outdated: dict[str, list[str]]
    """Instances started with other settings, and those settings; an empty list where the original settings are unknown."""
    rollout: RolloutOut | None
    """Newest rollout."""


class Compared(TypedDict):
    outdated: tuple[str, ...]


@router.get("/instances", response=Items[InstanceOut])
def list_instances(
    request: ApiRequest,
    model: str = "",
    region: str = "",
    gpu_type: str = "",
    state: InstanceState | None = None,
    q: str = "",
) -> dict[str, Any]:
    """List instances by name. `q` searches name, address and model. Live load is in `/api/summary`."""
    rows = list(selectors.instances(model=model, region=region, gpu_type=gpu_type, state=state or "", text=q))
    differ = revisions.outdated(rows)
    for row in rows:
        cast("WithAnnotations[Instance, Compared]", row).outdated = differ.get(row.pk, ())
    return {"items": rows}


@router.get("/instances/{name}", response=InstanceDetail)
def get_instance(request: ApiRequest, name: str) -> Instance:
    return get_object_or_404(selectors.instances(), name=name)


@router.get("/instances/{name}/log", response=LogOut)
def get_instance_log(request: ApiRequest, name: str, lines: int = QueryParam(200, ge=1, le=2000)) -> dict[str, Any]:
    """Return the end of the server's log. Requires the role operator, since it may hold tenants' prompts."""
    request.auth.require(Role.OPERATOR)
    row = get_object_or_404(selectors.instances(), name=name)
    failed = row.state == InstanceState.FAILED
    return {
        "lines": engine_logs.last_lines(row, lines),
        "file": str(engine_logs.path_of(row) or ""),
        "error": engine_logs.root_error(row) if failed else "",
    }


@router.post("/instances/{name}/{action}", response={202: ActionOut})
def act_on_instance(request: ApiRequest, name: str, action: Action, body: ActionIn) -> Status[dict[str, Any]]:
    """Drain, resume, start, stop, sleep or wake. 409 when the instance's state does not allow it.

    Workers continue after this response: poll `state` or the instance's commands.
    """
    user = request.auth.require(Role.OPERATOR)
    row = get_object_or_404(selectors.instances(), name=name)
    message = services.act(action, row, user, body.reason)
    return Status(202, {"message": message, "instance": row})


@router.get("/deployments/{int:deployment_id}/rollout", response=RolloutStatus)
def get_rollout(request: ApiRequest, deployment_id: int) -> rollout_selectors.Status:
    """Return which instances have the deployment's current engine settings, and the newest rollout."""
    get_object_or_404(Deployment, pk=deployment_id)
    return rollout_selectors.statuses(pk=deployment_id)[0]


@router.post("/deployments/{int:deployment_id}/rollout", response={202: RolloutOut})
def start_rollout(request: ApiRequest, deployment_id: int, body: ActionIn) -> Status[Rollout]:
    """Restart its instances with the current settings, one by one. 409 when a rollout is in progress or all are up to
    date.
    """
    user = request.auth.require(Role.OPERATOR)
    return Status(202, rollouts.start(get_object_or_404(Deployment, pk=deployment_id), user, body.reason))


@router.delete("/deployments/{int:deployment_id}/rollout", response=RolloutOut)
def cancel_rollout(request: ApiRequest, deployment_id: int, reason: str = Reason) -> Rollout:
    """Cancel the rollout in progress; instances that drain for it serve again. 409 when none is in progress."""
    user = request.auth.require(Role.OPERATOR)
    return rollouts.cancel(get_object_or_404(Deployment, pk=deployment_id), user, reason)
