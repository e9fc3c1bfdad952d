"""Trees that say what a series does over a horizon, where straight lines cannot: a burst goes, a rise in the morning stays.

Two kinds, whose errors differ enough for their mean to be better than either: a forest of extremely randomised trees
(Geurts, Ernst and Wehenkel, "Extremely randomized trees", Machine Learning 63, 2006), where every split is the best of a few
drawn at random and the forecast is the mean of many trees; and gradient boosting on histograms (Ke and others, "LightGBM",
2017), where each tree learns what those before it missed. They learn the move of z from what the regressions look at, from
the means, and from the time of day; one model for all horizons, with the horizon as a column. Grown by scikit-learn, kept
and walked as plain arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

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
ROWS_AT_ONCE: Final = 8192
NAMES: Final = ("forest", "boosted trees")

ARRAYS: Final = ("begins", "split_by", "thresholds", "rights", "values")


class Grown(NamedTuple):
    """A tree: for each node its right child (below 0 for a leaf), the column and threshold that it splits by, its value."""

    right: NDArray[np.integer[Any]]
    column: NDArray[np.integer[Any]]
    threshold: Values
    value: Values


class Trees(ABC):
    """Trees one after the other in flat arrays, whose values add up. Without trees it says NaN.

    A node's left child is the one after it; its right child is in `rights`, where a leaf has itself.
    """

    def __init__(self, horizons: tuple[int, ...] = HORIZONS) -> None:
        self.horizons = horizons
        self._clear()

    def _clear(self) -> None:
        self.begins: NDArray[np.int32] = np.empty(0, np.int32)
        self.split_by: NDArray[np.int8] = np.empty(0, np.int8)
        self.thresholds: NDArray[np.float32] = np.empty(0, np.float32)
        self.rights: NDArray[np.int32] = np.empty(0, np.int32)
        self.values: NDArray[np.float32] = np.empty(0, np.float32)

    @abstractmethod
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Sequence[Grown]:
        """Trees of *moves* by the rows of *table*."""

    def fit(self, trail: Trail, end: int) -> None:
        """Learn from windows before index *end*; with too few of them there are no trees."""
        rows = []
        for horizon in self.horizons:
            first = max(*LAGS, trail.season, end - FIT_DAYS * trail.season)
            origins = np.arange(first, end - horizon)
            rows.append((horizon, thinned(origins[trail.known[origins + horizon]], MOST_ROWS)))
        if sum(len(origins) for _, origins in rows) < LEAST_ROWS:
            self._clear()
            return
        tables, moves, weights = [], [], []
        for horizon, origins in rows:
            tables.append(_table(trail, origins, np.full(len(origins), horizon)))
            moves.append(trail.z[origins + horizon] - trail.z[origins])
            # Near horizons are asked for more; forgotten by halves.
            weights.append(0.5 ** ((end - origins) / (HALF_LIFE_DAYS * trail.season)) / horizon)
        trees = self.grow(np.concatenate(tables), np.concatenate(moves), np.concatenate(weights))
        begins = np.cumsum([0, *(len(tree.right) for tree in trees)])
        self.begins = begins[:-1].astype(np.int32)
        rights = np.concatenate([tree.right for tree in trees])
        of_tree = np.repeat(self.begins, np.diff(begins))
        self.rights = np.where(rights < 0, np.arange(len(rights)), rights + of_tree).astype(np.int32)
        self.split_by = np.maximum(np.concatenate([tree.column for tree in trees]), 0).astype(np.int8)
        self.thresholds = _rounded_down(np.concatenate([tree.threshold for tree in trees]))
        self.values = np.concatenate([tree.value for tree in trees]).astype(np.float32)

    def predict(self, trail: Trail, origins: Index, horizons: Index) -> Values:
        """z at *horizons* after *origins*; NaN without trees and beyond the last horizon that was learned."""
        origin, horizon = np.broadcast_arrays(origins, horizons)
        out = np.full(origin.shape, np.nan)
        usable = (horizon <= self.horizons[-1]) & (origin >= max(*LAGS, trail.season))
        if len(self.begins) and usable.any():
            out[usable] = trail.z[origin[usable]] + self._walk(_table(trail, origin[usable], horizon[usable]))
        return out

    def _walk(self, table: NDArray[np.float32]) -> Values:
        """Sum of the trees for each row of *table*."""
        out = np.empty(len(table))
        for begin in range(0, len(table), ROWS_AT_ONCE):
            part = table[begin : begin + ROWS_AT_ONCE]
            node = np.broadcast_to(self.begins, (len(part), len(self.begins)))
            while True:
                right = self.rights[node]
                if np.array_equal(right, node):
                    break
                low = np.take_along_axis(part, self.split_by[node].astype(np.intp), axis=1) <= self.thresholds[node]
                node = np.where(low & (right != node), node + 1, right)
            out[begin : begin + len(part)] = self.values[node].sum(axis=1)
        return out

    def state(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons), **{name: getattr(self, name) for name in ARRAYS}}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Self:
        trees = cls(tuple(state["horizons"]))
        for name in ARRAYS:
            setattr(trees, name, np.array(state[name]))
        return trees


class Forest(Trees):
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Sequence[Grown]:
        from sklearn.ensemble import ExtraTreesRegressor

        model = ExtraTreesRegressor(TREES, min_samples_leaf=LEAST_IN_LEAF, max_features=TRIED_SHARE, random_state=1)
        trees = [each.tree_ for each in model.fit(table, moves, sample_weight=weights).estimators_]
        return [Grown(each.children_right, each.feature, each.threshold, each.value[:, 0, 0] / TREES) for each in trees]


class Boosted(Trees):
    def grow(self, table: NDArray[np.float32], moves: Values, weights: Values) -> Sequence[Grown]:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

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
        with threadpool_limits(1):  # on a busy machine threads wait for one another far longer than they work
            model.fit(table[:, varied], moves, sample_weight=weights)
        base = float(np.ravel(model._baseline_prediction)[0])
        trees = [Grown(np.array([-1]), np.array([0]), np.zeros(1), np.array([base]))]  # a leaf alone
        for (each,) in model._predictors:
            nodes = each.nodes
            right = np.where(nodes["is_leaf"], -1, nodes["right"].astype(np.int64))
            trees.append(Grown(right, varied[nodes["feature_idx"]], nodes["num_threshold"], nodes["value"]))
        return trees


def _rounded_down(thresholds: Values) -> NDArray[np.float32]:
    """To float32, never above the float64: a value of the table in between would go the other way."""
    near = thresholds.astype(np.float32)
    return np.where(near > thresholds, np.nextafter(near, np.float32(-np.inf)), near)


def _table(trail: Trail, origin: Index, horizon: Index) -> NDArray[np.float32]:
    """The trees' features: (rows, columns)."""
    now = trail.z[origin]
    days = []
    for back in range(1, DAYS + 1):
        then = np.maximum(origin - back * trail.season, 0)
        days += [trail.z[np.minimum(then + horizon, origin)] - trail.z[then], trail.z[then] - now]
    angle = 2 * np.pi * ((origin + horizon) % trail.season) / trail.season
    return np.column_stack([
        recent_columns(trail, origin)[:, 1:],
        *days,
        np.nan_to_num(days_before(trail, origin, horizon, DAYS, 1)[0][-1]),
        (trail.means[:, origin] - now).T,
        (trail.medians[:, origin] - now).T,
        np.sin(angle),
        np.cos(angle),
        horizon,
    ]).astype(np.float32)  # fmt: skip
