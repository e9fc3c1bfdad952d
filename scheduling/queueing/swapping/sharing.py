"""Instances that share their GPUs, and so one virtual queue; their swap times; and their phase in a swap."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.groups import GroupArrays

SWAPPING_SHARE: Final = 0.1
"""Share of the time that swaps may take while several models have work."""

# Phases of an instance that shares its GPUs: `GroupArrays.phase`.
STAYS: Final = 0
"""It has the GPUs or sleeps, and no swap is in progress."""
LEAVES: Final = 1
"""It drains and goes to sleep for another."""
WAITS: Final = 2
"""It starts once that one sleeps."""
COMES: Final = 3
"""It has the GPUs and starts."""


class Swap(NamedTuple):
    """Seconds that an instance takes to leave its shared GPUs and to return."""

    sleep_s: float
    load_s: float


def share_queues(arrays: GroupArrays, sharing: Iterable[Mapping[int, Swap]]) -> bool:
    """Give the instances of each of *sharing* one common virtual queue, and every other instance a separate one.

    In QLM section 4 the queue of a GPU holds groups of all models that it may serve. Return whether anything but the
    seconds changed: then groups may be where no instance pulls them (`reassign`).
    """
    count = arrays.queue_of.size
    queue_of, swap_s, sleep_s = np.arange(count, dtype=np.int32), np.full(count, np.inf), np.zeros(count)
    for members in sharing:
        if len(members) > 1:
            queue_of[list(members)] = min(members)
            sleep_s[list(members)], swap_s[list(members)] = zip(*members.values(), strict=True)
    changed = not np.array_equal(queue_of, arrays.queue_of)
    changed = changed or not np.array_equal(np.isfinite(swap_s), np.isfinite(arrays.swap_s))
    arrays.queue_of[:], arrays.swap_s[:], arrays.sleep_s[:] = queue_of, swap_s, sleep_s
    return changed


@compiled
def note_phase(arrays: GroupArrays, instance: int, phase: int, up_s: float) -> None:
    """Set the phase of *instance*, which shares its GPUs; *up_s* is when it serves if it has just got them."""
    if phase != arrays.phase[instance]:
        arrays.phase[instance], arrays.up_s[instance] = phase, up_s
