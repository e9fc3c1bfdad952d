"""A demand drawn, forecast, and what instances serve of it: what all strategies of an experiment share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from controlplane.experiments.experiment import Progress
from controlplane.experiments.shared.demand import (
    BURSTS_OVER_S,
    DemandForecasts,
    Seen,
    check_days,
    forecast_demand,
    minutes,
)
from controlplane.experiments.shared.planner import Expected, measured_capability, planner
from controlplane.experiments.shared.scenes import DAY_S, INTERACTIVE, OTHER, Scene
from scheduling.planning.advisor import SimulatedPlanner
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import Capability
from scheduling.planning.simulated_capability import SIZES
from scheduling.scaling import PlansFor
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import Burst

WINDOW_S = 600.0
SMOOTH_SIZES = (4,)


@dataclass(frozen=True, slots=True)
class Setting:
    scene: Scene
    days: float
    seed: int
    workload: Workload
    expected: Expected
    foreknown: Expected
    capability: dict[str, Capability]
    """By model."""
    cvs: list[float]
    """Of the arrivals of each stream over the week before."""

    @property
    def until_s(self) -> float:
        return self.days * DAY_S

    def planner(self, plans_for: PlansFor, usd_per_hour: float, foreknown: bool = False) -> SimulatedPlanner:
        """The planner of a strategy that has plans made for *plans_for*; that of the oracle plans every window by the
        demand that will come in it."""
        expected = self.expected
        if foreknown:
            plans_for, expected = PlansFor(period_s=WINDOW_S, horizon_s=WINDOW_S), self.foreknown
        capacity = self.scene.instances * len(self.scene.models)
        return planner(self.scene.streams, expected, plans_for, self.capability, capacity, usd_per_hour)


def prepare(
    scene: Scene,
    days: float,
    seed: int,
    forecaster: str,
    progress: Progress,
    *,
    weeks: int,
    bursts: Sequence[Burst] = (),
    smooth: bool = False,
    **promise: float,
) -> Setting:
    """Draw the demand and that of *weeks* before, measure what instances serve, and forecast its windows.

    *promise* is that of `measured_capability`. *smooth*: instances are measured as if arrivals were, four together, and
    nothing is reserved for bursts.
    """
    check_days(days, WINDOW_S)
    streams, past = scene.streams, []
    for week in range(weeks):
        progress("drawing the demand", week, weeks + 1)
        drawn = scene.demand(7, seed + 1000 * (weeks - week))
        past.append(minutes(drawn, streams, [INTERACTIVE], 7 * DAY_S))
    other_before = minutes(drawn, streams, [OTHER], 7 * DAY_S)
    cvs = [arrival_cv(requests) for requests in past[-1].requests]
    progress("drawing the demand", weeks, weeks + 1)
    workload = scene.demand(days, seed, bursts)
    came, other = (minutes(workload, streams, [name], days * DAY_S) for name in (INTERACTIVE, OTHER))
    seen = Seen(came.after(past[-1].last(BURSTS_OVER_S)), other.after(other_before.last(BURSTS_OVER_S)), BURSTS_OVER_S)
    history, actual = past[-1].after(*past[:-1]).longer(WINDOW_S), came.longer(WINDOW_S)
    capability = {}
    for at, model in enumerate(scene.models):
        progress("measuring what instances serve", at, len(scene.models))
        own_cvs = [cv for cv, (name, _) in zip(cvs, streams, strict=True) if name == model.name]
        capability[model.name] = measured_capability(
            model.engine(),
            [client for client in scene.clients if client.model == model.name],
            cv=POISSON_CV if smooth else max(own_cvs),
            sizes=SMOOTH_SIZES if smooth else SIZES,
            seed=seed,
            **promise,
        )
    forecasts, known = [], []
    for quantity in ("prompt", "output"):
        rates = getattr(actual, quantity)
        report = partial(progress, f"forecasting {quantity} tokens by {forecaster}")
        forecasts.append(forecast_demand(forecaster, getattr(history, quantity), rates, WINDOW_S, report))
        known.append(DemandForecasts.foreknown(rates, WINDOW_S))
    return Setting(scene, days, seed, workload, Expected(*forecasts, seen), Expected(*known, seen), capability, cvs)
