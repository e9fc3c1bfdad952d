"""Rollouts of changed deployments."""

from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.rollouts.selectors import open_rollouts
from workers.celery import app


@app.task
def advance_rollouts() -> int:
    """Advance every rollout by one move, in a transaction each; return how many are in progress."""
    return sum(rollouts.advance(row).ended_at is None for row in open_rollouts())
