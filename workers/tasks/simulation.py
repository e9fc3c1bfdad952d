"""Runs of what-ifs, the nightly one, capacity plans, and twin errors."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.utils import timezone

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.planning.sizing.services import LIMIT_S, supervise
from controlplane.simulation.whatif import nightly, twin_errors, working
from workers.celery import app
from workers.tasks.planning import LONG_WORK, only_one, requested_work_waits

logger = logging.getLogger(__name__)
SHIFT_S = 120.0
"""Time for which a process takes runs one after another, which keeps its cached results and lets messages wait."""


@app.task(
    bind=True,
    acks_late=True,
    reject_on_worker_lost=True,
    soft_time_limit=working.LIMIT_S,
    time_limit=working.LIMIT_S + 20,
)
def run_future(self: Any) -> int | None:
    """Make the next waiting run of a what-if, further ones for `SHIFT_S`, and send a task for the one after; return the
    key of the last, None without any.

    At most `WHAT_IF_PROCESSES` run at once on a machine, so that short tasks always find a process.
    """
    ends_s = time.monotonic() + SHIFT_S
    last = None
    with slot() as free:
        while free and (pk := working.work(self.request.id or "")) is not None:
            last = pk
            if time.monotonic() >= ends_s:
                break
    if last is not None:
        working.send_workers(limit=1)
    return last


@app.task
def look_after_what_ifs() -> int:
    """Queue lost runs again, send tasks again that no broker accepted, and end lost capacity plans; return how many."""
    return working.supervise(timezone.now()) + supervise(timezone.now())


@app.task(soft_time_limit=working.LIMIT_S, time_limit=working.LIMIT_S + 20)
def nightly_what_if() -> int | None:
    """Submit the what-if of the ledger's last day under every bundle, when due; return its key."""
    with only_one("nightly_what_if") as free:
        now = timezone.now()
        if not free or not nightly.due(now):
            return None
        try:
            return int(nightly.submit(now).pk)
        except (ActionError, ValueError) as error:
            logger.info("nightly what-if: %s", error)
            return None


@app.task(soft_time_limit=LIMIT_S, time_limit=LIMIT_S + 20)
def plan_capacity(pk: int) -> None:
    """Answer a capacity plan."""
    from controlplane.planning.sizing.working import work

    work(pk)


@app.task(soft_time_limit=working.LIMIT_S, time_limit=working.LIMIT_S + 20)
def nightly_region_loss() -> int | None:
    """Lose each region in a simulation of the present fleet, when due; return the key of the verdicts."""
    from controlplane.planning.sizing import survival

    with only_one(LONG_WORK) as free:
        now = timezone.now()
        if not free or not survival.due(now) or requested_work_waits():
            return None
        try:
            return int(survival.judge(now).pk)
        except (ActionError, ValueError) as error:
            logger.info("loss of a region: %s", error)
            return None


@app.task(soft_time_limit=working.LIMIT_S, time_limit=working.LIMIT_S + 20)
def judge_twin() -> int:
    """Simulate the last window of the ledger again, when due; return how many profiles were judged."""
    with only_one(LONG_WORK) as free:
        now = timezone.now()
        return len(twin_errors.judge(now)) if free and twin_errors.due(now) and not requested_work_waits() else 0


@contextlib.contextmanager
def slot() -> Iterator[bool]:
    """Yield True if this process may make a run now."""
    with contextlib.ExitStack() as stack:
        yield any(stack.enter_context(only_one(f"what_if_{number}")) for number in range(settings.WHAT_IF_PROCESSES))
