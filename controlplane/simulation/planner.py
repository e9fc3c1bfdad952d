"""Planner of a scenario: plans as live, from forecasts made as simulated time passes."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence, Set
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.simulation.capabilities import capabilities
from controlplane.simulation.forecasts import (
    ORACLE,
    RECENT,
    ExpectedDemand,
    SeriesForecasts,
    by_window,
    cached,
    forecaster_named,
)
from forecasting.workload import usable
from forecasting.workload.calendar import Calendar
from scheduling.planning.advisor import (
    Band,
    FleetPlan,
    PlanInputs,
    PlanSettings,
    SimulatedPlanner,
    at_level,
    make_plan,
)
from scheduling.planning.capacity import arrivals_over_s
from scheduling.planning.places import Deployed, Endpoint, Fleet
from scheduling.scaling import EndpointView, PlansFor
from scheduling.simulation.scenario import Scenario, wrong_at
from scheduling.simulation.scenario.file import text_of
from scheduling.simulation.scenario.toml_lines import Key
from scheduling.simulation.staging import Stage, past_requests
from scheduling.simulation.staging.demand_minutes import MINUTE_S, DemandMinutes
from scheduling.simulation.staging.timed_events import lost_at

NO_STRATEGY = PlansFor()


def planner_of(staged: Stage) -> SimulatedPlanner | None:
    """Return the planner; None where no strategy follows plans. Raise ScenarioError for an unknown forecaster."""
    scenario = staged.scenario
    _check_forecasters(scenario, staged.path)
    if staged.scaled is None or not staged.scaled.one.uses_advice:
        return None
    own = staged.scaled.settings
    follows = {
        key[0]: at_level(strategy.plans_for, own[key].demand_level)
        for key, strategy in staged.scaled.strategies.items()
        if strategy.uses_advice
    }
    follows |= dict.fromkeys(set(staged.cluster.models) - set(follows), NO_STRATEGY)
    whole, expected, known = _fleet(staged, frozenset()), _expected(staged, own), capabilities(staged)
    settings = PlanSettings(scenario.planner.period_s, scenario.planner.epsilon, scenario.planner.time_limit_s)

    def inputs_at(now_s: float, views: Sequence[EndpointView]) -> PlanInputs:
        """Return the inputs without places whose machines are lost then."""
        lost = lost_at(scenario, staged.cluster, now_s)
        fleet = (_fleet(staged, lost) if lost else whole).with_instances(views)
        return PlanInputs(expected.at(now_s, follows), fleet, known, follows, settings)

    shares = {key[0]: own[key].niw_share for key in reversed(staged.cluster.endpoints)}
    return SimulatedPlanner(inputs_at, follows, settings, shares, _plan)


def _plan(now_s: float, inputs: PlanInputs) -> FleetPlan:
    """Call `make_plan`, cached in the process: futures that differ in nothing that plans depend on share them."""
    kept = cached(hashlib.sha256(pickle.dumps((now_s, inputs))).digest())
    if "plan" not in kept:
        kept["plan"] = make_plan(now_s, inputs)
    plan: FleetPlan = kept["plan"]
    return plan


def _check_forecasters(scenario: Scenario, path: Path) -> None:
    """Raise ScenarioError for an unknown or unavailable forecaster."""
    named: list[tuple[Key, str]] = [(("forecast", "forecaster"), scenario.forecast.forecaster)]
    named += [(("endpoints", at, "forecaster"), one.forecaster or "") for at, one in enumerate(scenario.endpoints)]
    for key, name in named:
        try:
            forecaster_named(name)
        except ValueError as error:
            raise wrong_at(path, text_of(path), key, str(error)) from error


def _expected(staged: Stage, settings: Mapping[Endpoint, Any]) -> ExpectedDemand:
    """Return the demand that plans expect: forecasts of the interactive classes, the rate at which deferred work arrives.

    *settings*: `Scenario.at` each endpoint. Where a bundle's forecaster is unavailable, the best stands in, as live.
    """
    scenario, cluster, requests = staged.scenario, staged.cluster, staged.requests
    window_s, forecasters = float(scenario.forecast.window_s), [usable(own.forecaster) for own in settings.values()]
    count = max(1, ceil(scenario.planner.horizon_s / window_s))
    shares = [own.niw_share for own in settings.values()]
    deferred = (one.deadline_s for one in scenario.classes.values() if one.kind == "non_interactive")
    over_s = arrivals_over_s(filter(None, deferred))
    kinds = [one.kind for one in scenario.classes.values()]
    shown, other = (
        [at for at, kind in enumerate(kinds) if kind == wanted] for wanted in ("interactive", "non_interactive")
    )
    minutes, before_s = int(requests.arrival_s[-1] // MINUTE_S) + 1, 0.0
    asked, others = (DemandMinutes.of(cluster, requests, classes, minutes) for classes in (shown, other))
    if staged.past is not None:
        before_s = staged.past[0].prompt.shape[1] * MINUTE_S // window_s * window_s  # whole windows
        before = (each.last(int(before_s // MINUTE_S)) for each in staged.past)
        asked, others = asked.after(next(before)), others.after(next(before))
    past = [np.zeros((len(cluster.endpoints), 0))] * 2
    if scenario.forecast.history_days and not {ORACLE, RECENT} >= set(forecasters):
        past = _past(staged, shown)
    zones = {
        name: Calendar(one.time_zone, frozenset(one.holidays)) if one.time_zone else None
        for name, one in scenario.regions.items()
    }
    begins_s, refit_s = scenario.begins_s - before_s, 3600 * scenario.forecast.refit_h
    series = [
        [
            SeriesForecasts(
                forecaster, window_s, minutes_of[at], past_of[at], refit_s, zones[cluster.endpoints[at][1]], begins_s
            )
            for minutes_of, past_of in zip((asked.prompt, asked.output), past, strict=True)
        ]
        for at, forecaster in enumerate(forecasters)
    ]

    def bands(at: int, now_s: float) -> tuple[Band, Band]:
        prompt, output = (_finite(one.ahead(before_s + now_s, count)) for one in series[at])
        return prompt, output

    seen = cached(asked.digest() + others.digest() + repr((shares, over_s)).encode())
    return ExpectedDemand(cluster.endpoints, window_s, bands, asked, others, before_s, shares, over_s, seen=seen)


def _finite(band: Band) -> Band:
    return Band(*(values if np.isfinite(values).all() else np.nan_to_num(values) for values in band))


def _past(staged: Stage, classes: list[int]) -> list[np.ndarray]:
    """Return prompt and output tokens of the days before the start, as (endpoints, windows)."""
    forecast = staged.scenario.forecast
    minutes = 7 * 1440 * ceil(forecast.history_days / 7)
    asked = DemandMinutes.of(staged.cluster, past_requests(staged), classes, minutes)
    window_s = forecast.window_s
    windows = int(minutes * MINUTE_S // window_s)
    kept = int(forecast.history_days * 86_400 // window_s)
    return [
        np.array([by_window(row, window_s, windows)[windows - kept :] for row in rows])
        for rows in (asked.prompt, asked.output)
    ]


def _fleet(staged: Stage, lost: Set[int]) -> Fleet:
    """Return the places of instances by model, region and GPUs; an instance is one unit, shared by models on the same
    GPUs.

    Places that are *lost* do not count.
    """
    cluster, scaled = staged.cluster, staged.scaled
    assert scaled is not None
    places: dict[tuple[str, str, str], int] = {}
    units: dict[tuple[str, str], int] = {}
    for at, spec in enumerate(cluster.instances):
        place = spec.model, spec.region, spec.gpu_type
        places[place] = places.get(place, 0) + (at not in lost)
        units[place[1:]] = units.get(place[1:], 0) + (at not in lost)
    delays = cluster.delays
    specs = {(spec.model, spec.region, spec.gpu_type): spec for spec in cluster.instances}
    deployments, left = {}, {key: bounds.min_instances for key, bounds in scaled.bounds.items()}
    for (model, region, gpus), count in places.items():
        bounds = scaled.bounds[model, region]
        most = min(bounds.max_instances, units[region, gpus] if cluster.share_spot else count)
        least = min(left[model, region], most)
        left[model, region] -= least
        spec = specs[model, region, gpus]
        takes_s = (delays.local_weights_s, delays.start_s) if spec.start_s is None else (spec.start_s, 0.0)
        deployments[model, region, gpus] = Deployed(0, 0, least, most, 1, spec.usd_per_hour, *takes_s)
    return Fleet(deployments, units)
