"""Prompts: token ids of an exact length for traces and runs, and instructions in words for the demo's waves."""

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS

IDS = (100, 1000)


def prompt_ids(draw: np.random.Generator, tokens: int, blocks: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return *tokens* ids; equal leading *blocks* are equal leading ids, and the rest is like no other prompt's."""
    shared = [np.random.default_rng(block).integers(*IDS, MOONCAKE_BLOCK_TOKENS) for block in blocks]
    return np.concatenate([*shared, draw.integers(*IDS, tokens)])[:tokens]


CHARACTERS_PER_TOKEN = 4
AGAIN, NEARLY_AGAIN = 0.10, 0.10
MAX_REMEMBERED = 60  # prompts that can be sent again
POOL_WORDS = 40_000
TOPICS = (
    "the harbour at Rotterdam", "a diesel generator", "the tides of the North Sea", "container insurance", "radar plotting",
    "a customs declaration", "the Panama Canal", "ballast water", "cold storage of fruit", "a maintenance contract",
    "satellite navigation", "crew training", "the price of bunker fuel", "a pilot boat", "ice in the Baltic",
)  # fmt: skip
PASSAGE = (
    "the vessel was delayed by fog near the eastern pier while two tugs waited for orders from the traffic centre and the "
    "master reported that cargo in hold four had shifted during the night so a surveyor came aboard before noon and wrote a "
    "short note about lashings dunnage moisture and missing seals which the agent sent to owners charterers insurers and "
    "terminal together with photographs of damaged crates invoices bills of lading stowage plans temperature records crew "
    "lists fuel figures tide tables berth windows crane hours overtime rates and an estimate of what repair would cost"
)
SHORT = (
    ("Is it true that {topic} needs a permit? Answer yes or no.", 2.0),
    ("Classify this message about {topic} as request, complaint or praise:\n{text}", 2.0),
    ("Tell me in one sentence what matters about {topic}.", 2.0),
    ("Explain {topic} to a new colleague.", 3.0),
    ("List the things to check for {topic}.", 2.0),
    ("Write a Python function that reads records of {topic} from a CSV file.", 1.5),
    ("Write an email to a customer about {topic}, given this:\n{text}", 1.5),
    ("Answer in about {words} words, with what is said here of {topic}:\n{text}", 6.0),
)
LONG = (
    ("Summarize this report on {topic}:\n{text}", 3.0),
    ("Extract all dates and amounts from this file on {topic}:\n{text}", 2.0),
    ("Translate into French:\n{text}", 1.0),
    ("Write a report on {topic} in about {words} words. Notes:\n{text}", 7.0),
    ("Compare the offers for {topic} below in about {words} words:\n{text}", 3.0),
)
"""Templates and their weights, for interactive work and for work that no one waits for."""


class Instructions:
    """Generator of prompts; *seed* fixes them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"instructions {seed}")
        self._pool = " ".join(self._random.choices(PASSAGE.split(), k=POOL_WORDS))
        self._sent: dict[bool, deque[str]] = {
            interactive: deque(maxlen=MAX_REMEMBERED) for interactive in (True, False)
        }

    def prompt(self, tokens: int, output_tokens: int, interactive: bool) -> str:
        """Return a prompt of at most about *tokens* tokens; some ask for about *output_tokens* tokens."""
        draw, sent, most = self._random, self._sent[interactive], tokens * CHARACTERS_PER_TOKEN
        fitting = [text for text in sent if len(text) <= most]
        kind = draw.random()
        if fitting and kind < AGAIN + NEARLY_AGAIN:
            again = draw.choice(fitting)
            return again if kind < AGAIN else f"Please help me. {again}"[:most]
        templates, weights = zip(*(SHORT if interactive else LONG), strict=True)
        template = draw.choices(templates, weights)[0]
        words = max(10, round(output_tokens, -1 if output_tokens < 200 else -2))
        text = self._text(max(0, most - len(template) - 24))
        made: str = template.format(topic=draw.choice(TOPICS), words=words, text=text)[: max(1, most)]
        sent.append(made)
        return made

    def passage(self, tokens: int) -> str:
        """Return a text of about *tokens* tokens, to be embedded."""
        most = tokens * CHARACTERS_PER_TOKEN
        return f"On {self._random.choice(TOPICS)}: {self._text(most)}"[:most]

    def _text(self, characters: int) -> str:
        start = self._random.randrange(max(1, len(self._pool) - characters))
        return self._pool[start : start + characters]
