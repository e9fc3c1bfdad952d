"""Work of Celery workers: take the next waiting run, simulate it, store its result; any number of workers.

A run is leased to the process that takes it, which sends heartbeats meanwhile. A silent run is interrupted and taken by
another process: it is deterministic by its seed, so its numbers are the same in any process.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from threading import Event, Thread
from typing import Any, Final

import numpy as np
from django.db import DatabaseError, connections, transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.jobs.broker import send_task
from controlplane.simulation.whatif import results
from controlplane.simulation.whatif.changes.applying import Changed, applied, parsed
from controlplane.simulation.whatif.models import Future, FutureSeed, Phase, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.simulation.measures.columns import MOST_SAMPLES, Counted
from scheduling.simulation.staging.scaling import follows_plans

logger = logging.getLogger(__name__)

TASK: Final = "workers.tasks.simulation.run_future"
LEASE_S: Final = 30.0
"""Seconds that a worker may be silent."""
BEAT_S: Final = 0.5
MOST_ATTEMPTS: Final = 3
GRACE_S: Final = 600.0
"""Seconds after the horizon for earlier requests to end."""
LIMIT_S: Final = 1800
"""Time limit of one run in seconds."""
MOST_MESSAGES: Final = 16
"""Maximum messages sent at once; each run that ends sends the next."""
OPEN: Final = (WhatIfState.QUEUED, WhatIfState.RUNNING, WhatIfState.INTERRUPTED)
LARGE: Final = ("result", "curves", "log", "pairs", "future__what_if__start")
"""Columns that lists of runs omit: a start alone takes milliseconds to read."""
STAGED_SHARE, SIMULATED_SHARE = 0.1, 0.95
"""Progress of a run once staged, and once simulated."""
_seeds: deque[tuple[int, int]] = deque(maxlen=64)
"""What-if and seed of this process's last runs."""


class Ended(Exception):
    """The run was cancelled."""


