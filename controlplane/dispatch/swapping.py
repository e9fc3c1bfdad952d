"""Swaps requested by the floor: the rules of `scheduling.scaling.swapping` applied to the groups of the inventory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from controlplane.dispatch.live_fleet.inventory import SwapGroupSpec, SwapMemberSpec
from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from controlplane.dispatch.prewarming import Prewarming
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.queueing.groups import NONE, put_first
from scheduling.scaling.swapping import Holder, Resting, has_groups, swap_by_queue, swap_wanted

RETRY_S = 5.0
"""Time after a requested swap until the rows show it, or until one that failed is retried."""
REFUSED_S = 30.0
"""Time after a failed swap by queue during which the awake instance continues to serve."""
AT_REST = frozenset({InstanceState.SLEEPING, InstanceState.STOPPED})


@dataclass(frozen=True, slots=True)
class _Shared:
    """The virtual queue shared by the instances of a swap group."""

    queue: int
    serves: int
    """Endpoint that has the GPUs, or will once the swap in progress is done; -1 for none."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A requested swap: when, and to which instance."""

    at_s: float
    instance_id: int


class Swapping:
    """Swap decisions. *pump* gives out requests where there is room; *prewarming* says which models are likely next."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        pump: Callable[[Endpoint], None],
        prewarming: Prewarming | None = None,
    ) -> None:
        self.topology = topology
        self._queue = queue
        self._pump, self._prewarming = pump, prewarming
        self._asked: dict[str, _Asked] = {}  # by group, until the rows show it
        self._refused_s: dict[str, float] = {}

    def wanted(self, now_s: float, wall_s: float) -> Iterator[tuple[int, str]]:
        """Yield the key of each instance that should get the GPUs of its group, with the reason."""
        for group in self.topology.swap_groups:
            shared = self._shared(group)
            asked = self._asked.get(group.name)
            if asked and (group.in_progress or (group.awake and group.awake.instance_id == asked.instance_id)):
                del self._asked[group.name]  # a quick swap begins and ends between two checks
                asked = None
            if group.in_progress:
                self._keep(shared)
            elif asked and now_s - asked.at_s < RETRY_S:
                continue
            elif swap := self._swap(group, shared, now_s, wall_s):
                self._asked[group.name] = _Asked(now_s, swap[0])
                yield swap

    def keep(self) -> None:
        """Let the awake instance serve its model while no swap can be requested."""
        for group in self.topology.swap_groups:
            self._keep(self._shared(group))

    def _swap(
        self, group: SwapGroupSpec, shared: _Shared | None, now_s: float, wall_s: float
    ) -> tuple[int, str] | None:
        holder, not_made = self._holder(group, wall_s, shared), self._asked.pop(group.name, None)
        if shared is None:
            return swap_wanted(self._resting(group), holder) or self._early(group, holder)
        if not_made:
            self._refused_s[group.name] = now_s
        if now_s - self._refused_s.get(group.name, -REFUSED_S) < REFUSED_S:
            self._keep(shared)
            return None
        at_rest = {
            endpoint.index: member
            for member in group.members
            if member.instance_id in self.topology.replicas
            and member.state in AT_REST
            and (endpoint := self.topology.endpoint(member.model, member.region)) is not None
        }

        def resting(index: int) -> Resting | None:
            member = at_rest.get(index)
            return _as_resting(member, self._queue.count(self.topology.endpoints[index])) if member else None

        fleet, waiting, clock_s = self.topology.fleet, self._queue.arrays, now_s
        swap = swap_by_queue(fleet, waiting, shared.queue, shared.serves, holder, resting, clock_s)
        if swap is None:
            self._pump_served(shared)
        return swap

    def _early(self, group: SwapGroupSpec, holder: Holder | None) -> tuple[int, str] | None:
        """Return the sleeping instance whose model will probably be called, and why; None while the GPUs have work."""
        if self._prewarming is None or (holder is not None and not (holder.is_ready and holder.is_idle)):
            return None
        for member in group.members:
            endpoint = self.topology.endpoint(member.model, member.region)
            if member.state in AT_REST and endpoint is not None and (call := self._prewarming.wakes(endpoint)):
                return member.instance_id, self._prewarming.woken(endpoint, call)
        return None

    def _shared(self, group: SwapGroupSpec) -> _Shared | None:
        """Return the virtual queue of *group*; None where each of its instances has a separate one."""
        replicas = [
            self.topology.replicas[one.instance_id]
            for one in group.members
            if one.instance_id in self.topology.replicas
        ]
        arrays = self._queue.arrays.groups
        slots = [
            one.slot for one in replicas if one.slot < arrays.swap_s.size and arrays.swap_s[one.slot] < float("inf")
        ]
        if not slots:
            return None
        serves = group.target if group.target is not None else group.awake.instance_id if group.awake else None
        replica = None if serves is None else self.topology.replicas.get(serves)
        return _Shared(int(arrays.queue_of[slots[0]]), replica.endpoint.index if replica else NONE)

    def _keep(self, shared: _Shared | None) -> None:
        """Serve the model that is awake or coming up first."""
        if shared is not None and shared.serves != NONE:
            put_first(self._queue.arrays.groups, shared.queue, shared.serves)
            self._pump_served(shared)

    def _pump_served(self, shared: _Shared) -> None:
        """Give out requests that wait for the model that has the GPUs."""
        if shared.serves != NONE:
            self._pump(self.topology.endpoints[shared.serves])

    def _resting(self, group: SwapGroupSpec) -> Iterator[Resting]:
        for member in group.members:
            endpoint = self.topology.endpoint(member.model, member.region)
            if endpoint is None or member.state not in AT_REST or not (waiting := self._queue.count(endpoint)):
                continue
            if not any(replica.spec.state in PRESENT for replica in self.topology.members(endpoint)):
                yield _as_resting(member, waiting)

    def _holder(self, group: SwapGroupSpec, wall_s: float, shared: _Shared | None) -> Holder | None:
        if (awake := group.awake) is None:
            return None
        endpoint = self.topology.endpoint(awake.model, awake.region)
        replica = self.topology.replicas.get(awake.instance_id)
        if shared is not None and endpoint is not None:
            waits = has_groups(self._queue.arrays.groups, shared.queue, endpoint.index)
        else:
            waits = endpoint is not None and self._queue.count(endpoint) > 0
        idle = not waits and not (replica and replica.requests)
        return Holder(awake.name, awake.state == InstanceState.READY, idle, wall_s - awake.state_changed_at)


def _as_resting(member: SwapMemberSpec, waiting: int) -> Resting:
    return Resting(member.instance_id, member.name, member.model, waiting, member.swap_s)
