"""Demand by window, and forecasts of it at every step from the windows before it only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forecasting.models_extra import ModelsExtraMissing
from forecasting.workload import FORECASTERS, Fallback, rests
from forecasting.workload.series import Series
from scheduling.planning.bursts import arrival_cv
from scheduling.simulation.workload.columns import Workload

Floats = NDArray[np.float64]
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
LOOK = 6
"""Windows that forecasts look ahead, as live."""
BURSTS_OVER_S = 4 * HOUR_S
"""Over how long unevenness of arrivals is measured, as live."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Tokens a second that were asked for, and requests, (streams, windows); a stream is a model in a region."""

    window_s: float
    prompt: Floats
    output: Floats
    requests: Floats
    """That came in a window."""

    @property
    def total(self) -> Floats:
        return self.prompt + self.output

    def after(self, *before: "Windows") -> "Windows":
        """*before*, in their order, and then these."""
        each = (*before, self)
        prompt, output, requests = (
            np.concatenate([getattr(one, name) for one in each], axis=1) for name in ("prompt", "output", "requests")
        )
        return Windows(self.window_s, prompt, output, requests)

    def last(self, duration_s: float) -> "Windows":
        """Those of the last *duration_s*."""
        first = self.prompt.shape[1] - round(duration_s / self.window_s)
        return Windows(self.window_s, self.prompt[:, first:], self.output[:, first:], self.requests[:, first:])

    def longer(self, window_s: float) -> "Windows":
        """The same in windows of *window_s*, a multiple of these; a last one that is not over is left out."""
        times = round(window_s / self.window_s)
        count = self.prompt.shape[1] // times
        prompt, output, requests = (
            rates[:, : count * times].reshape(-1, count, times) for rates in (self.prompt, self.output, self.requests)
        )
        return Windows(window_s, prompt.mean(axis=2), output.mean(axis=2), requests.sum(axis=2))


def check_days(days: float, window_s: float) -> None:
    """ValueError where *days* are less than one window of *window_s* seconds, for which forecasts are made."""
    if days * DAY_S < window_s:
        least = math.ceil(1e4 * window_s / DAY_S) / 1e4
        raise ValueError(
            f"--days must be at least {least:g}: forecasts are for windows of {window_s / MINUTE_S:g} min."
        )


def minutes(
    workload: Workload, streams: Sequence[tuple[str, str]], classes: Sequence[str], duration_s: float
) -> Windows:
    """Demand of *classes* in *workload* by stream (model, caller's region) and minute over *duration_s*."""
    count = round(duration_s / MINUTE_S)
    places = {stream: at for at, stream in enumerate(streams)}
    table = np.full((len(workload.model.names), len(workload.region.names)), -1, np.int64)
    for at, model in enumerate(workload.model.names):
        for to, region in enumerate(workload.region.names):
            table[at, to] = places.get((model, region), -1)
    asked = np.array([name in classes for name in workload.slo_class.names])
    stream = table[workload.model.codes, workload.region.codes]
    minute = (workload.arrival_s // MINUTE_S).astype(np.int64)
    taken = (stream >= 0) & asked[workload.slo_class.codes] & (minute < count)
    place = stream[taken] * count + minute[taken]
    prompt, output, requests = (
        np.bincount(place, None if column is None else column[taken], len(streams) * count).reshape(-1, count)
        for column in (workload.prompt_tokens, workload.output_tokens, None)
    )
    return Windows(MINUTE_S, prompt / MINUTE_S, output / MINUTE_S, requests.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements that plans take from the minutes behind them, from some hours before the start (`before_s`)."""

    interactive: Windows
    other: Windows
    before_s: float

    def arrival_cv(self, stream: int, now_s: float) -> float:
        """CV of the interactive arrivals over the last hours."""
        return arrival_cv(self.interactive.requests[stream, self._behind(now_s, BURSTS_OVER_S)])

    def other_tokens_per_s(self, stream: int, now_s: float) -> float:
        """Rate of the other work over the last hour."""
        return float(self.other.total[stream, self._behind(now_s, HOUR_S)].mean())

    def _behind(self, now_s: float, for_s: float) -> slice:
        until = round((self.before_s + now_s) // MINUTE_S)
        return slice(max(0, until - round(for_s / MINUTE_S)), until)


@dataclass(frozen=True, slots=True)
class DemandForecasts:
    """Forecasts made at the start of every window for the next *horizon* windows."""

    forecaster: str
    window_s: float
    mean: Floats
    """(windows, streams, horizon)"""
    upper_80: Floats
    error: float
    """Mean absolute error of the first window by its mean, over all forecasts and streams: their sum by that of demand."""

    def at(self, now_s: float) -> int:
        """The number of the newest forecast at *now_s*."""
        return min(int(now_s // self.window_s), len(self.mean) - 1)

    @classmethod
    def foreknown(cls, actual: Floats, window_s: float) -> "DemandForecasts":
        """The demand of each window as it will come."""
        known = actual.T[:, :, None]
        return cls("foreknown", window_s, known, known, 0.0)


def forecast_demand(
    name: str,
    history: Floats,
    actual: Floats,
    window_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> DemandForecasts:
    """Forecasts by the forecaster *name* while *actual* (streams, windows) comes in after *history*.

    As live: `LOOK` windows ahead, refitted every day on as much as *history* is, and a simpler forecaster stands in where
    it fails, which the name in the answer says. ValueError for a name that is no forecaster, ModelsExtraMissing for one that
    rests.
    """
    if name not in FORECASTERS:
        raise ValueError(f"there is no forecaster {name!r}; there is {', '.join(FORECASTERS)}")
    if reason := rests(name):
        raise ModelsExtraMissing(reason)
    streams, count = actual.shape
    mean, upper = np.zeros((count, streams, LOOK)), np.zeros((count, streams, LOOK))
    a_day, failed = round(DAY_S / window_s), 0
    for stream in range(streams):
        known = np.concatenate([history[stream], actual[stream]])
        fell_back = False
        for now in range(count):
            if now % a_day == 0:
                forecaster = Fallback(FORECASTERS[name]())
                forecaster.fit(
                    Series((now - history.shape[1]) * window_s, window_s, known[now : now + history.shape[1]])
                )
            else:
                forecaster.update(actual[stream, now - 1 : now])
            made = forecaster.predict(LOOK)
            mean[now, stream], upper[now, stream] = made.mean, made.upper_80
            fell_back |= bool(forecaster.failed)
        failed += fell_back
        if progress:
            progress(stream + 1, streams)
    wrong = np.abs(mean[:, :, 0] - actual.T).sum() / max(actual.sum(), 1e-9)
    by = f"{name} (failed: {failed} of {streams} series by a simpler one)" if failed else name
    return DemandForecasts(by, window_s, mean, upper, float(wrong))
