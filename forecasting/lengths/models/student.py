"""The student: our own length model for the data path. Small networks of quantiles, averaged with boosted trees.

Two bags of n-grams (all of what is asked; its opening) are averaged from one table, as fastText does, and join the measures
of `features`, what is known of the served model and of the tenant, in networks with two hidden layers (`network`). Trees on
the measures and on what model and tenant usually answer give a second opinion of the median; the two err differently. A
prediction is a compiled walk over the prompt, a few small products and walks through trees; only fitting needs scikit-learn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.length_model import DEFAULT, Fitting, LengthModel
from forecasting.lengths.models.network import MOST_TOKENS, Scaling, Weights, answer
from forecasting.lengths.models.trees import HabitTrees
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample
from forecasting.lengths.text.features import MEASURES, Features, Vocabulary, extract, packed, unpacked

LEAST_PROMPTS: Final = 5
"""That share an n-gram, for it to be known: rarer ones are learned by heart, and may be private."""
MOST_NGRAMS: Final = 24000
BUNDLED: Final = Path(__file__).parent / "student.npz"
NETWORKS: Final = 3
TREES: Final = 80
TREE_SHARE: Final = 0.5


class Student(LengthModel):
    """Fitted before, `fit` goes on from what it knows: a few hundred samples then bend it, not replace it.

    A query without text is answered, and learned from, by its features.
    """

    name = "student"
    version = 2
    reads_text = False
    quick = True

    def __init__(self, fitting: Fitting = DEFAULT, networks: int = NETWORKS, trees: int = TREES) -> None:
        super().__init__(fitting)
        self.size = networks
        self.trees = trees
        """Of the first stage; 0: networks alone."""
        self.models: dict[str, int] = {}
        """Row of each served model that it knows; row 0 stands for all others."""
        self.tenants: dict[str, int] = {}
        self.networks: list[Weights] = []
        self.stages: list[HabitTrees] = []
        """Trees for the median log-length, then for what the stages before are off by; a retraining grows the last alone."""
        self.scaling: Scaling | None = None
        self.vocabulary: Vocabulary | None = None
        self.knots: NDArray[np.float64] = np.zeros(0)
        """Predicted median log-lengths, ascending, at which the shifts of the quantiles are known."""
        self.shifts: NDArray[np.float64] = np.zeros((0, len(QUANTILES)))

    @property
    def fitted(self) -> bool:
        return bool(self.networks)

    def fit(self, samples: Sequence[Sample], teacher: LengthModel | None = None, epochs: int | None = None) -> Self:
        """Learn from *samples*, and from what *teacher* predicts for the same queries.

        Raises ValueError for no samples, and for kept features of another version or vocabulary.
        """
        if teacher is None and epochs is None:
            return super().fit(samples)
        taught = teacher.predict([sample.query for sample in samples]) if teacher else None
        self._fit(samples, taught, epochs)
        return self

    def _fit(self, samples: Sequence[Sample], taught: Predictions | None = None, epochs: int | None = None) -> None:
        if self.vocabulary is None:
            by_text = {sample.query.text: extract(sample.query) for sample in samples}
            self.vocabulary = Vocabulary.common(by_text.values(), LEAST_PROMPTS, MOST_NGRAMS)
        features = {query: self._read(query) for query in {sample.query: None for sample in samples}}
        self.fit_features([features[sample.query] for sample in samples], samples, taught, epochs)

    def fit_features(
        self,
        rows: Sequence[Features],
        samples: Sequence[Sample],
        taught: Predictions | None = None,
        epochs: int | None = None,
    ) -> None:
        """As `fit`, from the features of the prompts of *samples*."""
        from forecasting.lengths.training.student_training import train

        train(self, rows, samples, taught, epochs)

    def features(self, query: LengthQuery) -> bytes:
        """What to keep of *query*'s prompt so that a student can learn from it without its text."""
        vocabulary = self._known()
        return packed(vocabulary.features(extract(query)), vocabulary.fingerprint)

    def can_read(self, query: LengthQuery) -> bool:
        """Whether the features of *query*, if it has any, were made by this student's vocabulary."""
        try:
            self._read(query)
        except ValueError:
            return False
        return True

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        return self.predict_features([self._read(query) for query in queries], queries)

    def predict_features(self, rows: Sequence[Features], queries: Sequence[LengthQuery]) -> Predictions:
        """As `predict`, from features; model, tenant and limits are those of *queries*, text is not read."""
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
        """Log-quantiles before `shifted` corrects them. Raises ValueError before `fit`."""
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
        """*measures* of a prompt, brought to one size as the networks see them. Raises ValueError before `fit`."""
        if self.scaling is None:
            raise ValueError("The student was asked before it was fitted.")
        return self.scaling(measures)

    def shifted(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-quantiles corrected by what held-out prompts showed, between bands of the predicted median; ascending."""
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
        """In half precision, which it has anyway."""
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
    """The student that comes with the package (docs/length-models.md says what it was trained on)."""
    return Student.load(BUNDLED)
