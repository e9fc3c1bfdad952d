"""How long a sound is, and how many prompt tokens it counts as."""

import math
from typing import Final

SLOWEST_BYTES_PER_S: Final = 1000
"""Of any sound: a file that says less counts as this."""
USUAL_BYTES_PER_S: Final = 16_000
BYTES_PER_S: Final = {b"fLaC": 50_000, b"OggS": 4_000, b"\x1aE\xdf\xa3": 4_000}
"""Usual rates of coded sounds by how their files begin: FLAC, Opus, WebM."""
TOKENS_PER_S: Final = 100
"""Prompt tokens of a second of sound, as vLLM counts them for Whisper: a frame of its spectrogram every 10 ms."""


def seconds_of(sound: bytes) -> float:
    """Return the seconds of *sound*: of a WAV by its header, of any other by the usual rate of its coding."""
    rate = next((rate for begin, rate in BYTES_PER_S.items() if sound.startswith(begin)), USUAL_BYTES_PER_S)
    at = sound.find(b"fmt ", 12, 4096) if sound[:4] == b"RIFF" and sound[8:12] == b"WAVE" else -1
    if 0 < at <= len(sound) - 20:
        rate = int.from_bytes(sound[at + 16 : at + 20], "little")
    return len(sound) / max(rate, SLOWEST_BYTES_PER_S)


def sound_tokens(seconds: float) -> int:
    """Return the prompt tokens of *seconds* of sound; at least 1."""
    return max(1, math.ceil(seconds * TOKENS_PER_S))
