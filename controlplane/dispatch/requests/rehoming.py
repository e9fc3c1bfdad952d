"""Moving what waits: away from endpoints that cannot serve it, or not soon, and out where it was held too long."""

import math
from collections.abc import Callable

import numpy as np

from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from controlplane.dispatch.port import Deliver, Moved, Refused
from controlplane.dispatch.requests.placement import Placement
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from scheduling.queueing.ordering import hold_s
from scheduling.routing.regions import better_home, pressure


class Rehoming:
    """*refuse* takes a request out of wherever it is and refuses it."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        placement: Placement,
        *,
        refuse: Callable[[Request, Refused], None],
        deliver: Deliver,
    ) -> None:
        self.topology = topology
        self.queue = queue
        self.placement = placement
        self.refuse = refuse
        self.deliver = deliver

    def sweep(self, now_s: float) -> None:
        """Look at all that waits. Call it every `SWEEP_S`."""
        self.queue.fit()  # endpoints may have come
        max_hold_s = self.topology.tuned.MAX_HOLD_S
        for endpoint in self.topology.endpoints:
            for request in self.queue.in_order(endpoint):
                held_s = hold_s(request.asked.deadline_s or math.inf, max_hold_s)
                if not request.has_begun and now_s - request.asked.arrived_s > held_s:
                    self._unavailable(request, "hold_expired", f"No instance had room within {held_s:.0f} s.", 30)
            self.rehome(endpoint, now_s)

    def rehome(self, endpoint: Endpoint, now_s: float) -> None:
        """Let what waits for *endpoint* wait where it is better off, as long as it is."""
        topology, queue = self.topology, self.queue
        waiting = queue.in_order(endpoint)
        if not waiting:
            return
        candidates = topology.candidates(endpoint.model, endpoint.region)
        spill_above = endpoint.spec.policy.region_threshold
        for request in waiting:
            index = better_home(
                topology.fleet, topology.arrays, candidates, queue.arrays.size, endpoint.index, spill_above, now_s
            )
            if index < 0:
                others = [topology.endpoints[other] for other in candidates.tolist()]
                if any(other.can_start or self.placement.coming(other) for other in others):
                    break
                self._unavailable(
                    request, "model_unavailable", f"The last instance of {endpoint.model!r} went away.", 15
                )
                continue
            if index == endpoint.index:
                break
            here = pressure(topology.fleet, topology.arrays, endpoint.index, queue.count(endpoint), now_s)
            target = topology.endpoints[index]
            queue.move(request, target)
            self.deliver(
                Moved(
                    request.asked.number,
                    target.region,
                    request.predicted_tokens,
                    came_from=endpoint.region,
                    pressure=None if np.isinf(here) else float(here),
                )
            )
            self.placement.pump(target)

    def _unavailable(self, request: Request, code: str, message: str, retry_after_s: float) -> None:
        self.refuse(request, Refused(request.asked.number, 503, code, message, retry_after_s=retry_after_s))
