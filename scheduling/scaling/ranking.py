"""Which instance is added and which drains: one ranking under every clock. Lower ranks come first.

What exists differs: a fleet of rows has stopped and failed instances, a simulated one has spot. Each is a `Source`.
"""

from enum import IntEnum
from typing import Final

from scheduling.compiled import compiled


class Source(IntEnum):
    """Where an instance that is added comes from, the quickest first (SageServe 6.5)."""

    TAKEN_BACK = 0
    """It still drains."""
    OWN_SPOT = 1
    ASLEEP = 2
    OTHER_SPOT = 3
    """A spot instance of another model in the region, redeployed."""
    STOPPED = 4
    NEW = 5
    FAILED = 6
    """It may fail again: the last resort, unless the minimum is not there."""


FAILED: Final = int(Source.FAILED)
STOPPED: Final = int(Source.STOPPED)


@compiled
def addition_rank(source: int, usd_per_hour: float, below_minimum: bool) -> tuple[int, float]:
    """Rank of an instance from *source* among those that could be added: the quickest, of these the cheapest.

    *below_minimum*: the deployment has fewer than it must have. One that failed is then as near as one that was stopped.
    """
    if below_minimum and source == FAILED:
        return STOPPED, usd_per_hour
    return source, usd_per_hour


@compiled
def drain_rank(usd_per_hour: float, left_tokens: float) -> tuple[float, float]:
    """Rank of a ready instance among those that could go: the dearest, of these the one with the least left to do."""
    return -usd_per_hour, left_tokens
