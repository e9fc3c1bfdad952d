"""Prefix groups of recorded requests: hashes of the starts of a prompt, by which it is known what prompts share.

As text they are `TOKENS:HASHES`: the tokens of a block of that prompt, and base64 of six bytes for each recorded block
(`routing.prefix_affinity`), which stand for the prompt up to its end.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.routing.prefix_affinity import MOST_NOTED, filled

HASH_BYTES: Final = 6
MASK: Final = (1 << 8 * HASH_BYTES) - 1
BLOCK_TOKENS: Final = 16
"""Of an engine, as vLLM has it by default."""

Hashes = NDArray[np.int64]


def as_text(hashes: Sequence[int], block_tokens: int) -> str:
    """Return the prefix groups of a prompt; empty for none."""
    if not hashes:
        return ""
    return f"{block_tokens}:{b64encode(b''.join((each & MASK).to_bytes(HASH_BYTES, 'little') for each in hashes)).decode()}"


def read(text: str) -> tuple[Hashes, int]:
    """Return the hashes in *text*, and the tokens of their blocks. Raises ValueError that says what is wrong."""
    tokens, _, packed = text.partition(":")
    if not text:
        return np.zeros(0, np.int64), 0
    if not tokens.isdecimal() or not 0 < int(tokens) < 2**31:
        raise ValueError(f"{text[:40]!r} does not begin with the tokens of a block and a colon")
    try:
        known = b64decode(packed, validate=True)
    except ValueError:
        known = b""
    count, rest = divmod(len(known), HASH_BYTES)
    if rest or not 0 < count <= MOST_NOTED:
        raise ValueError(f"{text[:40]!r} has no 1 to {MOST_NOTED} hashes of {HASH_BYTES} bytes in base64")
    hashes = np.zeros((count, 8), np.uint8)
    hashes[:, :HASH_BYTES] = np.frombuffer(known, np.uint8).reshape(count, HASH_BYTES)
    return hashes.view(np.int64).ravel(), int(tokens)


def prefixes_of(texts: Sequence[str]) -> tuple[Hashes, Hashes] | tuple[None, None]:
    """Return `Workload.prefix_first` and `prefix_hashes`, in blocks of `BLOCK_TOKENS`, of requests with these prefix groups.

    What only one prompt has is left out, as nothing can find it in a cache. None where nothing is shared. Raises as `read`.
    """
    known = [read(text) for text in texts]
    whole = np.concatenate([np.zeros(0, np.int64), *(hashes for hashes, _ in known)])
    _, number, count = np.unique(whole, return_inverse=True, return_counts=True)
    shared = np.concatenate(([0], np.cumsum(count[number] > 1)))
    ends = np.concatenate(([0], np.cumsum([hashes.size for hashes, _ in known], dtype=np.int64)))
    leading = shared[ends[1:]] - shared[ends[:-1]]
    if not leading.any():
        return None, None
    blocks = [
        filled(hashes[:most], tokens, BLOCK_TOKENS) if most else hashes[:0]
        for (hashes, tokens), most in zip(known, leading.tolist(), strict=True)
    ]
    return np.cumsum([0, *(each.size for each in blocks)], dtype=np.int64), np.concatenate(blocks)
