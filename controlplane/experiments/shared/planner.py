"""The planner of an experiment: plans as live ones, by forecasts made beforehand and a measured capability."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.experiments.shared.demand import DemandForecasts, Seen
from scheduling.planning.advisor import Band, Demand, EndpointDemand, PlanSettings, SimulatedPlanner
from scheduling.planning.bursts import POISSON_CV
from scheduling.planning.capacity import Capability
from scheduling.planning.places import Deployed, Endpoint, Fleet
from scheduling.planning.simulated_capability import SIZES, simulated_capability
from scheduling.scaling import EndpointView, PlansFor
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.workload.generator import Client

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
        """What the callers of *streams* are expected to ask for; they are the rows of the forecasts.

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
    """What an instance with *engine* serves of the mix of *clients*, *percentile* of whose requests keep *ttft_s* and
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
