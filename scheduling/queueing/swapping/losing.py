"""Extra waiting of a model that loses its GPUs to another one while its requests wait."""

import math
from typing import Final

from scheduling.queueing.waits.waiting_time import Wait

MOST_LOSSES: Final = 16
LEAST_CHANCE: Final = 1e-3


def chance_above(wait: Wait, limit_s: float) -> float:
    """Return the probability that *wait* is longer than *limit_s*."""
    if wait.variance_s2 <= 0.0 or math.isinf(limit_s):
        return float(wait.mean_s > limit_s)
    return 0.5 * math.erfc((limit_s - wait.mean_s) / math.sqrt(2.0 * wait.variance_s2))


def losses(own: Wait, keeps_s: float, again_s: float) -> tuple[float, float]:
    """Return (mean, variance) of the number of losses before the requests ahead have had their *own* time of the GPUs.

    They are lost first after *keeps_s*, and again *again_s* after each return.
    """
    mean = square = 0.0
    for lost in range(MOST_LOSSES):
        chance = chance_above(own, keeps_s + lost * again_s)
        if chance < LEAST_CHANCE:
            break
        mean += chance
        square += (2.0 * lost + 1.0) * chance
    return mean, max(0.0, square - mean * mean)


def lost(own: Wait, keeps_s: float, again_s: float, away: Wait) -> Wait:
    """Return the extra time of *own* from losing the GPUs, as in `losses`, for a time *away* each."""
    mean, variance = losses(own, keeps_s, again_s)
    return Wait(mean * away.mean_s, mean * away.variance_s2 + variance * away.mean_s**2)
