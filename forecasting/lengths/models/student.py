"""The student: our own length model for the data path. Small networks of quantiles, averaged with boosted trees.

Two bags of n-grams (all of what is asked; its opening) are averaged from one table, as fastText does, and join the measures
of `features`, what is known of the served model and of the tenant, in networks with two hidden layers (`network`). Trees on
the measures and on what model and tenant usually answer give a second opinion of the median; the two err differently. A
prediction is a compiled walk over the prompt, a few small products and walks through trees; only fitting needs scikit-learn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.forest import Forest
from forecasting.lengths.models.network import MEDIAN, MOST_TOKENS, Scaling, Weights, answer
from forecasting.lengths.models.state import load_model, save_model
from forecasting.lengths.models.trees import Habits
from forecasting.lengths.query import QUANTILES, LengthModel, LengthQuery, Predictions, Sample
from forecasting.lengths.text.features import MEASURES, Features, Vocabulary, extract, packed, unpacked

VERSION: Final = 2
LEAST_PROMPTS: Final = 5
"""That share an n-gram, for it to be known: rarer ones are learned by heart, and may be private."""
MOST_NGRAMS: Final = 24000
BUNDLED: Final = Path(__file__).parent / "student.npz"
NETWORKS: Final = 3
TREES: Final = 80
TREE_SHARE: Final = 0.5


class Stage(NamedTuple):
    """Trees for the median log-length, or for what the stages before are off by; of a retraining only the last is grown."""

    habits: Habits
    forest: Forest

    def logs(self, measures: NDArray[np.float32], queries: Sequence[LengthQuery]) -> NDArray[np.float64]:
        """(n) of (n, measures)."""
        return self.forest.predict(np.concatenate([measures, self.habits.rows(queries)], axis=1))


class Student:
    """A LengthModel. Fitted before, `fit` goes on from what it knows: a few hundred samples then bend it, not replace it."""

    name = "student"

    def __init__(self, seed: int = 1, networks: int = NETWORKS, trees: int = TREES) -> None:
        self.seed = seed
        self.size = networks
        self.trees = trees
        """Of the first stage; 0: networks alone."""
        self.models: dict[str, int] = {}
        """Row of each served model that it knows; row 0 stands for all others."""
        self.tenants: dict[str, int] = {}
        self.networks: list[Weights] = []
        self.stages: list[Stage] = []
        self.scaling: Scaling | None = None
        self.vocabulary: Vocabulary | None = None
        self.knots: NDArray[np.float64] = np.zeros(0)
        """Predicted median log-lengths, ascending, at which the shifts of the quantiles are known."""
        self.shifts: NDArray[np.float64] = np.zeros((0, len(QUANTILES)))

    @property
    def fitted(self) -> bool:
        return bool(self.networks)

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
        from forecasting.lengths.training.student_training import train

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
        most = MOST_TOKENS if query.max_tokens is None else max(1.0, float(query.max_tokens))
        quantiles = np.clip(np.expm1(self.shifted(self.logs(read, query))), 1.0, most)
        return float(quantiles[MEDIAN]), quantiles

    def logs(self, read: Features, query: LengthQuery) -> NDArray[np.float64]:
        """Log-quantiles before they are put right by `shifted`. Raises ValueError before `fit`."""
        if self.scaling is None:
            raise ValueError("The student was asked before it was fitted.")
        scaled = self.scaling(read.measures)
        model, tenant = self.models.get(query.model, 0), self.tenants.get(query.tenant, 0)
        logs = answer(self.networks[0], scaled, read, model, tenant)
        for weights in self.networks[1:]:
            logs += answer(weights, scaled, read, model, tenant)
        logs /= len(self.networks)
        if self.stages:
            row = read.measures[None, :]
            logs += TREE_SHARE * (sum(float(stage.logs(row, (query,))[0]) for stage in self.stages) - logs[MEDIAN])
        return logs

    def scaled(self, measures: NDArray[np.float32]) -> NDArray[np.float32]:
        """*measures* of a prompt, brought to one size as the networks see them. Raises ValueError before `fit`."""
        if self.scaling is None:
            raise ValueError("The student was asked before it was fitted.")
        return self.scaling(measures)

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
        width = 0 if student.scaling is None else len(student.scaling.mean)
        if width != len(MEASURES):
            raise ValueError(f"{path}: a student with {width} measures, this version has {len(MEASURES)}.")
        return student

    def state(self) -> dict[str, Any]:
        if self.scaling is None:
            raise ValueError("The student was not fitted: there is nothing to save.")
        return {
            "models": self.models, "tenants": self.tenants, "hashes": self._known().hashes.astype(np.uint32),
            "networks": [{name: value.astype(np.float16) for name, value in each.items()} for each in self.networks],
            "scaling": self.scaling.state(), "knots": self.knots, "shifts": self.shifts,
            "stages": [
                {"habits": each.habits.means, "overall": each.habits.overall, "forest": each.forest.state()}
                for each in self.stages
            ],
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
        for each in state["stages"]:
            habits = Habits()
            habits.means, habits.overall = dict(each["habits"]), float(each["overall"])
            student.stages.append(Stage(habits, Forest.of_state(each["forest"])))
        student.trees = TREES if student.stages else 0
        return student


def bundled() -> Student:
    """The student that comes with the package (docs/length-models.md says what it was trained on)."""
    return Student.load(BUNDLED)
