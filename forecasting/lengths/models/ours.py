"""The teacher of our own: the student's network with a frozen encoder's view of the prompt beside, and boosted trees.

The network reads what the student reads and the main components of the encoder's embedding. Trees for the median, on
measures, components and the names' habits, are averaged with it in logarithms: the two err differently. Nothing of the
encoder is tuned, so a prompt is read once, whatever is fitted to it.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.length_model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.models.student import LEAST_PROMPTS, MOST_NGRAMS, Student
from forecasting.lengths.models.trees import HabitTrees
from forecasting.lengths.query import MEDIAN, LengthQuery, Predictions, Sample
from forecasting.lengths.text.embeddings import Embeddings
from forecasting.lengths.text.features import Features, Prompt, Vocabulary, extract, measure_matrix

COMPONENTS: Final = 48
TREE_SHARE: Final = 0.5
LEAVES: Final = 24
LEAST_SCALE: Final = 1e-3


class Ours(LengthModel):
    """Embeddings are kept in the folder of `Fitting` if there is one."""

    name = "ours"
    on_encoder = True

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.embeddings = Embeddings(fitting.encoder, fitting.folder, fitting.progress)
        self.network = Student(fitting, networks=1, trees=0)
        self.trees: HabitTrees | None = None
        self.centre: NDArray[np.float32] = np.zeros(0, np.float32)
        self.axes: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        """(embedding, components), scaled so that each component varies by about one."""

    @property
    def fitted(self) -> bool:
        return self.trees is not None

    def _fit(self, samples: Sequence[Sample]) -> None:
        texts = list(dict.fromkeys(sample.query.text for sample in samples))
        self._find_axes(self.embeddings.of(texts))
        prompts = {sample.query.text: extract(sample.query) for sample in samples}
        self.network.vocabulary = Vocabulary.common(prompts.values(), LEAST_PROMPTS, MOST_NGRAMS)
        rows = self._features([sample.query for sample in samples])
        self.network.fit_features(rows, samples)
        target = np.log1p([sample.output_tokens for sample in samples])
        self.trees = HabitTrees.grow(
            measure_matrix(rows), samples, target, self.fitting.trees, LEAVES, self.fitting.seed
        )

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        assert self.trees is not None
        rows = self._features(queries)
        logs = np.log(self.network.predict_features(rows, queries).quantiles)
        other = np.log(np.maximum(np.expm1(self.trees.predict(measure_matrix(rows), queries)), 1.0))
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

    def state(self) -> dict[str, Any]:
        assert self.trees is not None
        return {
            "encoder": self.embeddings.setting, "network": self.network.state(), **self.trees.state(),
            "centre": self.centre, "axes": self.axes,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls(Fitting(state["encoder"]))
        model.network, model.trees = Student.of_state(state["network"]), HabitTrees.of_state(state)
        model.centre, model.axes = state["centre"], state["axes"]
        return model
