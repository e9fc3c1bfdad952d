"""Times of what-ifs: what one will take before it is submitted, and what remains of one that runs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import heapreplace
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from django.conf import settings

from controlplane.simulation.whatif.arrivals import drawn, recorded
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from scheduling.simulation.workload.edits import Edit, Factor, More, edited

EVENLY: Final = 1_000
"""Moments at which a factor is evaluated."""
LATEST: Final = 30
"""Runs that the pace is taken from."""
LEAST_S: Final = 0.5
"""Of a run, however short: a worker takes it up, stages it and writes its result."""
KNOWN_SHARE: Final = 0.15
"""Progress from which a run's own pace says how long it takes."""
OPEN: Final = (WhatIfState.RUNNING, WhatIfState.QUEUED, WhatIfState.INTERRUPTED)


class Estimate(NamedTuple):
    """*requests* are those of a run; *takes_s* is None before any run has been done."""

    requests: int
    runs: int
    takes_s: float | None
    workers: int

    @property
    def requests_of_all(self) -> int:
        return self.requests * self.runs


def estimate(
    start: Start, horizon_s: float, runs: int, workers: int, changes: Sequence[Mapping[str, Any]] = ()
) -> Estimate:
    """Estimate *runs* runs of *start* on *workers* processes, with the requests that *changes* of demand leave and add."""
    edits = [edit for change in parsed(changes) for edit in change.edits(start.scenario, 1, horizon_s)]
    requests = _requests(start, horizon_s, edits)
    pace_s = _pace_s("result__about__requests")
    takes_s = None if pace_s is None else runs * max(LEAST_S, pace_s * requests) / workers
    return Estimate(requests, runs, takes_s, workers)


def _requests(start: Start, horizon_s: float, edits: Sequence[Edit]) -> int:
    """Return the requests of seed 1 within *horizon_s*."""
    match start.arrivals["kind"]:
        case "forecast" | "ledger" as kind:
            whole = drawn(start.arrivals, 1) if kind == "forecast" else recorded(start.arrivals, start.at)
            return len(edited(whole.select(whole.arrival_s < horizon_s), edits, seed=1, horizon_s=horizon_s))
        case "file":
            row = TraceFile.objects.only("requests", "span_s").filter(pk=start.arrivals["trace"]).first()
            if row is None:
                return 0
            speed, limit = float(start.arrivals.get("speed", 1.0)), int(start.arrivals.get("limit", row.requests))
            count = min(round(row.requests * min(1.0, horizon_s * speed / max(row.span_s, 1.0))), limit)
        case _:
            count = round(sum(float(each["requests_per_s"]) for each in start.scenario.get("clients", [])) * horizon_s)
    moments = np.linspace(0.0, horizon_s, EVENLY, endpoint=False)
    expected = float(count)
    for edit in edits:
        if isinstance(edit, Factor):
            expected *= float(edit.of(moments).mean())
        elif isinstance(edit, More):
            expected += len(edit.requests)
    return round(expected)


def _pace_s(column: str) -> float | None:
    """Return seconds by unit of *column* of the latest runs of any what-if; None before there are any."""
    done = FutureSeed.objects.filter(state=WhatIfState.DONE).order_by("-ended_at")
    latest = done.values_list("started_at", "ended_at", column)[:LATEST]
    known = [
        (ended - started).total_seconds() / units for started, ended, units in latest if started and ended and units
    ]
    return median(known) if known else None


def remaining_s(row: WhatIf, runs: Sequence[FutureSeed], now: datetime) -> dict[int, float]:
    """Return seconds until the last of *runs*, those of *row*, ends, by the key of its future; of futures with an open
    run.

    Open runs are given to processes in the order of `waiting_runs`. Empty before any run of any what-if has ended or
    runs.
    """
    expected_s = _expected_s(row, runs, now)
    if not expected_s:
        return {}
    usual_s = median(expected_s.values())
    ends_s: defaultdict[int, float] = defaultdict(float)
    free_s: list[float] = []
    for run in runs:
        if run.state == WhatIfState.RUNNING:
            free_s.append(_left_s(run, expected_s.get(run.future_id, usual_s), now))
            ends_s[run.future_id] = max(ends_s[run.future_id], free_s[-1])
    free_s += [0.0] * (settings.WHAT_IF_PROCESSES - len(free_s))
    free_s.sort()
    waiting = [run for run in runs if run.state in OPEN and run.state != WhatIfState.RUNNING]
    for run in sorted(waiting, key=lambda one: (one.seed, one.future_id)):
        end_s = free_s[0] + expected_s.get(run.future_id, usual_s)
        heapreplace(free_s, end_s)
        ends_s[run.future_id] = max(ends_s[run.future_id], end_s)
    return dict(ends_s)


def _expected_s(row: WhatIf, runs: Sequence[FutureSeed], now: datetime) -> dict[int, float]:
    """Return the known seconds of a run of each future; the key 0 is any of them."""
    took: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        if run.state == WhatIfState.DONE and run.started_at and run.ended_at:
            took[run.future_id].append((run.ended_at - run.started_at).total_seconds())
    if took:
        return {future: max(LEAST_S, median(each)) for future, each in took.items()}
    if (pace_s := _pace_s("future__what_if__horizon_s")) is not None:
        return {0: max(LEAST_S, pace_s * row.horizon_s)}
    underway = [run for run in runs if run.state == WhatIfState.RUNNING and run.progress >= KNOWN_SHARE]
    known = [(now - run.started_at).total_seconds() / run.progress for run in underway if run.started_at]
    return {0: median(known)} if known else {}


def _left_s(run: FutureSeed, expected_s: float, now: datetime) -> float:
    """Return the seconds left of a running run: its own pace counts more as it progresses."""
    took_s = (now - run.started_at).total_seconds() if run.started_at else 0.0
    if run.progress < KNOWN_SHARE:
        return max(expected_s - took_s, 0.1 * expected_s)
    whole_s = (1 - run.progress) * expected_s + took_s
    return (1 - run.progress) * whole_s
