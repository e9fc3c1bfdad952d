"""The student: our length model for the data path. Small quantile networks, averaged with boosted trees.

Two bags of n-grams (the whole question; its opening) are averaged from one table, as in fastText. With the measures of
`features`, the served model and the tenant they go through two hidden layers to the median log-length and the steps of
the other quantiles from it. Trees on the measures and on the usual lengths of model and tenant give a second estimate
of the median. A prediction is one compiled pass over the prompt, a few small products and walks through trees; only
fitting needs scikit-learn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import kernels
from forecasting.lengths.features import MEASURES, Features, Vocabulary, extract, packed, unpacked
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample
from forecasting.lengths.trees import HabitTrees

Weights = dict[str, NDArray[np.float32]]

MOST_TOKENS: Final = 32768.0
"""Longest prediction."""
LARGE_STEP: Final = 30.0  # above it softplus is the identity
LEAST_SPREAD: Final = 1e-2
"""Standard deviation below which a measure counts as constant."""
FURTHEST: Final = 4.0
"""Standard deviations from the mean to which measures are clipped."""


class Scaling:
    """Standardises measures by means, variances, bounds and the number of samples seen so far."""

    def __init__(
        self,
        mean: NDArray[np.float64],
        variance: NDArray[np.float64],
        low: NDArray[np.float64],
        high: NDArray[np.float64],
        seen: float,
    ) -> None:
        self.mean, self.variance, self.low, self.high, self.seen = mean, variance, low, high, seen
        spread = np.sqrt(variance)
        self.scale = np.where(spread >= LEAST_SPREAD, 1.0 / np.maximum(spread, LEAST_SPREAD), 0.0)

    @classmethod
    def of(cls, measures: NDArray[np.float32]) -> "Scaling":
        """Return the scaling of *measures* (n, measures)."""
        table = measures.astype(float)
        mean, variance = table.mean(axis=0), table.var(axis=0)
        reach = FURTHEST * np.sqrt(variance)
        low, high = np.maximum(table.min(axis=0), mean - reach), np.minimum(table.max(axis=0), mean + reach)
        return cls(mean, variance, low, high, float(len(table)))

    def with_more(self, other: "Scaling") -> "Scaling":
        """Return the scaling of both; earlier samples count at most as much as *other*, so that it can change."""
        before = min(self.seen, other.seen) / (min(self.seen, other.seen) + other.seen)
        mean = before * self.mean + (1.0 - before) * other.mean
        within = before * self.variance + (1.0 - before) * other.variance
        between = before * (1.0 - before) * (self.mean - other.mean) ** 2
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Scaling(mean, within + between, low, high, self.seen + other.seen)

    def __call__(self, measures: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return *measures*, one row or many, clipped to their bounds and standardised."""
        scaled: NDArray[np.float32] = ((np.clip(measures, self.low, self.high) - self.mean) * self.scale).astype(
            np.float32
        )
        return scaled

    def moved(self, weights: Weights, other: "Scaling") -> Weights:
        """Return *weights* with the same outputs under *other*; measures that did not vary before weigh nothing."""
        ratio = np.divide(self.scale, other.scale, out=np.zeros_like(self.scale), where=other.scale > 0)
        offset = self.scale * (other.mean - self.mean)
        moved = dict(weights)
        count = len(self.mean)
        for name, bias in (("first", "first_bias"), ("straight", "heads_bias")):
            table = weights[name].copy()
            moved[bias] = (weights[bias] + offset @ table[:count]).astype(np.float32)
            table[:count] *= ratio[:, None]
            moved[name] = table.astype(np.float32)
        return moved

    def state(self) -> dict[str, object]:
        return {"mean": self.mean, "variance": self.variance, "low": self.low, "high": self.high, "seen": self.seen}


