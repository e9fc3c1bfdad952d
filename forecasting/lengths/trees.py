"""Boosted trees for quantiles of lengths, on measures of the prompt and on usual lengths of the served model and tenant."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.features import extract, measure_matrix
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample
from forecasting.threads import one_thread
from forecasting.trees import Ensemble

LEAVES: Final = 31
RATE: Final = 0.06
LEAST_IN_LEAF: Final = 30


def boosted(
    rows: NDArray[np.float32],
    target: ArrayLike,
    quantile: float,
    trees: int,
    seed: int = 1,
    weights: ArrayLike | None = None,
    leaves: int = LEAVES,
) -> Ensemble:
    """Return trees for a *quantile* of *target* (n,) given *rows* (n, columns), by pinball loss."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=trees, learning_rate=RATE, max_leaf_nodes=leaves,
        min_samples_leaf=min(LEAST_IN_LEAF, max(1, len(rows) // 10)), l2_regularization=1.0, max_features=0.5,
        early_stopping=False, random_state=seed,
    )  # fmt: skip
    with one_thread():
        model.fit(rows, np.asarray(target, float), sample_weight=None if weights is None else np.asarray(weights))
    return Ensemble.of_boosting(model)


TRUST: Final = 20.0
"""Samples after which a name's own mean weighs as much as the mean of all."""


class Habits:
    """Mean log-length by served model, tenant and both, each shrunk towards the mean of all while samples are few."""

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
        """Return (n, 3): the means by model, by tenant, by both."""
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
    """Trees on the measures of a prompt and the habits of its names, for a log-length or a residual of it."""

    habits: Habits
    forest: Ensemble

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
        """Grow trees for the median of *target* given (n, measures) of *samples*."""
        habits = Habits().fit(samples)
        table = np.concatenate([measures, habits.rows([sample.query for sample in samples])], axis=1)
        return cls(habits, boosted(table, target, 0.5, trees, seed, weights, leaves))

    def predict(self, measures: NDArray[np.float32], queries: Sequence[LengthQuery]) -> NDArray[np.float64]:
        """Return predictions (n,) for *measures* (n, measures)."""
        return self.forest.predict(np.concatenate([measures, self.habits.rows(queries)], axis=1))

    def state(self) -> dict[str, Any]:
        return {**self.habits.state(), "forest": self.forest.state()}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        return cls(Habits.of_state(state), Ensemble.of_state(state["forest"]))


class Trees(LengthModel):
    """One ensemble for each quantile, on log-lengths."""

    name = "trees"

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.habits = Habits()
        self.forests: list[Ensemble] = []

    @property
    def fitted(self) -> bool:
        return bool(self.forests)

    def _fit(self, samples: Sequence[Sample]) -> None:
        self.habits.fit(samples)
        rows = self._rows([sample.query for sample in samples])
        target = np.log1p([sample.output_tokens for sample in samples])
        self.forests = [boosted(rows, target, level, self.fitting.trees, self.fitting.seed) for level in QUANTILES]

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
        model.forests = [Ensemble.of_state(each) for each in state["forests"]]
        return model
