"""Queries of length models, their estimates, and the samples that they learn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantile levels of every prediction."""
MEDIAN: Final = QUANTILES.index(0.5)


class Conversation(NamedTuple):
    """The messages of a conversation before the last one; sizes are characters of whole messages."""

    asked_characters: int
    """Characters at the end of the query's text that are the last message: the question to be answered."""
    system_characters: int = 0
    answers: int = 0
    """Messages of the assistant."""
    answered_characters: int = 0
    """Characters of all those messages."""
    last_answer_characters: int = 0


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """A request whose output length is to be predicted."""

    text: str
    """The prompt; of a conversation the turns in order. Empty if it came as token ids."""
    prompt_tokens: int
    model: str = ""
    """The served model."""
    tenant: str = ""
    slo_class: str = ""
    max_tokens: int | None = None
    turns: int = 1
    """Messages of the conversation so far."""
    conversation: Conversation | None = None
    """None: all of `text` is the question, or it is not known which part is."""
    tools: int = 0
    """Tools that the request offers."""
    min_tokens: int = 0
    ignore_eos: bool = False
    sequences: int = 1
    features: bytes = b""
    """`Trees.features` of the prompt, if its text is not kept."""

    @property
    def asked(self) -> str:
        """The part of `text` that is the present question."""
        if self.conversation is None:
            return self.text
        return self.text[max(0, len(self.text) - self.conversation.asked_characters) :]


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished request, from which a model learns."""

    query: LengthQuery
    output_tokens: int


class Estimate(NamedTuple):
    """The predicted length of one query."""

    tokens: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`, ascending."""
    seen: int = 0
    """Lengths of earlier requests that it rests on; 0: the model's own prediction."""


class Predictions(NamedTuple):
    """Predictions for n queries."""

    tokens: NDArray[np.float64]
    """n: the expected length, at least 1, where a single figure is needed."""
    quantiles: NDArray[np.float64]
    """n x QUANTILES: ascending along each row."""


KEPT_HEAD, KEPT_TAIL = 512, 3584
MOST_TURNS_READ: Final = 512
SYSTEM: Final = ("system", "developer")
ASSISTANT: Final = "assistant"


def joined(texts: Sequence[str], first: str) -> str:
    """Join *texts*, up to `KEPT_HEAD` + `KEPT_TAIL` characters; a longer whole begins as *first*.

    The task stands at one of the ends (SSJF, section 3.1, keeps the last one).
    """
    kept, room = [], KEPT_HEAD + KEPT_TAIL
    for text in reversed(texts):
        if text:
            kept.append(text[-room:])
            room -= len(kept[-1]) + 1
            if room <= 0:
                break
    whole = "\n".join(reversed(kept))
    return whole if room > 0 else first[:KEPT_HEAD] + "\n" + whole[-KEPT_TAIL:]


def read_turns(turns: Sequence[tuple[str, str]], first: str = "") -> tuple[str, Conversation]:
    """Return the text of the *turns*, (role, text) each, and the sizes of the earlier ones; *first* is the
    conversation's first text.

    Turns without text (images, calls of tools) are not counted; without any text the result is empty.
    """
    asked = next((text for _, text in reversed(turns) if text), "")
    system = answers = answered = last_answer = 0
    for role, said in turns[:-1]:
        if role == ASSISTANT and said:
            last_answer = len(said)
            answers, answered = answers + 1, answered + last_answer
        elif role in SYSTEM:
            system += len(said)
    if len(asked) > KEPT_TAIL:
        text = joined([asked], asked)
        own = len(text)
    else:
        text = joined([text for _, text in turns], first or asked)
        own = len(asked)
    return text, Conversation(own, system, answers, answered, last_answer)
