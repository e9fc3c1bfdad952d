"""`/api`: instances, operator actions and rollouts of changed deployments."""

from typing import Any

from django.shortcuts import get_object_or_404
from msgspec.structs import asdict
from ninja import Router
from ninja.params.functions import Query as QueryParam

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.resources import add_list, add_operations, schema_of
from controlplane.api.schemas import Described, RowSchema
from controlplane.fleet import selectors
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import Action
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    Instance,
    InstanceCommand,
    Rollout,
    RolloutState,
)
from controlplane.fleet.rollouts import selectors as rollout_selectors
from controlplane.resources.instances import INSTANCES, with_outdated
from controlplane.resources.resource import Column

router = Router(auth=VIEWERS, tags=["Instances"])


class CommandOut(RowSchema):
    class Meta:
        model = InstanceCommand
        fields = ("id", "actor", "reason", "error", "created_at", "finished_at")

    verb: CommandVerb
    state: CommandState


InstanceOut = schema_of(INSTANCES, "InstanceOut")
InstanceDetail = schema_of(
    INSTANCES,
    "InstanceDetail",
    "",
    Column(
        "possible_actions", source=selectors.possible_actions, type=list[Action], about="Actions allowed in its state."
    ),
    Column("commands", source=selectors.recent_commands, type=list[CommandOut], about="Newest ten commands."),
    Column(
        "engine",
        type=dict[str, Any],
        about="Measured server: version, arguments, KV cache in tokens and blocks, memory in bytes.",
    ),
)


class LogOut(Described):
    lines: list[str]
    """Last lines, oldest first."""
    file: str
    """Path of the log on its machine; empty for a server that Pilothouse did not start."""
    host: str
    """Host of its agent, where the log was read; empty for this one."""
    error: str
    """Error that ended the server, or why the log cannot be read; empty for none."""


class RolloutOut(RowSchema):
    class Meta:
        model = Rollout
        fields = ("id", "actor", "reason", "total", "up_to_date", "message", "started_at", "ended_at", "bake_s",
                  "failure_budget", "min_requests", "auto_back", "going_back", "cause")  # fmt: skip

    state: RolloutState


class RolloutStatus(Described):
    total: int
    """Running instances started by Pilothouse."""
    up_to_date: int
    outdated: dict[str, list[str]]
    """Instances started with other settings, and those settings; an empty list where the original settings are unknown."""
    rollout: RolloutOut | None
    """Newest rollout."""


add_list(
    router,
    INSTANCES,
    InstanceOut,
    "List instances by name. Live load is in `/api/summary`.",
    paged=False,
    show=with_outdated,
)


@router.get("/instances/{name}", response=InstanceDetail)
def get_instance(request: ApiRequest, name: str) -> Instance:
    """One instance with its newest commands."""
    return get_object_or_404(selectors.instances(), name=name)


@router.get("/instances/{name}/log", response=LogOut)
def get_instance_log(request: ApiRequest, name: str, lines: int = QueryParam(200, ge=1, le=2000)) -> dict[str, Any]:
    """Return the end of the server's log. Requires the role operator, since it may hold tenants' prompts."""
    request.auth.require(Role.OPERATOR)
    return asdict(engine_logs.read(get_object_or_404(selectors.instances(), name=name), lines))


add_operations(router, INSTANCES)


@router.get("/deployments/{int:deployment_id}/rollout", response=RolloutStatus)
def get_rollout(request: ApiRequest, deployment_id: int) -> rollout_selectors.Status:
    """Return which instances have the deployment's current engine settings, and the newest rollout."""
    get_object_or_404(Deployment, pk=deployment_id)
    return rollout_selectors.statuses(pk=deployment_id)[0]