@dataclass(slots=True)
class Beat:
    """Heartbeat and progress of a run in this process."""

    pk: int
    beaten_s: float = 0.0

    def phase(self, phase: Phase, progress: float) -> None:
        """Store the phase and progress of the run. Raise Ended once it is no longer to be run."""
        self.beaten_s = time.monotonic()
        alive = FutureSeed.objects.filter(pk=self.pk, state=WhatIfState.RUNNING)
        if not alive.update(heartbeat_at=timezone.now(), phase=phase, progress=progress):
            raise Ended

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send heartbeats from a separate thread: a run is silent for minutes where kernels are compiled first."""
        over = Event()

        def beat() -> None:
            try:
                while not over.wait(LEASE_S / 6):
                    alive = FutureSeed.objects.filter(pk=self.pk, state=WhatIfState.RUNNING)
                    alive.update(heartbeat_at=timezone.now())
            except DatabaseError as error:
                logger.warning("what-if: run %d cannot send a heartbeat: %s", self.pk, error)
            finally:
                connections.close_all()

        thread = Thread(target=beat, name="what-if-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def simulated(self, done: int, total: int) -> None:
        """Store the share of requests done, as `phase`, at most every BEAT_S."""
        if time.monotonic() - self.beaten_s >= BEAT_S:
            share = done / total if total else 1.0
            self.phase(Phase.SIMULATING, STAGED_SHARE + (SIMULATED_SHARE - STAGED_SHARE) * share)


def waiting_runs() -> Any:
    """Return runs that a worker may take, in order: nightly ones last, then by submission, then the first seeds first."""
    rows = FutureSeed.objects.filter(
        state__in=(WhatIfState.QUEUED, WhatIfState.INTERRUPTED),
        attempts__lt=MOST_ATTEMPTS,
        future__what_if__state__in=OPEN,
    )
    return rows.order_by("future__what_if__nightly", "future__what_if__submitted_at", "seed", "future__letter")


def work() -> int | None:
    """Take the next waiting run and simulate it; return its key, None if none waits."""
    row = take(timezone.now())
    if row is None:
        return None
    what_if = row.future.what_if
    try:
        ended = made(row)
    except Ended:
        return int(row.pk)
    except Exception as error:
        known = isinstance(error, ValueError | RuntimeError)
        logger.warning("what-if: run %d failed: %s", row.pk, error)
        _end(row, WhatIfState.FAILED, error=str(error) if known else f"{type(error).__name__}: {error}")
        settle(what_if.pk)
        if not known:
            raise
        return int(row.pk)
    if _end(row, WhatIfState.DONE, phase=Phase.WAITING, progress=1.0, error="", **ended):
        results.compare(row)
    settle(what_if.pk)
    return int(row.pk)


def take(now: datetime) -> FutureSeed | None:
    """Lease the next waiting run to this process; None if there is none."""
    for pk in _in_order(list(waiting_runs().select_related("future__what_if").defer(*LARGE)[:MOST_MESSAGES])):
        lease = uuid.uuid4()
        waits = FutureSeed.objects.filter(pk=pk, state__in=(WhatIfState.QUEUED, WhatIfState.INTERRUPTED))
        row = FutureSeed.objects.select_related("future").get(pk=pk)
        taken = waits.update(
            state=WhatIfState.RUNNING, lease=lease, heartbeat_at=now, started_at=now, attempts=row.attempts + 1,
            phase=Phase.STAGING, progress=0.0,
        )  # fmt: skip
        if taken:
            _seeds.append((row.future.what_if_id, row.seed))
            WhatIf.objects.filter(pk=row.future.what_if_id, state=WhatIfState.QUEUED).update(
                state=WhatIfState.RUNNING, started_at=now
            )
            return FutureSeed.objects.select_related("future__what_if").defer(*LARGE).get(pk=pk)
    return None


def _in_order(rows: list[FutureSeed]) -> list[int]:
    """Return keys of *rows*, some of `waiting_runs`, in the order to take them: A first, since others are compared with
    it.

    Of the first seed, futures without plans come next: they take a quarter of the time, and have a result while the
    planner of A measures what the others need too. Of later seeds they come last, so that all processes end at the same
    time. Later seeds that this process has begun come before others, since futures of a seed share cached work.
    """

    unbegun = {(row.future.what_if_id, row.seed) for row in rows if row.future.letter == results.BASELINE}

    def after(row: FutureSeed) -> tuple[bool, datetime | None, int, int, bool, bool]:
        future, what_if, of = row.future, row.future.what_if, (row.future.what_if_id, row.seed)
        is_later, is_first = future.letter != results.BASELINE, row.seed == results.FIRST_SEED
        whose = 0 if is_first or of in _seeds else 1 if of in unbegun else 2
        long = is_later and _plans(what_if.pk, what_if.created_at, future)
        return what_if.nightly, what_if.submitted_at, whose, row.seed, is_later, long == is_first

    return [int(row.pk) for row in sorted(rows, key=after)]


def _plans(pk: int, created_at: datetime, future: Future) -> bool:
    """Return whether *future*, of the what-if *pk*, follows plans; an unreadable one reports its error when it runs."""
    try:
        return follows_plans(changed(future.what_if, future, _start(pk, created_at)).scenario)
    except ValueError:
        return False


def made(row: FutureSeed) -> dict[str, Any]:
    """Simulate the run *row* and return the values of its result. Raise Ended, ValueError or RuntimeError as `simulate`."""
    # Imported here for solvers and forecasters, which a web process does not need.
    from controlplane.simulation.running import simulate

    beat, future, what_if = Beat(row.pk), row.future, row.future.what_if
    beat.phase(Phase.STAGING, 0.0)
    start = _start(what_if.pk, what_if.created_at)
    made_of = changed(what_if, future, start)
    edits = made_of.edits(row.seed, what_if.horizon_s)
    staged = stage_start(start, made_of.scenario, row.seed, edits, what_if.horizon_s)
    beat.phase(Phase.SIMULATING, STAGED_SHARE)
    with beat.heartbeat():
        ran = simulate(made_of.scenario, staged, progress=beat.simulated)
    beat.phase(Phase.MEASURING, SIMULATED_SHARE)
    values = results.packed(ran, counted_of(what_if, made_of))
    if start.kind == "scenario":
        values["result"]["simulated"] = results.simulated(ran)
    return values


@lru_cache(maxsize=2)
def _start(pk: int, created_at: datetime) -> Start:
    """Return the start of the what-if *pk*, created then; it never changes once runs exist."""
    return Start.model_validate(WhatIf.objects.values_list("start", flat=True).get(pk=pk))


def changed(what_if: WhatIf, future: Future, start: Start) -> Changed:
    """Return the scenario of *future* with all changes of its *what_if* against *start*. Raise ChangeError."""
    values = {**start.scenario, "sample_s": float(max(1.0, np.ceil(what_if.horizon_s / MOST_SAMPLES)))}
    if start.kind != "scenario":
        values["until_h"] = (what_if.horizon_s + GRACE_S) / 3600
    if start.asks and start.kind != "scenario":
        values["demand"] = {**values.get("demand", {}), "duration_h": what_if.horizon_s / 3600}
    edits = parsed(what_if.edits, "edits")
    return applied(values, [*edits, *parsed(future.changes)], asks=start.asks, shared=len(edits))


def counted_of(what_if: WhatIf, changed: Changed) -> dict[str, Counted]:
    """Return scopes of the comparison by name: the horizon, interactive classes alone, each in the edited time."""
    kinds = [one.kind for one in changed.scenario.classes.values()]
    shown = frozenset(number for number, kind in enumerate(kinds) if kind == "interactive")
    whole = Counted(what_if.warmup_s, what_if.horizon_s)
    scopes = {"all": whole, "interactive": replace(whole, classes=shown)}
    if (edited := edited_time(what_if)) is not None:
        part = Counted(max(what_if.warmup_s, edited[0]), min(what_if.horizon_s, edited[1]))
        if part.until_s > part.from_s:
            scopes |= {"all, edited": part, "interactive, edited": replace(part, classes=shown)}
    return scopes


def edited_time(what_if: WhatIf) -> tuple[float, float] | None:
    """Return the seconds from and until which shared edits of demand act; None without one that ends."""
    ends = [one for one in what_if.edits if one.get("until_s") is not None]
    if not ends:
        return None
    return min(one.get("from_s", 0.0) for one in ends), max(one["until_s"] for one in ends)


def settle(pk: int) -> None:
    """End the what-if *pk* if none of its runs is open."""
    with transaction.atomic():
        row = WhatIf.objects.select_for_update().defer("start").get(pk=pk)
        runs = FutureSeed.objects.filter(future__what_if=row)
        if row.state not in OPEN or runs.filter(state__in=OPEN).exists():
            return
        done = runs.filter(state=WhatIfState.DONE).exists()
        row.state, row.ended_at = (WhatIfState.DONE if done else WhatIfState.FAILED), timezone.now()
        row.save(update_fields=["state", "ended_at"])
        runs.update(log=None)
    failed = runs.filter(state=WhatIfState.FAILED).count()
    reason = f"{failed} of its runs failed" if failed else ""
    severity = Severity.WARNING if failed else Severity.INFO
    record(f"what_if.{row.state}", row, actor="simulation", reason=reason, severity=severity)


def supervise(now: datetime) -> int:
    """Interrupt runs whose worker is silent, and send workers for waiting ones; return the number interrupted."""
    silent = Q(heartbeat_at__lt=now - timedelta(seconds=LEASE_S))
    lost = FutureSeed.objects.filter(silent, state=WhatIfState.RUNNING)
    interrupted = lost.update(state=WhatIfState.INTERRUPTED, phase=Phase.WAITING, progress=0.0)
    stuck = FutureSeed.objects.filter(state=WhatIfState.INTERRUPTED, attempts__gte=MOST_ATTEMPTS)
    for what_if in set(stuck.values_list("future__what_if", flat=True)):
        error = f"Interrupted {MOST_ATTEMPTS} times: its workers died, or were stopped."
        stuck.filter(future__what_if=what_if).update(state=WhatIfState.FAILED, error=error, ended_at=now)
        settle(what_if)
    send_workers()
    return interrupted


def send_workers(most: int = MOST_MESSAGES) -> int:
    """Send workers for waiting runs, at most *most*; return the number sent."""
    count = waiting_runs()[:most].count()
    return sum(send_task(TASK, expires_s=LEASE_S, queue="simulation") for _ in range(count))


def _end(row: FutureSeed, state: WhatIfState, **values: Any) -> bool:
    """End the run as *state* with *values* if it was still open; return whether it was."""
    running = FutureSeed.objects.filter(pk=row.pk, state__in=(WhatIfState.RUNNING, WhatIfState.INTERRUPTED))
    return bool(running.update(state=state, ended_at=timezone.now(), lease=None, **values))
