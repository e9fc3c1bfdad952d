"""Prompts of an exact number of tokens.

A prompt is sent as a list of token ids, because text has no length in tokens until a tokenizer has seen it. The ids have
three digits: any vocabulary holds them, and a prompt is cut out of a ready-made text instead of being formatted.
"""

import random

from scheduling.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS

FIRST_ID, IDS = 100, 900
ID_BYTES = 4  # three digits and a comma
POOL_TOKENS = 2**17
HEAD_TOKENS = 7  # name a passage: 900^7 different ones, more than 64 bits


class Prompts:
    """Makes prompts; *seed* fixes them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        ids = self._random.choices(range(FIRST_ID, FIRST_ID + IDS), k=POOL_TOKENS)
        self._pool = b"".join(b"%d," % number for number in ids)

    def ids(self, tokens: int, prefix_blocks: tuple[int, ...] = ()) -> bytes:
        """*tokens* ids, separated by commas, as JSON text without brackets.

        Without *prefix_blocks* no two prompts begin alike. With them, equal leading blocks are equal leading ids, so that
        a prefix cache finds what it would have found in the original system.
        """
        parts = []
        for block in prefix_blocks:
            parts.append(self._passage(block, min(MOONCAKE_BLOCK_TOKENS, tokens)))
            tokens -= min(MOONCAKE_BLOCK_TOKENS, tokens)
        parts.append(self._passage(self._random.randrange(IDS**HEAD_TOKENS), tokens))
        return b"".join(parts)[:-1]

    def _passage(self, number: int, tokens: int) -> bytes:
        """*tokens* ids that begin with *number* in base 900 and go on with a stretch of the pool."""
        head = b"".join(b"%d," % (FIRST_ID + number // IDS**digit % IDS) for digit in range(HEAD_TOKENS))
        start = number % POOL_TOKENS * ID_BYTES
        wanted = tokens * ID_BYTES
        text = head + self._pool[start : start + wanted]
        while len(text) < wanted:
            text += self._pool[: wanted - len(text)]
        return text[:wanted]
