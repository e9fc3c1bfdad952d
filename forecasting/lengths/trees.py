"""The length model of the data path: boosted trees for quantiles of log-lengths.

They read the measures of a prompt, the score of its n-grams, and the usual lengths of the served model and the tenant.
A prediction is one compiled pass over the prompt and walks through trees; only fitting needs scikit-learn.

    python -m forecasting.lengths.trees FOLDER-OF-DATA-SETS

builds the bundled model. It learns from the sets whose licence lets a fitted model be shipped (`datasets.FREE`), from
nine tenths of their prompts (the rest is for tests), alone and with made histories. Tenants are hidden, names of served
models stay. The same data, seed and packages give the same file.
"""

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.datasets import free_answers, with_histories
from forecasting.lengths.features import FOLDS, TextScore, extract, features, packed, unpacked
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample
from forecasting.threads import one_thread
from forecasting.trees import Ensemble

BUNDLED: Final = Path(__file__).parent / "models" / "trees.npz"
LEAVES: Final = 31
RATE: Final = 0.06
MIN_IN_LEAF: Final = 30


def boosted(
    rows: NDArray[np.float32],
    target: ArrayLike,
    quantile: float,
    trees: int,
    seed: int = 1,
) -> Ensemble:
    """Return trees for a *quantile* of *target* (n,) given *rows* (n, columns), by pinball loss."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=trees, learning_rate=RATE, max_leaf_nodes=LEAVES,
        min_samples_leaf=min(MIN_IN_LEAF, max(1, len(rows) // 10)), l2_regularization=1.0, max_features=0.5,
        early_stopping=False, random_state=seed,
    )  # fmt: skip
    with one_thread():
        model.fit(rows, np.asarray(target, float))
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
        """Return (n, 3): the means by model, by tenant, by both; what is unknown is as the wider group."""
        return np.array([self._row(query) for query in queries], np.float32).reshape(-1, 3)

    def _row(self, query: LengthQuery) -> tuple[float, float, float]:
        model, tenant, both = self._keys(query)
        of_model, of_tenant = self.means.get(model, self.overall), self.means.get(tenant, self.overall)
        return of_model, of_tenant, self.means.get(both, of_model + of_tenant - self.overall)

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


FORGET_NAMES: Final = 0.3
"""Share of samples whose names are hidden in fitting, so that predictions for unknown names are learned too."""
MIN_SPREAD: Final = 1e-2
"""Standard deviation below which a feature counts as constant."""
MAX_DISTANCE: Final = 4.0
"""Standard deviations from the mean to which scaled features are clipped."""


class Trees(LengthModel):
    """One ensemble for each quantile; see the module.

    It fits a text score of its own unless it is given one, as it must be for queries with `features` and no text.
    """

    name = "trees"
    version = 2
    reads_text = False
    quick = True

    def __init__(self, fitting: Fitting = DEFAULT, text: TextScore | None = None) -> None:
        super().__init__(fitting)
        self.text = text
        self.habits = Habits()
        self.forests: list[Ensemble] = []
        self.mean = self.scale = np.zeros(0, np.float32)

    @property
    def fitted(self) -> bool:
        return bool(self.forests)

    def features(self, query: LengthQuery) -> bytes:
        """Return the features of *query*'s prompt, from which trees with the same text score learn without its text."""
        return packed(self._read(query), self._score())

    def can_read(self, query: LengthQuery) -> bool:
        """Return whether the features of *query*, if any, have this model's text score."""
        try:
            self._read(query)
        except ValueError:
            return False
        return True

    def scaled(self, query: LengthQuery) -> NDArray[np.float32]:
        """Return the features of *query*'s prompt, standardised and clipped; those that never varied are 0."""
        scaled: NDArray[np.float32] = (self._read(query) - self.mean) * self.scale
        return scaled.clip(-MAX_DISTANCE, MAX_DISTANCE)

    def _fit(self, samples: Sequence[Sample]) -> None:
        queries = [sample.query for sample in samples]
        target = np.log1p([sample.output_tokens for sample in samples])
        usual = self.habits.fit(samples).rows(queries)
        if self.text is None:
            prompts = {query: extract(query) for query in queries}
            folds = np.array([zlib.crc32(query.text.encode(errors="replace")) % FOLDS for query in queries])
            self.text, scores = TextScore.fit([prompts[query] for query in queries], target - usual[:, 2], folds)
            rows = self._rows(queries)
            rows[:, -1] = scores
        else:
            rows = self._rows(queries)
        spread = rows.std(axis=0)
        self.mean = rows.mean(axis=0)
        self.scale = np.where(spread < MIN_SPREAD, 0.0, 1.0 / np.maximum(spread, MIN_SPREAD)).astype(np.float32)
        table = self._table(rows, queries)
        hidden = np.random.default_rng(self.fitting.seed).random(len(table)) < FORGET_NAMES
        table[hidden, rows.shape[1] : rows.shape[1] + usual.shape[1]] = self.habits.overall
        self.forests = [boosted(table, target, level, self.fitting.trees, self.fitting.seed) for level in QUANTILES]

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        table = self._table(self._rows(queries), queries)
        quantiles = np.sort(np.expm1(np.stack([forest.predict(table) for forest in self.forests], axis=1)), axis=1)
        return bounded(quantiles[:, MEDIAN], quantiles, queries)

    def _rows(self, queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        rows = {query: self._read(query) for query in dict.fromkeys(queries)}
        return np.stack([rows[query] for query in queries])

    def _table(self, rows: NDArray[np.float32], queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        """Return what the trees read: *rows* of features, and the usual lengths of the names."""
        return np.concatenate([rows, self.habits.rows(queries)], axis=1)

    def _read(self, query: LengthQuery) -> NDArray[np.float32]:
        score = self._score()
        return unpacked(query.features, score) if query.features else features(extract(query), score)

    def _score(self) -> TextScore:
        if self.text is None:
            raise ValueError("The trees have no text score before they are fitted.")
        return self.text

    def state(self) -> dict[str, Any]:
        return {
            **self.habits.state(), "forests": [forest.state() for forest in self.forests],
            "text": self._score().weights.astype(np.float16), "mean": self.mean, "scale": self.scale,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls()
        model.habits = Habits.of_state(state)
        model.forests = [Ensemble.of_state(each) for each in state["forests"]]
        model.text, model.mean, model.scale = TextScore(state["text"]), state["mean"], state["scale"]
        return model


def bundled() -> Trees:
    """Return the trees that ship with the package, fitted as in docs/papers/length-models.md."""
    return Trees.load(BUNDLED)


def build(folder: Path, path: Path = BUNDLED) -> None:
    """Write the bundled trees to *path*. Raises DataMissing without the free sets."""
    Trees().fit(with_histories(free_answers(folder))).save(path)
    path.chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the bundled trees again.")
    parser.add_argument("folder", type=Path, help="with one folder a data set below it")
    parser.add_argument("--to", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.to)
