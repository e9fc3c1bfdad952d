"""Our most exact model: the trees of the data path on a frozen encoder's embedding of the prompt too.

The encoder is not tuned, so each prompt is read once for fitting and predicting; of its embedding the trees read the
principal components.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.encoder import Encoder
from forecasting.lengths.model import DEFAULT, Fitting
from forecasting.lengths.query import LengthQuery, Sample
from forecasting.lengths.trees import Trees

COMPONENTS: Final = 48
MIN_SCALE: Final = 1e-3
MAX_TOKENS: Final = 128
"""Tokens read of each prompt, from its end."""
KEPT: Final = 32_768


class Ours(Trees):
    """See the module. Embeddings of the last `KEPT` prompts stay in memory, by the hashes of their texts."""

    name = "ours"
    reads_text = True
    on_encoder = True
    quick = False

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.encoder = Encoder(fitting.encoder, MAX_TOKENS)
        self._embeddings: dict[int, NDArray[np.float16]] = {}
        self.centre: NDArray[np.float32] = np.zeros(0, np.float32)
        self.axes: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        """(embedding, components), scaled so that each component varies by about one."""

    def _fit(self, samples: Sequence[Sample]) -> None:
        self._find_axes(self._embedded(list(dict.fromkeys(sample.query.text for sample in samples))))
        super()._fit(samples)

    def _table(self, rows: NDArray[np.float32], queries: Sequence[LengthQuery]) -> NDArray[np.float32]:
        components = (self._embedded([query.text for query in queries]) - self.centre) @ self.axes
        return np.concatenate([super()._table(rows, queries), components], axis=1)

    def _find_axes(self, embedded: NDArray[np.float32]) -> None:
        """Find the principal components of the embeddings."""
        self.centre = embedded.mean(axis=0)
        values, vectors = np.linalg.eigh(np.cov((embedded - self.centre).T.astype(float)))
        count = min(COMPONENTS, len(values))
        scale = np.sqrt(np.maximum(values[::-1][:count], MIN_SCALE**2))
        self.axes = (vectors[:, ::-1][:, :count] / scale).astype(np.float32)

    def _embedded(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return means of the encoder's states over all tokens of each text, (n, width), in half precision."""
        keys = list(map(hash, texts))
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._embeddings}
        if missing:
            states = self.encoder.states(list(missing.values()), mean=True)
            self._embeddings.update(zip(missing, states.astype(np.float16), strict=True))
        rows = np.stack([self._embeddings[key] for key in keys]).astype(np.float32)
        for key in list(self._embeddings)[:-KEPT]:
            del self._embeddings[key]
        return rows

    def state(self) -> dict[str, Any]:
        return {**super().state(), "encoder": self.encoder.setting, "centre": self.centre, "axes": self.axes}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = super().of_state(state)
        model.encoder = Encoder(state["encoder"], MAX_TOKENS)
        model.centre, model.axes = state["centre"], state["axes"]
        return model
