"""A demand drawn and forecast, and what instances serve of it: what all strategies of an experiment share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from controlplane.experiments.experiment import Progress
from controlplane.experiments.shared.demand import (
    BURSTS_OVER_S,
    DemandForecasts,
    Seen,
    check_days,
    forecast_demand,
    minutes,
)
from controlplane.experiments.shared.scenes import DAY_S, INTERACTIVE, OTHER, Scene
from scheduling.planning.advisor import Band, Demand, EndpointDemand, PlanSettings, SimulatedPlanner
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import Capability
from scheduling.planning.places import Deployed, Endpoint, Fleet
from scheduling.planning.simulated_capability import SIZES, simulated_capability
from scheduling.scaling import EndpointView, PlansFor
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import Burst, Client

MACHINE = "vm"
PAIRS = 10_000
"""Lengths that are drawn of a mix."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand as plans know it: forecasts of the interactive tokens, and what lies behind them."""

    prompt: DemandForecasts
    output: DemandForecasts
    seen: Seen

    def demand(self, streams: Sequence[Endpoint], plans_for: PlansFor, now_s: float) -> Demand:
        """Expected demand of *streams*, which are the rows of the forecasts.

        Room is kept for all of the other work of the hour behind (beta), as live, since nothing holds that back.
        """
        now = self.prompt.at(now_s)
        of = {}
        for at, stream in enumerate(streams):
            prompt, output = (Band(each.mean[now, at], each.upper_80[now, at]) for each in (self.prompt, self.output))
            beta, cv = self.seen.other_tokens_per_s(at, now_s), self.seen.arrival_cv(at, now_s)
            of[stream] = EndpointDemand.of(prompt, output, plans_for, beta, cv)
        return Demand(now * self.prompt.window_s, self.prompt.window_s, of)


def planner(
    streams: Sequence[Endpoint],
    expected: Expected,
    plans_for: PlansFor,
    capability: Mapping[str, Capability],
    capacity: int,
    usd_per_hour: float,
) -> SimulatedPlanner:
    """The planner of a strategy that has plans made for *plans_for*, each at its period.

    Capability is by model, *capacity* the machines of a region, lent out or not, all of one type.
    """
    units = dict.fromkeys(((region, MACHINE) for _, region in streams), capacity)

    def fleet_at(now_s: float, views: Sequence[EndpointView]) -> Fleet:
        deployments = {
            (view.model, view.region, MACHINE): Deployed(
                view.instances, view.spot, view.min_instances, view.max_instances, 1, usd_per_hour
            )
            for view in views
        }
        return Fleet(deployments, units)

    return SimulatedPlanner(
        demand_at=lambda now_s: expected.demand(streams, plans_for, now_s),
        fleet_at=fleet_at,
        capability={(model, MACHINE): one for model, one in capability.items()},
        follows=dict.fromkeys((model for model, _ in streams), plans_for),
        settings=PlanSettings(),
    )


def measured_capability(
    engine: EngineConfig,
    clients: Sequence[Client],
    ttft_s: float = np.inf,
    normalised_s: float = np.inf,
    percentile: float = 95.0,
    cv: float = POISSON_CV,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
) -> Capability:
    """Capability of an instance with *engine* for the mix of *clients*, *percentile* of whose requests keep *ttft_s* and
    *normalised_s*, when their arrivals have *cv*."""
    random = np.random.default_rng([seed, 3])
    shares = np.array([client.requests_per_s for client in clients])
    prompt, output = np.empty(PAIRS, np.int64), np.empty(PAIRS, np.int64)
    of = random.choice(len(clients), PAIRS, p=shares / shares.sum())
    for at, client in enumerate(clients):
        prompt[of == at], output[of == at] = client.lengths.draw(random, int((of == at).sum()))
    return simulated_capability(
        engine,
        prompt,
        output,
        Promise(ttft_s=ttft_s),
        normalised_s=normalised_s,
        percentile=percentile,
        cv=cv,
        sizes=sizes,
        seed=seed,
    )


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
    forecasts, known = {}, {}
    for quantity in ("prompt", "output"):
        rates = getattr(actual, quantity)
        report = partial(progress, f"forecasting {quantity} tokens by {forecaster}")
        forecasts[quantity] = forecast_demand(forecaster, getattr(history, quantity), rates, WINDOW_S, report)
        known[quantity] = DemandForecasts.foreknown(rates, WINDOW_S)
    expected, foreknown = (Expected(seen=seen, **each) for each in (forecasts, known))
    return Setting(scene, days, seed, workload, expected, foreknown, capability, cvs)
