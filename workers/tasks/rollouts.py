"""Changed deployments on their way to their instances: what Celery beat runs."""

from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.rollouts.selectors import open_rollouts
from workers.celery import app


@app.task
def advance_rollouts() -> int:
    """Make the next move of every rollout; returns how many are in progress. One transaction each."""
    return sum(rollouts.advance(row).ended_at is None for row in open_rollouts())
