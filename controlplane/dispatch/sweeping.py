"""What waits in vain: refused when it was held too long, queued for its fallback, or moved to where it is better off."""

import math
from collections import Counter
from collections.abc import Iterable

from controlplane.dispatch import port
from controlplane.dispatch.adapters import no_adapters
from controlplane.dispatch.core import Core
from controlplane.dispatch.fallbacks import ModelFallbacks
from controlplane.dispatch.holding import HeldRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Request
from controlplane.dispatch.placement import Placement, none_serves
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.dispatch.waits import WaitEstimates
from scheduling.queueing.ordering import FAIR, ORDERINGS, hold_s
from scheduling.routing.regions import SWEEP_S, better_home, pressure

RETRY_S = 30.0
"""`Retry-After` of a request that was held too long, where its wait is not known."""


class Sweeping(Stage):
    def __init__(
        self,
        core: Core,
        queue: WaitingQueue,
        placement: Placement,
        waits: WaitEstimates,
        holding: HeldRequests,
        fallbacks: ModelFallbacks,
    ) -> None:
        self.core, self.queue, self.placement, self.waits = core, queue, placement, waits
        self.holding, self.fallbacks = holding, fallbacks

    def sweep(self) -> None:
        """Refuse requests held too long, and move those that are better off elsewhere."""
        core = self.core
        check = core.guarded(self._check_hold)
        # Those of donated instances come last, in the order of their models and regions, not as they were first needed.
        for endpoint in sorted(core.topology.endpoints, key=lambda one: (one.is_spot, (one.base or one).index)):
            self._follow_start(endpoint)
            for request in self.queue.still_waiting(endpoint):
                check(request)
            self.rehome(endpoint)
        for request in self.holding.of_unserved():
            check(request)
        if core.topology.zones:
            self._forward(request for one in core.topology.own_endpoints for request in self.queue.still_waiting(one))
            self._forward(self.holding.requests())
            core.deliver(port.Room(self._rooms()))

    def _forward(self, requests: Iterable[Request]) -> None:
        """Forward those of *requests*, which wait, that another zone has room for."""
        stay = set[tuple[str, str]]()
        for request in requests:
            asked, place = request.asked, (request.asked.model, request.endpoint.region)
            if place not in stay and not self.core.forward(request) and len(asked.zones) <= 1:
                stay.add(place)

    def _rooms(self) -> dict[str, dict[str, int]]:
        """Return how many more requests of each model leave the pressure low, by role; 0 where they would wait."""
        topology = self.core.topology
        rooms = {role: Counter[str]() for role in self.placement.epochs}
        for endpoint in topology.own_endpoints:
            slack, room = self.placement.slack(endpoint), rooms.get(endpoint.spec.shard)
            is_left = not topology.serves(endpoint) or topology.is_dark(endpoint.region)
            if room is None or is_left or not (slack > -math.inf or topology.coming(endpoint)):
                continue
            takes = (one for one in topology.members(endpoint) if topology.fleet.accepting[one.slot])
            room[endpoint.model] += max(1, int(slack * sum(map(topology.at_once, takes)))) if slack > 0 else 0
        return {role: dict(room) for role, room in rooms.items()}

    def _check_hold(self, request: Request) -> None:
        """Refuse *request*, which waits, if it waits in vain or too long, or queue it for the fallback of its model."""
        asked, core = request.asked, self.core
        if request.replica is not None or not core.is_open(request):
            return
        if request.slot < 0 and not core.topology.candidates(asked.model, asked.region).size:
            if not core.forward(request):
                core.drop(request, none_serves(asked))
        elif request.adapter >= 0 and not request.has_begun and not core.topology.serves_adapters(request.endpoint):
            core.drop(request, no_adapters(asked))
        elif request.slot < 0 or not self.fallbacks.control.serve_late(request.row):
            self._give_up_late(request)

    def _follow_start(self, endpoint: Endpoint) -> None:
        """Note when an instance of *endpoint*, which none served, has come up: holds start again there."""
        starting = self.waits.start_left_s(endpoint) is not None
        if endpoint.starting and not starting and self.waits.control.serving(endpoint.index):
            endpoint.up_s = self.core.clock()
        endpoint.starting = starting

    def expire(self, request: Request) -> None:
        """Refuse *request*, which the queue manager held, or have it held on."""
        if not self._give_up_late(request):
            self.holding.hold_until(request, self.core.clock() + SWEEP_S)

    def rehome(self, endpoint: Endpoint) -> None:
        """Move requests that wait for *endpoint* to a better one, as long as there is one."""
        kept, now_s = set[bool](), self.core.clock()  # whether requests of a kind stay
        while self._moves(endpoint, now_s, kept):
            pass

    def _moves(self, endpoint: Endpoint, now_s: float, kept: set[bool]) -> bool:
        """Do so with the order as it is; return whether a move has changed it."""
        core, topology, queue = self.core, self.core.topology, self.queue
        spill_above = endpoint.spec.policy.region_threshold
        fair = ORDERINGS[endpoint.spec.policy.ordering] in FAIR
        for request in queue.still_waiting(endpoint):
            opportunistic = request.asked.opportunistic
            if opportunistic in kept:
                continue
            candidates = topology.candidates(endpoint.model, endpoint.region, opportunistic)
            index = better_home(
                topology.fleet, topology.arrays, candidates, queue.arrays.size, endpoint.index, spill_above, now_s
            )
            if index < 0:
                others = [topology.endpoints[other] for other in candidates.tolist()]
                if any(other.can_start or topology.coming(other) for other in others):
                    kept.add(opportunistic)
                    continue
                message = f"The last instance of {endpoint.model!r} went away."
                if not core.forward(request):
                    core.refuse(request, 503, "model_unavailable", message, 15)
                continue
            if index == endpoint.index:
                kept.add(opportunistic)
                continue
            if request.adapter >= 0 and not topology.serves_adapters(topology.endpoints[index]):
                continue
            here = pressure(topology.fleet, topology.arrays, endpoint.index, queue.count(endpoint), now_s)
            target = topology.endpoints[index]
            queue.move(request, target)
            core.deliver(
                port.Rerouted(
                    request.asked.number,
                    target.region,
                    request.predicted_tokens,
                    came_from=endpoint.region,
                    pressure=None if math.isinf(here) else float(here),
                )
            )
            self.placement.pump(target)
            if fair:
                return True
        return False

    def _give_up_late(self, request: Request) -> bool:
        """Refuse *request*, which waits, if it may wait no longer (docs/tenants/api.md); return whether it is."""
        asked, tuned, core = request.asked, request.endpoint.spec.tuned, self.core
        waited_s = core.clock() - asked.arrived_s
        held_s = hold_s(math.inf if asked.deadline_s is None else asked.deadline_s, tuned.MAX_HOLD_S)
        if request.has_begun:
            return False
        if asked.max_wait_s is not None and waited_s > asked.max_wait_s:
            why = (
                f"No instance had room within {asked.max_wait_s:g} s, as long as X-Max-Wait says that the caller waits."
            )
            core.refuse(request, 504, "max_wait_expired", why, self._retry_s(request.endpoint))
            return True
        left_s = None
        if asked.deadline_s is None:
            left_s = self.waits.start_left_s(request.endpoint) if request.endpoint.starting else None
            if tuned.HOLD_FOR_STARTS:
                waited_s = min(waited_s, core.clock() - request.endpoint.up_s)
        too_late = waited_s + (left_s or 0.0) > held_s and (left_s is None or not tuned.HOLD_FOR_STARTS)
        if too_late:
            why = f"No instance had room within {held_s:.0f} s."
            if left_s is not None:
                why = f"{asked.model} starts, which takes {left_s:.0f} s more. Its requests wait {held_s:.0f} s at the most."
            core.refuse(request, 503, "hold_expired", why, self._retry_s(request.endpoint))
        return too_late

    def _retry_s(self, endpoint: Endpoint) -> float:
        """Return when a refused request for *endpoint* may be sent again: once it should be served."""
        core = self.core
        return self.waits.start_left_s(endpoint) or core.estimated_wait_s(endpoint) or RETRY_S
