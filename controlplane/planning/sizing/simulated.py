"""Simulation of a fleet that is planned: the present policies, its instances alone, and the planned requests."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.fleet.models import SloClass, SloKind
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.planning.sizing.demand import WARM_UP_S, Demand
from controlplane.planning.sizing.offers import Offer
from controlplane.simulation.running import simulate
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.arrivals import RECENT, drawn
from controlplane.simulation.whatif.twin_errors import SCALED_BY
from scheduling.planning.sizing import Judge, Sought
from scheduling.queueing.release_rule import AT_ONCE
from scheduling.simulation.measures.results import kept
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import ProfileOf
from scheduling.simulation.staging import SOURCE, stage
from scheduling.simulation.workload.columns import Workload

Values = dict[str, Any]
GRACE_S: Final = 300.0
"""After the last arrival, for requests to end."""
PACE: Final = 10
"""Deferred work must end within this part of the simulated time: it has to keep pace with its arrival."""
SEEDS: Final = ((1, 2), (3, 4))
"""Of the draws of requests, with each of which a fleet must keep its promises."""
AT_PEAK: Final[Values] = {"niw": {"by": AT_ONCE}, "ordering": "priority"}
"""Instead of the live policies: demand is level, so nothing is held for later; and queues are short where promises are kept,
while the order of long ones is slow to simulate.
"""
UNSCALED: Final = ("scaling", "planner", "schedules", "swap_groups")


class SimulatedFleet:
    """Simulates instances (l, r, g) of *sought*, whose offers are *offers* (l, g)."""

    def __init__(
        self,
        sought: Sought,
        offers: Sequence[Sequence[Offer | None]],
        demand: Demand,
        classes: Mapping[str, SloClass],
        present: Values,
    ) -> None:
        self.sought, self.offers, self.demand, self.classes, self.present = sought, offers, demand, classes, present
        self._workloads: dict[int, Workload] = {}

    @cached_property
    def wanted(self) -> NDArray[np.float64]:
        """Return the share of requests that must keep their promise, by class."""
        return np.array([row.percentile / 100.0 for row in self.classes.values()])

    @cached_property
    def draws(self) -> list[Judge]:
        """Return the judge of each draw of requests."""
        return [partial(self._judged, seeds) for seeds in SEEDS]

    def _judged(self, seeds: Sequence[int], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of requests whose promise was kept, by model and class, over *seeds*; NaN without any."""
        models, names = self.sought.models, list(self.classes)
        sums = np.zeros((2, len(models), len(names)))
        asked = np.array([[name in self.demand.models[model].classes for name in names] for model in models])
        serving: NDArray[np.bool_] = np.asarray(counts.any(axis=(1, 2)))
        for seed in seeds if serving.any() else ():
            scenario = Scenario.model_validate(self.values(counts))
            if seed not in self._workloads:
                self._workloads[seed] = drawn(self.demand.arrivals, seed)
            staged = stage(scenario, SOURCE, seed, self._workloads[seed])
            result = simulate(scenario, staged).result
            judged, met = kept(result, result.cluster.promises)
            judged &= result.requests.arrival_s >= WARM_UP_S
            model = np.array([models.index(name) for name in result.cluster.models])[result.requests.model]
            of = [names.index(name) if name in names else -1 for name in scenario.classes]
            slo_class = np.array(of)[result.requests.slo_class]
            counted = judged & (slo_class >= 0)
            np.add.at(sums[0], (model[counted], slo_class[counted]), 1)
            np.add.at(sums[1], (model[counted], slo_class[counted]), met[counted])
        shares: NDArray[np.float64] = np.divide(sums[1], sums[0], out=np.full_like(sums[0], np.nan), where=sums[0] > 0)
        shares[asked & ~serving[:, None]] = 0.0
        return shares

    def values(self, counts: NDArray[np.int64]) -> Values:
        """Return the scenario of *counts*."""
        sought, serving = self.sought, counts.sum(axis=2) > 0
        served = zip(sought.models, serving.sum(axis=1) > 0, strict=True)
        models = {name: self.present["models"][name] for name, is_served in served if is_served}
        fleet, profiles = [], {}
        for i, j, k in np.argwhere(counts > 0).tolist():
            offer = self.offers[i][k]
            assert offer is not None
            assert offer.profile is not None
            fleet.append(offer.group(sought.regions[j], int(counts[i, j, k])))
            table = ProfileOf.table(offer.model, offer.gpu_type, offer.profile, offer.tensor_parallel)
            profiles[offer.model, offer.gpu_type] = table
        places = {(sought.models[i], sought.regions[j]) for i, j in np.argwhere(serving).tolist()}
        prices = dict(zip(sought.gpu_types, sought.usd_per_hour.tolist(), strict=True))
        endpoints = [one for one in self.present["endpoints"] if (one["model"], one["region"]) in places]
        return self.present | {
            "models": models,
            "gpus": {name: {"usd_per_hour": usd} for name, usd in prices.items()},
            "profiles": list(profiles.values()),
            "fleet": fleet,
            "endpoints": endpoints,
            "until_h": (self.demand.horizon_s + GRACE_S) / 3600,
        }


def present_scenario(demand: Demand, classes: Mapping[str, SloClass], now: datetime) -> Values:
    """Return the live fleet's scenario with the promises of *classes* for the models of *demand*. Nothing is scaled."""
    values = scenario_of(inventory.read(set(demand.models)), ledger_rows(now - RECENT, now), now)
    values = {name: table for name, table in values.items() if name not in UNSCALED}
    for model in values["models"].values():
        for key in ("bundle", "marks", "fallback", "fallback_wait_s"):
            model.pop(key, None)
    for row in classes.values():
        of = values["classes"][row.name]
        for target in ("ttft", "itl", "e2e"):
            if (ms := getattr(row, f"{target}_target_ms")) is not None:
                of[f"{target}_ms"] = float(ms)
        of["percentile"] = row.percentile
        if row.kind == SloKind.NON_INTERACTIVE:
            of["deadline_s"] = min(float(row.deadline_s or np.inf), demand.horizon_s / PACE)
    values["endpoints"] = [
        {name: value for name, value in one.items() if name not in (*SCALED_BY, "niw_share")} | AT_PEAK
        for one in values["endpoints"]
    ]
    targets = values.get("weighted_targets", {})
    values["weighted_targets"] = {name: of for name, of in targets.items() if of.keys() <= values["models"].keys()}
    return values | {
        "demand": {"too_long": "clip"},
        "sample_s": 0.0,
        "regions": {name: {} for name in values["regions"]},
    }
