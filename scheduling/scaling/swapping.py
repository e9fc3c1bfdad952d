"""When the GPUs shared by several models are given to another one. The same rules apply under both clocks.

*On demand*, as in llama-swap: a sleeping instance with requests waiting wakes as soon as the awake one is idle. A busy
one keeps the GPUs until swaps take at most a tenth of the time.

*By queue*, for request groups (QLM section 5): instances that share their GPUs have one virtual queue, and the model of
its first group is next. So the global scheduler decides about swaps, whose times it counts. A busy instance keeps the
GPUs while no group of its model waits behind the first and the others have time for one more stay of it. The tenth of
the time bounds all swaps; otherwise two tight classes would pass the GPUs back and forth and neither would be served.
Until then the groups of the awake instance go first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from scheduling.fleet.arrays import FleetArrays
from scheduling.queueing.groups import NONE, GroupArrays, put_first
from scheduling.queueing.swapping.keeping import kept_queues
from scheduling.queueing.swapping.service import due_at, group_s
from scheduling.queueing.swapping.sharing import SWAPPING_SHARE
from scheduling.queueing.swapping.timeline import change_s
from scheduling.queueing.virtual_queues import head
from scheduling.queueing.waiting_set import WaitingArrays

LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Resting:
    """A sleeping instance with requests waiting for its model that nothing else will serve."""

    instance: int
    name: str
    model: str
    waiting: int
    swap_s: float
    """Time of a swap to it once the awake instance runs nothing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The instance that is awake."""

    name: str
    is_ready: bool
    is_idle: bool
    """Nothing runs on it, and nothing waits for its model."""
    ready_s: float
    """For how long it has been ready."""


class SwapMember(NamedTuple):
    """One of the instances that share GPUs."""

    key: int
    """By which swaps name it."""
    name: str
    model: str
    instance: int
    """Its number in the arrays; -1 for none."""
    endpoint: int
    """-1 for none."""
    at_rest: bool
    """Whether a swap could bring it up."""
    served: bool
    """Whether an instance of its endpoint serves, or starts."""
    swap_s: float
    """Duration of a swap to it once the awake one runs nothing."""


class SwapGroup(NamedTuple):
    """Instances that share their GPUs, of which at most one is awake."""

    name: str
    members: Sequence[SwapMember]
    awake: SwapMember | None
    """The one that has the GPUs."""
    is_ready: bool
    """Whether that one serves."""
    since_s: float
    """When it got into its state."""
    target: SwapMember | None
    """To which a swap in progress leads."""
    in_progress: bool

    @property
    def serves(self) -> int:
        """The endpoint that has the GPUs, or will once the swap in progress is done; -1 for none."""
        next_up = self.target if self.in_progress else self.awake
        return NONE if next_up is None or next_up.instance < 0 else next_up.endpoint


def swap_wanted(resting: Iterable[Resting], holder: Holder | None) -> tuple[int, str] | None:
    """Return the instance of a swap group that should get the GPUs now, and why; None to leave them where they are.

    It is the one for which most requests wait, the first of equals.
    """
    target = max(resting, key=lambda one: one.waiting, default=None)
    if target is None or (holder is not None and not holder.is_ready):
        return None
    if holder is None:
        why = "nothing has the GPUs"
    elif holder.is_idle:
        why = f"{holder.name} is idle"
    elif holder.ready_s * SWAPPING_SHARE >= target.swap_s:
        why = f"{holder.name} has held the GPUs for {holder.ready_s:.0f} s"
    else:
        return None
    return target.instance, f"{target.waiting} requests wait for {target.model}, and {why}."


def swap_by_queue(
    fleet: FleetArrays,
    waiting: WaitingArrays,
    queue: int,
    serves: int,
    holder: Holder | None,
    resting: Callable[[int], Resting | None],
    now_s: float,
) -> tuple[int, str] | None:
    """Like `swap_wanted`, for instances that share the virtual *queue*: the one whose model its first group is of.

    *serves* is the endpoint that has the GPUs, or will after the swap in progress; -1 for none. *resting*
    returns the sleeping instance that serves an endpoint, None if there is none. The groups of *serves* go first
    while it starts, and if the GPUs should stay, also for requests still to come (`kept_queues`). An operator's
    pin of the first group forces the swap.
    """
    arrays = waiting.groups
    group = head(arrays, queue)
    if group < 0:
        return None
    first: Any = arrays.groups[group]
    target, wanted = None if first.endpoint == serves else resting(int(first.endpoint)), None
    if target is not None and holder is not None and holder.is_ready and first.pinned:
        wanted = target.instance, f"An operator wants group {int(first.number)} of {target.model} served first."
    elif target is not None and queue not in kept_queues(fleet, waiting):
        stay_s = target.swap_s / SWAPPING_SHARE
        stays = holder is not None and not holder.is_idle and not has_groups(arrays, queue, serves)
        if not stays or slack_s(fleet, waiting, queue, serves, now_s) <= stay_s:
            wanted = swap_wanted([target], holder)
    if wanted is None and serves != NONE:
        put_first(arrays, queue, serves)
    return wanted


def slack_s(fleet: FleetArrays, waiting: WaitingArrays, queue: int, serves: int, now_s: float) -> float:
    """Return how many seconds later a swap to the model of the first group of *queue* may start.

    Until then no group of that model becomes late that is before any other model's; negative if one is late already.
    The holder of the GPUs, of the endpoint *serves*, completes its requests before.
    """
    arrays, least_s = waiting.groups, math.inf
    group = head(arrays, queue)
    endpoint = int(arrays.groups[group]["endpoint"])
    member, holder = _member(fleet, arrays, queue, endpoint), _member(fleet, arrays, queue, serves)
    running = 0.0 if holder == NONE else float(fleet.running[holder])
    time_s = now_s + float(change_s(fleet, arrays, holder, running, member))
    while group >= 0 and arrays.groups[group]["endpoint"] == endpoint:
        time_s += group_s(fleet, arrays, group, member)
        least_s = min(least_s, due_at(waiting, group) - time_s)
        group = int(arrays.groups[group]["following"])
    return least_s


def _member(fleet: FleetArrays, arrays: GroupArrays, queue: int, endpoint: int) -> int:
    """Return the instance that serves *endpoint* from the virtual *queue*; -1 for none."""
    count = fleet.endpoint.size
    at = np.flatnonzero((arrays.queue_of[:count] == queue) & (fleet.endpoint == endpoint))
    return int(at[0]) if at.size and endpoint != NONE else NONE


def has_groups(arrays: GroupArrays, queue: int, endpoint: int) -> bool:
    """Whether a group of *endpoint* is in the virtual *queue*."""
    groups: Any = arrays.groups
    return bool(((groups["queue"] == queue) & (groups["endpoint"] == endpoint)).any())
