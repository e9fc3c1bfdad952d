"""Times of what-ifs: what one will take before it is submitted, and what remains of one that runs."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from django.conf import settings

from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.arrivals import expected_requests
from controlplane.simulation.whatif.changes.base import Change
from controlplane.simulation.whatif.changes.demand import DemandChange, TenantChange
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from scheduling.simulation.workload.edits import Factor, Scope

EVENLY: Final = 1_000
"""Moments at which a factor is evaluated."""
MAX_RUNS: Final = 30
"""Runs that the pace is taken from."""
MIN_S: Final = 0.5
"""Of a run, however short: a worker takes it up, stages it and writes its result."""


USUAL_PACE: Final = 30_000.0
"""Requests a second of one process where no run has been done yet: a third of what an idle machine makes."""


class Estimate(NamedTuple):
    """*requests* are those of a run; the pace is *measured* once a run has been done."""

    requests: int
    takes_s: float
    workers: int
    measured: bool


def estimate(start: Start, horizon_s: float, runs: int, workers: int, changes: Sequence[Change] = ()) -> Estimate:
    """Estimate *runs* runs of *start* on *workers* processes, with *changes* of demand."""
    requests = round(expected(start, horizon_s, changes))
    paces = [made / max(took_s, MIN_S) for took_s, made in _latest() if made]
    takes_s = runs * max(MIN_S, requests / (median(paces) if paces else USUAL_PACE)) / workers
    return Estimate(requests, takes_s, workers, bool(paces))


def expected(start: Start, horizon_s: float, changes: Sequence[Change]) -> float:
    """Return the expected requests of *start* within *horizon_s* after *changes*; partial factors do not count."""
    demand = [edit for each in changes if isinstance(each, DemandChange) for edit in each.edits({}, 1, horizon_s)]
    factors = [edit for edit in demand if isinstance(edit, Factor) and edit.scope == Scope()]
    arrivals = start.arrivals
    added = horizon_s * sum(each.client.requests_per_s for each in changes if isinstance(each, TenantChange))
    match arrivals["kind"]:
        case "forecast":
            count = expected_requests(arrivals, horizon_s)
        case "ledger":
            until = min(datetime.fromisoformat(arrivals["until"]), start.at + timedelta(seconds=horizon_s))
            count = float(ledger_rows(datetime.fromisoformat(arrivals["since"]), until).count())
        case "file":
            row = TraceFile.objects.only("requests", "span_s").filter(pk=arrivals["trace"]).first()
            speed, part = float(arrivals.get("speed", 1.0)), 0.0
            if row is not None:
                part = row.requests * min(1.0, horizon_s * speed / max(row.span_s, 1.0))
            count = min(part, float(arrivals.get("limit", part)))
        case _:
            count = sum(float(each["requests_per_s"]) for each in start.scenario.get("clients", [])) * horizon_s
    moments = np.linspace(0.0, horizon_s, EVENLY, endpoint=False)
    for factor in factors:
        count *= float(factor.of(moments).mean())
    return count + added


def _latest(row: WhatIf | None = None) -> list[tuple[float, int]]:
    """Return the seconds and requests of the latest finished runs, of *row* if it has any, else of any what-if."""
    done = FutureSeed.objects.filter(state=WhatIfState.DONE).order_by("-ended_at")
    if row is not None and (own := done.filter(future__what_if=row)).exists():
        done = own
    latest = done.values_list("started_at", "ended_at", "result__about__requests")[:MAX_RUNS]
    return [((end - begin).total_seconds(), requests or 0) for begin, end, requests in latest if begin and end]


def remaining_s(row: WhatIf, runs: Sequence[FutureSeed]) -> float | None:
    """Return seconds until the open ones of *runs*, those of *row*, end; None before any run of any what-if has ended."""
    latest = _latest(row)
    left = sum(1.0 - run.progress for run in runs if run.state in (WhatIfState.QUEUED, WhatIfState.RUNNING))
    if not latest or not left:
        return None
    left_s: float = left * max(MIN_S, median(took_s for took_s, _ in latest))
    return left_s / min(float(settings.WHAT_IF_PROCESSES), max(left, 1.0))
