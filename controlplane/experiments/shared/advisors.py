"""The planner in an experiment: that of live plans, by forecasts made beforehand, for instances on machines of one type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from controlplane.experiments.shared.demand import DemandForecasts, Windows
from scheduling.planning.advisor import Band, Demand, EndpointDemand, PlanSettings, SimulatedPlanner
from scheduling.planning.capacity import Capability
from scheduling.planning.places import Deployed, Endpoint, Fleet
from scheduling.scaling import EndpointView, PlansFor

Floats = NDArray[np.float64]
HOUR_S = 3600.0
MACHINE = "vm"


def by_total(
    streams: Sequence[Endpoint],
    forecasts: DemandForecasts,
    other_work: Windows,
    plans_for: PlansFor,
    period_s: float,
    capability: Mapping[str, Capability],
    cvs: Sequence[float],
    capacity: int,
    usd_per_hour: float,
) -> SimulatedPlanner:
    """SageServe's planner (sections 5 and 6.4): demand is the forecast of interactive tokens, prompt and output together.

    *streams* are the rows of the forecasts, of *other_work* and of *cvs*, those of their arrivals; beta is all of the other
    work of the hour behind, since nothing holds it back here. Capability is by model, *capacity* the machines of a region,
    lent out or not.
    """
    units = dict.fromkeys(((region, MACHINE) for _, region in streams), capacity)

    def demand_at(now_s: float) -> Demand:
        step, other = forecasts.at(now_s), _hour_behind(other_work, now_s)
        none = Band(*np.zeros((2, forecasts.mean.shape[2])))
        of = {
            stream: EndpointDemand.of(_band(forecasts, step, at), none, plans_for, float(other[at]), cvs[at])
            for at, stream in enumerate(streams)
        }
        return Demand(_start_s(forecasts, step), forecasts.window_s, of)

    return SimulatedPlanner(
        demand_at=demand_at,
        fleet_of=_fleet_of(units, usd_per_hour),
        # Demand is of tokens of both kinds.
        capability={
            (model, MACHINE): replace(one, prompt_tokens_per_s=inf, output_tokens_per_s=inf)
            for model, one in capability.items()
        },
        follows=dict.fromkeys((model for model, _ in streams), plans_for),
        settings=PlanSettings(period_s),
    )


def by_quantity(
    streams: Sequence[Endpoint],
    prompt: DemandForecasts,
    output: DemandForecasts,
    capability: Capability,
    cvs: Sequence[float],
    plans_for: PlansFor,
    period_s: float,
) -> SimulatedPlanner:
    """PreServe's planner (section 4.2): prompt and output tokens are forecast separately, for instances all alike."""

    def demand_at(now_s: float) -> Demand:
        step = prompt.at(now_s)
        of = {
            stream: EndpointDemand.of(_band(prompt, step, at), _band(output, step, at), plans_for, cv=cvs[at])
            for at, stream in enumerate(streams)
        }
        return Demand(_start_s(prompt, step), prompt.window_s, of)

    return SimulatedPlanner(
        demand_at=demand_at,
        fleet_of=_fleet_of({}, 1.0),
        capability=dict.fromkeys(((model, MACHINE) for model, _ in streams), capability),
        follows=dict.fromkeys((model for model, _ in streams), plans_for),
        settings=PlanSettings(period_s),
    )


def _band(forecasts: DemandForecasts, step: int, at: int) -> Band:
    return Band(forecasts.mean[step, at], forecasts.upper_80[step, at])


def _start_s(forecasts: DemandForecasts, step: int) -> float:
    return step * forecasts.every * forecasts.window_s


def _fleet_of(units: Mapping[tuple[str, str], int], usd_per_hour: float) -> Callable[[Sequence[EndpointView]], Fleet]:
    def fleet_of(views: Sequence[EndpointView]) -> Fleet:
        deployments = {
            (view.model, view.region, MACHINE): Deployed(
                view.instances, view.spot, view.min_instances, view.max_instances, 1, usd_per_hour
            )
            for view in views
        }
        return Fleet(deployments, units)

    return fleet_of


def _hour_behind(other_work: Windows, now_s: float) -> Floats:
    """Rate of the other work over the hour behind, by stream; that of the first window where nothing lies behind."""
    total = other_work.total
    until = int(now_s // other_work.window_s)
    hour = max(1, round(HOUR_S / other_work.window_s))
    seen = total[:, max(0, until - hour) : until]
    rate: Floats = seen.mean(axis=1) if seen.shape[1] else total[:, :1].mean(axis=1)
    return rate
