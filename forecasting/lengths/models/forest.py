"""Gradient-boosted trees: grown by scikit-learn, kept as plain arrays, walked by a compiled kernel without it."""

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.text import kernels

LEAVES: Final = 31
RATE: Final = 0.06
LEAST_IN_LEAF: Final = 30


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees one after the other; a leaf has itself as its left child."""

    base: float
    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    lefts: NDArray[np.int32]
    rights: NDArray[np.int32]
    values: NDArray[np.float32]

    @classmethod
    def grow(
        cls,
        rows: ArrayLike,
        target: ArrayLike,
        quantile: float,
        trees: int,
        seed: int = 1,
        weights: ArrayLike | None = None,
        leaves: int = LEAVES,
    ) -> Self:
        """Trees for a *quantile* of *target* (n) given *rows* (n, features), by pinball loss."""
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

        table = np.asarray(rows, np.float32)
        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=quantile, max_iter=trees, learning_rate=RATE, max_leaf_nodes=leaves,
            min_samples_leaf=min(LEAST_IN_LEAF, max(1, len(table) // 10)), l2_regularization=1.0, max_features=0.5,
            early_stopping=False, random_state=seed,
        )  # fmt: skip
        with threadpool_limits(1):  # on a busy machine threads wait for one another far longer than they work
            model.fit(table, np.asarray(target, float), sample_weight=None if weights is None else np.asarray(weights))
        return cls._of(model)

    @classmethod
    def _of(cls, model: Any) -> Self:
        nodes = [each[0].nodes for each in model._predictors]
        sizes = np.array([len(each) for each in nodes], np.int64)
        joined = np.concatenate(nodes)
        own = np.concatenate([np.arange(size) for size in sizes])
        leaf = joined["is_leaf"].astype(bool)
        return cls(
            float(np.ravel(model._baseline_prediction)[0]),
            np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
            joined["feature_idx"].astype(np.int32),
            # A float32 just above the float64 threshold would send an equal value the other way.
            _rounded_up(joined["num_threshold"]),
            np.where(leaf, own, joined["left"]).astype(np.int32),
            np.where(leaf, own, joined["right"]).astype(np.int32),
            joined["value"].astype(np.float32),
        )

    def predict(self, rows: ArrayLike) -> NDArray[np.float64]:
        """(n) of (n, features)."""
        table = np.ascontiguousarray(rows, np.float32)
        sums = np.full(len(table), self.base)
        kernels.walk_trees(
            table, self.starts, self.columns, self.thresholds, self.lefts, self.rights, self.values, sums
        )
        return sums

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})


def _rounded_up(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Each as the smallest float32 that is not below it, so that a float32 value falls on the same side of both."""
    finite = np.clip(values, -3e38, 3e38)
    near = finite.astype(np.float32)
    return np.where(near < finite, np.nextafter(near, np.float32(np.inf)), near).astype(np.float32)
