"""Forecasts, the models that make them, and the forecaster around a model.

A `PointModel` gives one number per window. `Forecaster` keeps it fitted, bounds it, puts bands around it, and lets a
simpler model stand in while there is too little to learn from.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.files import StateError, read_state, write_state
from forecasting.threads import one_thread
from forecasting.workload.bands import GROWTH, Bands
from forecasting.workload.calendar import Calendar, Days, straightened
from forecasting.workload.series import Series, Values, windows_in_a_day


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens a second expected in each of the next windows, with bands; arrays of (horizon,), none below 0.

    `mean` is the figure to plan with: the middle of the expectation, not inflated for safety. The upper ends serve that.
    """

    start_s: float  # seconds since 1970 (UTC) of the first window's begin
    window_s: float
    mean: NDArray[np.float64]
    lower_80: NDArray[np.float64]
    upper_80: NDArray[np.float64]
    lower_95: NDArray[np.float64]
    upper_95: NDArray[np.float64]
    forecaster: str
    note: str = ""  # why a simpler model stood in, if one did

    def __len__(self) -> int:
        return len(self.mean)


LEVEL_WINDOWS: Final = 6  # whose mean is the present level


class PointModel(ABC):
    """One series' model. Values are tokens a second, NaN for gaps; `season` is the windows of a day."""

    reach: ClassVar[int] = 36
    """Windows ahead for which bands are learned."""

    @classmethod
    @abstractmethod
    def least(cls, season: int) -> int:
        """Return the known windows that it needs."""

    @abstractmethod
    def fit(self, values: Values, season: int) -> None:
        """Learn from all *values*, oldest first. A later fit keeps parts that are costly to find."""

    @abstractmethod
    def append(self, value: float) -> None:
        """Move on by the window that followed, without learning again."""

    @abstractmethod
    def path(self, horizon: int) -> Values:
        """Return the next *horizon* windows; the caller replaces values below 0 and infinite ones."""

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Import slow packages, so that this is not counted as fitting."""

    def know(self, days: Days | None) -> None:  # noqa: B027  # most look at the time of day alone
        """Take in the days of what is fitted on next; None: they are not known."""

    def walk(self, values: Values) -> Values:
        """Append *values* one after another; return the `reach` windows forecast before each, (len(values), reach)."""
        paths = np.empty((len(values), self.reach))
        for index, value in enumerate(values):
            paths[index] = self.path(self.reach)
            self.append(float(value))
        return paths

    def tried(self) -> Sequence[str]:
        """Return words on the findings of the fit, such as the orders of a model."""
        return ()

    def state(self) -> dict[str, Any]:
        return deepcopy(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Set what `state` returned. Raises StateError for a model of another version."""
        if state.keys() != self.state().keys():
            raise StateError("a model of another version: fit the forecaster again")
        vars(self).update(deepcopy(state))


class Level(PointModel):
    """The mean of the last known windows, flat: all that a handful of points can support. Without any, 0."""

    def __init__(self) -> None:
        self.recent: list[float] = []

    @classmethod
    def least(cls, season: int) -> int:
        return 0

    def fit(self, values: Values, season: int) -> None:
        self.recent = [float(value) for value in values[~np.isnan(values)][-LEVEL_WINDOWS:]]

    def append(self, value: float) -> None:
        if not np.isnan(value):
            self.recent = [*self.recent[1 - LEVEL_WINDOWS :], value]

    def path(self, horizon: int) -> Values:
        return np.full(horizon, np.mean(self.recent) if self.recent else 0.0)


class SeasonalNaive(PointModel):
    """The last known value at this time of day; if there is none, the latest known window."""

    def __init__(self) -> None:
        self.day: Values = np.empty(0)  # the last known value by time of day
        self.at = 0  # time of day of the next window
        self.latest = 0.0

    @classmethod
    def least(cls, season: int) -> int:
        return season

    def fit(self, values: Values, season: int) -> None:
        self.day, self.at, self.latest = np.full(season, np.nan), 0, 0.0
        for value in values:
            self.append(float(value))

    def append(self, value: float) -> None:
        if not np.isnan(value):
            self.day[self.at] = self.latest = value
        self.at = (self.at + 1) % len(self.day)

    def path(self, horizon: int) -> Values:
        path = self.day[(self.at + np.arange(horizon)) % len(self.day)]
        return np.where(np.isnan(path), self.latest, path)


def filled(values: Values) -> Values:
    """Return *values* with gaps interpolated; before the first known window, that one's value. All gaps: zeros."""
    known = ~np.isnan(values)
    if not known.any():
        return np.zeros(len(values))
    index = np.arange(len(values))
    return np.interp(index, index[known], values[known])


HISTORY_DAYS: Final = 28
MOST_HISTORY: Final = 12_000  # windows kept, whatever their width: eight days of minutes
CALIBRATION_WINDOWS: Final = 288  # at the end of what is fitted on, forecast as if they had not been seen


