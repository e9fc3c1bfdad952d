"""Boosted trees: grown by scikit-learn, kept as plain arrays, walked by a compiled kernel without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths import kernels
from forecasting.lengths.features import extract, measure_matrix
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample

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


TRUST: Final = 20.0
"""Samples after which a name's own mean weighs as much as the mean of all."""


class Habits:
    """Mean log-length by served model, by tenant and by both, each drawn towards the wider mean while samples are few."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.overall = 0.0

    def fit(self, samples: Sequence[Sample]) -> Self:
        logs = np.log1p([sample.output_tokens for sample in samples])
        self.overall = float(logs.mean())
        sums: dict[str, list[float]] = {}
        for sample, log in zip(samples, logs, strict=True):
            for key in self._keys(sample.query):
                entry = sums.setdefault(key, [0.0, 0.0])
                entry[0] += 1.0
                entry[1] += float(log)
        self.means = {key: (total + TRUST * self.overall) / (count + TRUST) for key, (count, total) in sums.items()}
        return self

    def rows(self, queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        """(n, 3): by model, by tenant, by both."""
        return np.array(
            [[self.means.get(key, self.overall) for key in self._keys(query)] for query in queries], np.float32
        ).reshape(-1, 3)

    def state(self) -> dict[str, Any]:
        return {"habits": self.means, "overall": self.overall}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        habits = cls()
        habits.means, habits.overall = dict(state["habits"]), float(state["overall"])
        return habits

    @staticmethod
    def _keys(query: LengthQuery) -> tuple[str, str, str]:
        return f"model {query.model}", f"tenant {query.tenant}", f"both {query.model} {query.tenant}"


class HabitTrees(NamedTuple):
    """One forest on the measures of a prompt and the habits of its names: for a log-length, or what others miss of it."""

    habits: Habits
    forest: Forest

    @classmethod
    def grow(
        cls,
        measures: NDArray[np.float32],
        samples: Sequence[Sample],
        target: NDArray[np.float64],
        trees: int,
        leaves: int,
        seed: int,
        weights: NDArray[np.float64] | None = None,
    ) -> Self:
        """Trees for the median of *target* given (n, measures) of *samples*."""
        habits = Habits().fit(samples)
        table = np.concatenate([measures, habits.rows([sample.query for sample in samples])], axis=1)
        return cls(habits, Forest.grow(table, target, 0.5, trees, seed, weights, leaves))

    def predict(self, measures: NDArray[np.float32], queries: Sequence[LengthQuery]) -> NDArray[np.float64]:
        """(n) of (n, measures)."""
        return self.forest.predict(np.concatenate([measures, self.habits.rows(queries)], axis=1))

    def state(self) -> dict[str, Any]:
        return {**self.habits.state(), "forest": self.forest.state()}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        return cls(Habits.of_state(state), Forest.of_state(state["forest"]))


class Trees(LengthModel):
    """One forest a quantile, on log-lengths."""

    name = "trees"

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.habits = Habits()
        self.forests: list[Forest] = []

    @property
    def fitted(self) -> bool:
        return bool(self.forests)

    def _fit(self, samples: Sequence[Sample]) -> None:
        self.habits.fit(samples)
        rows = self._rows([sample.query for sample in samples])
        target = np.log1p([sample.output_tokens for sample in samples])
        self.forests = [Forest.grow(rows, target, level, self.fitting.trees, self.fitting.seed) for level in QUANTILES]

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        rows = self._rows(queries)
        quantiles = np.sort(np.expm1(np.stack([forest.predict(rows) for forest in self.forests], axis=1)), axis=1)
        return bounded(quantiles[:, MEDIAN], quantiles, queries)

    def _rows(self, queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        return np.concatenate(
            [measure_matrix([extract(query) for query in queries]), self.habits.rows(queries)], axis=1
        )

    def state(self) -> dict[str, Any]:
        return {**self.habits.state(), "forests": [forest.state() for forest in self.forests]}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls()
        model.habits = Habits.of_state(state)
        model.forests = [Forest.of_state(each) for each in state["forests"]]
        return model
