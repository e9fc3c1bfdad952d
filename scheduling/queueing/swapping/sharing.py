"""Which instances share their GPUs, and so one virtual queue; what each takes to leave them and to come back; and where
it is in a swap."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.groups import GroupArrays

# Where an instance that shares its GPUs is in a swap: `GroupArrays.phase`.
STAYS: Final = 0
"""It has the GPUs or is at rest, and no swap is in progress."""
LEAVES: Final = 1
"""It ends what it runs and sleeps, for another."""
WAITS: Final = 2
"""It comes up once that one sleeps."""
COMES: Final = 3
"""It has the GPUs and comes up."""


class Swap(NamedTuple):
    """What an instance that shares its GPUs takes to leave them and to come back, in seconds."""

    sleep_s: float
    load_s: float


def share_queues(arrays: GroupArrays, sharing: Iterable[Mapping[int, Swap]]) -> bool:
    """Let the instances of each of *sharing* have one virtual queue together, and every other one its own (QLM section 4:
    the queue of a GPU holds groups of all models that it may serve).

    Whether anything but the seconds is another than before: then groups may stand where nobody pulls them (`reassign`).
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
    """*instance*, which shares its GPUs, is in *phase* from now on; *up_s* is when it serves if it has just got them."""
    if phase != arrays.phase[instance]:
        arrays.phase[instance], arrays.up_s[instance] = phase, up_s
