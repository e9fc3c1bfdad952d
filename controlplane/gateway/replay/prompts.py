"""Prompts: an exact number of token ids for traces, and instructions in words for demo traffic."""

import random
from collections import deque

from scheduling.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS

FIRST_ID, IDS = 100, 900
ID_BYTES = 4  # three digits and a comma
POOL_TOKENS = 2**17
HEAD_TOKENS = 7  # identify a passage: 900^7 different ones, more than 64 bits


class Prompts:
    """Generator of prompts; *seed* fixes them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        ids = self._random.choices(range(FIRST_ID, FIRST_ID + IDS), k=POOL_TOKENS)
        self._pool = b"".join(b"%d," % number for number in ids)

    def ids(self, tokens: int, prefix_blocks: tuple[int, ...] = ()) -> bytes:
        """Return *tokens* ids, separated by commas, as JSON text without brackets.

        Without *prefix_blocks* no two prompts begin alike. With them, equal leading blocks are equal leading ids, so that a
        prefix cache hits as it would have in the original system.
        """
        parts = []
        for block in prefix_blocks:
            parts.append(self._passage(block, min(MOONCAKE_BLOCK_TOKENS, tokens)))
            tokens -= min(MOONCAKE_BLOCK_TOKENS, tokens)
        parts.append(self._passage(self._random.randrange(IDS**HEAD_TOKENS), tokens))
        return b"".join(parts)[:-1]

    def _passage(self, number: int, tokens: int) -> bytes:
        """Return *tokens* ids that begin with *number* in base 900 and continue with a stretch of the pool."""
        head = b"".join(b"%d," % (FIRST_ID + number // IDS**digit % IDS) for digit in range(HEAD_TOKENS))
        start = number % POOL_TOKENS * ID_BYTES
        wanted = tokens * ID_BYTES
        text = head + self._pool[start : start + wanted]
        while len(text) < wanted:
            text += self._pool[: wanted - len(text)]
        return text[:wanted]


CHARACTERS_PER_TOKEN = 4
AGAIN, NEARLY_AGAIN = 0.10, 0.10
REMEMBERED = 60  # of the prompts that can recur
POOL_WORDS = 40_000

TOPICS = (
    "the harbour at Rotterdam", "a diesel generator", "the tides of the North Sea", "container insurance", "radar plotting",
    "a customs declaration", "the Panama Canal", "ballast water", "cold storage of fruit", "a maintenance contract",
    "satellite navigation", "crew training", "the price of bunker fuel", "a pilot boat", "ice in the Baltic",
    "a quarterly budget", "supplier audits", "an engine room alarm", "a passenger survey", "freight by rail",
    "a dry dock", "weather routing", "cargo of timber", "lifeboat drills", "a spare parts warehouse",
)  # fmt: skip
LANGUAGES = ("French", "German", "Spanish", "Dutch", "Polish", "Portuguese")
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
    ("Translate into {language}:\n{text}", 1.0),
    ("Write a report on {topic} in about {words} words. Notes:\n{text}", 7.0),
    ("Compare the offers for {topic} below in about {words} words:\n{text}", 3.0),
)
"""Templates and their weights, for interactive work and for work that no one waits for."""


class Instructions:
    """Generator of prompts; *seed* fixes them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"instructions {seed}")
        self._pool = " ".join(self._random.choices(PASSAGE.split(), k=POOL_WORDS))
        self._said: dict[bool, deque[str]] = {waited_for: deque(maxlen=REMEMBERED) for waited_for in (True, False)}

    def prompt(self, tokens: int, output_tokens: int, waited_for: bool) -> str:
        """Return a prompt of at most about *tokens* tokens; some ask for about *output_tokens* tokens."""
        draw, said = self._random, self._said[waited_for]
        fitting = [text for text in said if len(text) <= tokens * CHARACTERS_PER_TOKEN]
        kind = draw.random()
        if fitting and kind < AGAIN:
            return draw.choice(fitting)
        if fitting and kind < AGAIN + NEARLY_AGAIN:
            return f"Please help me. {draw.choice(fitting)}"[: tokens * CHARACTERS_PER_TOKEN]
        templates = SHORT if waited_for else LONG
        template = draw.choices([text for text, _ in templates], [weight for _, weight in templates])[0]
        room = max(0, tokens * CHARACTERS_PER_TOKEN - len(template) - 24)
        start = draw.randrange(max(1, len(self._pool) - room))
        words = max(10, round(output_tokens, -1 if output_tokens < 200 else -2))
        made = template.format(
            topic=draw.choice(TOPICS),
            language=draw.choice(LANGUAGES),
            words=words,
            text=self._pool[start : start + room],
        )[: max(1, tokens * CHARACTERS_PER_TOKEN)]
        said.append(made)
        return made

    def passage(self, tokens: int) -> str:
        """Return a text of about *tokens* tokens, to be embedded."""
        start = self._random.randrange(max(1, len(self._pool) - tokens * CHARACTERS_PER_TOKEN))
        text = f"On {self._random.choice(TOPICS)}: {self._pool[start : start + tokens * CHARACTERS_PER_TOKEN]}"
        return text[: tokens * CHARACTERS_PER_TOKEN]
