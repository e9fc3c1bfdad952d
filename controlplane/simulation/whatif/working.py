"""Work of Celery workers: claim the next waiting run, simulate it, store its result; any number of workers.

A run belongs to the Celery task that claims it. Tasks are acknowledged late: that of a lost process is delivered again and
makes its run again, with the same numbers, since a run is deterministic by its seed.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import numpy as np
from django.db import connection, transaction
from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.jobs.broker import send_task
from controlplane.simulation.whatif import results
from controlplane.simulation.whatif.changes.applying import Changed, applied, parsed
from controlplane.simulation.whatif.models import Future, FutureSeed, Phase, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.simulation.measures.columns import MOST_SAMPLES, Counted

logger = logging.getLogger(__name__)

TASK: Final = "workers.tasks.simulation.run_future"
WRITE_S: Final = 0.5
"""Minimum seconds between two writes of a run's progress."""
MAX_ATTEMPTS: Final = 3
GRACE_S: Final = 600.0
"""Seconds after the horizon for earlier requests to end."""
LIMIT_S: Final = 1800
"""Time limit of one run in seconds."""
MAX_MESSAGES: Final = 16
"""Maximum messages sent at once; each run that ends sends the next."""
OPEN: Final = (WhatIfState.QUEUED, WhatIfState.RUNNING)
RECORDED: Final = ("fleet", "ledger", "trace")
"""Kinds of starts whose requests were recorded."""
LARGE: Final = ("result", "curves")
"""Columns that lists of runs omit."""
ORDER: Final = ("future__what_if__nightly", "future__what_if__submitted_at", "seed", "future__letter")
STAGED_SHARE, SIMULATED_SHARE = 0.1, 0.95
"""Progress of a run once staged, and once simulated."""


class Ended(Exception):
    """The run was cancelled."""


def _advance(row: FutureSeed, phase: Phase, progress: float) -> None:
    """Store the phase and progress of *row*. Raise Ended once it is no longer to be run."""
    running = FutureSeed.objects.filter(pk=row.pk, state=WhatIfState.RUNNING)
    if not running.update(phase=phase, progress=progress):
        raise Ended


def waiting_runs() -> Any:
    """Return runs that a worker may claim, in order: nightly ones last, then by submission, then the first seeds first."""
    rows = FutureSeed.objects.filter(
        state=WhatIfState.QUEUED,
        future__what_if__state__in=OPEN,
    )
    return rows.order_by(*ORDER)


def work(task: str = "") -> int | None:
    """Claim the next run for the Celery task with the id *task* and simulate it; return its key, None if none waits."""
    row = claim(timezone.now(), task)
    if row is None:
        return None
    what_if = row.future.what_if
    try:
        ended = run(row)
    except Ended:
        return int(row.pk)
    except Exception as error:
        known = isinstance(error, ValueError | RuntimeError)
        logger.warning("what-if: run %d failed: %s", row.pk, error)
        _end(row, WhatIfState.FAILED, error=str(error) if known else f"{type(error).__name__}: {error}")
        close(what_if.pk)
        if not known:
            raise
        return int(row.pk)
    _end(row, WhatIfState.DONE, phase=Phase.WAITING, progress=1.0, error="", **ended)
    close(what_if.pk)
    return int(row.pk)


@transaction.atomic
def claim(now: datetime, task: str = "") -> FutureSeed | None:
    """Claim the run that *task* had when it was lost, or the next waiting one; None if there is none."""
    skips = connection.features.has_select_for_update_skip_locked
    rows = FutureSeed.objects.select_for_update(skip_locked=skips, of=("self",) if skips else ())
    lost = rows.filter(state=WhatIfState.RUNNING, task=task).first() if task else None
    row = lost or rows.filter(pk__in=waiting_runs()).order_by(*ORDER).defer(*LARGE).first()
    if row is None:
        return None
    if row.attempts >= MAX_ATTEMPTS:
        _fail_lost([row], now)
        return None
    FutureSeed.objects.filter(pk=row.pk).update(
        state=WhatIfState.RUNNING,
        task=task,
        started_at=now,
        attempts=row.attempts + 1,
        phase=Phase.STAGING,
        progress=0.0,
    )
    WhatIf.objects.filter(futures=row.future_id, state=WhatIfState.QUEUED).update(
        state=WhatIfState.RUNNING, started_at=now
    )
    return FutureSeed.objects.select_related("future__what_if").defer(*LARGE, "future__what_if__start").get(pk=row.pk)


