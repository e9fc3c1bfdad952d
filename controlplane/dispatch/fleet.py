"""The live fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the dispatcher."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.request_table import LiveRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.port import Asked
from controlplane.dispatch.waiting_queue import WaitingQueue, first_due_of
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.control.fleet import SwapGroup
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.carried import OUTPUT, PROMPT
from scheduling.queueing.groups import NONE
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.queueing.running import Running, running_of
from scheduling.queueing.waiting_set import WaitingArrays

AT_REST: Final = frozenset({InstanceState.SLEEPING, InstanceState.STOPPED})
LEAVING_S: Final = 5.0
"""Time after which a request to be evicted is assumed to stay: it had begun to emit what cannot be continued."""


class LiveFleet:
    """Rows are those of *requests*; the actions are the dispatcher's."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        requests: LiveRequests,
        *,
        enqueue: Callable[[Request, Endpoint], None],
        expire: Callable[[Request], None],
        spot_with_room: Callable[[Asked], Endpoint | None],
        pump: Callable[[Endpoint], None],
        evict: Callable[[int], object],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.topology, self.waiting_queue, self.requests = topology, queue, requests
        self._enqueue, self._expire, self._spot_with_room = enqueue, expire, spot_with_room
        self._pump, self._evict, self.wall_clock = pump, evict, wall_clock

    @property
    def now_s(self) -> float:
        return self.waiting_queue.clock()

    @property
    def instances(self) -> FleetArrays:
        return self.topology.fleet

    @property
    def members(self) -> EndpointArrays:
        return self.topology.arrays

    @property
    def waiting(self) -> WaitingArrays:
        return self.waiting_queue.arrays

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self.topology.endpoints

    def request(self, row: int) -> Request:
        """Return the open request of *row*."""
        request = self.requests.of[row]
        assert request is not None
        return request

    def serves(self, endpoint: int) -> bool:
        return self.topology.serves(self.topology.endpoints[endpoint])

    def spot_with_room(self, row: int) -> int:
        endpoint = self._spot_with_room(self.request(row).asked)
        return -1 if endpoint is None else endpoint.index

    def occupancy(self) -> NDArray[np.int64]:
        topology, fleet = self.topology, self.topology.fleet
        rows = np.zeros((len(topology.endpoints), 10), np.int64)
        held = list[tuple[int, Request]]()
        for replica in topology.replicas.values():
            slot, at = replica.slot, replica.endpoint.index
            if not fleet.accepting[slot]:
                continue
            prompt, output = fleet.given_tokens[slot, PROMPT], fleet.given_tokens[slot, OUTPUT]
            given = (1, int(prompt), int(output)) if output > 0 else (0, 0, 0)
            rows[at] += (
                int(fleet.kv_capacity_tokens[slot]), topology.at_once(replica), 0, 0, 0, 0, 1, *given,
            )  # fmt: skip
            held += ((at, request) for request in replica.requests)
        for endpoint in topology.endpoints:
            held += ((endpoint.index, request) for request in self.waiting_queue.of(endpoint))
        for at, request in held:
            other = not request.asked.interactive
            rows[at, 2 + other] += request.expected_tokens
            rows[at, 4 + other] += request.asked.sequences
        return rows

    def running_requests(self) -> Running:
        return running_of(
            self._running(request, replica)
            for replica in self.topology.replicas.values()
            if self.waiting_queue.grouped(replica.endpoint)
            for request in replica.requests
        )

    def _running(self, request: Request, replica: Replica) -> tuple[Any, ...]:
        """Return the fields of `Running`. The output of an answer that is not streamed is unknown, so it stays."""
        asked, now_s = request.asked, self.now_s
        resumable = asked.evictable or not request.output_tokens
        output = request.expected_tokens - request.expected_prompt
        due_s = first_due_of(replica.endpoint.profile, asked, request.expected_prompt, output)
        return (
            request.row,
            replica.slot,
            asked.arrived_s + (due_s if due_s < math.inf else NO_DEADLINE_S),
            asked.allowed_s,
            asked.priority,
            asked.prompt_tokens,
            request.output_tokens,
            request.expected_tokens,
            request.evictions,
            resumable and asked.streamed and asked.sequences == 1,
            request.evicting_s is not None and now_s - request.evicting_s < LEAVING_S,
        )

    def swap_groups(self) -> Iterator[SwapGroup]:
        wall_s, replicas = self.wall_clock(), self.topology.replicas
        for group in self.topology.swap_groups:
            slots = {
                one.instance_id: replicas[one.instance_id].slot for one in group.members if one.instance_id in replicas
            }
            known, awake = [one for one in group.members if one.instance_id in slots], group.awake
            yield SwapGroup(
                name=group.name,
                at_rest={slots[one.instance_id]: one.swap_s for one in known if one.state in AT_REST},
                awake=slots.get(awake.instance_id, NONE) if awake else NONE,
                is_ready=awake is not None and awake.state == InstanceState.READY,
                ready_s=wall_s - awake.state_changed_at if awake else 0.0,
                in_progress=group.in_progress,
                target=NONE if group.target is None else slots.get(group.target, NONE),
            )

    def name(self, instance: int) -> str:
        return self.topology.by_slot[instance].name

    def is_served(self, endpoint: int) -> bool:
        members = self.topology.members(self.topology.endpoints[endpoint])
        return any(one.spec.state in PRESENT for one in members)

    def pump(self, endpoint: int) -> None:
        self._pump(self.topology.endpoints[endpoint])

    def evict(self, row: int) -> None:
        self._evict(self.request(row).asked.number)

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        request = self.request(row)
        if release is not None:
            priority = release.priority and max(1, request.asked.priority)
            request.asked = replace(request.asked, priority=priority)
            request.release, request.released_s = release, self.now_s
        self._enqueue(request, self.topology.endpoints[endpoint])

    def expire(self, row: int) -> None:
        self._expire(self.request(row))
