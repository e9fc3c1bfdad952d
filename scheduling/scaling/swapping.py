"""When the GPUs that several models share are given to another one. The same rules under both clocks.

*On demand*, as llama-swap does: who is at rest and has requests waiting wakes as soon as who is awake is idle. While that
one is busy it keeps the GPUs until swaps take a tenth of the time at most.

*By queue*, where what waits is in request groups (QLM section 5): instances that share their GPUs have one virtual queue,
and the model of its first group is the next. So the global scheduler decides about swaps, whose times it counts. Who is
busy keeps the GPUs as long as no group of its model waits behind and the others have time for one more stay of it. That
tenth of the time bounds all of it, or two tight classes would pass the GPUs to and fro and neither be served: until then the
groups of who is awake go first.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from scheduling.fleet.arrays import FleetArrays
from scheduling.queueing.groups import NONE, GroupArrays, put_first
from scheduling.queueing.swapping.keeping import kept_queues
from scheduling.queueing.swapping.service import due_at, group_s
from scheduling.queueing.swapping.timeline import change_s
from scheduling.queueing.virtual_queues import head
from scheduling.queueing.waiting_set import WaitingArrays

SWAPPING_SHARE: Final = 0.1
"""Of the time, that swaps may take where several models have work."""
LOOK_S: Final = 1.0
MOST_EXPONENT: Final = 50.0


@dataclass(frozen=True, slots=True)
class Resting:
    """An instance at rest, for whose model requests wait that nothing else will serve."""

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
    """As `swap_wanted`, for instances that share the virtual *queue*: the one whose model its first group is of.

    *serves* is the endpoint that has the GPUs, or will once the swap in progress is done; -1 for none. *resting* gives
    the instance at rest that serves an endpoint, None where there is none. The groups of *serves* go first while it comes
    up, and where the GPUs are to stay, as they are also for what is still to come (`kept_queues`). An operator's pin of the
    first group is an order to swap.
    """
    arrays = waiting.groups
    group = head(arrays, queue, now_s)
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
    """How much later a swap to the model of the first group of *queue* may begin, in seconds, until a group of that model
    is late which stands there before any other model's; negative where one is already. Who has the GPUs, of the endpoint
    *serves*, ends what it runs before."""
    arrays, least_s = waiting.groups, math.inf
    group = head(arrays, queue, now_s)
    endpoint = int(arrays.groups[group]["endpoint"])
    member, holder = _member(fleet, arrays, queue, endpoint), _member(fleet, arrays, queue, serves)
    running = 0.0 if holder == NONE else float(fleet.running[holder])
    time_s = now_s + float(change_s(fleet, arrays, holder, running, member))
    while group >= 0 and arrays.groups[group]["endpoint"] == endpoint:
        time_s += group_s(fleet, arrays, group, member)
        least_s = min(least_s, due_at(waiting, group) - time_s)
        group = int(arrays.groups[group]["following"])
    return least_s


class Leaving(NamedTuple):
    """When who has the GPUs leaves them for another model, as `swap_by_queue` has it."""

    mean_s: float
    variance_s2: float
    runs: float
    """How likely it is that something runs there by then, so that it drains."""


def leaving(given_s: float, limit_s: float, busy_s: float) -> Leaving:
    """What waits for it is given out in *given_s*. Then it stays while it is busy, as it will be for *busy_s* on average
    (exponentially distributed), and until *limit_s* at most."""
    rest_s = max(0.0, limit_s - given_s)
    if busy_s <= 0.0 or rest_s == 0.0:
        return Leaving(given_s, 0.0, 1.0 if busy_s > 0.0 else 0.0)
    if math.isinf(busy_s):
        return Leaving(given_s + rest_s, 0.0, 1.0)
    ratio = rest_s / busy_s
    runs = math.exp(-ratio)
    lost = 2.0 * ratio * runs if math.isfinite(ratio) else 0.0
    return Leaving(given_s + busy_s * (1.0 - runs), busy_s**2 * max(0.0, 1.0 - lost - runs * runs), runs)


def busy_spell_s(per_s: float, lasts_s: float, running: float = 1.0) -> float:
    """For how long something runs, on average, from when *running* requests do, where others come *per_s* a second and each
    runs for *lasts_s*, exponentially distributed, at once (M/M/infinity): until one less runs, and so on to none."""
    load = per_s * lasts_s
    if load > MOST_EXPONENT:
        return math.inf
    total = 0.0
    for left in range(1, max(1, round(running)) + 1):
        term = one_less = 1.0 / left
        more = 1
        while term > 1e-9 * one_less:
            term *= load / (left + more)
            one_less += term
            more += 1
        total += one_less
    return lasts_s * total


def _member(fleet: FleetArrays, arrays: GroupArrays, queue: int, endpoint: int) -> int:
    """The instance that serves *endpoint* out of the virtual *queue*; -1 for none."""
    count = fleet.endpoint.size
    at = np.flatnonzero((arrays.queue_of[:count] == queue) & (fleet.endpoint == endpoint))
    return int(at[0]) if at.size and endpoint != NONE else NONE


def has_groups(arrays: GroupArrays, queue: int, endpoint: int) -> bool:
    """Whether a group of *endpoint* stands in the virtual *queue*."""
    groups: Any = arrays.groups
    return bool(((groups["queue"] == queue) & (groups["endpoint"] == endpoint)).any())
