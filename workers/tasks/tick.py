"""The fleet's short periodic work, every few seconds in one task: each step by itself, so that one that fails stops none."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from controlplane.fleet import maintenance
from controlplane.fleet.models import SwapState
from controlplane.fleet.swaps import services as swaps
from controlplane.fleet.swaps.selectors import open_swaps
from controlplane.jobs.services import recorded
from workers.celery import app
from workers.tasks import fleet
from workers.tasks.nodes import report_nodes
from workers.tasks.observation import observe_instances
from workers.tasks.ray import watch_ray
from workers.tasks.rollouts import advance_rollouts


def advance_swaps() -> int:
    """Advance every swap by one move, in a transaction each; return how many are in progress."""
    return sum(swaps.advance(row).state == SwapState.IN_PROGRESS for row in open_swaps())


STEPS: Final[dict[str, Callable[[], Any]]] = {
    "run-pending-commands": fleet.run_pending_commands,
    "watch-loading": fleet.watch_loading,
    "end-failed": fleet.end_failed,
    "advance-rollouts": advance_rollouts,
    "advance-swaps": advance_swaps,
    "advance-maintenance": maintenance.advance,
    "observe-instances": observe_instances,
    "report-nodes": report_nodes,
    "watch-ray": watch_ray,
}
"""By the names of their jobs."""


@app.task
def tick(*names: str) -> None:
    """Do the steps *names*, or all; a step that raises is recorded as a failed run of its job."""
    run_steps({name: STEPS[name] for name in names or STEPS})


@app.task
def watch_host(names: Sequence[str]) -> None:
    """Do *names* for the servers that this host started, or Ray keeps, without sending other hosts the same."""
    for name in names:
        {**fleet.FORWARDED, "watch-ray": watch_ray}[name](forward=False)


def run_steps(steps: dict[str, Callable[[], Any]]) -> None:
    for name, step in steps.items():
        with contextlib.suppress(Exception), recorded(name):
            step()
