"""Which model has the GPUs that several share: the rules of `scheduling.scaling.swapping` on the swap groups of a fleet."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from scheduling.control.fleet import Fleet
from scheduling.queueing.groups import NONE, put_first
from scheduling.scaling.swapping import (
    Holder,
    Resting,
    SwapGroup,
    SwapMember,
    has_groups,
    swap_by_queue,
    swap_wanted,
)

RETRY_S: Final = 5.0
"""Time after a requested swap until the fleet shows it, or until one that failed is retried."""
REFUSED_S: Final = 30.0
"""Time after a failed swap by queue during which the awake instance continues to serve."""


class Swaps:
    """*early* says why an instance of an endpoint should be brought up while the GPUs are idle; "" for no reason."""

    def __init__(self, fleet: Fleet, early: Callable[[int], str] = lambda endpoint: "") -> None:
        self.fleet, self._early = fleet, early
        self._requested: dict[str, tuple[float, int]] = {}  # when and to which, by group, until the fleet shows it
        self._refused_s: dict[str, float] = {}

    def wanted(self, wall_s: float) -> Iterator[tuple[int, str]]:
        """Yield the key of each instance that should get the GPUs of its group, with the reason.

        *wall_s* is now, on the clock of `SwapGroup.since_s`.
        """
        now_s = self.fleet.now_s
        for group in self.fleet.swap_groups():
            requested = self._requested.get(group.name)
            if requested and (group.in_progress or (group.awake and group.awake.key == requested[1])):
                del self._requested[group.name]  # a quick swap begins and ends between two checks
                requested = None
            if group.in_progress:
                self._keep(group)
            elif requested and now_s - requested[0] < RETRY_S:
                continue
            elif swap := self._swap(group, now_s, wall_s):
                self._requested[group.name] = now_s, swap[0]
                yield swap

    def keep(self) -> None:
        """Let the awake instances serve their models while no swap can be requested."""
        for group in self.fleet.swap_groups():
            self._keep(group)

    def _swap(self, group: SwapGroup, now_s: float, wall_s: float) -> tuple[int, str] | None:
        fleet, not_made, queue = self.fleet, self._requested.pop(group.name, None), self._queue(group)
        holder = self._holder(group, queue, wall_s)
        at_rest = [one for one in group.members if one.at_rest]
        if queue == NONE:
            waiting = fleet.waiting.size
            rest = [self._resting(one) for one in at_rest if not one.served and waiting[one.endpoint]]
            return swap_wanted(rest, holder) or self._before_calls(at_rest, holder)
        if not_made:
            self._refused_s[group.name] = now_s
        if now_s - self._refused_s.get(group.name, -REFUSED_S) < REFUSED_S:
            self._keep(group)
            return None
        of = {one.endpoint: self._resting(one) for one in at_rest if one.instance >= 0}
        swap = swap_by_queue(fleet.instances, fleet.waiting, queue, group.serves, holder, of.get, now_s)
        if swap is None and group.serves != NONE:
            fleet.pump(group.serves)  # its groups may be first again
        return swap

    def _before_calls(self, at_rest: Sequence[SwapMember], holder: Holder | None) -> tuple[int, str] | None:
        """Return the instance whose model will probably be called, and why; None while the GPUs have work."""
        if holder is None or (holder.is_ready and holder.is_idle):
            for member in at_rest:
                if why := self._early(member.endpoint):
                    return member.key, why
        return None

    def _queue(self, group: SwapGroup) -> int:
        """Return the virtual queue of *group*; -1 where each of its instances has a separate one."""
        arrays = self.fleet.waiting.groups
        shared = (one.instance for one in group.members if one.instance >= 0)
        return next((int(arrays.queue_of[one]) for one in shared if arrays.swap_s[one] < float("inf")), NONE)

    def _keep(self, group: SwapGroup) -> None:
        """Serve the model that is awake or starting first."""
        queue, serves = self._queue(group), group.serves
        if NONE not in (queue, serves):
            put_first(self.fleet.waiting.groups, queue, serves)
            self.fleet.pump(serves)

    def _resting(self, member: SwapMember) -> Resting:
        waiting = int(self.fleet.waiting.size[member.endpoint])
        return Resting(member.key, member.name, member.model, waiting, member.swap_s)

    def _holder(self, group: SwapGroup, queue: int, wall_s: float) -> Holder | None:
        if (awake := group.awake) is None:
            return None
        waiting, endpoint = self.fleet.waiting, awake.endpoint
        waits = endpoint != NONE and bool(waiting.size[endpoint])
        if NONE not in (queue, endpoint):
            waits = has_groups(waiting.groups, queue, endpoint)
        runs = awake.instance >= 0 and bool(self.fleet.instances.running[awake.instance])
        return Holder(awake.name, group.is_ready, not waits and not runs, wall_s - group.since_s)
