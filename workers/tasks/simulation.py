"""Simulations that were asked for by REST."""

from django.utils import timezone

from controlplane.simulation import requested
from workers.celery import app
from workers.tasks.planning import LONG_WORK, only_one


@app.task(soft_time_limit=requested.LIMIT_S, time_limit=requested.LIMIT_S + 20)
def run_simulation(pk: int) -> str:
    """Run the simulation *pk*; its state afterwards, empty if it did not wait any more, or waits on for other long work."""
    with only_one(LONG_WORK) as free:
        return requested.run_requested(pk) if free else ""


@app.task
def look_after_simulations() -> int:
    """Fail what a worker left behind, and ask again for what waits; how many."""
    return requested.look_after(timezone.now())
