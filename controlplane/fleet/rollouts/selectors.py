"""Reads of rollouts: status of each deployment, and rollouts that are not done."""

from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Q
from django.utils import timezone

from controlplane.fleet.lifecycle.states import InstanceState as S
from controlplane.fleet.models import Deployment, Instance, Rollout, RolloutState
from controlplane.fleet.rollouts import revisions
from controlplane.rows import narrowed, newest_of_each

SHOWN = timedelta(days=1)
"""For how long a rollout that failed or went back is shown."""


@dataclass(frozen=True, slots=True)
class Status:
    deployment: Deployment
    rollout: Rollout | None
    """The newest."""
    total: int
    up_to_date: int
    outdated: dict[str, tuple[str, ...]]
    """Settings that differ, by instance; empty if the original settings are unknown."""

    @property
    def needs_attention(self) -> bool:
        newest = self.rollout
        bad = newest is not None and newest.state in (RolloutState.FAILED, RolloutState.ROLLED_BACK)
        recent = newest is not None and newest.ended_at is not None and timezone.now() - newest.ended_at < SHOWN
        return self.runs or (bad and recent) or any(self.outdated.values())

    @property
    def runs(self) -> bool:
        return self.rollout is not None and self.rollout.state == RolloutState.IN_PROGRESS


def statuses(model: str = "", region: str = "", pk: int | None = None) -> list[Status]:
    """Return the status of each deployment, by name; empty filters are ignored."""
    every = Deployment.objects.select_related("model", "region", "gpu_type")
    deployments = list(narrowed(every, model__name=model, region__name=region, pk=pk))
    rows = Instance.objects.launched().filter(deployment__in=deployments, state__in=revisions.RUNNING - {S.DRAINING})
    rows = rows.order_by("name")
    instances = list(rows.select_related("deployment__model", "deployment__gpu_type", "node"))
    differ = revisions.outdated(instances)
    newest = newest_of_each(Rollout.objects.filter(deployment__in=deployments), "deployment")
    rollouts = {row.deployment_id: row for row in newest}
    standing = []
    for deployment in deployments:
        own = [row for row in instances if row.deployment_id == deployment.pk]
        rollout = rollouts.get(deployment.pk)
        outdated = {row.name: differ.get(row.pk, ()) for row in own if row.pk in differ or not row.launched_with}
        total, up_to_date = len(own), sum(row.state == S.READY and row.name not in outdated for row in own)
        if rollout is not None and rollout.state == RolloutState.IN_PROGRESS:
            total, up_to_date = rollout.total, rollout.up_to_date
        standing.append(Status(deployment, rollout, total, up_to_date, outdated))
    return standing


def failed() -> list[Status]:
    """Return deployments whose newest rollout failed and that still have outdated instances."""
    if not Rollout.objects.filter(state=RolloutState.FAILED).exists():
        return []
    return [
        status
        for status in statuses()
        if status.rollout is not None and status.rollout.state == RolloutState.FAILED and status.outdated
    ]


def open_rollouts() -> list[Rollout]:
    """Return rollouts in progress, and ended ones with an instance to put back."""
    rows = Rollout.objects.filter(Q(state=RolloutState.IN_PROGRESS) | Q(draining__isnull=False))
    return list(rows.select_related("deployment").order_by("pk"))