def run(row: FutureSeed) -> dict[str, Any]:
    """Simulate the run *row* and return the values of its result. Raise Ended, ValueError or RuntimeError as `simulate`."""
    # Imported here for solvers and forecasters, which a web process does not need.
    from controlplane.simulation.running import simulate

    future, what_if, written_s = row.future, row.future.what_if, time.monotonic()

    def simulated(done: int, total: int) -> None:
        """Store the share of requests done at most every WRITE_S."""
        nonlocal written_s
        if time.monotonic() - written_s >= WRITE_S:
            written_s = time.monotonic()
            share = done / total if total else 1.0
            _advance(row, Phase.SIMULATING, STAGED_SHARE + (SIMULATED_SHARE - STAGED_SHARE) * share)

    _advance(row, Phase.STAGING, 0.0)
    start = _start(what_if.pk, what_if.created_at)
    altered = changed(what_if, future, start)
    edits = altered.edits(row.seed, what_if.horizon_s)
    staged = stage_start(start, altered.scenario, row.seed, edits, what_if.horizon_s)
    _advance(row, Phase.SIMULATING, STAGED_SHARE)
    ran = simulate(altered.scenario, staged, progress=simulated)
    _advance(row, Phase.MEASURING, SIMULATED_SHARE)
    values = results.packed(ran, counted_of(what_if, altered))
    values["result"]["unranked"] = results.unranked(staged) if start.kind in RECORDED else ""
    return values


@lru_cache(maxsize=2)
def _start(pk: int, created_at: datetime) -> Start:
    """Return the start of the what-if *pk*, created then; it never changes once runs exist."""
    return Start.model_validate(WhatIf.objects.values_list("start", flat=True).get(pk=pk))


def changed(what_if: WhatIf, future: Future, start: Start) -> Changed:
    """Return the scenario of *future* with all changes of its *what_if* against *start*. Raise ChangeError."""
    values = {**start.scenario, "sample_s": float(max(1.0, np.ceil(what_if.horizon_s / MOST_SAMPLES)))}
    values["until_h"] = (what_if.horizon_s + GRACE_S) / 3600
    if start.asks:
        values["demand"] = {**values.get("demand", {}), "duration_h": what_if.horizon_s / 3600}
    edits = parsed(what_if.edits, "edits")
    return applied(values, [*edits, *parsed(future.changes)], asks=start.asks, shared=len(edits))


def counted_of(what_if: WhatIf, changed: Changed) -> dict[str, Counted]:
    """Return what is counted, by name: each SLO class, and `all` of them."""
    whole = Counted(what_if.warmup_s, what_if.horizon_s)
    classes = {name: frozenset({number}) for number, name in enumerate(changed.scenario.classes)}
    return {name: replace(whole, classes=own) for name, own in classes.items()} | {"all": whole}


def close(pk: int) -> None:
    """End the what-if *pk* if none of its runs is open."""
    with transaction.atomic():
        row = WhatIf.objects.select_for_update().defer("start").get(pk=pk)
        runs = FutureSeed.objects.filter(future__what_if=row)
        if row.state not in OPEN or runs.filter(state__in=OPEN).exists():
            return
        done = runs.filter(state=WhatIfState.DONE).exists()
        row.state, row.ended_at = (WhatIfState.DONE if done else WhatIfState.FAILED), timezone.now()
        row.save(update_fields=["state", "ended_at"])
    failed = runs.filter(state=WhatIfState.FAILED).count()
    reason = f"{failed} of its runs failed" if failed else ""
    severity = Severity.WARNING if failed else Severity.INFO
    record(f"what_if.{row.state}", row, actor="simulation", reason=reason, severity=severity)


def supervise(now: datetime) -> int:
    """Queue runs whose task is past its time limit, and send workers for waiting ones; return the number of lost runs."""
    late = FutureSeed.objects.filter(
        state=WhatIfState.RUNNING, started_at__lt=now - timedelta(seconds=LIMIT_S + GRACE_S)
    )
    lost = list(late.select_related("future").defer(*LARGE))
    again = [row.pk for row in lost if row.attempts < MAX_ATTEMPTS]
    FutureSeed.objects.filter(pk__in=again).update(state=WhatIfState.QUEUED, phase=Phase.WAITING, progress=0.0, task="")
    _fail_lost([row for row in lost if row.pk not in again], now)
    send_workers()
    return len(lost)


def _fail_lost(rows: Iterable[FutureSeed], now: datetime) -> None:
    for row in rows:
        error = f"Its worker was lost {MAX_ATTEMPTS} times."
        FutureSeed.objects.filter(pk=row.pk).update(state=WhatIfState.FAILED, error=error, ended_at=now)
        close(row.future.what_if_id)


def send_workers(limit: int = MAX_MESSAGES) -> int:
    """Send workers for waiting runs, at most *limit*; return the number sent."""
    count = waiting_runs()[:limit].count()
    return sum(send_task(TASK, expires_s=LIMIT_S, queue="simulation") for _ in range(count))


def _end(row: FutureSeed, state: WhatIfState, **values: Any) -> None:
    """End the run as *state* with *values* if it was still open."""
    running = FutureSeed.objects.filter(pk=row.pk, state=WhatIfState.RUNNING)
    running.update(state=state, ended_at=timezone.now(), **values)
