"""Donated instances: opportunistic requests go there first, and leave when the owner reclaims one."""

import math

import numpy as np

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.kernels import first_with_room
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.stages import Arrival, Stage
from controlplane.dispatch.waiting_queue import WaitingQueue

NONE_DONATED = np.zeros(0, np.int32)


class Spot(Stage):
    def __init__(self, core: Core, queue: WaitingQueue) -> None:
        self.core, self.queue = core, queue

    def is_wanted(self) -> bool:
        return any(endpoint.is_spot for endpoint in self.core.topology.endpoints)

    def admit(self, arrival: Arrival) -> None:
        if arrival.asked.opportunistic and (spot := self.with_room(arrival.asked)) is not None:
            arrival.endpoint, arrival.on_spot = spot, True

    def with_room(self, asked: port.Asked) -> Endpoint | None:
        """Return the nearest donated instances with room for *asked*; None for none.

        What is not opportunistic has to be evictable: it was promised an answer.
        """
        topology, may_go = self.core.topology, asked.opportunistic or asked.evictable
        donated = topology.lent(asked.model, asked.region, asked.regions) if may_go else NONE_DONATED
        if not donated.size:
            return None
        index = first_with_room(topology.fleet, topology.arrays, donated, self.queue.arrays.size)
        return topology.endpoints[int(index)] if index >= 0 else None

    def reclaim(self, replica: Replica, *, late: bool) -> tuple[int, int]:
        """Take the requests off *replica*, which is donated and reclaimed; return how many wait again, and how many ended.

        One that has begun an answer which no other instance can continue ends by itself, unless the reclaim is *late*.
        """
        evicted = ended = 0
        for request in list(replica.requests):
            number = request.asked.number
            if late or request.asked.ends_on_reclaim:
                if request.evicting_s != math.inf:
                    request.evicting_s = math.inf  # it ends
                    self.core.deliver(port.Lost(number, request.attempts, reclaimed=True))
                    ended += 1
            elif request.evicting_s is None and self.core.evict(number) is not None:
                evicted += 1
        return evicted, ended
