"""Times of what-ifs: what one will take before it is submitted, and what remains of one that runs."""

from collections.abc import Mapping, Sequence
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
    paces = [made / max(took_s, LEAST_S) for took_s, made in _latest() if made]
    takes_s = runs * max(LEAST_S, requests / median(paces)) / workers if paces else None
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


def _latest(row: WhatIf | None = None) -> list[tuple[float, int]]:
    """Return the seconds and requests of the latest finished runs, of *row* if it has any, else of any what-if."""
    done = FutureSeed.objects.filter(state=WhatIfState.DONE).order_by("-ended_at")
    if row is not None and (own := done.filter(future__what_if=row)).exists():
        done = own
    latest = done.values_list("started_at", "ended_at", "result__about__requests")[:LATEST]
    return [((end - begin).total_seconds(), requests or 0) for begin, end, requests in latest if begin and end]


def remaining_s(row: WhatIf, runs: Sequence[FutureSeed]) -> float | None:
    """Return seconds until the open ones of *runs*, those of *row*, end; None before any run of any what-if has ended."""
    latest = _latest(row)
    left = sum(1.0 - run.progress for run in runs if run.state in (WhatIfState.QUEUED, WhatIfState.RUNNING))
    if not latest or not left:
        return None
    left_s: float = left * max(LEAST_S, median(took_s for took_s, _ in latest))
    return left_s / min(float(settings.WHAT_IF_PROCESSES), max(left, 1.0))
