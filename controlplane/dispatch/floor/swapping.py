"""Which swaps the floor asks for: the rule of `scheduling.scaling.swapping` on the groups of the inventory."""

from collections.abc import Callable, Iterator

from controlplane.dispatch.live_fleet.inventory import SwapGroupSpec
from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.scaling.swapping import Holder, Resting, swap_wanted

RETRY_S = 5.0
"""After a swap was asked for: until the rows show it, or it could not be made."""
AT_REST = frozenset({InstanceState.SLEEPING, InstanceState.STOPPED})


class Swapping:
    """*waiting* counts the requests that an endpoint holds."""

    def __init__(self, topology: Topology, waiting: Callable[[Endpoint], int]) -> None:
        self.topology = topology
        self._waiting = waiting
        self._asked_s: dict[str, float] = {}  # by group

    def wanted(self, now_s: float, wall_s: float) -> Iterator[tuple[int, str]]:
        """The instances, by key, that are to have the GPUs of their groups now, each with the reason."""
        for group in self.topology.swap_groups:
            if group.in_progress or now_s - self._asked_s.get(group.name, -RETRY_S) < RETRY_S:
                continue
            if swap := swap_wanted(self._resting(group), self._holder(group, wall_s)):
                self._asked_s[group.name] = now_s
                yield swap

    def _resting(self, group: SwapGroupSpec) -> Iterator[Resting]:
        for member in group.members:
            endpoint = self.topology.endpoint(member.model, member.region)
            if endpoint is None or member.state not in AT_REST or not (waiting := self._waiting(endpoint)):
                continue
            if not any(replica.spec.state in PRESENT for replica in self.topology.members(endpoint)):
                yield Resting(member.instance_id, member.name, member.model, waiting, member.swap_s)

    def _holder(self, group: SwapGroupSpec, wall_s: float) -> Holder | None:
        if (awake := group.awake) is None:
            return None
        endpoint = self.topology.endpoint(awake.model, awake.region)
        replica = self.topology.replicas.get(awake.instance_id)
        idle = not (endpoint and self._waiting(endpoint)) and not (replica and replica.requests)
        is_ready = awake.state == InstanceState.READY
        return Holder(awake.name, is_ready, idle, wall_s - awake.state_changed_at)
