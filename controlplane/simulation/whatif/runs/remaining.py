"""How long a what-if still takes: from what its own runs took, or before any has ended, from the pace of earlier ones.

Runs that are open are given to the processes that there are in the order in which workers take them; what comes of that
is a time for each future and for all.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from heapq import heapreplace
from statistics import median
from typing import Final

from django.conf import settings

from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState

LATEST: Final = 30
"""Earlier runs that the pace is taken of."""
LEAST_S: Final = 0.5
"""Of a run, however short what it simulates."""
KNOWN_SHARE: Final = 0.15
"""Of a run: when it is so far, how far it came in its time says how long it takes."""
OPEN: Final = (WhatIfState.RUNNING, WhatIfState.QUEUED, WhatIfState.INTERRUPTED)


def remaining_s(row: WhatIf, runs: Sequence[FutureSeed], now: datetime) -> dict[int, float]:
    """Seconds until the last of *runs*, those of *row*, has ended, by the key of its future; empty where nobody can know.

    Of futures that have an open run. Nothing is known before any run of any what-if has ended or is underway.
    """
    expected_s = _expected_s(row, runs, now)
    if not expected_s:
        return {}
    usual_s = median(expected_s.values())
    at_work = [run for run in runs if run.state == WhatIfState.RUNNING]
    ends_s: defaultdict[int, float] = defaultdict(float)
    free_s: list[float] = []
    for run in at_work:
        left_s = _left_s(run, expected_s.get(run.future_id, usual_s), now)
        free_s.append(left_s)
        ends_s[run.future_id] = max(ends_s[run.future_id], left_s)
    free_s += [0.0] * (settings.WHAT_IF_PROCESSES - len(free_s))
    free_s.sort()
    waiting = [run for run in runs if run.state in OPEN and run.state != WhatIfState.RUNNING]
    for run in sorted(waiting, key=lambda one: (one.seed, one.future_id)):
        end_s = free_s[0] + expected_s.get(run.future_id, usual_s)
        heapreplace(free_s, end_s)
        ends_s[run.future_id] = max(ends_s[run.future_id], end_s)
    return dict(ends_s)


def _expected_s(row: WhatIf, runs: Sequence[FutureSeed], now: datetime) -> dict[int, float]:
    """How long a run of each future takes, as far as that is known; 0 as a key is any of them."""
    took: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        if run.state == WhatIfState.DONE and run.started_at and run.ended_at:
            took[run.future_id].append((run.ended_at - run.started_at).total_seconds())
    if took:
        return {future: max(LEAST_S, median(each)) for future, each in took.items()}
    if (pace := _pace()) is not None:
        return {0: max(LEAST_S, pace * row.horizon_s)}
    underway = [run for run in runs if run.state == WhatIfState.RUNNING and run.progress >= KNOWN_SHARE]
    known = [(now - run.started_at).total_seconds() / run.progress for run in underway if run.started_at]
    return {0: median(known)} if known else {}


def _pace() -> float | None:
    """Seconds that a simulated second took in the latest runs of any what-if; None before there are any."""
    done = FutureSeed.objects.filter(state=WhatIfState.DONE)
    latest = done.order_by("-ended_at").values_list("started_at", "ended_at", "future__what_if__horizon_s")[:LATEST]
    known = [(ended - begun).total_seconds() / horizon_s for begun, ended, horizon_s in latest if begun and ended]
    return median(known) if known else None


def _left_s(run: FutureSeed, expected_s: float, now: datetime) -> float:
    """Of a run that is underway: the further it is, the more its own pace counts."""
    took_s = (now - run.started_at).total_seconds() if run.started_at else 0.0
    if run.progress < KNOWN_SHARE:
        return max(expected_s - took_s, 0.1 * expected_s)
    whole_s = (1 - run.progress) * expected_s + took_s
    return (1 - run.progress) * whole_s
