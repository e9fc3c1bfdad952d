"""What is asked of a length model, what it answers, what it learns from, and the one interface that all models have."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of every prediction; the third is the median."""


class Conversation(NamedTuple):
    """What is known of the messages of a conversation beside the last one; sizes are characters of all of each message."""

    asked_characters: int
    """How many of the last characters of the query's text are the last message: what is to be answered now."""
    system_characters: int = 0
    answers: int = 0
    """Messages of the assistant."""
    answered_characters: int = 0
    """Of all those messages."""
    last_answer_characters: int = 0


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
    conversation: Conversation | None = None
    """None: all of `text` is what is to be answered, or which part is not known."""
    tools: int = 0
    """Tools that the request offers."""

    @property
    def asked(self) -> str:
        """The part of `text` that is to be answered now."""
        if self.conversation is None:
            return self.text
        return self.text[max(0, len(self.text) - self.conversation.asked_characters) :]


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
