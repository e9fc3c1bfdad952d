"""The last hours of the ledger under each strategy: what each would have cost and achieved with the fleet as it is.

The fleet is simulated from its rows (profiles, bounds, limits, prices), the requests are the ledger's, and plans are made
inside as they are live: by the forecasts that had been made by then, never by what came later. Requests come from the
regions of their callers; those that the fleet did not serve are among them.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from controlplane.fleet.models import Deployment
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.comparison.replay import Replay, left_out
from controlplane.planning.execution import strategies
from controlplane.planning.json_values import plain
from controlplane.planning.models import StrategyComparison
from controlplane.planning.plans import inventory
from controlplane.tuning.selectors import tuned

logger = logging.getLogger(__name__)
LEAST_REQUESTS = 200
LEAST = timedelta(minutes=5)
TOO_LITTLE = "Too little to compare"
AGAIN_S = 120.0
"""When there was too little, it is tried again after this."""


def compare_strategies(
    hours: float, now: datetime, somebody_waits: Callable[[], bool] = lambda: False
) -> StrategyComparison | None:
    """Simulate the last *hours* under every strategy and keep the result as a row; None if *somebody_waits* meanwhile.

    With too few requests, the row notes it and has no lines. Bounded in requests and time by the settings.
    """
    since = now - timedelta(hours=hours)
    served = Q(outcome=Outcome.DONE, repeated=False, prompt_tokens__gt=0, output_tokens__gt=0)
    unserved = Q(unserved=True, predicted_prompt_tokens__gt=0, predicted_output_tokens__gt=0)
    rows = LedgerRow.objects.filter(served | unserved, arrived_at__gte=since, arrived_at__lt=now)
    fleet = inventory.read(set(Deployment.objects.filter(active=True).values_list("model__name", flat=True)))
    replay = Replay.read(rows, fleet, now)
    missing = _missing(replay)
    if replay is None or missing:
        # One such row is enough: a newer one stands for it.
        StrategyComparison.objects.filter(note__startswith=TOO_LITTLE).delete()
        count = len(replay.arrived_s) if replay else 0
        note = f"{TOO_LITTLE}: {'; '.join(filter(None, (missing, left_out(fleet))))}."
        return StrategyComparison.objects.create(from_at=since, to_at=now, requests=count, note=note[:255])
    began = time.monotonic()
    lines: list[dict[str, Any]] = []
    notes = [*filter(None, (left_out(fleet),)), *replay.notes]
    names = strategies.names()
    for done, name in enumerate(names):
        if somebody_waits():
            return None
        if time.monotonic() - began > tuned().COMPARE_LIMIT_S:
            notes.append(f"the time was over after {done} of {len(names)} strategies")
            break
        try:
            lines.append(replay.line(name))
        except Exception as error:
            logger.exception("planning: %s could not be simulated", name)
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return StrategyComparison.objects.create(
        from_at=replay.from_at,
        to_at=replay.to_at,
        requests=len(replay.arrived_s),
        rows=plain(lines),
        note="; ".join(notes)[:255],
    )


def _missing(replay: Replay | None) -> str:
    """What is missing for a comparison, in words; empty if there is enough. More than enough requests are never too few
    minutes: a busy fleet's newest ones, cut at `COMPARE_REQUESTS`, are compared whatever time they cover."""
    count = len(replay.arrived_s) if replay else 0
    if replay is None or count < LEAST_REQUESTS:
        return f"{count} requests of the {LEAST_REQUESTS} that are needed"
    covered = replay.to_at - replay.from_at
    if covered < LEAST and not replay.cut:
        return f"requests of {covered.seconds} s; {LEAST.seconds // 60} minutes are needed"
    return ""


def due(now: datetime) -> bool:
    """Whether it is time for the next comparison."""
    if tuned().COMPARE_EVERY_S <= 0:
        return False
    newest = StrategyComparison.objects.order_by("-pk").first()
    if newest is None:
        return True
    too_little = newest.note.startswith(TOO_LITTLE)
    every_s: float = min(AGAIN_S, tuned().COMPARE_EVERY_S) if too_little else tuned().COMPARE_EVERY_S
    return (now - newest.made_at).total_seconds() >= every_s
