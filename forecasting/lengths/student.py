"""The student: our own length model for the data path. Known n-grams and cheap measures into a small network of quantiles.

Two bags of n-grams (all of the text; its opening) are averaged from one table, as fastText does, and join the measures of
`features`, what is known of the served model and of the tenant, in a network with two hidden layers. It gives the median of
the log-length and the steps down and up to the other quantiles, so that quantiles cannot cross. A prediction is a compiled
walk over the prompt and a few small products in NumPy; only fitting imports torch (`student_training`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import kernels
from forecasting.lengths.features import MEASURES, Features, Vocabulary, extract, packed, unpacked
from forecasting.lengths.query import QUANTILES, LengthModel, LengthQuery, Predictions, Sample
from forecasting.lengths.state import load_model, save_model

Weights = dict[str, NDArray[np.float32]]

VERSION: Final = 1
LEAST_PROMPTS: Final = 5
"""That share an n-gram, for it to be known: rarer ones are learned by heart, and may be private."""
MOST_NGRAMS: Final = 24000
BUNDLED: Final = Path(__file__).parent / "student.npz"
MOST_TOKENS: Final = 32768.0
"""Above it no length is predicted, whatever the network says."""
MEDIAN: Final = QUANTILES.index(0.5)
LARGE_STEP: Final = 30.0  # above it softplus is the identity


class Student:
    """A LengthModel. Fitted before, `fit` goes on from what it knows: a few hundred samples then bend it, not replace it."""

    name = "student"

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.models: dict[str, int] = {}
        """Row of each served model that it knows; row 0 stands for all others."""
        self.tenants: dict[str, int] = {}
        self.weights: Weights = {}
        self.vocabulary: Vocabulary | None = None
        self.knots: NDArray[np.float64] = np.zeros(0)
        """Predicted median log-lengths, ascending, at which the shifts of the quantiles are known."""
        self.shifts: NDArray[np.float64] = np.zeros((0, len(QUANTILES)))

    @property
    def fitted(self) -> bool:
        return bool(self.weights)

    def fit(self, samples: Sequence[Sample], teacher: LengthModel | None = None, epochs: int | None = None) -> Self:
        """Learn from *samples*, and from what *teacher* says of the same queries. Raises ValueError if there are none."""
        taught = teacher.predict([sample.query for sample in samples]) if teacher and samples else None
        if not samples:
            raise ValueError("A length model cannot be fitted to no samples.")
        prompts = {sample.query: extract(sample.query) for sample in samples}
        if self.vocabulary is None:
            by_text = {query.text: prompt for query, prompt in prompts.items()}
            self.vocabulary = Vocabulary.common(by_text.values(), LEAST_PROMPTS, MOST_NGRAMS)
        features = {query: self.vocabulary.features(prompt) for query, prompt in prompts.items()}
        return self.fit_features([(features[sample.query], sample) for sample in samples], taught, epochs)

    def fit_features(
        self,
        rows: Sequence[tuple[Features | bytes, Sample]],
        taught: Predictions | None = None,
        epochs: int | None = None,
    ) -> Self:
        """As `fit`, from features that were kept (`features`): the queries in *rows* need no text.

        *taught* are a teacher's predictions for the same rows. Raises ValueError for no rows, bytes of another version or
        vocabulary, and a student that has no vocabulary yet (begin with `bundled`, or `fit` once).
        """
        from forecasting.lengths.student_training import train

        if not rows:
            raise ValueError("A length model cannot be fitted to no samples.")
        vocabulary = self._known()
        read = [unpacked(each, vocabulary) if isinstance(each, bytes) else each for each, _ in rows]
        train(self, read, [sample for _, sample in rows], taught, epochs)
        return self

    def features(self, query: LengthQuery) -> bytes:
        """What to keep of *query*'s prompt so that a student can learn from it without its text."""
        vocabulary = self._known()
        return packed(vocabulary.features(extract(query)), vocabulary.fingerprint)

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        vocabulary = self._known()
        return self.from_features([vocabulary.features(extract(query)) for query in queries], queries)

    def from_features(self, rows: Sequence[Features | bytes], queries: Sequence[LengthQuery]) -> Predictions:
        """As `predict`, from features that were kept; model, tenant and limits are those of *queries*, text is not read."""
        tokens, quantiles = np.empty(len(queries)), np.empty((len(queries), len(QUANTILES)))
        for index, (row, query) in enumerate(zip(rows, queries, strict=True)):
            read = unpacked(row, self._known()) if isinstance(row, bytes) else row
            tokens[index], quantiles[index] = self._answer(read, query)
        return Predictions(tokens, quantiles)

    def predict_one(self, query: LengthQuery) -> tuple[float, NDArray[np.float64]]:
        """Expected tokens and quantiles of one query; what the data path asks. Raises ValueError before `fit`."""
        return self._answer(self._known().features(extract(query)), query)

    def _known(self) -> Vocabulary:
        if self.vocabulary is None:
            raise ValueError("The student was asked before it was fitted.")
        return self.vocabulary

    def _answer(self, read: Features, query: LengthQuery) -> tuple[float, NDArray[np.float64]]:
        weights = self.weights
        if not weights:
            raise ValueError("The student was asked before it was fitted.")
        table = weights["table"]
        width = table.shape[1]
        inputs = weights["centre"].shape[0]
        row = np.empty(inputs + 2 * width + weights["models"].shape[1] + weights["tenants"].shape[1], np.float32)
        row[:inputs] = (read.measures - weights["centre"]) * weights["scale"]
        kernels.gather(table, read.ids, row[inputs : inputs + width])
        kernels.gather(table, read.opening, row[inputs + width : inputs + 2 * width])
        at = inputs + 2 * width
        names = weights["models"][self.models.get(query.model, 0)]
        row[at : at + len(names)] = names
        row[at + len(names) :] = weights["tenants"][self.tenants.get(query.tenant, 0)]
        hidden = np.maximum(row @ weights["first"] + weights["first_bias"], 0.0)
        hidden = np.maximum(hidden @ weights["second"] + weights["second_bias"], 0.0)
        heads = hidden @ weights["heads"] + row @ weights["straight"] + weights["heads_bias"]
        most = MOST_TOKENS if query.max_tokens is None else max(1.0, float(query.max_tokens))
        logs = self.shifted(ascending(heads.astype(float)))
        quantiles = np.clip(np.expm1(logs), 1.0, most)
        return float(quantiles[MEDIAN]), quantiles

    def shifted(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-quantiles put right by what held-out prompts showed, between bands of the predicted median; ascending."""
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

    def save(self, path: Path) -> None:
        """Write it to *path*, in half precision, which it has anyway. Raises ValueError before `fit`."""
        save_model(path, self.name, VERSION, self.state())

    @classmethod
    def load(cls, path: Path) -> Self:
        """The student in a file that `save` wrote. Raises ValueError for any other file, OSError as `open`."""
        student = cls.of_state(load_model(path, cls.name, VERSION))
        width = student.weights["centre"].shape[0]
        if width != len(MEASURES):
            raise ValueError(f"{path}: a student with {width} measures, this version has {len(MEASURES)}.")
        return student

    def state(self) -> dict[str, Any]:
        if not self.weights:
            raise ValueError("The student was not fitted: there is nothing to save.")
        weights: dict[str, Any] = {name: value.astype(np.float16) for name, value in self.weights.items()}
        weights |= {"centre": self.weights["centre"], "scale": self.weights["scale"]}
        return {
            "models": self.models, "tenants": self.tenants, "hashes": self._known().hashes.astype(np.uint32),
            "weights": weights, "knots": self.knots, "shifts": self.shifts,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        student = cls()
        student.models, student.tenants = dict(state["models"]), dict(state["tenants"])
        student.weights = {name: value.astype(np.float32) for name, value in state["weights"].items()}
        student.vocabulary = Vocabulary(state["hashes"])
        student.knots, student.shifts = state["knots"], state["shifts"]
        return student


def ascending(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-quantiles from a network's *heads*: the median as it is, every other a positive step away from its neighbour."""
    steps = np.where(heads > LARGE_STEP, heads, np.log1p(np.exp(np.minimum(heads, LARGE_STEP))))
    logs = np.empty_like(heads)
    logs[MEDIAN] = min(max(float(heads[MEDIAN]), 0.0), float(np.log1p(MOST_TOKENS)))
    for index in range(MEDIAN - 1, -1, -1):
        logs[index] = logs[index + 1] - steps[index]
    for index in range(MEDIAN + 1, len(heads)):
        logs[index] = logs[index - 1] + steps[index]
    return np.clip(logs, 0.0, np.log1p(MOST_TOKENS))


def bundled() -> Student:
    """The student that comes with the package (docs/length-models.md says what it was trained on)."""
    return Student.load(BUNDLED)
