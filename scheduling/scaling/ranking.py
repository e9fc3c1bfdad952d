"""Ranking of instances to add and to drain, the same under every clock. Lower ranks come first.

Sources differ: a fleet of rows has stopped and failed instances, a simulated one has spot. Each is a `Source`.
"""

from enum import IntEnum
from typing import Final

from scheduling.compiled import compiled


class Source(IntEnum):
    """Source of an added instance, in SageServe's order (6.5): it decides among equally quick ones."""

    TAKEN_BACK = 0
    """It still drains."""
    OWN_SPOT = 1
    ASLEEP = 2
    OTHER_SPOT = 3
    """A spot instance of another model in the region, redeployed."""
    STOPPED = 4
    NEW = 5
    FAILED = 6
    """It may fail again: the last resort, unless the deployment is below its minimum."""


FAILED: Final = int(Source.FAILED)
STOPPED: Final = int(Source.STOPPED)


@compiled
def addition_rank(
    source: int, serves_in_s: float, usd_per_hour: float, below_minimum: bool
) -> tuple[int, float, int, float]:
    """Return the rank of an instance from *source* among those that could be added: by its time until it serves, as
    measured; then by its source, then the cheapest. What needs free GPUs comes after all others, the cheapest first.

    *below_minimum*: the deployment is below its minimum. A failed instance is then as near as a stopped one.
    """
    if source < STOPPED:
        return 0, serves_in_s, source, usd_per_hour
    if below_minimum and source == FAILED:
        return STOPPED, 0.0, STOPPED, usd_per_hour
    return source, 0.0, source, usd_per_hour


@compiled
def drain_rank(usd_per_hour: float, left_tokens: float) -> tuple[float, float]:
    """Return the rank for removal of a ready instance: the most expensive, then the least work left."""
    return -usd_per_hour, left_tokens
