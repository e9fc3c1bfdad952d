"""Demand of a simulation by window, and forecasts of it at a time, from the demand before."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload import BEST, FORECASTERS, Fallback, Series, unavailable_reason
from forecasting.workload.calendar import Calendar
from scheduling.planning.advisor import Band, Demand, EndpointDemand
from scheduling.planning.places import Endpoint
from scheduling.scaling import PlansFor
from scheduling.simulation.staging.demand_minutes import MINUTE_S, DemandMinutes

Floats = NDArray[np.float64]
ORACLE, RECENT = "oracle", "recent"
MIN_WINDOWS: Final = 2
"""Minimum known windows; with fewer, the highest of the last ten minutes stands in, as live."""
RECENT_MINUTES: Final = 10


@dataclass(slots=True)
class CachedForecast:
    """A forecaster's answer, and its later answers by the windows known and asked for."""

    band: Band | None = None
    after: dict[tuple[int, int], "CachedForecast"] = field(default_factory=dict)


def forecaster_named(name: str) -> str:
    """Return *name*, or the best forecaster's. Raise ValueError for an unknown or unavailable one."""
    name = name or BEST
    if name not in (ORACLE, RECENT, *FORECASTERS):
        raise ValueError(f"must be one of {', '.join((ORACLE, RECENT, *FORECASTERS))}, not {name!r}")
    if reason := unavailable_reason(name):
        raise ValueError(reason)
    return name


@dataclass(slots=True)
class SeriesForecasts:
    """Forecasts of one series by the forecaster *name*, at growing times, each from the demand before it.

    *minutes* are tokens a second by minute from the start of the simulation, *history* those of the windows before.
    """

    name: str
    window_s: float
    minutes: Floats
    history: Floats
    refit_s: float
    calendar: Calendar | None = None
    begins_s: float = 0.0
    """Of the first minute, in seconds since 1970."""
    _fitted: Fallback | None = field(default=None, init=False)
    _fitted_windows: int = field(default=0, init=False)
    """Windows of the simulation known at the fit."""
    _known: int = field(default=0, init=False)
    _asked: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Windows known and asked for, each time."""
    _answered: int = field(default=0, init=False)
    """Number of these that the forecaster answered; it is asked the others when the next answer is not cached."""
    _last: CachedForecast | None = field(default=None, init=False)
    """Unchanged until the next window is known."""

    def ahead(self, now_s: float, count: int) -> Band:
        """Return the *count* windows from the one that contains *now_s*."""
        now = int(now_s // self.window_s)
        if self.name == ORACLE:
            known = self._windows(now + count)[now:]
            return Band(known, known)
        if self.name == RECENT or self.history.size + now < MIN_WINDOWS:
            until = int(now_s // MINUTE_S)
            seen = self.minutes[max(0, until - RECENT_MINUTES) : until]
            highest = np.full(count, float(seen.max(initial=0.0)))
            return Band(highest, highest)
        if not self._asked or self._asked[-1] != (now, count):
            self._asked.append((now, count))
            last = cached(self._digest()).setdefault("answers", CachedForecast()) if self._last is None else self._last
            self._last = last.after.setdefault((now, count), CachedForecast())
        assert self._last is not None
        if self._last.band is None:
            self._last.band = self._answer()
        return self._last.band

    def _answer(self) -> Band:
        """Return the forecaster's last answer, after every question that it was not asked yet."""
        for now, count in self._asked[self._answered :]:
            made = self._up_to(now).predict(count)
        self._answered = len(self._asked)
        return Band(made.mean, made.upper_80)

    def _digest(self) -> bytes:
        """Return a digest of everything that a forecast depends on."""
        digest = hashlib.sha256(
            repr((self.name, self.window_s, self.refit_s, self.minutes.size, self.calendar, self.begins_s)).encode()
        )
        digest.update(self.minutes.tobytes())
        digest.update(self.history.tobytes())
        return digest.digest()

    def _up_to(self, now: int) -> Fallback:
        """Return the forecaster fitted before *now*; refitted after `refit_s`, or with half as many windows more."""
        grown = self.history.size + now > 1.5 * (self.history.size + self._fitted_windows)
        old = (now - self._fitted_windows) * self.window_s >= self.refit_s
        if self._fitted is None or grown or old:
            self._fitted = Fallback(FORECASTERS[self.name]())
            values = np.concatenate([self.history, self._windows(now)])
            start_s = self.begins_s - self.history.size * self.window_s
            self._fitted.fit(Series(start_s, self.window_s, values, calendar=self.calendar))
            self._fitted_windows = now
        elif now > self._known:
            self._fitted.update(self._windows(now)[self._known :])
        self._known = now
        return self._fitted

    def _windows(self, count: int) -> Floats:
        """Return the first *count* windows of the simulation, 0 after its end."""
        return by_window(self.minutes, self.window_s, count)


@lru_cache(maxsize=512)
def cached(inputs: bytes) -> dict[Any, Any]:
    """Return the cache of this process for what depends on the *inputs* of this digest, which futures of a what-if share."""
    return {}


def by_window(minutes: Floats, window_s: float, count: int) -> Floats:
    """Return means of *count* windows, each of whole minutes; 0 beyond the end of *minutes*."""
    each = round(window_s / MINUTE_S)
    padded = np.zeros(count * each)
    known = minutes[: padded.size]
    padded[: known.size] = known
    means: Floats = padded.reshape(count, each).mean(axis=1)
    return means


@dataclass(frozen=True, slots=True)
class ExpectedDemand:
    """Expected demand of *endpoints* as live plans know it: forecasts of the interactive classes, and minutes that are past.

    *bands* gives the forecasts of prompt and output tokens of an endpoint (by its number) at a time. The minutes begin
    *before_s* before time 0.
    """

    endpoints: Sequence[Endpoint]
    window_s: float
    bands: Callable[[int, float], tuple[Band, Band]]
    asked: DemandMinutes
    other: DemandMinutes
    """Of the deferred classes."""
    before_s: float = 0.0
    shares: Sequence[float] | None = None
    """Share of the deferred work that plans of each endpoint have room for; None: all of it."""
    over_s: float = 3600.0
    """Time over which the rate of deferred work is measured."""
    guarded: bool = True
    """Whether no plan goes below the load of now, as live; the papers' plans follow the forecast alone."""
    seen: dict[tuple[int, float], tuple[float, float, float]] = field(default_factory=dict)
    """Cache of rates, CVs and loads of now."""

    def at(self, now_s: float, follows: Mapping[str, PlansFor]) -> Demand:
        """Return the demand that plans which are made for *follows*, by model, expect at *now_s*."""
        of: dict[Endpoint, EndpointDemand] = {}
        known_s = self.before_s + now_s
        for at, key in enumerate(self.endpoints):
            if (at, known_s) not in self.seen:
                share = 1.0 if self.shares is None else self.shares[at]
                beta = share * self.other.rate(at, known_s, self.over_s)
                asked, other = (each.rate(at, known_s, RECENT_MINUTES * MINUTE_S) for each in (self.asked, self.other))
                now = asked + share * other if self.guarded else 0.0
                self.seen[at, known_s] = beta, self.asked.arrival_cv(at, known_s), now
            of[key] = EndpointDemand.of(*self.bands(at, now_s), follows[key[0]], *self.seen[at, known_s])
        return Demand(now_s // self.window_s * self.window_s, self.window_s, of)
