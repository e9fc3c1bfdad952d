"""Which endpoint a request waits for, and giving requests out to instances: each decision is one compiled call."""

from collections.abc import Callable

import numpy as np

from controlplane.dispatch.live_fleet.lookahead import Anticipation
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Deliver, Placed
from controlplane.dispatch.requests.explanation import CANDIDATES, explain
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.token_accounts import TokenAccounts
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import PRESENT
from scheduling.dispatch import dispatch
from scheduling.routing.candidates import COLUMNS
from scheduling.routing.predictive import dispatch_ahead
from scheduling.routing.prefix_affinity import learn
from scheduling.routing.regions import choose_region
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES, PRESERVE


class Placement:
    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        anticipation: Anticipation,
        accounts: TokenAccounts,
        clock: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self.topology = topology
        self.queue = queue
        self.anticipation = anticipation
        self.accounts = accounts
        self.clock = clock
        self.deliver = deliver
        self._candidates = np.zeros((CANDIDATES, COLUMNS))  # of the decision in hand

    def choose_endpoint(self, model: str, region: str) -> Endpoint | None:
        """The endpoint for a new request for *model* from *region*: one that serves, or soon will, or can be started.

        None if there is none.
        """
        topology = self.topology
        candidates = topology.candidates(model, region)
        if candidates.size:
            self.queue.fit()
            spill_above = topology.endpoints[int(candidates[0])].spec.tuned.SPILL_ABOVE
            index = int(choose_region(topology.fleet, topology.arrays, candidates, self.queue.arrays.size, spill_above))
            if index >= 0:
                return topology.endpoints[index]
            endpoints: list[Endpoint] = [topology.endpoints[index] for index in candidates.tolist()]
            for endpoint in endpoints:
                if self.coming(endpoint):
                    return endpoint
            for endpoint in endpoints:
                if endpoint.can_start:
                    return endpoint
        return None

    def coming(self, endpoint: Endpoint) -> bool:
        """Whether an instance of *endpoint* is there or on its way."""
        return any(replica.spec.state in PRESENT for replica in self.topology.members(endpoint))

    def pump(self, endpoint: Endpoint) -> None:
        """Give out requests of *endpoint*, in order, while an instance has room or may have one more ahead."""
        topology, queue = self.topology, self.queue
        policy = POLICY_CODES[endpoint.spec.routing_policy]
        while queue.count(endpoint):
            if policy >= PRESERVE:
                self.anticipation.fit(topology.fleet.endpoint.size)
                slot, instance = dispatch_ahead(
                    topology.fleet,
                    topology.arrays,
                    queue.arrays,
                    self.anticipation.maps,
                    queue.affinity,
                    endpoint.index,
                    policy,
                    self._candidates,
                )
            else:
                slot, instance = dispatch(
                    topology.fleet, topology.arrays, queue.arrays, endpoint.index, policy, self._candidates
                )
            if slot < 0:
                return
            request, replica = queue.take_out(slot), topology.by_slot[instance]
            request.placed_s = self.clock()
            request.attempts += 1
            why = self._explain(request, endpoint, replica)
            self.accounts.opened(request, replica)
            if policy == LEAST_DELAY:
                learn(topology.fleet, queue.affinity, endpoint.index, slot, instance)
            if not request.asked.streamed:
                self.accounts.runs_unseen(request, replica)
            self.deliver(
                Placed(
                    request.asked.number,
                    request.attempts,
                    replica.name,
                    replica.spec.state_changed_at,
                    replica.spec.url,
                    replica.spec.api_key,
                    endpoint.region,
                    endpoint.spec.ordering_policy,
                    request.queue_key_s,
                    request.placed_s,
                    why,
                )
            )

    def pump_all(self) -> None:
        for endpoint in self.topology.endpoints:
            if self.queue.count(endpoint):
                self.pump(endpoint)

    def _explain(self, request: Request, endpoint: Endpoint, replica: Replica) -> dict[str, object]:
        """What the decision in hand saw: docs/routing.md."""
        return {
            "instance": replica.name,
            "region": endpoint.region,
            "policy": endpoint.spec.routing_policy,
            "ordering": endpoint.spec.ordering_policy,
            "waited_ms": round((request.placed_s - request.asked.arrived_s) * 1000, 3),
            "waiting": self.queue.count(endpoint),
            **explain(self.topology, endpoint, replica, self._candidates),
        }
