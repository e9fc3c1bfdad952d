"""Demand by window, and forecasts of it at every step from the windows before it only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forecasting.workload import FORECASTERS, Fallback
from forecasting.workload.series import Series
from scheduling.planning.bursts import arrival_cv
from scheduling.simulation.workload.columns import Workload

Floats = NDArray[np.float64]
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Windows:
    """Tokens a second that were asked for, (streams, windows); a stream is a model in a region, of some classes."""

    window_s: float
    prompt: Floats
    output: Floats

    @property
    def total(self) -> Floats:
        return self.prompt + self.output

    def after(self, more: "Windows") -> "Windows":
        """These, and then *more*."""
        return Windows(
            self.window_s,
            np.concatenate([self.prompt, more.prompt], axis=1),
            np.concatenate([self.output, more.output], axis=1),
        )


def windows(
    workload: Workload,
    streams: Sequence[tuple[str, str]],
    classes: Sequence[str],
    window_s: float,
    duration_s: float,
) -> Windows:
    """Demand of *classes* in *workload* by stream (model, caller's region) over *duration_s*."""
    count = round(duration_s / window_s)
    places = {stream: at for at, stream in enumerate(streams)}
    table = np.full((len(workload.model.names), len(workload.region.names)), -1, np.int64)
    for at, model in enumerate(workload.model.names):
        for to, region in enumerate(workload.region.names):
            table[at, to] = places.get((model, region), -1)
    asked = np.array([name in classes for name in workload.slo_class.names])
    stream = table[workload.model.codes, workload.region.codes]
    window = (workload.arrival_s // window_s).astype(np.int64)
    taken = (stream >= 0) & asked[workload.slo_class.codes] & (window < count)
    place = stream[taken] * count + window[taken]
    tokens = [
        np.bincount(place, column[taken], len(streams) * count).reshape(-1, count) / window_s
        for column in (workload.prompt_tokens, workload.output_tokens)
    ]
    return Windows(window_s, tokens[0], tokens[1])


def arrival_cvs(
    workload: Workload, streams: Sequence[tuple[str, str]], classes: Sequence[str], duration_s: float
) -> list[float]:
    """CV of the arrivals of each stream, as its requests by minute show it."""
    asked = np.array([name in classes for name in workload.slo_class.names])[workload.slo_class.codes]
    minute = (workload.arrival_s // MINUTE_S).astype(np.int64)
    cvs = []
    for model, region in streams:
        of = workload.model.codes == workload.model.names.index(model)
        of &= (workload.region.codes == workload.region.names.index(region)) & asked
        cvs.append(arrival_cv(np.bincount(minute[of], minlength=int(duration_s // MINUTE_S))))
    return cvs


@dataclass(frozen=True, slots=True)
class DemandForecasts:
    """Forecasts made at the begin of every *every*-th window for the *horizon* windows from then on."""

    forecaster: str
    every: int
    window_s: float
    mean: Floats
    """(steps, streams, horizon)"""
    upper_80: Floats
    error: float
    """Mean absolute error of the first window by its mean, over all steps and streams: sum of errors by sum of demand."""

    def at(self, now_s: float) -> int:
        """The step whose forecast is the newest one at *now_s*."""
        return min(int(now_s // (self.every * self.window_s)), len(self.mean) - 1)


def forecast_demand(
    name: str,
    history: Floats,
    actual: Floats,
    window_s: float,
    every: int,
    horizon: int,
    progress: Callable[[int, int], None] | None = None,
) -> DemandForecasts:
    """Forecasts by the forecaster *name* while *actual* (streams, windows) comes in after *history*.

    As live, a simpler forecaster stands in where it fails, and the name in the answer says so. ValueError for a name
    that is no forecaster.
    """
    if name not in FORECASTERS:
        raise ValueError(f"there is no forecaster {name!r}; there is {', '.join(FORECASTERS)}")
    streams, count = actual.shape
    steps = -(-count // every)
    mean, upper = np.zeros((steps, streams, horizon)), np.zeros((steps, streams, horizon))
    failed = 0
    for stream in range(streams):
        forecaster = Fallback(FORECASTERS[name]())
        forecaster.fit(Series(-history.shape[1] * window_s, window_s, history[stream]))
        for step in range(steps):
            if step:
                forecaster.update(actual[stream, (step - 1) * every : step * every])
            made = forecaster.predict(horizon)
            mean[step, stream], upper[step, stream] = made.mean, made.upper_80
        failed += bool(forecaster.failed)
        if progress:
            progress(stream + 1, streams)
    first = actual[:, ::every].T
    wrong = np.abs(mean[:, :, 0] - first).sum() / max(first.sum(), 1e-9)
    by = f"{name} (failed: {failed} of {streams} series by a simpler one)" if failed else name
    return DemandForecasts(by, every, window_s, mean, upper, float(wrong))
