"""Where weights go when an instance sleeps: QLM's two tiers below the GPU (section 5), one rule under every clock."""

from typing import Final

from scheduling.compiled import compiled

IN_MEMORY: Final = 1
"""vLLM's sleep level that keeps the weights in CPU memory."""
DISCARDED: Final = 2
"""The level that discards them: they come back from storage."""


@compiled
def sleep_level(weights_bytes: float, held_bytes: float, memory_bytes: float) -> int:
    """The level for an instance with *weights_bytes*, while others that sleep have *held_bytes* of *memory_bytes*.

    "Warm" models stay in CPU memory until it is exhausted, the remaining ones are cold.
    """
    return IN_MEMORY if held_bytes + weights_bytes <= memory_bytes else DISCARDED
