"""Counterfactual replay: the ledger's last day under each bundle, compared with the present policies.

A day is `REPLAY_EVERY_S` long, and the fleet starts in its present state, with no requests: simulations of the same
requests are compared, not measurements.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import transaction

from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.selectors import asked_rows
from controlplane.simulation.whatif.models import Counterfactual, Future, WhatIf
from controlplane.simulation.whatif.start import Start, stage_start
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from controlplane.simulation.whatif.working import changed
from controlplane.tuning.selectors import tuned
from scheduling.bundles import BUNDLES
from scheduling.simulation.measures.columns import Counted, columns

logger = logging.getLogger(__name__)
USD_PER_MISS: Final = 0.005
"""Dollars per missed request when ranking by cost, the default of what-ifs."""
LEAST_REQUESTS: Final = 200
SEED: Final = 1
KEPT: Final = timedelta(days=90)
AS_IT_WAS: Final = ""
LIMITS: Final = (
    "Requests are replayed without their runs and prefixes: what bundles gain by these (Hermes' order, routing to cached "
    "prefixes) is not counted."
)


def due(now: datetime) -> bool:
    """Return whether the day after the last replay is over."""
    every_s = tuned().REPLAY_EVERY_S
    newest = Counterfactual.objects.order_by("-made_at").first()
    return every_s > 0 and (newest is None or (now - newest.made_at).total_seconds() >= every_s)


def replay(now: datetime, requested_work_waits: Callable[[], bool] = lambda: False) -> list[Counterfactual]:
    """Simulate the last day under every bundle; return rows, none with too little data or once *requested_work_waits*."""
    since = now - timedelta(seconds=tuned().REPLAY_EVERY_S)
    horizon_s = (now - since).total_seconds()
    if asked_rows(since, now)[:LEAST_REQUESTS].count() < LEAST_REQUESTS:
        return []
    try:
        start = start_of(Begin(kind="ledger", since=since, until=now), horizon_s)
    except (ActionError, ValueError) as error:
        logger.info("counterfactual replay: %s", error)
        return []
    made: dict[str, dict[str, Any]] = {}
    for name in (AS_IT_WAS, *BUNDLES):
        if requested_work_waits():
            return []
        changes = [{"kind": "policy", "part": "bundle", "value": name}] if name else []
        try:
            made[name] = _columns(start, changes, horizon_s)
        except (ValueError, RuntimeError) as error:
            logger.warning("counterfactual replay: %s could not be simulated: %s", name or "as it was", error)
            if name == AS_IT_WAS:
                return []
    return _kept(made, since, now, start.remarks)


def _columns(start: Start, changes: Sequence[dict[str, str]], horizon_s: float) -> dict[str, Any]:
    # Imported here for solvers and forecasters, which a web process does not need.
    from controlplane.simulation.running import simulate

    scenario = changed(WhatIf(horizon_s=horizon_s), Future(changes=changes), start).scenario
    staged = stage_start(start, scenario, SEED, (), horizon_s)
    result = simulate(scenario, staged).result
    return columns(result, staged.promises, staged.prices, {"all": Counted(0.0, horizon_s)})["all"]


def _kept(
    made: dict[str, dict[str, Any]], since: datetime, until: datetime, remarks: Sequence[str]
) -> list[Counterfactual]:
    was, number = made[AS_IT_WAS], uuid.uuid4()
    rows = [
        Counterfactual(
            round=number,
            from_at=since,
            to_at=until,
            bundle=name,
            requests=row["requests"],
            cost_usd=row["cost_usd"],
            missed=row["missed"],
            ttft_p95_ms=row["ttft_p95_ms"],
            saved_usd=round(was["cost_usd"] - row["cost_usd"], 4),
            fewer_missed=was["missed"] - row["missed"],
        )
        for name, row in made.items()
    ]
    with transaction.atomic():
        Counterfactual.objects.bulk_create(rows)
        Counterfactual.objects.filter(made_at__lt=until - KEPT).delete()
        record(
            "counterfactual.replayed",
            actor="simulation",
            reason=" ".join([said(rows).sentence, *remarks]),
            inputs={row.bundle or "as it was": {"cost_usd": row.cost_usd, "missed": row.missed} for row in rows},
        )
    return rows


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The newest replay in a sentence, what it cannot judge, and its rows, cheapest first."""

    sentence: str
    rows: list[Counterfactual]
    limits: str = LIMITS


def newest() -> ReplaySummary | None:
    """Return the summary of the last replay; None before the first."""
    last = Counterfactual.objects.order_by("-made_at", "-pk").first()
    return said(list(Counterfactual.objects.filter(round=last.round))) if last else None


def said(rows: list[Counterfactual]) -> ReplaySummary:
    """Describe the cheapest of *rows*, with misses at USD_PER_MISS."""
    ordered = sorted(rows, key=lambda row: row.cost_usd + USD_PER_MISS * row.missed)
    best = ordered[0]
    span = _span(best.to_at - best.from_at)
    if best.bundle == AS_IT_WAS or (best.saved_usd == 0 and best.fewer_missed == 0):
        return ReplaySummary(f"Simulated over {span}, no other bundle is cheaper than the present policies.", ordered)
    money = f"${abs(best.saved_usd):,.2f} {'less' if best.saved_usd >= 0 else 'more'}"
    misses = f"{abs(best.fewer_missed):,} {'miss' if abs(best.fewer_missed) == 1 else 'misses'}"
    more = f"{misses} {'fewer' if best.fewer_missed >= 0 else 'more'}" if best.fewer_missed else "as many misses"
    title = BUNDLES[best.bundle].title if best.bundle in BUNDLES else best.bundle
    return ReplaySummary(f"Simulated over {span}, {title} is cheapest: {money}, {more}.", ordered)


def _span(lasts: timedelta) -> str:
    minutes = round(lasts.total_seconds() / 60)
    if minutes < 120:
        return f"the last {minutes} min"
    hours = round(minutes / 60)
    return "the last day" if hours == 24 else f"the last {hours} h"