def answer(
    weights: Weights, scaled: NDArray[np.float32], read: Features, model: int, tenant: int
) -> NDArray[np.float64]:
    """Return ascending log-quantiles of one prompt; *model* and *tenant* are rows of the tables of names."""
    table = weights["table"]
    width, inputs = table.shape[1], len(scaled)
    row = np.empty(inputs + 2 * width + weights["models"].shape[1] + weights["tenants"].shape[1], np.float32)
    row[:inputs] = scaled
    kernels.gather(table, read.ids, row[inputs : inputs + width])
    kernels.gather(table, read.opening, row[inputs + width : inputs + 2 * width])
    at = inputs + 2 * width
    names = weights["models"][model]
    row[at : at + len(names)] = names
    row[at + len(names) :] = weights["tenants"][tenant]
    hidden = np.maximum(row @ weights["first"] + weights["first_bias"], 0.0)
    hidden = np.maximum(hidden @ weights["second"] + weights["second_bias"], 0.0)
    heads = hidden @ weights["heads"] + row @ weights["straight"] + weights["heads_bias"]
    return ascending(heads.astype(float))


def ascending(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-quantiles from *heads*: the median as it is, every other a positive step from its neighbour."""
    steps = np.where(heads > LARGE_STEP, heads, np.log1p(np.exp(np.minimum(heads, LARGE_STEP))))
    logs = np.empty_like(heads)
    logs[MEDIAN] = min(max(float(heads[MEDIAN]), 0.0), float(np.log1p(MOST_TOKENS)))
    for index in range(MEDIAN - 1, -1, -1):
        logs[index] = logs[index + 1] - steps[index]
    for index in range(MEDIAN + 1, len(heads)):
        logs[index] = logs[index - 1] + steps[index]
    return np.clip(logs, 0.0, np.log1p(MOST_TOKENS))


LEAST_PROMPTS: Final = 5
"""Prompts that share an n-gram, for it to be known: rarer ones are memorised, and may be private."""
MOST_NGRAMS: Final = 24000
BUNDLED: Final = Path(__file__).parent / "models" / "student.npz"
NETWORKS: Final = 3
TREES: Final = 80
TREE_SHARE: Final = 0.5


class Student(LengthModel):
    """The length model of the data path; see the module.

    If it was fitted before, `fit` continues from its weights: a few hundred samples then adjust it, not replace it. A
    query without text is answered, and learned from, by its features. Fitting raises ValueError for features of another
    version or vocabulary.
    """

    name = "student"
    version = 2
    reads_text = False
    quick = True

    def __init__(self, fitting: Fitting = DEFAULT, networks: int = NETWORKS, trees: int = TREES) -> None:
        super().__init__(fitting)
        self.size = networks
        self.trees = trees
        """Trees of the first stage; 0: networks alone."""
        self.models: dict[str, int] = {}
        """Row of each known served model; row 0 stands for all others."""
        self.tenants: dict[str, int] = {}
        self.networks: list[Weights] = []
        self.stages: list[HabitTrees] = []
        """Trees for the median log-length, then for the error of the stages before; a retraining grows the last alone.
        """
        self.scaling: Scaling | None = None
        self.vocabulary: Vocabulary | None = None
        self.knots: NDArray[np.float64] = np.zeros(0)
        """Predicted median log-lengths, ascending, at which the shifts of the quantiles are known."""
        self.shifts: NDArray[np.float64] = np.zeros((0, len(QUANTILES)))

    @property
    def fitted(self) -> bool:
        return bool(self.networks)

    def _fit(self, samples: Sequence[Sample]) -> None:
        queries = dict.fromkeys(sample.query for sample in samples)
        if self.vocabulary is None:
            by_text = {query.text: extract(query) for query in queries}
            self.vocabulary = Vocabulary.common(by_text.values(), LEAST_PROMPTS, MOST_NGRAMS)
        features = {query: self._read(query) for query in queries}
        self.fit_features([features[sample.query] for sample in samples], samples)

    def fit_features(self, rows: Sequence[Features], samples: Sequence[Sample]) -> None:
        """Fit as `fit` does, from the features of the prompts of *samples*."""
        from forecasting.lengths.student_training import train

        train(self, rows, samples)

    def features(self, query: LengthQuery) -> bytes:
        """Return bytes of *query*'s prompt from which a student can learn without its text."""
        vocabulary = self._known()
        return packed(vocabulary.features(extract(query)), vocabulary.fingerprint)

    def can_read(self, query: LengthQuery) -> bool:
        """Return whether the features of *query*, if any, are of this student's vocabulary."""
        try:
            self._read(query)
        except ValueError:
            return False
        return True

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        return self.predict_features([self._read(query) for query in queries], queries)

    def predict_features(self, rows: Sequence[Features], queries: Sequence[LengthQuery]) -> Predictions:
        """Predict from features; model, tenant and limits are those of *queries*, text is not read."""
        tokens, quantiles = np.empty(len(queries)), np.empty((len(queries), len(QUANTILES)))
        for index, (row, query) in enumerate(zip(rows, queries, strict=True)):
            tokens[index], quantiles[index] = self._answer(row, query)
        return Predictions(tokens, quantiles)

    def predict_one(self, query: LengthQuery) -> tuple[float, NDArray[np.float64]]:
        self._require_fitted()
        return self._answer(self._read(query), query)

    def _read(self, query: LengthQuery) -> Features:
        vocabulary = self._known()
        return unpacked(query.features, vocabulary) if query.features else vocabulary.features(extract(query))

    def _known(self) -> Vocabulary:
        if self.vocabulary is None:
            raise ValueError("The student has no vocabulary before it is fitted.")
        return self.vocabulary

    def _answer(self, read: Features, query: LengthQuery) -> tuple[float, NDArray[np.float64]]:
        most = MOST_TOKENS if query.max_tokens is None else max(1.0, float(query.max_tokens))
        quantiles = np.clip(np.expm1(self.shifted(self.logs(read, query))), 1.0, most)
        return float(quantiles[MEDIAN]), quantiles

    def logs(self, read: Features, query: LengthQuery) -> NDArray[np.float64]:
        """Return log-quantiles before `shifted` corrects them. Raises ValueError before `fit`."""
        scaled = self.scaled(read.measures)
        model, tenant = self.models.get(query.model, 0), self.tenants.get(query.tenant, 0)
        logs = answer(self.networks[0], scaled, read, model, tenant)
        for weights in self.networks[1:]:
            logs += answer(weights, scaled, read, model, tenant)
        logs /= len(self.networks)
        if self.stages:
            row = read.measures[None, :]
            logs += TREE_SHARE * (sum(float(stage.predict(row, (query,))[0]) for stage in self.stages) - logs[MEDIAN])
        return logs

    def scaled(self, measures: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return *measures* of a prompt, standardised as the networks see them. Raises ValueError before `fit`."""
        if self.scaling is None:
            raise ValueError("The student was asked before it was fitted.")
        return self.scaling(measures)

    def shifted(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ascending log-quantiles, corrected by held-out errors between bands of the predicted median."""
        at = float(logs[MEDIAN])
        knots = self.knots
        if not len(knots):
            return logs
        place = int(np.searchsorted(knots, at))
        if place in (0, len(knots)):
            shift = self.shifts[min(place, len(knots) - 1)]
        else:
            part = (at - knots[place - 1]) / (knots[place] - knots[place - 1])
            shift = (1.0 - part) * self.shifts[place - 1] + part * self.shifts[place]
        moved: NDArray[np.float64] = np.maximum.accumulate(logs + shift)
        return moved

    @classmethod
    def load(cls, path: Path) -> Self:
        student = super().load(path)
        width = 0 if student.scaling is None else len(student.scaling.mean)
        if width != len(MEASURES):
            raise ValueError(f"{path}: a student with {width} measures, this version has {len(MEASURES)}.")
        return student

    def state(self) -> dict[str, Any]:
        """Return the contents of its file, in half precision, which the weights have anyway."""
        assert self.scaling is not None
        return {
            "models": self.models, "tenants": self.tenants, "hashes": self._known().hashes.astype(np.uint32),
            "networks": [{name: value.astype(np.float16) for name, value in each.items()} for each in self.networks],
            "scaling": self.scaling.state(), "knots": self.knots, "shifts": self.shifts,
            "stages": [stage.state() for stage in self.stages],
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        student = cls()
        student.models, student.tenants = dict(state["models"]), dict(state["tenants"])
        student.networks = [
            {name: value.astype(np.float32) for name, value in each.items()} for each in state["networks"]
        ]
        student.size = len(student.networks)
        student.scaling = Scaling(**state["scaling"])
        student.vocabulary = Vocabulary(state["hashes"])
        student.knots, student.shifts = state["knots"], state["shifts"]
        student.stages = [HabitTrees.of_state(each) for each in state["stages"]]
        student.trees = TREES if student.stages else 0
        return student


def bundled() -> Student:
    """Return the student that ships with the package, trained as in docs/papers/length-models.md."""
    return Student.load(BUNDLED)
