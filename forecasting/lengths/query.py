"""What is asked of a length model, what it answers, what it learns from, and the one interface that all models have."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of every prediction; the third is the median."""


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """One request whose output length is asked for."""

    text: str
    """The prompt; of a conversation the turns in order, one after the other. Empty when it came as token ids."""
    prompt_tokens: int
    model: str = ""
    """The served model, whose verbosity is asked for."""
    tenant: str = ""
    slo_class: str = ""
    max_tokens: int | None = None
    turns: int = 1
    """Messages of the conversation so far."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that is done: what a model learns from."""

    query: LengthQuery
    output_tokens: int


class Predictions(NamedTuple):
    """Of n queries."""

    tokens: NDArray[np.float64]
    """n: the expected length, at least 1; what a single figure is wanted for."""
    quantiles: NDArray[np.float64]
    """n x QUANTILES: ascending along each row."""


class LengthModel(Protocol):
    """A length model. `fit` on nothing, `predict` before `fit`, or a file of another version raise ValueError."""

    name: str

    def fit(self, samples: Sequence[Sample]) -> Self: ...

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions: ...

    def save(self, path: Path) -> None: ...

    @classmethod
    def load(cls, path: Path) -> Self: ...
