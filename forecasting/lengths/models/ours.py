"""The teacher of our own: the student's network with a frozen encoder's view of the prompt beside, and boosted trees.

The network reads what the student reads and the main components of the encoder's embedding. Trees for the median, on
measures, components and the names' habits, are averaged with it in logarithms: the two err differently. Nothing of the
encoder is tuned, so a prompt is read once, whatever is fitted to it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.forest import Forest
from forecasting.lengths.models.spread import bounded
from forecasting.lengths.models.state import load_model, save_model
from forecasting.lengths.models.student import LEAST_PROMPTS, MOST_NGRAMS, Student
from forecasting.lengths.models.trees import Habits
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions, Sample
from forecasting.lengths.text.embeddings import Embeddings
from forecasting.lengths.text.encoder import MINILM, Progress
from forecasting.lengths.text.features import Features, Prompt, Vocabulary, extract

VERSION: Final = 1
COMPONENTS: Final = 48
TREES: Final = 120
TREE_SHARE: Final = 0.5
MEDIAN: Final = QUANTILES.index(0.5)
LEAST_SCALE: Final = 1e-3


class Ours:
    """A LengthModel. Embeddings are kept in *folder* if one is given."""

    name = "ours"

    def __init__(
        self,
        encoder: str = MINILM,
        folder: Path | None = None,
        seed: int = 1,
        progress: Progress | None = None,
        trees: int = TREES,
    ) -> None:
        self.embeddings = Embeddings(encoder, folder, progress)
        self.trees = trees
        self.network = Student(seed, networks=1, trees=0)
        self.habits = Habits()
        self.forest: Forest | None = None
        self.centre: NDArray[np.float32] = np.zeros(0, np.float32)
        self.axes: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        """(embedding, components), scaled so that each component varies by about one."""

    def fit(self, samples: Sequence[Sample]) -> Self:
        if not samples:
            raise ValueError("A length model cannot be fitted to no samples.")
        texts = list(dict.fromkeys(sample.query.text for sample in samples))
        self._find_axes(self.embeddings.of(texts))
        prompts = {sample.query.text: extract(sample.query) for sample in samples}
        self.network.vocabulary = Vocabulary.common(prompts.values(), LEAST_PROMPTS, MOST_NGRAMS)
        queries = [sample.query for sample in samples]
        rows = self._features(queries)
        self.network.fit_features(list(zip(rows, samples, strict=True)))
        self.habits.fit(samples)
        self.forest = Forest.grow(
            self._tree_rows(rows, queries), np.log1p([sample.output_tokens for sample in samples]), 0.5, self.trees,
            self.network.seed, leaves=24,
        )  # fmt: skip
        return self

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        if self.forest is None:
            raise ValueError("The teacher was asked before it was fitted.")
        if not queries:
            return bounded([], [], queries)
        rows = self._features(queries)
        logs = np.log(self.network.from_features(rows, queries).quantiles)
        other = np.log(np.maximum(np.expm1(self.forest.predict(self._tree_rows(rows, queries))), 1.0))
        logs += TREE_SHARE * (other - logs[:, MEDIAN])[:, None]
        quantiles = np.exp(logs)
        return bounded(quantiles[:, MEDIAN], quantiles, queries)

    def _find_axes(self, embedded: NDArray[np.float32]) -> None:
        """Main components of the mean over tokens."""
        mean = embedded[:, embedded.shape[1] // 2 :]
        self.centre = mean.mean(axis=0)
        values, vectors = np.linalg.eigh(np.cov((mean - self.centre).T.astype(float)))
        count = min(COMPONENTS, len(values))
        scale = np.sqrt(np.maximum(values[::-1][:count], LEAST_SCALE**2))
        self.axes = (vectors[:, ::-1][:, :count] / scale).astype(np.float32)

    def _features(self, queries: Sequence[LengthQuery]) -> list[Features]:
        """What the student sees, with the components after the measures."""
        assert self.network.vocabulary is not None
        texts = list(dict.fromkeys(query.text for query in queries))
        places = {text: place for place, text in enumerate(texts)}
        embedded = self.embeddings.of(texts)
        components = (embedded[:, embedded.shape[1] // 2 :] - self.centre) @ self.axes
        features = []
        for query in queries:
            prompt = extract(query)
            wide = np.concatenate([prompt.measures, components[places[query.text]]]).astype(np.float32)
            features.append(self.network.vocabulary.features(Prompt(wide, prompt.hashes, prompt.opening)))
        return features

    def _tree_rows(self, rows: Sequence[Features], queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        return np.concatenate([np.stack([row.measures for row in rows]), self.habits.rows(queries)], axis=1)

    def save(self, path: Path) -> None:
        if self.forest is None:
            raise ValueError("The teacher was not fitted: there is nothing to save.")
        save_model(path, self.name, VERSION, {
            "encoder": self.embeddings.setting, "network": self.network.state(), "forest": self.forest.state(),
            "habits": self.habits.means, "overall": self.habits.overall, "centre": self.centre, "axes": self.axes,
        })  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Self:
        state: dict[str, Any] = load_model(path, cls.name, VERSION)
        model = cls(state["encoder"])
        model.network, model.forest = Student.of_state(state["network"]), Forest.of_state(state["forest"])
        model.habits.means, model.habits.overall = dict(state["habits"]), float(state["overall"])
        model.centre, model.axes = state["centre"], state["axes"]
        return model
