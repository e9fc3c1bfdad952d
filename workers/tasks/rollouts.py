"""Changed deployments on their way to their instances: what Celery beat runs."""

from celery import shared_task

from controlplane.fleet import rollouts


@shared_task
def advance_rollouts() -> int:
    """Make the next move of every rollout; returns how many are in progress. Each is a transaction of its own."""
    return sum(rollouts.advance(row).ended_at is None for row in rollouts.open_rollouts())
