"""Planner of a scenario: plans as live, from forecasts made as simulated time passes."""

import hashlib
import pickle
from collections.abc import Sequence, Set
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.simulation.capabilities import capabilities
from controlplane.simulation.forecasts import (
    MINUTE_S,
    ORACLE,
    RECENT,
    DemandMinutes,
    SeriesForecasts,
    by_window,
    cached,
    forecaster_named,
)
from forecasting.workload import usable
from scheduling.planning.advisor import (
    Band,
    Demand,
    EndpointDemand,
    FleetPlan,
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
from scheduling.simulation.staging.stage import PastDemand
from scheduling.simulation.staging.timed_events import lost_at

NO_STRATEGY = PlansFor()


def planner_of(staged: Stage) -> SimulatedPlanner | None:
    """Return the planner; None where no strategy follows plans. Raise ScenarioError for an unknown forecaster."""
    scenario = staged.scenario
    _check_forecasters(scenario, staged.path)
    if staged.scaled is None or not staged.scaled.one.uses_advice:
        return None
    settings = staged.scaled.settings
    follows = {
        key[0]: at_level(strategy.plans_for, settings[key].demand_level)
        for key, strategy in staged.scaled.strategies.items()
        if strategy.uses_advice
    }
    follows |= dict.fromkeys(set(staged.cluster.models) - set(follows), NO_STRATEGY)
    whole = _fleet(staged, frozenset())

    def fleet_at(now_s: float, views: Sequence[EndpointView]) -> Fleet:
        """Return the fleet without places whose machines are lost then."""
        lost = lost_at(scenario, staged.cluster, now_s)
        return (_fleet(staged, lost) if lost else whole).with_instances(views)

    return SimulatedPlanner(
        demand_at=_Expected(staged, settings, follows),
        fleet_at=fleet_at,
        capability=capabilities(staged),
        follows=follows,
        settings=PlanSettings(scenario.planner.period_s, scenario.planner.epsilon, scenario.planner.time_limit_s),
        due_shares={key[0]: settings[key].niw_share for key in reversed(staged.cluster.endpoints)},
        make=_plan,
    )


def _plan(*given: Any) -> FleetPlan:
    """Call `make_plan`, cached in the process: futures that differ in nothing that plans depend on share them."""
    kept = cached(hashlib.sha256(pickle.dumps(given)).digest())
    if "plan" not in kept:
        kept["plan"] = make_plan(*given)
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


class _Expected:
    """Expected demand at a time: forecasts of the interactive classes, the rate at which deferred work arrives."""

    def __init__(self, staged: Stage, settings: dict[Endpoint, Any], follows: dict[str, PlansFor]) -> None:
        scenario, cluster, requests = staged.scenario, staged.cluster, staged.requests
        # Where a bundle's forecaster is unavailable, the best stands in, as live.
        forecasters = {key: usable(own.forecaster) for key, own in settings.items()}
        self._endpoints, self._follows = cluster.endpoints, follows
        self._window_s = float(scenario.forecast.window_s)
        self._count = max(1, ceil(scenario.planner.horizon_s / self._window_s))
        self._shares = [own.niw_share for own in settings.values()]
        deferred = (one.deadline_s for one in scenario.classes.values() if one.kind == "non_interactive")
        self._over_s = arrivals_over_s(filter(None, deferred))
        kinds = [one.kind for one in scenario.classes.values()]
        shown, other = (
            [at for at, kind in enumerate(kinds) if kind == wanted] for wanted in ("interactive", "non_interactive")
        )
        minutes = int(requests.arrival_s[-1] // MINUTE_S) + 1
        asked, others = (DemandMinutes.of(cluster, requests, classes, minutes) for classes in (shown, other))
        self._before_s = 0.0
        if staged.past is not None:
            before, asked, others = _after(staged.past, asked, others, self._window_s)
            self._before_s = before * MINUTE_S
        self._asked, self._other = asked, others
        self._seen = cached(asked.digest() + others.digest() + repr((self._shares, self._over_s)).encode())
        past = [np.zeros((len(cluster.endpoints), 0))] * 2
        if scenario.forecast.history_days and not {ORACLE, RECENT} >= set(forecasters.values()):
            past = _past(staged, shown)
        refit_s = 3600 * scenario.forecast.refit_h
        self._series = [
            [
                SeriesForecasts(forecasters[key], self._window_s, minutes_of[at], past_of[at], refit_s)
                for minutes_of, past_of in zip((asked.prompt, asked.output), past, strict=True)
            ]
            for at, key in enumerate(cluster.endpoints)
        ]

    def __call__(self, now_s: float) -> Demand:
        of: dict[Endpoint, EndpointDemand] = {}
        known_s = self._before_s + now_s
        for at, key in enumerate(self._endpoints):
            prompt, output = (series.ahead(known_s, self._count) for series in self._series[at])
            beta, cv = self._buffer_and_cv(at, known_s)
            of[key] = EndpointDemand.of(_finite(prompt), _finite(output), self._follows[key[0]], beta, cv)
        return Demand(now_s // self._window_s * self._window_s, self._window_s, of)

    def _buffer_and_cv(self, endpoint: int, known_s: float) -> tuple[float, float]:
        """Return the rate at which deferred work arrives at *endpoint* (tokens per second), and the interactive CV."""
        seen: tuple[float, float] | None = self._seen.get((endpoint, known_s))
        if seen is None:
            beta = self._shares[endpoint] * self._other.rate(endpoint, known_s, self._over_s)
            seen = self._seen[endpoint, known_s] = beta, self._asked.arrival_cv(endpoint, known_s)
        return seen


def _after(
    past: PastDemand, asked: DemandMinutes, others: DemandMinutes, window_s: float
) -> tuple[int, DemandMinutes, DemandMinutes]:
    """Return the minutes in whole windows before the start, and *asked* and *others* with the demand in these before."""
    minutes = int(past.prompt.shape[1] * MINUTE_S // window_s * window_s // MINUTE_S)
    prompt, output, requests, other = (each[:, each.shape[1] - minutes :] for each in past)
    none = np.zeros_like(prompt)
    before, other_before = DemandMinutes(prompt, output, requests), DemandMinutes(other, none, none)
    return minutes, asked.after(before), others.after(other_before)


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
