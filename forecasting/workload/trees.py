"""Trees for the course of a series over a horizon, where lines fail: a burst ends, a rise in the morning stays.

Two kinds, whose errors differ enough for their mean to be better than either: a forest of extremely randomised trees
(Geurts, Ernst and Wehenkel, "Extremely randomized trees", Machine Learning 63, 2006), where every split is the best of
a few drawn at random and the forecast is the mean of many trees; and gradient boosting on histograms (Ke and others,
"LightGBM", 2017), where each tree learns what those before it missed. They learn the move of z from what the
regressions look at, from the means, and from the time of day; one model for all horizons, with the horizon as a column.
Grown by scikit-learn, kept and walked as plain arrays.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.files import StateError
from forecasting.threads import one_thread
from forecasting.trees import Ensemble, Nodes
from forecasting.workload.experts import LAGS, Index, Trail, days_before, recent_columns, thinned
from forecasting.workload.series import Values

TREES: Final = 40
LEAST_IN_LEAF: Final = 15
TRIED_SHARE: Final = 0.5  # of the columns, at each split
BOOSTED_TREES: Final = 80
LEARNING_RATE: Final = 0.08
MOST_LEAVES: Final = 15
LEAST_IN_BOOSTED_LEAF: Final = 20
HALF_LIFE_DAYS: Final = 3.0  # a window that long ago counts half
FIT_DAYS: Final = 14
MOST_ROWS: Final = 1500  # of one horizon; evenly thinned beyond
LEAST_ROWS: Final = 200
HORIZONS: Final = (1, 2, 4, 6, 12)  # learned from; those between are found by the column of the horizon
DAYS: Final = 2  # before, whose course is looked at
NAMES: Final = ("forest", "boosted trees")


class Trees(ABC):
    """Trees for the move of z over a horizon. Without trees the prediction is NaN."""

    def __init__(self, horizons: tuple[int, ...] = HORIZONS) -> None:
        self.horizons = horizons
        self.forest: Ensemble | None = None

    @abstractmethod
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Ensemble:
        """Return trees of *moves* by the rows of *table*."""

    def fit(self, trail: Trail, end: int) -> None:
        """Learn from windows before index *end*; too few of them give no trees."""
        rows = []
        for horizon in self.horizons:
            first = max(*LAGS, trail.season, end - FIT_DAYS * trail.season)
            origins = np.arange(first, end - horizon)
            rows.append((horizon, thinned(origins[trail.known[origins + horizon]], MOST_ROWS)))
        if sum(len(origins) for _, origins in rows) < LEAST_ROWS:
            self.forest = None
            return
        tables, moves, weights = [], [], []
        for horizon, origins in rows:
            tables.append(_table(trail, origins, np.full(len(origins), horizon)))
            moves.append(trail.z[origins + horizon] - trail.z[origins])
            # Near horizons are asked for more; forgotten by halves.
            weights.append(0.5 ** ((end - origins) / (HALF_LIFE_DAYS * trail.season)) / horizon)
        self.forest = self.grow(np.concatenate(tables), np.concatenate(moves), np.concatenate(weights))

    def predict(self, trail: Trail, origins: Index, horizons: Index) -> Values:
        """Return z at *horizons* after *origins*; NaN without trees and beyond the last learned horizon."""
        origin, horizon = np.broadcast_arrays(origins, horizons)
        out = np.full(origin.shape, np.nan)
        usable = (horizon <= self.horizons[-1]) & (origin >= max(*LAGS, trail.season))
        if self.forest is not None and usable.any():
            table = _table(trail, origin[usable], horizon[usable])
            out[usable] = trail.z[origin[usable]] + self.forest.predict(table)
        return out

    def state(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons), "forest": self.forest.state() if self.forest else None}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Self:
        """Return the trees that `state` described. Raises StateError for those of another version."""
        trees = cls(tuple(state["horizons"]))
        if "forest" not in state:
            raise StateError("trees of another version: fit the forecaster again")
        trees.forest = Ensemble.of_state(state["forest"]) if state["forest"] else None
        return trees


class Forest(Trees):
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Ensemble:
        from sklearn.ensemble import ExtraTreesRegressor

        model = ExtraTreesRegressor(TREES, min_samples_leaf=LEAST_IN_LEAF, max_features=TRIED_SHARE, random_state=1)
        trees = (each.tree_ for each in model.fit(table, moves, sample_weight=weights).estimators_)
        return Ensemble.of_trees(
            Nodes(
                tree.children_left < 0,
                tree.children_left,
                tree.children_right,
                tree.feature,
                tree.threshold,
                tree.value[:, 0, 0] / TREES,
            )
            for tree in trees
        )


class Boosted(Trees):
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Ensemble:
        from sklearn.ensemble import HistGradientBoostingRegressor

        varied = np.flatnonzero(np.ptp(table, axis=0) > 0)  # of a column that is always the same it makes no bins
        model = HistGradientBoostingRegressor(
            loss="absolute_error",  # as forecasts are judged, and so that bursts do not steer it
            max_iter=BOOSTED_TREES,
            learning_rate=LEARNING_RATE,
            max_leaf_nodes=MOST_LEAVES,
            min_samples_leaf=LEAST_IN_BOOSTED_LEAF,
            l2_regularization=1.0,
            early_stopping=False,
            random_state=1,
        )
        with one_thread():
            model.fit(table[:, varied], moves, sample_weight=weights)
        trees = Ensemble.of_boosting(model)
        return replace(trees, columns=varied[trees.columns].astype(np.int32))


def _table(trail: Trail, origin: Index, horizon: Index) -> NDArray[np.float32]:
    """Return the trees' features: (rows, columns)."""
    now = trail.z[origin]
    days = []
    for back in range(1, DAYS + 1):
        then = np.maximum(origin - back * trail.season, 0)
        days += [trail.z[np.minimum(then + horizon, origin)] - trail.z[then], trail.z[then] - now]
    of_a_kind = []
    if trail.days is not None:
        of_a_kind.append(np.nan_to_num(days_before(trail, origin, horizon, 1, 1, of_a_kind=True)[0][-1]))
    angle = 2 * np.pi * ((origin + horizon) % trail.season) / trail.season
    return np.column_stack([
        recent_columns(trail, origin)[:, 1:],
        *days,
        np.nan_to_num(days_before(trail, origin, horizon, DAYS, 1)[0][-1]),
        *of_a_kind,
        (trail.means[:, origin] - now).T,
        (trail.medians[:, origin] - now).T,
        np.sin(angle),
        np.cos(angle),
        horizon,
    ]).astype(np.float32)  # fmt: skip
