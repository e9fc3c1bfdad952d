"""What a what-if will take: requests of a run, and seconds on the workers that there are, at the pace of the last runs."""

from statistics import median
from typing import NamedTuple

from controlplane.simulation.whatif.arrivals import drawn, recorded
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIfState
from controlplane.simulation.whatif.start import Start

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


def estimate(start: Start, horizon_s: float, runs: int, workers: int) -> Estimate:
    """For *runs* runs of *start* on *workers* processes; what edits of demand add is not counted."""
    requests = _requests(start, horizon_s)
    pace_s = _pace_s()
    takes_s = None if pace_s is None else runs * max(LEAST_S, pace_s * requests) / workers
    return Estimate(requests, runs, takes_s, workers)


def _requests(start: Start, horizon_s: float) -> int:
    """Of seed 1, within *horizon_s*."""
    match start.arrivals["kind"]:
        case "forecast":
            return int((drawn(start.arrivals, 1).arrival_s < horizon_s).sum())
        case "ledger":
            return int((recorded(start.arrivals, start.at).arrival_s < horizon_s).sum())
        case "file":
            row = TraceFile.objects.only("requests", "span_s").filter(pk=start.arrivals["trace"]).first()
            if row is None:
                return 0
            speed, limit = float(start.arrivals.get("speed", 1.0)), int(start.arrivals.get("limit", row.requests))
            return min(round(row.requests * min(1.0, horizon_s * speed / max(row.span_s, 1.0))), limit)
    clients = start.scenario.get("clients", [])
    return round(sum(float(client["requests_per_s"]) for client in clients) * horizon_s)


def _pace_s() -> float | None:
    """Seconds that a request took to be simulated in the last runs."""
    runs = FutureSeed.objects.filter(state=WhatIfState.DONE).order_by("-ended_at")
    known = [
        (ended - begun).total_seconds() / result["about"]["requests"]
        for begun, ended, result in runs.values_list("started_at", "ended_at", "result")[:LATEST]
        if begun and ended and result.get("about", {}).get("requests")
    ]
    return median(known) if known else None
