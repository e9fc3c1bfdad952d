"""Where the weights of a sleeping instance are: QLM's two tiers below the GPU (section 5).

vLLM cannot discard the weights of an instance that sleeps with them in CPU memory, so its tier is chosen as it falls
asleep: memory stays free for the members of the swap group to which most swaps go, awake or not. Members are LIFE records
of a simulation, or `Member`s.
"""

from dataclasses import dataclass
from typing import Any, Final

from scheduling.compiled import compiled, compiled_inline

IN_MEMORY: Final = 1
"""vLLM's sleep level that keeps the weights in CPU memory."""
DISCARDED: Final = 2
"""Level that discards them: they are reloaded from storage."""
KEPT: Final = 0.98
"""Part of the swaps counted before that one more swap of the group leaves."""


@dataclass(slots=True)
class Member:
    """An instance of a swap group, with the fields of LIFE that a sleep level depends on."""

    weights_bytes: float
    in_memory: bool = False
    swaps: float = 0.0
    swap_group: int = 0


@compiled
def sleep_level(members: Any, own: int, memory_bytes: float) -> int:
    """Return the sleep level of *own* of *members*, whose swap group has *memory_bytes* for weights.

    Without a swap yet, "warm" models stay in CPU memory until it is exhausted; the others are cold.
    """
    this, held_bytes, better_bytes = members[own], 0.0, 0.0
    for at in range(len(members)):
        other = members[at]
        if at != own and other.swap_group == this.swap_group:
            held_bytes += other.in_memory * other.weights_bytes
            if other.swaps > this.swaps and other.weights_bytes <= memory_bytes:
                better_bytes += other.weights_bytes
    return IN_MEMORY if max(held_bytes, better_bytes) + this.weights_bytes <= memory_bytes else DISCARDED


@compiled_inline
def count_swap(members: Any, to: int) -> None:
    """Count a swap to the member *to*, once the other sleeps: of two that alternate, the one with the GPUs counts more."""
    for at in range(len(members)):
        if members[at].swap_group == members[to].swap_group:
            members[at].swaps *= KEPT
    members[to].swaps += 1.0
