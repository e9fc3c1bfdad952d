"""`/api/deployments/ID/rollout`: a changed deployment on its way to its instances."""

from datetime import datetime

from django.shortcuts import get_object_or_404
from ninja import Router, Status
from ninja.params.functions import Query as QueryParam

from controlplane.accounts.models import Role
from controlplane.api.callers import PEOPLE, ApiRequest
from controlplane.api.schemas import ActionIn, Described
from controlplane.fleet.models import Deployment, Rollout, RolloutState
from controlplane.fleet.rollouts import selectors
from controlplane.fleet.rollouts import services as rollouts

router = Router(auth=PEOPLE)


class RolloutOut(Described):
    id: int
    state: RolloutState
    actor: str
    reason: str
    total: int
    """Instances that are kept while it lasts."""
    up_to_date: int
    """Instances that are ready with the present settings."""
    message: str
    """What it does or waits for, or how it ended."""
    started_at: datetime
    ended_at: datetime | None


class RolloutStatus(Described):
    total: int
    """Instances that Pilothouse started and that run."""
    up_to_date: int
    outdated: dict[str, list[str]]
    """Instances that were started with other settings, and which; an empty list where it is not known what they were."""
    rollout: RolloutOut | None
    """The newest."""


@router.get("/deployments/{int:deployment_id}/rollout", response=RolloutStatus, tags=["Instances"])
def get_rollout(request: ApiRequest, deployment_id: int) -> selectors.Status:
    """Which instances have the deployment's present engine settings, and the newest rollout."""
    request.auth.require(Role.VIEWER)
    get_object_or_404(Deployment, pk=deployment_id)
    return selectors.statuses(pk=deployment_id)[0]


@router.post("/deployments/{int:deployment_id}/rollout", response={202: RolloutOut}, tags=["Instances"])
def start_rollout(request: ApiRequest, deployment_id: int, body: ActionIn) -> Status[Rollout]:
    """Start its instances again with the present settings, one by one. 409 when one is in progress or all are up to
    date."""
    user = request.auth.require(Role.OPERATOR)
    return Status(202, rollouts.start(get_object_or_404(Deployment, pk=deployment_id), user, body.reason))


@router.delete("/deployments/{int:deployment_id}/rollout", response=RolloutOut, tags=["Instances"])
def cancel_rollout(
    request: ApiRequest,
    deployment_id: int,
    reason: str = QueryParam("", max_length=255, description="Kept with the event."),
) -> Rollout:
    """End the rollout in progress where it stands; what drains for it serves again. 409 when none is in progress."""
    user = request.auth.require(Role.OPERATOR)
    return rollouts.cancel(get_object_or_404(Deployment, pk=deployment_id), user, reason)
