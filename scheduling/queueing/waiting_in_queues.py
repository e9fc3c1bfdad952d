"""What waits before a request whose endpoint has request groups: those before it in its virtual queue, not in its endpoint.

So the order of the global scheduler is what estimates of waiting go by, and the instance that pulls from that queue is the
only one whose throughput counts (QLM section 6: W is summed over the groups ahead).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.queueing.groups import GroupArrays, allocate_groups
from scheduling.queueing.waiting_time import ERROR, EXPECTED_COLUMNS, MEAN, VARIANCE

SAMPLE: Final = 16
"""Members of a group that stand for all: they are of one class and of like lengths."""


@compiled
def ahead_in_queue(
    arrays: GroupArrays, expected: NDArray[np.float64], slot: int, now_s: float
) -> tuple[float, float, float, float]:
    """As `waiting_time.ahead`, for *slot*, whose group stands in a virtual queue.

    All of the groups before its own count that are not held at *now_s*, and of its own group the members before it.
    """
    requests, mean, variance, error = 0.0, 0.0, 0.0, 0.0
    own = int(arrays.members[slot].group)
    group = int(arrays.queues[arrays.groups[own].queue].first)
    while group != own:
        this = arrays.groups[group]
        if this.hold_until_s <= now_s:
            looked_at = min(int(this.count), SAMPLE)
            share = float(this.count) / looked_at
            other = int(this.first)
            for _ in range(looked_at):
                mean += share * expected[other, MEAN]
                variance += share * expected[other, VARIANCE]
                error += share * expected[other, ERROR]
                other = int(arrays.members[other].following)
            requests += float(this.count)
        group = int(this.following)
    other = int(arrays.groups[own].first)
    while other != slot:
        requests += 1.0
        mean += expected[other, MEAN]
        variance += expected[other, VARIANCE]
        error += expected[other, ERROR]
        other = int(arrays.members[other].following)
    return requests, mean, variance, error


def warm_up() -> None:
    """Compile what runs live, or load it."""
    arrays = allocate_groups(1, 1, 1)
    arrays.members["group"][0] = arrays.groups["first"][0] = arrays.groups["queue"][0] = arrays.queues["first"][0] = 0
    ahead_in_queue(arrays, np.zeros((1, EXPECTED_COLUMNS)), 0, 0.0)
