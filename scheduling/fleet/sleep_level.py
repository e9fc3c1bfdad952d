"""Where the weights of a sleeping instance are: QLM's two tiers below the GPU (section 5)."""

from typing import Final

from scheduling.compiled import compiled

IN_MEMORY: Final = 1
"""vLLM's sleep level that keeps the weights in CPU memory."""
DISCARDED: Final = 2
"""Level that discards them: they are reloaded from storage."""


@compiled
def sleep_level(weights_bytes: float, held_bytes: float, memory_bytes: float) -> int:
    """Return the sleep level of an instance with *weights_bytes*, when others asleep
    hold *held_bytes* of *memory_bytes*.

    "Warm" models stay in CPU memory until it is exhausted; the others are cold.
    """
    return IN_MEMORY if held_bytes + weights_bytes <= memory_bytes else DISCARDED
