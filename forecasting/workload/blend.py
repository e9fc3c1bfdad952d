"""Our own forecaster: many simple opinions, each weighted by its recent loss at the horizon in question.

One opinion is best on calm nights, another when bursts come and go, a third at the hours at which people start work,
and which one it is changes with the service and from day to day. So none is chosen: for each horizon of a grid every
opinion has a loss, exponentially forgotten by window, and another by time of day, forgotten by day: what was right in
the night says little of the morning. The forecast is the mean of their logarithms with weights exp(-loss), and horizons
between are interpolated. The weighting is that of prediction with expert advice (Cesa-Bianchi and Lugosi, "Prediction,
Learning, and Games", 2006); the opinions are in `experts` and `trees`. The trees start with almost as much weight as
all others together: these say much the same in many ways, and would outvote them by number.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.files import StateError
from forecasting.workload.calendar import Days
from forecasting.workload.experts import NAMES as SIMPLE
from forecasting.workload.experts import OF_A_KIND, OFFSET_SHARE, Index, Regression, Trail, opinions
from forecasting.workload.forecaster import Forecaster, PointModel
from forecasting.workload.series import DAY_S, Values
from forecasting.workload.trees import NAMES as TREES
from forecasting.workload.trees import Boosted, Forest

LEAST_WINDOWS: Final = 12
GRID: Final = (1, 2, 3, 4, 6, 9, 12, 18, 24, 36, 72, 144)  # horizons at which losses are kept
LEARNED: Final = tuple(horizon for horizon in GRID if horizon <= 36)
NAMES: Final = (*SIMPLE, *OF_A_KIND, "regression", *TREES)
TREE_SHARES: Final = (0.2, 0.2)
"""Weights of the trees before any loss; the other opinions share the rest equally."""
MEMORY: Final = 0.99  # of losses, by window
DAY_MEMORY: Final = 0.9  # of losses by time of day, by day
DAY_PARTS: Final = 8  # of a day, at most, that have their own losses
EAGERNESS: Final = 20.0  # one window ahead, an opinion with twice the loss of the best has exp(-20) of its weight
# Errors h windows ahead overlap: as many of them say less, so they move the weights less.
EAGERNESS_BY_GRID: Final = EAGERNESS / np.array(GRID, np.float64) ** 0.2
SIMPLE_SHARE: Final = (1 - sum(TREE_SHARES)) / (len(SIMPLE) + 1)  # as if days of a kind said nothing
FIRST_WEIGHTS: Final = np.array([SIMPLE_SHARE] * (len(NAMES) - len(TREES)) + list(TREE_SHARES))
LOSS_WINDOWS: Final = 288  # at the end of what is first fitted on, whose forecasts give the first losses
LARGEST_LOSS: Final = 2.0  # an opinion cannot be more wrong than that in one window
LEAST_LEVEL: Final = 0.3
"""Least divisor of an error, as a share of the mean rate: a mostly idle series would else decide by nothing."""


class BlendModel(PointModel):
    def __init__(self) -> None:
        self.trail: Trail | None = None
        self.regression, self.forest, self.boosted = Regression(LEARNED), Forest(), Boosted()
        self.days: Days | None = None
        self.losses: Values = np.zeros((len(NAMES), len(GRID)))
        self.by_part: Values = np.zeros((2, 1, len(NAMES), len(GRID)))
        """The same by whether the day is of another kind than the one before, and part of the day."""
        self.phase = (
            0  # time of day of the trail's first window, counted from that of the first that was ever fitted on
        )

    @classmethod
    def least(cls, season: int) -> int:
        return LEAST_WINDOWS

    def prepare(self) -> None:
        import sklearn.ensemble  # noqa: F401

    def fit(self, values: Values, season: int) -> None:
        """Fit regression and trees; at first, also take losses from forecasts of the last windows, which those had not
        seen.

        A later fit keeps the losses, since *values* end where the trail does, and real forecasts say more than
        hypothetical ones.
        """
        before, count = self.trail, len(values)
        self.trail = Trail(values, season, DAY_S / season, self.days)
        if before is None:
            judged = min(LOSS_WINDOWS, count // 3)
            self.losses = np.zeros((len(NAMES), len(GRID)))
            self.by_part = np.zeros((2, min(DAY_PARTS, season), len(NAMES), len(GRID)))
            self._learn(count - judged)
            self._remember(np.arange(count - judged, count))
        else:
            self.phase = (self.phase + len(before) - count) % season
        self._learn(count)

    def _learn(self, end: int) -> None:
        """Fit the regression and the trees on windows before index *end*."""
        assert self.trail is not None
        self.regression.fit(self.trail, end)
        self.forest.fit(self.trail, end)
        self.boosted.fit(self.trail, end)

    def _remember(self, targets: Index) -> None:
        """Add the losses on *targets*, one after another; a gap makes nothing forgotten."""
        assert self.trail is not None
        for target, loss in zip(targets, np.moveaxis(self._loss(targets), -1, 0), strict=True):
            if self.trail.known[target]:
                self._add(int(target), loss)

    def _add(self, target: int, loss: Values) -> None:
        self.losses = MEMORY * self.losses + loss
        parts, begins = self.by_part.shape[1], int(self._begins_a_kind(np.array(target)))
        part = (self.phase + target) % self._season * parts // self._season
        self.by_part[begins, part] = DAY_MEMORY ** (parts / self._season) * self.by_part[begins, part] + loss

    def _begins_a_kind(self, targets: Index) -> NDArray[np.bool_]:
        """Return whether the day of each of *targets* is of another kind than the day before, such as a Monday."""
        if self.days is None:
            return np.zeros(targets.shape, np.bool_)
        return np.asarray(self.days.kinds(targets) != self.days.kinds(targets, 1))

    def know(self, days: Days | None) -> None:
        self.days = days
        if self.trail is not None:
            self.trail.days = days

    @property
    def _season(self) -> int:
        assert self.trail is not None
        return self.trail.season

    def append(self, value: float) -> None:
        assert self.trail is not None
        self.trail.append(value)
        self._remember(np.array([len(self.trail) - 1]))

    def path(self, horizon: int) -> Values:
        assert self.trail is not None
        horizons = np.arange(1, horizon + 1)
        return self._mean(
            self.said(np.full(horizon, len(self.trail) - 1), horizons), self.weights(len(self.trail)), horizon
        )

    def walk(self, values: Values) -> Values:
        """Do what a loop over `path` and `append` would, with all moments at once."""
        trail = self.trail
        assert trail is not None
        begin = len(trail)
        for value in values:
            trail.append(float(value))
        losses = np.moveaxis(self._loss(np.arange(begin, len(trail))), -1, 0)
        weights = np.empty((len(values), *self.losses.shape))
        for index, loss in enumerate(losses):
            weights[index] = self.weights(begin + index)
            if trail.known[begin + index]:
                self._add(begin + index, loss)
        origins, horizons = begin - 1 + np.arange(len(values))[:, None], np.arange(1, self.reach + 1)
        return self._mean(self.said(origins, horizons), np.moveaxis(weights, 0, 1), self.reach)

    def weights(self, next_window: int) -> Values:
        """Return the weight of every opinion at every horizon of the grid, *next_window* being the first.

        (opinions, grid); columns add up to 1.
        """
        losses = self.losses + self._by_time_of_day(next_window + np.array(GRID) - 1)
        best = np.maximum(losses.min(axis=0), 1e-9)
        weights = FIRST_WEIGHTS[:, None] * np.exp(-EAGERNESS_BY_GRID * np.minimum(losses / best - 1.0, 20.0))
        return np.asarray(weights / weights.sum(axis=0))

    def _by_time_of_day(self, targets: Index) -> Values:
        """Return losses at the times of day of *targets* by horizon of the grid, interpolated between parts of day."""
        parts, begins = self.by_part.shape[1], self._begins_a_kind(targets).astype(np.int64)
        at = ((self.phase + targets) % self._season + 0.5) * parts / self._season - 0.5
        before = np.floor(at).astype(np.int64)
        later, grid = at - before, np.arange(len(GRID))
        losses = (1 - later) * self.by_part[begins, before % parts, :, grid].T + later * self.by_part[
            begins, (before + 1) % parts, :, grid
        ].T
        return np.asarray(losses)

    def _mean(self, said: Values, weights: Values, horizon: int) -> Values:
        """Return rates from *said* (opinions, ..., horizon) by *weights* (opinions, ..., grid), without silent ones."""
        assert self.trail is not None
        weights = np.where(np.isnan(said), 0.0, weights @ between_grid(horizon))
        total = weights.sum(axis=0)
        mean = (weights * np.nan_to_num(said)).sum(axis=0) / np.where(total > 0, total, 1.0)
        # `last` always has a say, but its weight can be too small for a number.
        return self.trail.rate(np.where(total > 0, mean, said[0]))

    def tried(self) -> Sequence[str]:
        """Return the opinions with the largest weights at the next window."""
        weights = self.weights(0 if self.trail is None else len(self.trail))[:, 0]
        return [f"{NAMES[index]} {weights[index]:.0%}" for index in np.argsort(-weights)[:3]]

    def said(self, origins: Index, horizons: Index) -> Values:
        """Return logarithms of the rate by each opinion, *horizons* after *origins*; NaN where it is silent."""
        assert self.trail is not None
        return np.concatenate([
            opinions(self.trail, origins, horizons),
            self.regression.predict(self.trail, origins, horizons)[None],
            self.forest.predict(self.trail, origins, horizons)[None],
            self.boosted.predict(self.trail, origins, horizons)[None],
        ])  # fmt: skip

    def _loss(self, targets: Index) -> Values:
        """Return losses of every opinion on *targets*, at every horizon of the grid: (opinions, grid, targets).

        A silent opinion is as wrong as the worst that spoke; gaps cost nothing.
        """
        trail = self.trail
        assert trail is not None
        grid = np.array(GRID)[:, None]
        origins = targets - grid
        said = self.said(np.maximum(origins, 0), np.broadcast_to(grid, origins.shape))
        actual = trail.rate(trail.z[targets])
        scale = np.maximum(actual, LEAST_LEVEL / OFFSET_SHARE * trail.offset)
        loss = np.minimum(np.abs(np.maximum(trail.rate(said), 0.0) - actual) / scale, LARGEST_LOSS)
        loss = np.where((origins >= 0) & trail.known[targets], loss, 0.0)
        worst = np.nanmax(np.where(np.isnan(loss), -1.0, loss), axis=0)
        return np.where(np.isnan(loss), np.maximum(worst, 0.0), loss)

    def state(self) -> dict[str, Any]:
        return {
            "trail": self.trail.state() if self.trail else None,
            "regression": self.regression.state(),
            "forest": self.forest.state(),
            "boosted": self.boosted.state(),
            "losses": self.losses.copy(),
            "by_part": self.by_part.copy(),
            "phase": self.phase,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state().keys():
            raise StateError("a blend of another version: fit the forecaster again")
        self.trail = Trail.load(state["trail"]) if state["trail"] else None
        self.regression, self.forest = Regression.load(state["regression"]), Forest.load(state["forest"])
        self.boosted = Boosted.load(state["boosted"])
        self.losses, self.by_part = np.array(state["losses"]), np.array(state["by_part"])
        self.phase = int(state["phase"])


@lru_cache(maxsize=64)
def between_grid(horizon: int) -> Values:
    """Return the matrix (grid, horizon) that interpolates values at `GRID` to horizons 1 to *horizon*."""
    horizons = np.arange(1, horizon + 1)
    return np.stack([np.interp(horizons, GRID, unit) for unit in np.eye(len(GRID))])


class Blend(Forecaster):
    name = "blend"
    model_class = BlendModel
