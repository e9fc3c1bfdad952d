"""Interface of all length models, and the effort of fitting them.

A model's file is written by `forecasting.files`, with the model's name and version, which are checked.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.files import StateError, read_state, write_state
from forecasting.lengths.encoder import MINILM
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions, Sample


@dataclass(frozen=True, slots=True)
class Fitting:
    """Effort of fitting a model; a kind uses the fields that concern it."""

    encoder: str = MINILM
    """A setting of `Encoder`."""
    tuned: int = 1500
    """Samples of the first phase, in which encoder and head learn."""
    epochs: int = 1
    """Rounds over those samples."""
    read: int = 3000
    """Prompts of the second phase, whose states are computed once; all samples with these prompts count."""
    head_epochs: int = 20
    most_tokens: int = 96
    """Tokens read of each prompt."""
    layers: int = 0
    """Layers of the encoder, from the first; 0: all."""
    rate: float = 5e-5
    """Learning rate of the encoder's weights in the first phase."""
    batch: int = 16
    trees: int = 120
    """Trees of each ensemble of `trees` and `ours`."""
    seed: int = 1


DEFAULT = Fitting()


class LengthModel(ABC):
    """A length model. Fitting on nothing, asking before fitting, and a file of another version raise ValueError."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version of its file."""
    reads_text: ClassVar[bool] = True
    """Whether it needs samples with their text to learn."""
    on_encoder: ClassVar[bool] = False
    """Whether an encoder reads the prompts: some milliseconds each, and the models extra."""
    quick: ClassVar[bool] = False
    """Whether one prediction takes well under a millisecond."""

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        self.fitting = fitting

    # Each kind defines these.

    @property
    @abstractmethod
    def fitted(self) -> bool: ...

    @abstractmethod
    def _fit(self, samples: Sequence[Sample]) -> None:
        """Learn from *samples*, at least one."""

    @abstractmethod
    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        """Return predictions of *queries*, at least one, by a fitted model."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the contents of its file."""

    @classmethod
    @abstractmethod
    def of_state(cls, state: dict[str, Any]) -> Self: ...

    # All kinds share these.

    def fit(self, samples: Sequence[Sample]) -> Self:
        if not samples:
            raise ValueError("A length model cannot be fitted to no samples.")
        self._fit(samples)
        return self

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        if not self.fitted:
            raise ValueError(f"The length model {self.name!r} is not fitted.")
        return self._predict(queries) if queries else bounded([], [], queries)

    def predict_one(self, query: LengthQuery) -> tuple[float, NDArray[np.float64]]:
        """Return the expected tokens and quantiles of one query."""
        tokens, quantiles = self.predict([query])
        return float(tokens[0]), quantiles[0]

    def quantise(self) -> None:  # noqa: B027 (most kinds have nothing to quantise)
        """Make predictions faster where the kind can; the model can then be neither fitted nor saved."""

    def save(self, path: Path) -> None:
        """Write the model to *path* atomically: a concurrent reader has the old file or the new one."""
        if not self.fitted:
            raise ValueError(f"The length model {self.name!r} is not fitted.")
        write_state(path, {"model": self.name, "version": self.version, **self.state()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the model that `save` wrote. Raises StateError for any other file, OSError as `open`."""
        state = read_state(path)
        if state.get("model") != cls.name:
            raise StateError(f"{path}: holds {state.get('model')!r}, not the length model {cls.name!r}")
        if state.get("version") != cls.version:
            raise StateError(
                f"{path}: {cls.name} of version {state.get('version')!r}, this version reads {cls.version}"
            )
        return cls.of_state(state)


def bounded(tokens: ArrayLike, quantiles: ArrayLike, queries: Sequence[LengthQuery]) -> Predictions:
    """Return predictions with everything in [1, max_tokens], and each row of quantiles ascending."""
    most = np.array([np.inf if query.max_tokens is None else max(1.0, query.max_tokens) for query in queries])
    return Predictions(
        np.clip(np.asarray(tokens, float), 1.0, most),
        np.clip(np.sort(np.asarray(quantiles, float).reshape(-1, len(QUANTILES)), axis=1), 1.0, most[:, None]),
    )
