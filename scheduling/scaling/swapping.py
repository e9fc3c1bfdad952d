"""Swaps on demand: a model that is asked for while another has its GPUs gets them, not too often. One rule for both clocks.

As llama-swap does: who is at rest and has requests waiting wakes as soon as who is awake is idle. While that one is busy it
keeps the GPUs until swaps take a tenth of the time at the most.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SWAPPING_SHARE: Final = 0.1
"""Of the time, that swaps may take where several models have work."""
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Resting:
    """An instance at rest, for whose model requests wait that nothing else will serve."""

    instance: int
    name: str
    model: str
    waiting: int
    swap_s: float
    """What a swap to it takes when nothing runs any more on who is awake."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The instance that is awake."""

    name: str
    is_ready: bool
    is_idle: bool
    """Nothing runs on it, and nothing waits for its model."""
    ready_s: float
    """For how long it has been ready."""


def swap_wanted(resting: Iterable[Resting], holder: Holder | None) -> tuple[int, str] | None:
    """The instance of a swap group that is to have the GPUs now, and why; None to leave them where they are.

    The one for which most requests wait, of these the first.
    """
    target = max(resting, key=lambda one: one.waiting, default=None)
    if target is None or (holder is not None and not holder.is_ready):
        return None
    if holder is None:
        why = "nothing has the GPUs"
    elif holder.is_idle:
        why = f"{holder.name} is idle"
    elif holder.ready_s * SWAPPING_SHARE >= target.swap_s:
        why = f"{holder.name} has had the GPUs for {holder.ready_s:.0f} s"
    else:
        return None
    return target.instance, f"{target.waiting} requests wait for {target.model}, and {why}."
