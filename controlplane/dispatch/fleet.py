"""The live fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the dispatcher."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.request_table import LiveRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Request, Topology
from controlplane.dispatch.port import Asked
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.carried import OUTPUT, PROMPT
from scheduling.queueing.held_work import Release
from scheduling.queueing.waiting_set import WaitingArrays


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
    ) -> None:
        self.topology, self.waiting_queue, self.requests = topology, queue, requests
        self._enqueue, self._expire, self._spot_with_room = enqueue, expire, spot_with_room

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

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        request = self.request(row)
        if release is not None:
            priority = release.priority and max(1, request.asked.priority)
            request.asked = replace(request.asked, priority=priority)
            request.release, request.released_s = release, self.now_s
        self._enqueue(request, self.topology.endpoints[endpoint])

    def expire(self, row: int) -> None:
        self._expire(self.request(row))
