"""Which endpoint a request waits for, and giving requests out to instances: each decision is one compiled call."""

from collections.abc import Callable

import numpy as np

from controlplane.dispatch.kernels import (
    ask,
    choose_region,
    dispatch,
    dispatch_ahead,
    insert_loose,
    learn,
    pull,
    send,
    write_loads,
)
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.lookahead import Anticipation
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Deliver, Placed
from controlplane.dispatch.requests.explanation import CANDIDATES, explain
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.token_accounts import TokenAccounts
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from controlplane.dispatch.requests.waiting_times import WaitingTimes
from controlplane.fleet.lifecycle.states import PRESENT
from scheduling.compiled import uncompiled
from scheduling.queueing.running import prefill_s
from scheduling.routing.candidates import COLUMNS
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES, PRESERVE


class Placement:
    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        anticipation: Anticipation,
        accounts: TokenAccounts,
        times: WaitingTimes,
        clock: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self.topology = topology
        self.queue = queue
        self.anticipation = anticipation
        self.accounts = accounts
        self.times = times
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
            spill_above = topology.endpoints[int(candidates[0])].spec.policy.region_threshold
            now_s = self.clock()
            index = int(
                choose_region(topology.fleet, topology.arrays, candidates, self.queue.arrays.size, spill_above, now_s)
            )
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
        """Whether an instance of *endpoint* is there or on its way, or a swap can bring one up."""
        return endpoint.spec.shares_gpus or any(
            replica.spec.state in PRESENT for replica in self.topology.members(endpoint)
        )

    def pump(self, endpoint: Endpoint) -> None:
        """Give out requests of *endpoint*, in order, while an instance has room or may have one more ahead."""
        topology, queue = self.topology, self.queue
        policy, grouped = POLICY_CODES[endpoint.spec.policy.routing], queue.grouped(endpoint)
        while queue.count(endpoint):
            slot, instance, pulled = self._pull(endpoint) if grouped else (-1, -1, "")
            if slot < 0:
                if grouped and not queue.may_balance(endpoint, self.clock()):
                    break
                slot, instance = self._route(endpoint, policy)
            if slot < 0:
                break
            prompt, output = int(queue.arrays.prompt_tokens[slot]), int(queue.arrays.output_tokens[slot])
            request, replica = queue.take_out(slot), topology.by_slot[instance]
            request.placed_s = self.clock()
            ask(topology.fleet, topology.arrays, instance, prompt, output, request.placed_s)
            request.attempts += 1
            self.times.placed(request, replica)
            why = self._explain(request, endpoint, replica, pulled)
            self.accounts.opened(request, replica)
            if replica.health.breaker is not Breaker.CLOSED:  # it takes one at a time
                topology.settle(replica)
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
                    endpoint.spec.policy.ordering,
                    request.queue_key_s,
                    request.placed_s,
                    why,
                    self._first_token_s(request, instance),
                    keep_tokens=queue.grouped(endpoint),
                )
            )

        if grouped and queue.count(endpoint):
            insert_loose(topology.fleet, topology.arrays, queue.arrays, endpoint.index)

    def _route(self, endpoint: Endpoint, policy: int) -> tuple[int, int]:
        """The first request of *endpoint*, and the instance that its router gives it to; (-1, -1) if none has room."""
        topology, queue = self.topology, self.queue
        if policy < PRESERVE:
            return dispatch(topology.fleet, topology.arrays, queue.arrays, endpoint.index, policy, self._candidates)
        self.anticipation.fit(topology.fleet.endpoint.size)
        return dispatch_ahead(
            topology.fleet,
            topology.arrays,
            queue.arrays,
            self.anticipation.maps,
            queue.affinity,
            endpoint.index,
            policy,
            self._candidates,
        )

    def _pull(self, endpoint: Endpoint) -> tuple[int, int, str]:
        """What an instance of *endpoint* pulls from its own virtual queue, the instance, and why in words."""
        topology, queue = self.topology, self.queue
        now_s = queue.now_s(self.clock())
        slot, instance = pull(topology.fleet, topology.arrays, queue.arrays, endpoint.index, now_s)
        if slot < 0:
            return -1, -1, ""
        words = queue.why_pulled(slot, now_s)
        prompt, output = int(queue.arrays.prompt_tokens[slot]), int(queue.arrays.output_tokens[slot])
        write_loads(topology.fleet, topology.arrays, endpoint.index, prompt, output, instance, self._candidates)
        send(topology.fleet, topology.arrays, queue.arrays, slot, instance)
        return slot, instance, words

    def pump_all(self) -> None:
        self.queue.keep_order()
        for endpoint in self.topology.endpoints:
            if self.queue.count(endpoint):
                self.pump(endpoint)

    def _first_token_s(self, request: Request, instance: int) -> float:
        """How long the first token of *request* may take at *instance*: a long prompt is not given up and begun anew."""
        tuned = self.topology.tuned
        prompt_s = uncompiled(prefill_s)(self.topology.fleet, instance, float(request.asked.prompt_tokens))
        return max(tuned.FIRST_TOKEN_S, tuned.FIRST_TOKEN_FACTOR * prompt_s)

    def _explain(self, request: Request, endpoint: Endpoint, replica: Replica, pulled: str) -> dict[str, object]:
        """What the decision in hand saw: docs/routing.md."""
        return {
            "instance": replica.name,
            "region": endpoint.region,
            "policy": endpoint.spec.policy.routing,
            "ordering": endpoint.spec.policy.ordering,
            "waited_ms": round((request.placed_s - request.asked.arrived_s) * 1000, 3),
            "waiting": self.queue.count(endpoint),
            **explain(self.topology, endpoint, replica, self._candidates, pulled),
        }
