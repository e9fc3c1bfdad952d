"""The signature of a prompt in plain Python."""

import re

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.caches import BINS, LEAST_SHINGLES, SHINGLE_BYTES


def signature_plain(text: str) -> tuple[NDArray[np.uint32] | None, int]:
    """Twin of `signature`."""
    raw = text.lower().encode(errors="surrogatepass")
    if len(raw) - SHINGLE_BYTES + 1 < LEAST_SHINGLES:
        return None, 0
    least: dict[int, int] = {}
    for at in range(len(raw) - SHINGLE_BYTES + 1):
        value = _mix_plain(int.from_bytes(raw[at : at + SHINGLE_BYTES], "big"))
        where, rest = value >> 58, (value >> 26) & 0xFFFFFFFF
        least[where] = min(rest, least.get(where, 0xFFFFFFFF))
    bins = []
    for where in range(BINS):
        steps = next(steps for steps in range(BINS) if (where + steps) % BINS in least)
        bins.append((least[(where + steps) % BINS] + steps * 0x9E3779B9) & 0xFFFFFFFF)
    numbers = 0
    for byte in re.sub(rb"[^0-9]+", b" ", raw).lstrip():
        numbers = _mix_plain(numbers ^ byte)
    return np.array(bins, np.uint32), numbers


def _mix_plain(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 32
    value = (value * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 32)
