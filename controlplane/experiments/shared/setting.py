"""Demand drawn and forecast, and the capability of instances: the inputs that all strategies of an experiment share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controlplane.experiments.experiment import Progress
from controlplane.experiments.shared.scenes import DAY_S, INTERACTIVE, OTHER, Scene
from controlplane.simulation.forecasts import ExpectedDemand, by_window
from forecasting.models_extra import ModelsExtraMissing
from forecasting.workload import FORECASTERS, Fallback, unavailable_reason
from forecasting.workload.series import Series
from scheduling.planning.advisor import Band, PlanInputs, PlanSettings, SimulatedPlanner
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import Capability
from scheduling.planning.places import Deployed, Fleet
from scheduling.planning.simulated_capability import SIZES, simulated_capability
from scheduling.queueing.promises import Promise
from scheduling.scaling import EndpointView, PlansFor
from scheduling.simulation.cluster.description import cluster_of
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.staging.demand_minutes import MINUTE_S, DemandMinutes
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import Burst, Client

Floats = NDArray[np.float64]
MACHINE = "vm"
PAIRS = 10_000
"""Lengths drawn from a mix."""
WINDOW_S = 600.0
WINDOWS_AHEAD = 6
"""Horizon of forecasts, as live."""
BEFORE_S = 4 * 3600.0
"""Time before the start over which the CV of arrivals is measured, as live."""
SMOOTH_SIZES = (4,)


def check_days(days: float, window_s: float) -> None:
    """Raise ValueError where *days* are less than one window of *window_s* seconds."""
    if days * DAY_S < window_s:
        least = math.ceil(1e4 * window_s / DAY_S) / 1e4
        raise ValueError(
            f"--days must be at least {least:g}: forecasts are for windows of {window_s / MINUTE_S:g} min."
        )


def minutes(scene: Scene, drawn: Workload, name: str, duration_s: float) -> DemandMinutes:
    """Return the demand of the class *name* in *drawn* by stream (model, caller's region) and minute."""
    scenario = scene.scenario()
    cluster = cluster_of(scenario)
    classes = [list(scenario.classes).index(name)]
    return DemandMinutes.of(cluster, requests_of(scenario, cluster, drawn, 0), classes, round(duration_s / MINUTE_S))


@dataclass(frozen=True, slots=True)
class DemandForecasts:
    """Forecasts made at the start of every window for the next windows."""

    forecaster: str
    window_s: float
    mean: Floats
    """(windows, streams, horizon)"""
    upper_80: Floats
    error: float
    """Absolute error of the first window's mean over all forecasts and streams, divided by the demand."""

    def band(self, stream: int, now_s: float) -> Band:
        """Return the newest forecast of *stream* at *now_s*."""
        now = min(int(now_s // self.window_s), len(self.mean) - 1)
        return Band(self.mean[now, stream], self.upper_80[now, stream])

    @classmethod
    def foreknown(cls, actual: Floats, window_s: float) -> "DemandForecasts":
        """Return the actual demand of each window as its forecast."""
        known = actual.T[:, :, None]
        return cls("foreknown", window_s, known, known, 0.0)


def forecast_demand(
    name: str,
    history: Floats,
    actual: Floats,
    window_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> DemandForecasts:
    """Return forecasts by the forecaster *name* while *actual* (streams, windows) comes in after *history*.

    As live: `WINDOWS_AHEAD` windows ahead, refitted every day on as many windows as *history* has. Where it fails a simpler
    forecaster stands in, and the name in the result says so. Raises ValueError for an unknown forecaster, and
    ModelsExtraMissing for one that is not installed.
    """
    if name not in FORECASTERS:
        raise ValueError(f"there is no forecaster {name!r}; there is {', '.join(FORECASTERS)}")
    if reason := unavailable_reason(name):
        raise ModelsExtraMissing(reason)
    streams, count = actual.shape
    mean, upper = np.zeros((count, streams, WINDOWS_AHEAD)), np.zeros((count, streams, WINDOWS_AHEAD))
    a_day, failed, past = round(DAY_S / window_s), 0, history.shape[1]
    for stream in range(streams):
        known = np.concatenate([history[stream], actual[stream]])
        fell_back = False
        for now in range(count):
            if now % a_day == 0:
                forecaster = Fallback(FORECASTERS[name]())
                forecaster.fit(Series((now - past) * window_s, window_s, known[now : now + past]))
            else:
                forecaster.update(actual[stream, now - 1 : now])
            made = forecaster.predict(WINDOWS_AHEAD)
            mean[now, stream], upper[now, stream] = made.mean, made.upper_80
            fell_back |= bool(forecaster.failed)
        failed += fell_back
        if progress:
            progress(stream + 1, streams)
    wrong = np.abs(mean[:, :, 0] - actual.T).sum() / max(actual.sum(), 1e-9)
    by = f"{name} (failed: {failed} of {streams} series by a simpler one)" if failed else name
    return DemandForecasts(by, window_s, mean, upper, float(wrong))


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand as plans know it: forecasts of the interactive tokens, and the minutes before, from `BEFORE_S` before 0."""

    prompt: DemandForecasts
    output: DemandForecasts
    interactive: DemandMinutes
    other: DemandMinutes


def measured_capability(
    engine: EngineConfig, clients: Sequence[Client], *, ttft_s: float = np.inf, seed: int = 0, **measuring: float
) -> Capability:
    """Return the capability of an instance with *engine* for the mix of *clients*, whose promise is *ttft_s*.

    *measuring* is passed to `simulated_capability`.
    """
    random = np.random.default_rng([seed, 3])
    shares = np.array([client.requests_per_s for client in clients])
    prompt, output = np.empty(PAIRS, np.int64), np.empty(PAIRS, np.int64)
    of = random.choice(len(clients), PAIRS, p=shares / shares.sum())
    for at, client in enumerate(clients):
        prompt[of == at], output[of == at] = client.lengths.draw(random, int((of == at).sum()))
    return simulated_capability(engine, prompt, output, Promise(ttft_s=ttft_s), seed=seed, **measuring)  # type: ignore[arg-type]


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

    def planner(
        self, plans_for: PlansFor, usd_per_hour: float, foreknown: bool = False, niw_share: float = 1.0
    ) -> SimulatedPlanner:
        """Return the planner of a strategy that follows plans made for *plans_for*, each at its period; *foreknown*: one
        that plans every window for its actual demand.

        Room is kept for *niw_share* of the other work of the past hour (beta): all of it where nothing holds that back. A
        region has as many machines for each model as the scene has instances, all of one type.
        """
        expected, streams = self.expected, self.scene.streams
        if foreknown:
            plans_for, expected = PlansFor(period_s=WINDOW_S, horizon_s=WINDOW_S), self.foreknown
        capacity, models = self.scene.instances * len(self.scene.models), [model for model, _ in streams]
        units = dict.fromkeys(((region, MACHINE) for _, region in streams), capacity)
        follows, settings = dict.fromkeys(models, plans_for), PlanSettings()
        known = {(model, MACHINE): one for model, one in self.capability.items()}

        def bands(at: int, now_s: float) -> tuple[Band, Band]:
            return expected.prompt.band(at, now_s), expected.output.band(at, now_s)

        of, shares = (expected.interactive, expected.other), [niw_share] * len(streams)
        demand = ExpectedDemand(streams, expected.prompt.window_s, bands, *of, BEFORE_S, shares, guarded=False)

        def inputs_at(now_s: float, views: Sequence[EndpointView]) -> PlanInputs:
            deployments = {
                (view.model, view.region, MACHINE): Deployed(
                    view.instances, view.spot, view.min_instances, view.max_instances, 1, usd_per_hour
                )
                for view in views
            }
            return PlanInputs(demand.at(now_s, follows), Fleet(deployments, units), known, follows, settings)

        return SimulatedPlanner(inputs_at, follows, settings)


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
    """Draw the demand and that of *weeks* before, measure the capability of instances, and forecast every window.

    *promise* is passed to `measured_capability`. *smooth*: capability is measured on four instances under Poisson arrivals,
    and nothing is reserved for bursts.
    """
    check_days(days, WINDOW_S)
    past = []
    for week in range(weeks):
        progress("drawing the demand", week, weeks + 1)
        drawn = scene.demand(7, seed + 1000 * (weeks - week))
        past.append(minutes(scene, drawn, INTERACTIVE, 7 * DAY_S))
    other_before = minutes(scene, drawn, OTHER, 7 * DAY_S)
    cvs = [arrival_cv(requests) for requests in past[-1].requests]
    progress("drawing the demand", weeks, weeks + 1)
    workload = scene.demand(days, seed, bursts)
    came, other = (minutes(scene, workload, name, days * DAY_S) for name in (INTERACTIVE, OTHER))
    before = round(BEFORE_S / MINUTE_S)
    seen = came.after(past[-1].last(before)), other.after(other_before.last(before))
    history, capability = past[-1].after(*past[:-1]), {}
    for at, model in enumerate(scene.models):
        progress("measuring capability", at, len(scene.models))
        own_cvs = [cv for cv, (name, _) in zip(cvs, scene.streams, strict=True) if name == model.name]
        capability[model.name] = measured_capability(
            model.engine(),
            [client for client in scene.clients if client.model == model.name],
            cv=POISSON_CV if smooth else max(own_cvs),
            sizes=SMOOTH_SIZES if smooth else SIZES,  # type: ignore[arg-type]
            seed=seed,
            **promise,
        )
    forecasts, known = {}, {}
    for quantity in ("prompt", "output"):
        rates = in_windows(getattr(came, quantity))
        report = partial(progress, f"forecasting {quantity} tokens by {forecaster}")
        forecasts[quantity] = forecast_demand(
            forecaster, in_windows(getattr(history, quantity)), rates, WINDOW_S, report
        )
        known[quantity] = DemandForecasts.foreknown(rates, WINDOW_S)
    expected, foreknown = (Expected(each["prompt"], each["output"], *seen) for each in (forecasts, known))
    return Setting(scene, days, seed, workload, expected, foreknown, capability, cvs)


def in_windows(rates: Floats) -> Floats:
    """Return *rates* by minute as means of windows, without an incomplete last one."""
    count = int(rates.shape[1] * MINUTE_S // WINDOW_S)
    return np.array([by_window(row, WINDOW_S, count) for row in rates])