class Forecaster:
    """One series and one point model: fit it on the known windows, update it with later ones, ask it at any time.

    `fit` first fits on all but the last windows (at most a third), forecasts those window by window to learn the bands,
    then fits on everything. `update` moves the model on and fits again when a day has passed.
    """

    name: ClassVar[str]
    model_class: ClassVar[type[PointModel]]
    slow_to_fit: ClassVar[bool] = False
    """Whether a fit takes tens of seconds rather than one, so that forecasts of other series should not wait for it."""

    needs_models_extra: ClassVar[bool] = False
    """Whether its fit needs the extra: see `forecasting.models_extra`."""

    def __init__(self) -> None:
        self.window_s = 600.0
        self.end_s = 0.0
        self.season = 1
        self.calendar: Calendar | None = None
        self.first = 0
        """Position of the first value by the local clock."""
        self.values: NDArray[np.float64] = np.empty(0)
        """By local window (`calendar.straightened`)."""
        self.since_fit = 0
        self.note = ""
        self.fit_s = 0.0  # what the last fit took
        self.bands: Bands | None = None
        self._own = self.model_class()
        self._used: PointModel = Level()
        self._ahead: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        """The next windows within reach and the ends of their bands; None: not computed yet."""

    def fit(self, series: Series) -> None:
        started_s = time.perf_counter()
        self.window_s, self.end_s = float(series.window_s), float(series.end_s)
        self.season = windows_in_a_day(self.window_s)
        self._take(series)
        self._own = self.model_class()
        count = len(self.values)
        calibrating = min(CALIBRATION_WINDOWS, count // 3)
        begin = count - calibrating
        self._choose(begin)
        self.bands = Bands(self._used.reach, self.values[:begin])
        self._fit(self.values[:begin])
        self._walk(self.values[begin:])
        self._choose(count)
        if (
            self._used.reach != self.bands.reach
        ):  # another model than the one that was calibrated: bands from what is known
            self.bands = Bands(self._used.reach, self.values)
        self._fit(self.values)
        self._ask(self.bands)
        self.since_fit = 0
        self.fit_s = time.perf_counter() - started_s

    def _take(self, series: Series) -> None:
        """Keep the windows of *series* by its local clock, the last ones."""
        self.calendar, values = series.calendar, series.tokens_per_s
        if self.calendar is not None and len(series):
            positions = self.calendar.positions(series.start_s, series.window_s, len(series))
            values, self.first = straightened(values, positions), int(positions.min())
        kept = _trimmed(values, self.season)
        self.values, self.first = kept, self.first + len(values) - len(kept)

    @property
    def _days(self) -> Days | None:
        return None if self.calendar is None else Days(self.calendar, self.first, self.season)

    def _ahead_of_clock(self, count: int) -> NDArray[np.int64]:
        """Return, for each of the next *count* windows, how many local windows it is after the last one that is known."""
        if self.calendar is None:
            return np.arange(count)
        known = self.first + len(self.values)
        return self.calendar.positions(self.end_s, self.window_s, count) - known

    def _fit(self, values: NDArray[np.float64]) -> None:
        """Fit the model in use on *values*, with one thread of linear algebra."""
        self._used.know(self._days)
        self._used.prepare()  # a library that is loaded later would not be limited
        with one_thread("blas"):
            self._used.fit(values, self.season)

    def refit(self, series: Series) -> None:
        """Fit again on *series*, which ends where the known windows do. The bands keep what they learned."""
        if self.bands is None or self._own_can_take_over():
            self.fit(series)
            return
        started_s = time.perf_counter()
        self._take(series)
        self._fit(self.values)
        self._ask(self.bands)
        self.since_fit = 0
        self.fit_s = time.perf_counter() - started_s

    def update(self, tokens_per_s: NDArray[np.float64]) -> None:
        fresh = np.asarray(tokens_per_s, dtype=np.float64)
        if self.bands is None:
            raise RuntimeError("fit the forecaster before its first update")
        if np.isinf(fresh).any() or (fresh < 0).any():
            raise ValueError("a rate is a finite number from 0 up, or NaN where nothing is known")
        for value in fresh:
            missing = int(self._ahead_of_clock(1)[0])
            self.end_s += self.window_s
            # A change of the clocks leaves an hour out, or repeats one.
            for each in [math.nan] * missing + [float(value)] if missing >= 0 else []:
                self.bands.learn(each)
                self._used.append(each)
                self.values = np.append(self.values, each)
                self.since_fit += 1
                if self.since_fit >= self.season or self._own_can_take_over():
                    self.refit(self.series)
                else:
                    self._ask(self.bands)

    def predict(self, horizon: int) -> Forecast:
        if horizon < 1:
            raise ValueError(f"a horizon is at least one window, not {horizon}")
        if self.bands is None:
            raise RuntimeError("fit the forecaster before it predicts")
        at = np.maximum(self._ahead_of_clock(horizon), 0)
        if self._ahead is None or at[-1] >= len(self._ahead[0]):
            path = self._path(max(int(at[-1]) + 1, self._used.reach))
            self._ahead = path, self.bands.ends(path)
        path, ends = (each[at] for each in self._ahead)
        return Forecast(
            self.end_s, self.window_s, path, ends[:, 0], ends[:, 1], ends[:, 2], ends[:, 3], self.name, self.note
        )

    @property
    def series(self) -> Series:
        """The windows that it keeps, without those of an hour that the clocks repeated."""
        if self.calendar is None:
            return Series(self.end_s - len(self.values) * self.window_s, self.window_s, self.values)
        count = len(self.values)
        at = self.calendar.positions(self.end_s - count * self.window_s, self.window_s, count) - self.first
        seen = np.flatnonzero(at >= 0)
        begin = int(seen[0]) if len(seen) else count
        values = self.values[np.minimum(at[begin:], count - 1)]
        return Series(self.end_s - (count - begin) * self.window_s, self.window_s, values, calendar=self.calendar)

    def prepare(self) -> None:
        """Import slow packages, so that this is not counted as fitting."""
        self._own.prepare()

    def describe(self) -> str:
        """Return the findings of the model's fit in words; may be empty."""
        return ", ".join(self._used.tried())

    def _ask(self, bands: Bands) -> None:
        path = self._path(self._used.reach)
        self._ahead = path, bands.ask(path)

    def _choose(self, count: int) -> None:
        """Use the simplest substitute that the first *count* windows support if they are too few, and note it."""
        known = int(np.count_nonzero(~np.isnan(self.values[:count])))
        needed = self._own.least(self.season)
        if known >= needed:
            self._used, self.note = self._own, ""
            return
        simpler: PointModel = SeasonalNaive() if known >= SeasonalNaive.least(self.season) else Level()
        self._used = simpler
        what = "the same time of the day before" if isinstance(simpler, SeasonalNaive) else "the latest level"
        self.note = f"{known} known windows, {self.name} needs {needed}: {what} stands in"

    def _own_can_take_over(self) -> bool:
        if self._used is self._own:
            return False
        return int(np.count_nonzero(~np.isnan(self.values))) >= self._own.least(self.season)

    def _walk(self, values: NDArray[np.float64]) -> None:
        """Forecast each of *values* before appending it."""
        bands = self.bands
        assert bands is not None
        for value, path in zip(values, self._mended(self._used.walk(values)), strict=True):
            bands.ask(path)
            bands.learn(float(value))

    def _path(self, horizon: int) -> NDArray[np.float64]:
        return self._mended(self._used.path(horizon))

    def _mended(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a model's answer clipped to the range of the series: from 0 to `GROWTH` times the highest rate."""
        known = self.values[~np.isnan(self.values)]
        ceiling = GROWTH * float(known.max()) if known.size else 0.0
        return np.clip(np.nan_to_num(path, nan=0.0, posinf=ceiling, neginf=0.0), 0.0, ceiling)

    def state(self) -> dict[str, Any]:
        return {
            "forecaster": self.name,
            "window_s": self.window_s,
            "end_s": self.end_s,
            "season": self.season,
            "zone": self.calendar.zone if self.calendar else "",
            "holidays": sorted(str(day) for day in self.calendar.holidays) if self.calendar else [],
            "first": self.first,
            "values": self.values.copy(),
            "since_fit": self.since_fit,
            "note": self.note,
            "used": type(self._used).__name__,
            "model": self._used.state(),
            "bands": self.bands.state() if self.bands else {},
        }

    @classmethod
    def load(cls, state: dict[str, Any] | Path) -> Self:
        if isinstance(state, Path):
            state = read_state(state)
        if state["forecaster"] != cls.name:
            raise ValueError(f"this is the state of {state['forecaster']!r}, not of {cls.name!r}")
        forecaster = cls()
        if "zone" not in state:
            raise StateError("a forecaster of another version: fit it again")
        for name in ("window_s", "end_s", "season", "first", "since_fit", "note"):
            setattr(forecaster, name, state[name])
        if state["zone"]:
            forecaster.calendar = Calendar(state["zone"], frozenset(map(date.fromisoformat, state["holidays"])))
        forecaster.values = np.array(state["values"])
        for simpler in (Level, SeasonalNaive):
            if state["used"] == simpler.__name__ and simpler is not cls.model_class:
                forecaster._used = simpler()
                break
        else:
            forecaster._used = forecaster._own
        if state["bands"]:
            forecaster._used.restore(state["model"])
            forecaster._used.know(forecaster._days)
            forecaster.bands = Bands.load(state["bands"])
        return forecaster

    def save(self, path: Path) -> None:
        # Not compressed: trees hardly shrink, and this is written for every series and window.
        write_state(path, self.state(), compressed=False)


def _trimmed(values: NDArray[np.float64], season: int) -> NDArray[np.float64]:
    """Return *values* without leading gaps, no longer than the kept history."""
    known = np.flatnonzero(~np.isnan(values))
    first = int(known[0]) if known.size else len(values)
    return np.array(values[max(first, len(values) - min(HISTORY_DAYS * season, MOST_HISTORY)) :])


class Naive(Forecaster):
    """The baseline: the value at the same time of the day before."""

    name = "seasonal_naive"
    model_class = SeasonalNaive
