"""Boosted trees on cheap features: the measures of the prompt, and what the model and the tenant answer at what length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.forest import Forest
from forecasting.lengths.models.spread import bounded
from forecasting.lengths.models.state import load_model, save_model
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions, Sample
from forecasting.lengths.text.features import extract, measure_matrix

VERSION: Final = 1
TREES: Final = 120
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

    @staticmethod
    def _keys(query: LengthQuery) -> tuple[str, str, str]:
        return f"model {query.model}", f"tenant {query.tenant}", f"both {query.model} {query.tenant}"


class Trees:
    """A LengthModel: one forest a quantile, on log-lengths."""

    name = "trees"

    def __init__(self, trees: int = TREES, seed: int = 1) -> None:
        self.trees = trees
        self.seed = seed
        self.habits = Habits()
        self.forests: list[Forest] = []

    def fit(self, samples: Sequence[Sample]) -> Self:
        if not samples:
            raise ValueError("A length model cannot be fitted to no samples.")
        queries = [sample.query for sample in samples]
        self.habits.fit(samples)
        rows = self._rows(queries)
        target = np.log1p([sample.output_tokens for sample in samples])
        self.forests = [Forest.grow(rows, target, level, self.trees, self.seed) for level in QUANTILES]
        return self

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        if not self.forests:
            raise ValueError("The trees were asked before they were fitted.")
        if not queries:
            return bounded([], [], queries)
        rows = self._rows(queries)
        quantiles = np.sort(np.expm1(np.stack([forest.predict(rows) for forest in self.forests], axis=1)), axis=1)
        return bounded(quantiles[:, QUANTILES.index(0.5)], quantiles, queries)

    def _rows(self, queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        return np.concatenate(
            [measure_matrix([extract(query) for query in queries]), self.habits.rows(queries)], axis=1
        )

    def save(self, path: Path) -> None:
        if not self.forests:
            raise ValueError("The trees were not fitted: there is nothing to save.")
        save_model(path, self.name, VERSION, {
            "habits": self.habits.means, "overall": self.habits.overall,
            "forests": [forest.state() for forest in self.forests],
        })  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Self:
        state: dict[str, Any] = load_model(path, cls.name, VERSION)
        model = cls()
        model.habits.means, model.habits.overall = dict(state["habits"]), float(state["overall"])
        model.forests = [Forest.of_state(each) for each in state["forests"]]
        return model
