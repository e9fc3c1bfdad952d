"""Whether the fleet survives the loss of a region: every night each is lost in a simulation.

It has the present fleet, policies and forecast.
"""

from datetime import datetime
from typing import Any, Final

import numpy as np

from controlplane.fleet.models import Region
from controlplane.planning.models import RegionLoss
from controlplane.simulation.running import simulate
from controlplane.simulation.whatif.start import Start, stage_start
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from controlplane.tuning.selectors import tuned
from scheduling.simulation.measures.results import kept
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging import SOURCE

LOST_S, HORIZON_S, GRACE_S = 300.0, 3000.0, 300.0
"""When the region is lost, until when requests come, and how long they may take afterwards. It does not come back."""
PART_S: Final = 300.0
"""Parts of the time after the loss, in each of which a class keeps its target or falls below."""
MIN_JUDGED: Final = 20
"""Requests of a part; with fewer it says nothing."""
KEPT: Final = 60


def due(now: datetime) -> bool:
    """Return whether a verdict is due."""
    every_s, newest = tuned().NIGHTLY_EVERY_S, RegionLoss.objects.values_list("made_at", flat=True).first()
    old = newest is None or (now - newest).total_seconds() >= every_s
    return every_s > 0 and old and Region.objects.filter(active=True).count() > 1


def judge(now: datetime) -> RegionLoss:
    """Simulate the loss of each region and store the verdicts. Raise ActionError or ValueError where the fleet cannot be
    forked, or nothing is asked of it.
    """
    start = start_of(Begin(kind="fleet"), HORIZON_S)
    if start.is_quiet:
        raise ValueError("No request came in the last hour.")
    titles = dict(Region.objects.values_list("name", "title"))
    regions = [name for name in start.scenario["regions"] if name in titles]
    whole = _shares(start, "")
    rows = [{"region": name, "title": titles[name], **_verdict(_shares(start, name), whole)} for name in regions]
    made = RegionLoss.objects.create(made_at=now, regions=rows)
    old = RegionLoss.objects.values_list("pk", flat=True)[KEPT:]
    RegionLoss.objects.filter(pk__in=list(old)).delete()
    return made


def _shares(start: Start, lost: str) -> dict[str, tuple[float, Any, Any]]:
    """Return by class its target, and requests judged and kept by part of the time after the loss of the region *lost*."""
    failure = {"at_h": LOST_S / 3600, "region": lost, "repair_min": 2 * HORIZON_S / 60}
    values = start.scenario | {"until_h": (HORIZON_S + GRACE_S) / 3600, "failures": [failure] if lost else []}
    scenario = check_scenario(values, SOURCE, asks=False)
    result = simulate(scenario, stage_start(start, scenario, 1, (), HORIZON_S)).result
    judged, met = kept(result, result.cluster.promises)
    arrival_s = result.requests.arrival_s
    part = np.floor((arrival_s - LOST_S) / PART_S).astype(int)
    parts, of = round((HORIZON_S - LOST_S) / PART_S), dict[str, tuple[float, Any, Any]]()
    for number, (name, row) in enumerate(scenario.classes.items()):
        own = judged & (result.requests.slo_class == number) & (arrival_s >= LOST_S) & (part < parts)
        if row.kind != "opportunistic" and own.any():
            counts = [np.bincount(part[which], minlength=parts) for which in (own, own & met)]
            of[name] = row.percentile / 100.0, counts[0], counts[1]
    return of


def _verdict(shares: dict[str, tuple[float, Any, Any]], whole: dict[str, tuple[float, Any, Any]]) -> dict[str, Any]:
    """Return the class that falls farthest below its target: the share that is kept meanwhile, and for how long."""
    worst: dict[str, Any] = {"survives": True, "slo_class": "", "slo_met_ratio": None, "below_target_s": 0.0}
    lowest = 0.0
    for name, (target, judged, met) in shares.items():
        below = (judged >= MIN_JUDGED) & (met < target * judged)
        share = float(met.sum() / judged.sum())
        worst = worst if worst["slo_class"] else worst | {"slo_class": name, "slo_met_ratio": round(share, 4)}
        if share < target and below.any():
            fallen = float(met[below].sum() / judged[below].sum())
            if target - fallen > lowest:
                lowest = target - fallen
                worst = {"survives": False, "slo_class": name, "slo_met_ratio": round(fallen, 4),
                         "below_target_s": PART_S * float(below.sum())}  # fmt: skip
    of = whole.get(worst["slo_class"])
    return worst | {"without_loss_ratio": None if of is None else round(float(of[2].sum() / of[1].sum()), 4)}
