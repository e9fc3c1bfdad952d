"""Regression trees of scikit-learn as plain arrays, walked by a compiled kernel: predictions need no scikit-learn."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.compiled import compiled
from forecasting.files import StateError


class Nodes(NamedTuple):
    """One tree; children are indices of its own nodes, those of a leaf are not read."""

    is_leaf: NDArray[np.bool_]
    left: NDArray[np.integer[Any]]
    right: NDArray[np.integer[Any]]
    column: NDArray[np.integer[Any]]
    threshold: NDArray[np.float64]
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Trees in flat arrays, one after another; a prediction is `base` plus the value of one leaf of each.

    `starts` has the first node of each tree, from which children are counted; a leaf has itself as both children.
    """

    base: float
    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    lefts: NDArray[np.int32]
    rights: NDArray[np.int32]
    values: NDArray[np.float32]

    @classmethod
    def of_trees(cls, trees: Iterable[Nodes], base: float = 0.0) -> Self:
        """Join *trees*, at least one."""
        joined = Nodes(*map(np.concatenate, zip(*(trees := list(trees)), strict=True)))
        sizes = [len(tree.is_leaf) for tree in trees]
        own = np.concatenate([np.arange(size) for size in sizes])
        return cls(
            base,
            np.cumsum([0, *sizes[:-1]]).astype(np.int64),
            np.maximum(joined.column, 0).astype(np.int32),
            _rounded_down(joined.threshold),
            np.where(joined.is_leaf, own, joined.left).astype(np.int32),
            np.where(joined.is_leaf, own, joined.right).astype(np.int32),
            joined.value.astype(np.float32),
        )

    @classmethod
    def of_boosting(cls, model: Any) -> Self:
        """Take over a fitted HistGradientBoostingRegressor."""
        trees = (
            Nodes(*(nodes[name] for name in ("is_leaf", "left", "right", "feature_idx", "num_threshold", "value")))
            for nodes in (predictors[0].nodes for predictors in model._predictors)
        )
        trees = (tree._replace(is_leaf=tree.is_leaf.astype(bool)) for tree in trees)
        return cls.of_trees(trees, float(np.ravel(model._baseline_prediction)[0]))

    def predict(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return predictions (n,) for *rows* (n, columns)."""
        table = np.ascontiguousarray(rows, np.float32)
        sums = np.full(len(table), self.base)
        walk(table, self.starts, self.columns, self.thresholds, self.lefts, self.rights, self.values, sums)
        return sums

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        """Return the ensemble that `state` described. Raises StateError for one of another version."""
        if state.keys() != cls.__dataclass_fields__.keys():
            raise StateError("trees of another version: fit the model again")
        return cls(**state)


def _rounded_down(thresholds: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 that is not above each: a float32 value then falls on the same side of both."""
    near = np.clip(thresholds, -3e38, 3e38).astype(np.float32)
    return np.where(near > thresholds, np.nextafter(near, np.float32(-np.inf)), near)


@compiled
def walk(
    rows: NDArray[np.float32],
    starts: NDArray[np.int64],
    columns: NDArray[np.int32],
    thresholds: NDArray[np.float32],
    lefts: NDArray[np.int32],
    rights: NDArray[np.int32],
    values: NDArray[np.float32],
    sums: NDArray[np.float64],
) -> None:
    """Add the prediction of each tree of an `Ensemble` for each of *rows* (n, columns) to *sums* (n,)."""
    for row in range(len(rows)):
        for start in starts:
            node = 0
            while lefts[start + node] != node:
                if rows[row, columns[start + node]] <= thresholds[start + node]:
                    node = lefts[start + node]
                else:
                    node = rights[start + node]
            sums[row] += values[start + node]
