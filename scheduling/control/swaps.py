"""When the GPUs that several models share are given to another one.

*On demand*, as in llama-swap: a sleeping instance with requests waiting wakes as soon as the awake one is idle. A busy
one keeps the GPUs until swaps take at most a tenth of the time.

*By queue*, for request groups (QLM section 5): instances that share their GPUs have one virtual queue, and the model of
its first group is next. So the global scheduler decides about swaps, whose times it counts. A busy instance keeps the
GPUs while no group of its model waits behind the first and the others have time for one more stay of it. The tenth of
the time bounds all swaps; otherwise two tight classes would pass the GPUs back and forth and neither would be served.
Until then the groups of the awake instance go first, and while one starts, or the GPUs should stay for requests still to
come (`kept_queues`), its groups.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

from scheduling.control.fleet import Fleet, SwapGroup
from scheduling.queueing.groups import NONE, GroupArrays, put_first
from scheduling.queueing.swapping.keeping import kept_queues
from scheduling.queueing.swapping.service import due_at, group_s
from scheduling.queueing.swapping.sharing import SWAPPING_SHARE
from scheduling.queueing.swapping.timeline import change_s
from scheduling.queueing.virtual_queues import head

EVERY_S: Final = 1.0
RETRY_S: Final = 5.0
"""Time after a requested swap until the fleet shows it, or until one that failed is retried."""
REFUSED_S: Final = 30.0
"""Time after a failed swap by queue during which the awake instance continues to serve."""

Wanted = tuple[int, str]
"""The instance that should get the GPUs, and why."""


class Swaps:
    """Call `wanted` every `EVERY_S`.

    *early* says why an instance of an endpoint should be brought up while the GPUs are idle; "" for no reason.
    """

    def __init__(self, fleet: Fleet, early: Callable[[int], str] = lambda endpoint: "") -> None:
        self.fleet, self._early = fleet, early
        self._requested: dict[str, tuple[float, int]] = {}  # when and to which, by group, until the fleet shows it
        self._refused_s: dict[str, float] = {}

    def wanted(self) -> Iterator[Wanted]:
        """Yield each instance that should get the GPUs of its group now, with the reason."""
        now_s = self.fleet.now_s
        for group in self.fleet.swap_groups():
            requested = self._requested.get(group.name)
            if requested and (group.in_progress or group.awake == requested[1]):
                del self._requested[group.name]  # a quick swap begins and ends between two checks
                requested = None
            if group.in_progress:
                self._keep(group)
            elif requested and now_s - requested[0] < RETRY_S:
                continue
            elif swap := self._swap(group, now_s):
                self._requested[group.name] = now_s, swap[0]
                yield swap

    def keep(self) -> None:
        """Let the awake instances serve their models while no swap can be requested."""
        for group in self.fleet.swap_groups():
            self._keep(group)

    def _swap(self, group: SwapGroup, now_s: float) -> Wanted | None:
        fleet, queue, not_made = self.fleet, self._queue(group), self._requested.pop(group.name, None)
        if queue == NONE:
            waiting = fleet.waiting.size
            asked = [one for one in group.at_rest if waiting[of := self._endpoint(one)] and not fleet.is_served(of)]
            return self._on_demand(group, asked) or self._before_calls(group)
        if not_made:
            self._refused_s[group.name] = now_s
        if now_s - self._refused_s.get(group.name, -REFUSED_S) < REFUSED_S:
            self._keep(group)
            return None
        swap = self._by_queue(group, queue)
        if swap is None and (serves := self._serves(group)) != NONE:
            fleet.pump(serves)  # its groups may be first again
        return swap

    def _on_demand(self, group: SwapGroup, asked: Iterable[int]) -> Wanted | None:
        """Return the instance of *asked* for which most requests wait, the first of equals, if it should get the GPUs."""
        waiting = self.fleet.waiting.size
        target = max(asked, key=lambda one: int(waiting[self._endpoint(one)]), default=NONE)
        if target == NONE or (group.awake != NONE and not group.is_ready):
            return None
        if group.awake == NONE:
            why = "nothing has the GPUs"
        elif self._is_idle(group):
            why = f"{self.fleet.name(group.awake)} is idle"
        elif group.ready_s * SWAPPING_SHARE >= group.at_rest[target]:
            why = f"{self.fleet.name(group.awake)} has held the GPUs for {group.ready_s:.0f} s"
        else:
            return None
        endpoint = self._endpoint(target)
        return target, f"{waiting[endpoint]} requests wait for {self.fleet.endpoints[endpoint].model}, and {why}."

    def _before_calls(self, group: SwapGroup) -> Wanted | None:
        """Return the instance whose model will probably be called, and why; None while the GPUs have work."""
        if group.awake == NONE or (group.is_ready and self._is_idle(group)):
            for one in group.at_rest:
                if why := self._early(self._endpoint(one)):
                    return one, why
        return None

    def _by_queue(self, group: SwapGroup, queue: int) -> Wanted | None:
        """Return the instance whose model the first group of *queue* is of, if it should get the GPUs.

        An operator's pin of the first group forces the swap.
        """
        fleet, arrays, serves, wanted = self.fleet, self.fleet.waiting.groups, self._serves(group), None
        if (at := head(arrays, queue)) < 0:
            return None
        first: Any = arrays.groups[at]
        targets = [one for one in group.at_rest if self._endpoint(one) == first.endpoint != serves]
        if targets and first.pinned and group.is_ready:
            model = fleet.endpoints[int(first.endpoint)].model
            wanted = targets[0], f"An operator wants group {int(first.number)} of {model} served first."
        elif targets and queue not in kept_queues(fleet.instances, fleet.waiting):
            stay_s = group.at_rest[targets[0]] / SWAPPING_SHARE
            stays = group.awake != NONE and not self._is_idle(group) and not has_groups(arrays, queue, serves)
            if not stays or slack_s(fleet, queue, serves) <= stay_s:
                wanted = self._on_demand(group, targets)
        if wanted is None and serves != NONE:
            put_first(arrays, queue, serves)
        return wanted

    def _keep(self, group: SwapGroup) -> None:
        """Serve the model that is awake or starting first."""
        queue, serves = self._queue(group), self._serves(group)
        if NONE not in (queue, serves):
            put_first(self.fleet.waiting.groups, queue, serves)
            self.fleet.pump(serves)

    def _queue(self, group: SwapGroup) -> int:
        """Return the virtual queue of *group*; -1 where each of its instances has a separate one."""
        arrays = self.fleet.waiting.groups
        shared = (one for one in (*group.at_rest, group.awake, group.target) if one != NONE)
        return next((int(arrays.queue_of[one]) for one in shared if arrays.swap_s[one] < math.inf), NONE)

    def _serves(self, group: SwapGroup) -> int:
        """Return the endpoint that has the GPUs, or will once the swap in progress is done; -1 for none."""
        one = group.target if group.in_progress else group.awake
        return NONE if one == NONE else self._endpoint(one)

    def _is_idle(self, group: SwapGroup) -> bool:
        """Whether nothing runs on the instance that is awake, and nothing waits for its model."""
        waiting, endpoint, queue = self.fleet.waiting, self._endpoint(group.awake), self._queue(group)
        waits = waiting.size[endpoint] > 0 if queue == NONE else has_groups(waiting.groups, queue, endpoint)
        return not waits and not self.fleet.instances.running[group.awake]

    def _endpoint(self, instance: int) -> int:
        return int(self.fleet.instances.endpoint[instance])


def slack_s(fleet: Fleet, queue: int, serves: int) -> float:
    """Return how many seconds later a swap to the model of the first group of *queue* may start.

    Until then no group of that model becomes late that is before any other model's; negative if one is late already.
    The holder of the GPUs, of the endpoint *serves*, completes its requests before.
    """
    instances, waiting, arrays, least_s = fleet.instances, fleet.waiting, fleet.waiting.groups, math.inf
    group = head(arrays, queue)
    endpoint = int(arrays.groups[group]["endpoint"])
    member, holder = _member(fleet, queue, endpoint), _member(fleet, queue, serves)
    running = 0.0 if holder == NONE else float(instances.running[holder])
    time_s = fleet.now_s + float(change_s(instances, arrays, holder, running, member))
    while group >= 0 and arrays.groups[group]["endpoint"] == endpoint:
        time_s += group_s(instances, arrays, group, member)
        least_s = min(least_s, due_at(waiting, group) - time_s)
        group = int(arrays.groups[group]["following"])
    return least_s


def _member(fleet: Fleet, queue: int, endpoint: int) -> int:
    """Return the instance that serves *endpoint* from the virtual *queue*; -1 for none."""
    of = fleet.instances.endpoint
    at = np.flatnonzero((fleet.waiting.groups.queue_of[: of.size] == queue) & (of == endpoint))
    return int(at[0]) if at.size and endpoint != NONE else NONE


def has_groups(arrays: GroupArrays, queue: int, endpoint: int) -> bool:
    """Whether a group of *endpoint* is in the virtual *queue*."""
    groups: Any = arrays.groups
    return bool(((groups["queue"] == queue) & (groups["endpoint"] == endpoint)).any())
