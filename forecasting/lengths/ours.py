"""Our most exact model: the student's network with a frozen encoder's embedding of the prompt, and boosted trees.

The network reads what the student reads and the principal components of the embedding. Trees for the median, on
measures, components and the names' habits, are averaged with it in logarithms: the two err differently. The encoder is
not tuned, so each prompt is read once for fitting and predicting.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.encoder import Encoder
from forecasting.lengths.features import Features, Prompt, Vocabulary, extract, measure_matrix
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import MEDIAN, LengthQuery, Predictions, Sample
from forecasting.lengths.student import LEAST_PROMPTS, MOST_NGRAMS, Student
from forecasting.lengths.trees import HabitTrees

COMPONENTS: Final = 48
TREE_SHARE: Final = 0.5
LEAVES: Final = 24
LEAST_SCALE: Final = 1e-3
MOST_TOKENS: Final = 128
"""Tokens read of each prompt, from its end."""
KEPT: Final = 32_768


class Ours(LengthModel):
    """See the module. Embeddings of the last `KEPT` prompts stay in memory, by the hashes of their texts."""

    name = "ours"
    on_encoder = True

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.encoder = Encoder(fitting.encoder, MOST_TOKENS)
        self._embeddings: dict[int, NDArray[np.float16]] = {}
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
        self._find_axes(self._embedded(texts))
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
        """Find the principal components of the embeddings."""
        self.centre = embedded.mean(axis=0)
        values, vectors = np.linalg.eigh(np.cov((embedded - self.centre).T.astype(float)))
        count = min(COMPONENTS, len(values))
        scale = np.sqrt(np.maximum(values[::-1][:count], LEAST_SCALE**2))
        self.axes = (vectors[:, ::-1][:, :count] / scale).astype(np.float32)

    def _embedded(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return means of the encoder's states over all tokens of each text, (n, width), in half precision."""
        keys = list(map(hash, texts))
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._embeddings}
        if missing:
            states = self.encoder.states(list(missing.values()), self.fitting.progress, "embed prompts", mean=True)
            self._embeddings.update(zip(missing, states[:, self.encoder.width :].astype(np.float16), strict=True))
        rows = np.stack([self._embeddings[key] for key in keys]).astype(np.float32)
        for key in list(self._embeddings)[:-KEPT]:
            del self._embeddings[key]
        return rows

    def _features(self, queries: Sequence[LengthQuery]) -> list[Features]:
        """Return the student's features, with the components after the measures."""
        assert self.network.vocabulary is not None
        texts = list(dict.fromkeys(query.text for query in queries))
        places = {text: place for place, text in enumerate(texts)}
        components = (self._embedded(texts) - self.centre) @ self.axes
        features = []
        for query in queries:
            prompt = extract(query)
            wide = np.concatenate([prompt.measures, components[places[query.text]]]).astype(np.float32)
            features.append(self.network.vocabulary.features(Prompt(wide, prompt.hashes, prompt.opening)))
        return features

    def state(self) -> dict[str, Any]:
        assert self.trees is not None
        return {
            "encoder": self.encoder.setting, "network": self.network.state(), **self.trees.state(),
            "centre": self.centre, "axes": self.axes,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls(Fitting(state["encoder"]))
        model.network, model.trees = Student.of_state(state["network"]), HabitTrees.of_state(state)
        model.centre, model.axes = state["centre"], state["axes"]
        return model
