"""What a what-if will take: requests of a run, and seconds on the workers that there are, at the pace of the last runs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from controlplane.simulation.whatif.arrivals import drawn, recorded
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import Change
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIfState
from controlplane.simulation.whatif.start import Start
from scheduling.simulation.workload.edits import Edit, Factor, More, edited

EVENLY = 1_000
"""Moments at which a factor is looked at."""
LATEST = 50
"""Runs that the pace is taken of."""
LEAST_S = 0.5
"""Of a run, however few requests it has: a worker takes it up, stages it and writes what came of it."""


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
    """For *runs* runs of *start* on *workers* processes, with the requests that *changes* of demand leave and add."""
    requests = _requests(start, horizon_s, parsed(changes))
    pace_s = _pace_s()
    takes_s = None if pace_s is None else runs * max(LEAST_S, pace_s * requests) / workers
    return Estimate(requests, runs, takes_s, workers)


def _requests(start: Start, horizon_s: float, changes: Sequence[Change]) -> int:
    """Of seed 1, within *horizon_s*."""
    edits = [edit for change in changes for edit in change.edits(start.scenario, 1, horizon_s)]
    match start.arrivals["kind"]:
        case "forecast" | "ledger":
            whole = (
                drawn(start.arrivals, 1) if start.arrivals["kind"] == "forecast" else recorded(start.arrivals, start.at)
            )
            return len(edited(whole.select(whole.arrival_s < horizon_s), edits, seed=1, horizon_s=horizon_s))
        case "file":
            row = TraceFile.objects.only("requests", "span_s").filter(pk=start.arrivals["trace"]).first()
            if row is None:
                return 0
            speed, limit = float(start.arrivals.get("speed", 1.0)), int(start.arrivals.get("limit", row.requests))
            count = min(round(row.requests * min(1.0, horizon_s * speed / max(row.span_s, 1.0))), limit)
            return _evenly(count, horizon_s, edits)
    clients = start.scenario.get("clients", [])
    return _evenly(round(sum(float(client["requests_per_s"]) for client in clients) * horizon_s), horizon_s, edits)


def _evenly(count: int, horizon_s: float, edits: Sequence[Edit]) -> int:
    """*count* requests that come evenly, after *edits*, whatever these are narrowed to."""
    moments = np.linspace(0.0, horizon_s, EVENLY, endpoint=False)
    expected = float(count)
    for edit in edits:
        if isinstance(edit, Factor):
            expected *= float(edit.of(moments).mean())
        elif isinstance(edit, More):
            expected += len(edit.requests)
    return round(expected)


def _pace_s() -> float | None:
    """Seconds that a request took to be simulated in the last runs."""
    runs = FutureSeed.objects.filter(state=WhatIfState.DONE).order_by("-ended_at")
    known = [
        (ended - begun).total_seconds() / result["about"]["requests"]
        for begun, ended, result in runs.values_list("started_at", "ended_at", "result")[:LATEST]
        if begun and ended and result.get("about", {}).get("requests")
    ]
    return median(known) if known else None
