"""Simple opinions on the next windows of a series, for many moments and horizons at once.

All work on the logarithm z of the rate: demand grows and falls by factors. An opinion is made of what is true now (the
last window, exponential means, medians that a single burst does not move), of how earlier days continued from this time
of day (a difference of z, smoothed over a few windows and averaged over days), or of both.

`Trail` holds z and all running means of it; `opinions` answers for pairs of (origin, horizon), so that the same code
makes one forecast, and thousands of past ones at once when it is asked how good each opinion has been.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.calendar import Days
from forecasting.workload.series import LEAST_RATE, Values

OFFSET_SHARE: Final = 0.01  # of the mean rate; added so that a rate of 0 has a logarithm
SMOOTHING: Final = (0.3, 0.5, 0.7)  # of the exponential means
MEDIANS: Final = (3, 5)  # windows
LEVEL_DAYS: Final = (1, 4)  # over which the level is a mean
GAP_PULL: Final = 0.05  # by which each window of a gap goes to what is usual at its time
NARROW_S, WIDE_S = 1200.0, 2400.0  # seconds to either side over which days before are smoothed

Index = NDArray[np.int64]


class Trail:
    """z by window and all that is derived from it; a gap continues the day before, or the last window."""

    def __init__(self, values: Values, season: int, window_s: float, days: Days | None = None) -> None:
        self.days = days
        known = values[~np.isnan(values)]
        self.season = season
        self.offset = OFFSET_SHARE * float(known.mean()) if known.size and known.mean() > LEAST_RATE else 1.0
        self.widths = (0, max(1, round(NARROW_S / window_s)), max(2, round(WIDE_S / window_s)))
        with np.errstate(invalid="ignore"):
            z = np.log(values + self.offset)
        self.known = ~np.isnan(z)
        z = self._bridged(z)
        self.z = z
        self.means = np.empty((len(SMOOTHING), len(z)))
        alphas = np.array(SMOOTHING)
        level = np.full(len(SMOOTHING), z[0] if len(z) else 0.0)
        for index, value in enumerate(z):
            level = level + alphas * (value - level)
            self.means[:, index] = level
        self.medians = np.array([_medians(z, count) for count in MEDIANS])
        self.levels = np.array([_trailing(z, days * season) for days in LEVEL_DAYS])
        self.smooth = np.array([self._smoothed(z, width) for width in self.widths])

    def __len__(self) -> int:
        return len(self.z)

    def append(self, value: float) -> None:
        known = not np.isnan(value)
        z = float(np.log(value + self.offset)) if known else self._next(self.z, bool(self.known[-1]))
        self.known = np.append(self.known, known)
        self.z = np.append(self.z, z)
        level = self.means[:, -1] if len(self.z) > 1 else np.full(len(SMOOTHING), z)
        level = level + np.array(SMOOTHING) * (z - level)
        self.means = np.concatenate([self.means, level[:, None]], axis=1)
        last = len(self.z) - 1
        levels = np.array([[self.z[-days * self.season :].mean()] for days in LEVEL_DAYS])
        self.levels = np.concatenate([self.levels, levels], axis=1)
        medians = np.array([[_median(self.z[-count:])] for count in MEDIANS])
        self.medians = np.concatenate([self.medians, medians], axis=1)
        self.smooth = np.concatenate([self.smooth, np.full((len(self.widths), 1), np.nan)], axis=1)
        for row, width in enumerate(self.widths):
            if last >= 2 * width:
                self.smooth[row, last - width] = self.z[last - 2 * width :].mean()

    def rate(self, z: Values) -> Values:
        """Return the tokens a second of logarithms *z*."""
        return np.exp(np.minimum(z, 700.0)) - self.offset

    def _bridged(self, z: Values) -> Values:
        """Return *z* with each gap continued from the window before, in time order, so that nothing later is read."""
        out = np.array(z)
        gaps = np.flatnonzero(np.isnan(out))
        if len(gaps) == len(out):
            return np.full(len(out), np.log(self.offset))
        for index in gaps:
            out[index] = self._next(out[:index], bool(self.known[index - 1])) if index else out[self.known][0]
        return out

    def _next(self, z: Values, opening: bool) -> float:
        """Return the value that bridges a gap after *z*; *opening*: it is the gap's first window.

        It starts from the median of the last windows (a burst just before the collector stopped is no level), moves as
        the smoothed day before did from there, and is pulled to the usual value of that time.
        """
        count, width = len(z), self.widths[1]
        start = float(np.median(z[-MEDIANS[1] :])) if opening else float(z[-1])
        then = count - self.season
        if then - 1 - width < 0 or width >= self.season:
            return start + GAP_PULL * (float(z[-self.season :].mean()) - start)
        usual = float(z[then - width : then + width + 1].mean())
        start += usual - float(z[then - 1 - width : then + width].mean())
        return start + GAP_PULL * (usual - start)

    @staticmethod
    def _smoothed(z: Values, width: int) -> Values:
        """Return means over *width* windows to either side; NaN where they do not all exist."""
        if width == 0:
            return np.array(z)
        out = np.full(len(z), np.nan)
        if len(z) >= 2 * width + 1:
            sums = np.concatenate([[0.0], np.cumsum(z)])
            out[width : len(z) - width] = (sums[2 * width + 1 :] - sums[: -2 * width - 1]) / (2 * width + 1)
        return out

    def state(self) -> dict[str, Any]:
        kept = {
            name: value for name, value in vars(self).items() if name != "days"
        }  # the forecaster keeps the calendar
        return {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in kept.items()}

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Trail":
        trail = cls.__new__(cls)
        trail.days = None
        for name, value in state.items():
            setattr(trail, name, np.array(value) if isinstance(value, np.ndarray) else value)
        trail.widths = tuple(trail.widths)  # type: ignore[assignment]  # JSON has lists only
        return trail


def _medians(z: Values, count: int) -> Values:
    """Return the median of each value and the *count* - 1 before it, or of as many as there are."""
    lead = [_median(z[: index + 1]) for index in range(min(count - 1, len(z)))]
    if len(z) < count:
        return np.array(lead)
    windows = np.lib.stride_tricks.sliding_window_view(z, count)
    return np.concatenate([lead, np.median(windows, axis=1)])


def _median(z: Values) -> float:
    """Return `np.median` of a handful of values, which takes a hundred times as long for so few."""
    ordered, half = sorted(z.tolist()), len(z) // 2
    return float(ordered[half] if len(z) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _trailing(z: Values, count: int) -> Values:
    """Return the mean of each value and the *count* - 1 before it, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(z)])
    ends = np.arange(1, len(z) + 1)
    begins = np.maximum(ends - count, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


NAMES: Final = (
    "last", "mean", "median 3", "median 5",
    "last, day", "last, 3 days", "mean, 3 days", "mean, 2 days wide",
    "day", "3 days", "back to 3 days fast", "back to 3 days slowly",
    "back to the day's level", "back to 4 days' level",
)  # fmt: skip
OF_A_KIND: Final = ("last, day of the kind", "mean, 2 days of the kind", "back to 2 days of the kind slowly")
"""Opinions by days of the kind of the forecast one, such as Saturdays; silent where days are not known."""
FAST, SLOW = 0.85, 0.97  # of the distance to a profile or level that is left after one window of ten minutes


def opinions(trail: Trail, origins: Index, horizons: Index) -> Values:
    """Return z at *horizons* windows after each of *origins* (index of the last window known there): (opinions, ...).

    They are `NAMES` and `OF_A_KIND`.

    Both are broadcast. NaN where an opinion has too little data. Only windows up to the origin are read.
    """
    origin, horizon = np.broadcast_arrays(origins, horizons)
    last = trail.z[origin]
    mean = trail.means[SMOOTHING.index(0.5), origin]
    short, long = trail.medians[:, origin]
    day_level, days_level = trail.levels[:, origin]
    (raw_1,), then_1 = days_before(trail, origin, horizon, 1, 0)
    (_, _, smooth_3), then_3 = days_before(trail, origin, horizon, 3, 1)
    (_, wide_2), _ = days_before(trail, origin, horizon, 2, 2)
    away = last - (then_3 - smooth_3)  # distance of the last window from the profile at its time of day
    (kind_1, kind_2), kind_then = days_before(trail, origin, horizon, 2, 1, of_a_kind=True)
    kind_away = last - (kind_then - kind_2)
    return np.stack([
        last, mean, short, long,
        last + raw_1, last + smooth_3, mean + smooth_3, mean + wide_2,
        then_1, then_3, then_3 + away * FAST**horizon, then_3 + away * SLOW**horizon,
        day_level + (last - day_level) * FAST**horizon, days_level + (last - days_level) * SLOW**horizon,
        last + kind_1, mean + kind_2, kind_then + kind_away * SLOW**horizon,
    ])  # fmt: skip


def days_before(
    trail: Trail, origin: Index, horizon: Index, days: int, smoothing: int, *, of_a_kind: bool = False
) -> tuple[Values, Values]:
    """Return the course of smoothed z on the last *days* over *horizon* from the time of *origin*.

    *of_a_kind*: on days of the kind of the one on which the horizon ends.

    First its move, (days, ...): row k is the mean over the last k + 1 days. Then its value at the end of the horizon, the
    mean over all days. Days without data are left out of the means; NaN without any.
    """
    width, smooth = trail.widths[smoothing], trail.smooth[smoothing]
    # The nearest day whose smoothed value ends at or before the origin, and those before it.
    back = -(-(horizon + width) // trail.season) + np.arange(days).reshape(-1, *(1,) * origin.ndim)
    now = origin - back * trail.season
    usable = now >= width
    if of_a_kind:
        if trail.days is None:
            return np.full(usable.shape, np.nan), np.full(usable.shape[1:], np.nan)
        back = _days_of_the_kind(trail.days, origin + horizon, back[0], days)
        now = origin - back * trail.season
        usable = (now >= width) & (back < FARTHEST_DAYS)
    if not usable.any():  # as for all of the first day
        return np.full(usable.shape, np.nan), np.full(usable.shape[1:], np.nan)
    # Where there is no such day, any window may be read: nothing is made of it.
    before, after = smooth[np.where(usable, now, 0)], smooth[np.where(usable, now + horizon, 0)]
    count = np.cumsum(usable, axis=0)
    with np.errstate(invalid="ignore"):
        moved = np.cumsum(np.where(usable, after - before, 0.0), axis=0) / count
        value = np.where(usable, after, 0.0).sum(axis=0) / count[-1]
    return moved, value


FARTHEST_DAYS: Final = 29
"""Days before that are looked at: a history has 28."""


def _days_of_the_kind(days: Days, targets: Index, nearest: Index, count: int) -> Index:
    """Return how many days before each of *targets*, at least *nearest*, the last *count* days of its kind are.

    (count, ...); `FARTHEST_DAYS` where there are not so many.
    """
    backs = np.arange(1, FARTHEST_DAYS).reshape(-1, *(1,) * targets.ndim)
    same = (days.kinds(targets, backs) == days.kinds(targets)) & (backs >= nearest)
    rank = np.cumsum(same, axis=0)
    found = [np.where(same & (rank == 1 + at), backs, FARTHEST_DAYS).min(axis=0) for at in range(count)]
    return np.stack(found)


LAGS: Final = (1, 2, 3, 5, 8)
RIDGE: Final = 5.0  # in units of one window's weight, on columns of unit size
ROUNDS: Final = 6  # of reweighting
SMALLEST_ERROR: Final = 0.01  # in logarithms; smaller ones weigh no more
FIT_DAYS: Final = 14
MOST_ROWS: Final = 3000
LEAST_ROWS: Final = 60
COLUMNS: Final = 1 + len(LAGS) + len(LEVEL_DAYS)


class Regression:
    """Regression of the move of z over a horizon on its last moves and its distance to the levels.

    Least absolute deviations (so that bursts do not steer it) with a small ridge, by iteratively reweighted least
    squares; one set of coefficients per horizon of a grid, between which horizons are interpolated.
    """

    def __init__(self, horizons: tuple[int, ...]) -> None:
        self.horizons = horizons
        self.weights = np.full((len(horizons), COLUMNS), np.nan)
        self._interpolate()

    def fit(self, trail: Trail, end: int) -> None:
        """Learn from windows before index *end*; horizons with too few windows keep no coefficients."""
        for row, horizon in enumerate(self.horizons):
            origins = np.arange(max(*LAGS, end - FIT_DAYS * trail.season - horizon), end - horizon)
            origins = thinned(origins[trail.known[origins + horizon]], MOST_ROWS)
            self.weights[row] = np.nan
            if len(origins) >= LEAST_ROWS and horizon + trail.widths[1] <= trail.season:
                moved = trail.z[origins + horizon] - trail.z[origins]
                self.weights[row] = _least_absolute(recent_columns(trail, origins), moved)
        self._interpolate()

    def _interpolate(self) -> None:
        """Compute coefficients at every horizon from 0 to the last of the grid: (last + 1, columns)."""
        horizons = np.arange(self.horizons[-1] + 1)
        self.between = np.stack([np.interp(horizons, self.horizons, column) for column in self.weights.T], axis=-1)

    def predict(self, trail: Trail, origins: Index, horizons: Index) -> Values:
        """Return z at *horizons* after *origins*; NaN where nothing was learned or the horizon is beyond the grid."""
        origin, horizon = np.broadcast_arrays(origins, horizons)
        last = self.horizons[-1]
        usable = (horizon <= last) & (origin >= max(LAGS))
        if not usable.any() or np.isnan(self.between).all():
            return np.full(origin.shape, np.nan)
        moved = (recent_columns(trail, origin) * self.between[np.minimum(horizon, last)]).sum(axis=-1)
        return np.where(usable, trail.z[origin] + moved, np.nan)

    def state(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons), "weights": self.weights.copy()}

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Regression":
        regression = cls(tuple(state["horizons"]))
        regression.weights = np.array(state["weights"])
        regression._interpolate()
        return regression


def thinned(origins: Index, most: int) -> Index:
    """Return *origins*, evenly thinned to about *most*."""
    return origins if len(origins) <= most else origins[:: -(-len(origins) // most)]


def recent_columns(trail: Trail, origin: Index) -> Values:
    """Return 1, the last moves, and the distance to the levels: (..., columns)."""
    now = trail.z[origin]
    moves = [trail.z[np.maximum(origin - lag, 0)] - now for lag in LAGS]
    return np.stack([np.ones(origin.shape), *moves, *(trail.levels[:, origin] - now)], axis=-1)


def _least_absolute(columns: Values, target: Values) -> Values:
    size = columns.std(axis=0) + 1e-9
    size[0] = 1.0
    scaled = columns / size
    ridge = RIDGE * np.eye(columns.shape[1])
    weight = np.ones(len(target))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        weighted = scaled * weight[:, None]
        coefficients = np.linalg.solve(scaled.T @ weighted + ridge, weighted.T @ target)
        weight = 1.0 / np.maximum(np.abs(target - scaled @ coefficients), SMALLEST_ERROR)
        weight /= weight.mean()
    return np.asarray(coefficients / size)
