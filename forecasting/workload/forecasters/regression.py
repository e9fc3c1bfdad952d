"""Regression of what a series does over a horizon on what it did lately and on the days before.

Least absolute deviations on logarithms (so that bursts do not steer it) with a small ridge, by iteratively reweighted least
squares; one set of coefficients a horizon of a grid, between which horizons are interpolated.
"""

from typing import Any, Final

import numpy as np

from forecasting.workload.forecasters.experts import LEVEL_DAYS, Index, Trail, days_before
from forecasting.workload.forecasters.points import Values

LAGS: Final = (1, 2, 3, 5, 8)
RIDGE: Final = 5.0  # in units of one window's weight, on columns of unit size
ROUNDS: Final = 6  # of reweighting
SMALLEST_ERROR: Final = 0.01  # in logarithms; smaller ones weigh no more
FIT_DAYS: Final = 14
MOST_ROWS: Final = 3000
LEAST_ROWS: Final = 60
DAYS: Final = (0, 2)  # before, whose course each regression looks at
NAMES: Final = ("regression", "regression, 2 days")


class Regression:
    """Two regressions: on the last windows alone, and with two days before."""

    def __init__(self, horizons: tuple[int, ...]) -> None:
        self.horizons = horizons
        self.weights = [np.full((len(horizons), _width(days)), np.nan) for days in DAYS]
        self._interpolate()

    def fit(self, trail: Trail, end: int) -> None:
        """Learn from windows before index *end*; what has too few windows keeps no coefficients."""
        for days, weights in zip(DAYS, self.weights, strict=True):
            for row, horizon in enumerate(self.horizons):
                first = max(*LAGS, days * trail.season, end - FIT_DAYS * trail.season - horizon)
                origins = np.arange(first, end - horizon)
                origins = origins[trail.known[origins + horizon]]
                if len(origins) > MOST_ROWS:
                    origins = origins[:: -(-len(origins) // MOST_ROWS)]
                weights[row] = np.nan
                if len(origins) >= LEAST_ROWS and horizon + trail.widths[1] <= trail.season:
                    moved = trail.z[origins + horizon] - trail.z[origins]
                    weights[row] = _least_absolute(columns(trail, origins, np.full(len(origins), horizon), days), moved)
        self._interpolate()

    def _interpolate(self) -> None:
        """Coefficients at every horizon from 0 to the last of the grid: (last + 1, columns)."""
        horizons = np.arange(self.horizons[-1] + 1)
        self.between = [
            np.stack([np.interp(horizons, self.horizons, column) for column in weights.T], axis=-1)
            for weights in self.weights
        ]

    def predict(self, trail: Trail, origins: Index, horizons: Index) -> Values:
        """z at *horizons* after *origins*: (2, ...); NaN where nothing was learned or the horizon is beyond the grid."""
        origin, horizon = np.broadcast_arrays(origins, horizons)
        out = np.full((len(NAMES), *origin.shape), np.nan)
        last = self.horizons[-1]
        for row, (days, between) in enumerate(zip(DAYS, self.between, strict=True)):
            usable = (horizon <= last) & (origin >= max(*LAGS, days * trail.season))
            if not usable.any() or np.isnan(between).all():
                continue
            moved = (columns(trail, origin, horizon, days) * between[np.minimum(horizon, last)]).sum(axis=-1)
            out[row] = np.where(usable, trail.z[origin] + moved, np.nan)
        return out

    def state(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons), "weights": [weights.copy() for weights in self.weights]}

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Regression":
        regression = cls(tuple(state["horizons"]))
        regression.weights = [np.array(weights) for weights in state["weights"]]
        regression._interpolate()
        return regression


def _width(days: int) -> int:
    return 1 + len(LAGS) + len(LEVEL_DAYS) + (0 if days == 0 else 1 + 2 * days)


def columns(trail: Trail, origin: Index, horizon: Index, days: int) -> Values:
    """1, the last moves, the distance to the levels, how the same hours of each day before went: (..., columns)."""
    now = trail.z[origin]
    parts = [np.ones(origin.shape), *(trail.z[np.maximum(origin - lag, 0)] - now for lag in LAGS)]
    parts += list(trail.levels[:, origin] - now)
    for back in range(1, days + 1):
        then = np.maximum(origin - back * trail.season, 0)
        parts.append(trail.z[np.minimum(then + horizon, origin)] - trail.z[then])
        parts.append(trail.z[then] - now)
    if days:
        parts.append(np.nan_to_num(days_before(trail, origin, horizon, trail.season, days, 1)[0][-1]))
    return np.stack(parts, axis=-1)


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
