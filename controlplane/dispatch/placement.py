"""The endpoint of a request, and its instance: each decision is one compiled call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import kernels
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.port import ESTIMATE, KV_EVENTS, Deliver, Placed, Pulled, Reasons, RunRank
from controlplane.dispatch.prompt_blocks import PromptBlocks
from controlplane.dispatch.token_accounts import TokenAccounts
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.applications.standings import FIRST_S
from scheduling.fleet.kv_cost import OFFLOADED, plain_cost_s
from scheduling.routing import candidates as columns
from scheduling.routing.adapters import TIERS
from scheduling.routing.regions import pressure
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, LEAST_DELAY, LOOK_AHEAD, POLICY_CODES


@dataclass(eq=False)
class Placement:
    topology: Topology
    queue: WaitingQueue
    accounts: TokenAccounts
    blocks: PromptBlocks
    clock: Callable[[], float]
    deliver: Deliver
    placed: Sequence[Callable[[Request, Replica], None]] = ()
    """Stages that act when an instance gets a request."""

    places: Callable[[str], bool] = lambda shard: True  # whether this process may place
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Of this process as the owner, by shard."""

    def __post_init__(self) -> None:
        self._candidates = np.zeros((CANDIDATES, columns.COLUMNS))  # of the current decision
        self._loads = self._candidates[:, : columns.IN_SECONDS]  # whole numbers

    def serving(self, candidates: NDArray[np.int32]) -> Endpoint | None:
        """Return the endpoint of *candidates* for a new request, one that serves now; None without."""
        if not candidates.size:
            return None
        topology = self.topology
        spill_above, now_s = topology.endpoints[int(candidates[0])].spec.policy.region_threshold, self.clock()
        index = kernels.choose_region(
            topology.fleet, topology.arrays, candidates, self.queue.arrays.size, spill_above, now_s
        )
        return topology.endpoints[int(index)] if index >= 0 else None

    def choose_endpoint(self, candidates: NDArray[np.int32]) -> Endpoint | None:
        """Return the endpoint of *candidates* that serves, soon will, or can be started, for a new request; None without."""
        if (serving := self.serving(candidates)) is not None:
            return serving
        topology = self.topology
        endpoints = [topology.endpoints[at] for at in candidates.tolist()]
        startable = (endpoint for endpoint in endpoints if endpoint.can_start)
        return next(filter(topology.coming, endpoints), None) or next(startable, None)

    def slack(self, endpoint: Endpoint) -> float:
        """Return by how much the pressure on *endpoint* is below that from which requests leave its region."""
        topology, waiting = self.topology, self.queue.count(endpoint)
        here = pressure(topology.fleet, topology.arrays, endpoint.index, waiting, self.clock())
        return endpoint.spec.policy.region_threshold - here

    def pump(self, endpoint: Endpoint) -> None:
        """Give out requests of *endpoint*, in order, while an instance has room or may have one more ahead."""
        topology, queue = self.topology, self.queue
        if not queue.count(endpoint) or not self.places(endpoint.spec.shard):
            return
        policy, grouped = POLICY_CODES[endpoint.spec.policy.routing], queue.grouped(endpoint)
        while queue.count(endpoint):
            slot, instance = -1, -1
            pulled: Pulled | None = None
            if grouped:
                slot, instance, pulled = self._pull(endpoint)
            if slot < 0:
                if grouped and not queue.may_balance(endpoint):
                    break
                slot, instance = self._route(endpoint, policy)
            if slot < 0:
                break
            prompt, output = int(queue.arrays.prompt_tokens[slot]), int(queue.arrays.output_tokens[slot])
            request, replica = queue.take_out(slot), topology.by_slot[instance]
            request.placed_s = self.clock()
            kernels.add_prefill(topology.fleet, topology.arrays, instance, prompt, output, request.placed_s)
            request.attempts += 1
            for placed in self.placed:
                placed(request, replica)
            why = self._explain(request, endpoint, replica, pulled)
            request.cached_tokens = why.cached_tokens or 0
            if policy == LEAST_DELAY:
                kernels.learn(topology.fleet, queue.affinity, endpoint.index, slot, instance)
            self.deliver(
                Placed(
                    request.asked.number,
                    request.attempts,
                    replica.spec.name,
                    replica.spec.state_changed_at,
                    replica.spec.url,
                    replica.spec.api_key,
                    endpoint.spec.region,
                    endpoint.spec.policy.ordering,
                    request.queue_key_s,
                    request.placed_s,
                    why,
                    self._first_token_s(request, instance),
                    keep_tokens=grouped or endpoint.is_spot,
                    priority=request.asked.priority,
                    recompute=bool(topology.fleet.offload[instance, OFFLOADED])
                    and not plain_cost_s(topology.fleet, instance, request.asked.prompt_tokens, restored=True)[1],
                    adapter=request.asked.adapter,
                    adapter_source=topology.adapter_source(request.asked.adapter),
                    unload=request.unload,
                    epoch=self.epochs.get(endpoint.spec.shard, 0),
                )
            )

        if grouped and queue.count(endpoint):
            kernels.insert_loose(topology.fleet, topology.arrays, queue.arrays, endpoint.index)

    def give(self, request: Request, replica: Replica, placed: Placed) -> None:
        """Give *request*, which has just been queued, to *replica*, where another dispatcher has placed it."""
        topology, arrays, slot = self.topology, self.queue.arrays, request.slot
        prompt, output = int(arrays.prompt_tokens[slot]), int(arrays.output_tokens[slot])
        self._send(replica.endpoint, slot, replica.slot)
        self.queue.take_out(slot)
        request.placed_s, request.queue_key_s = placed.placed_s, placed.queue_key_s
        kernels.add_prefill(topology.fleet, topology.arrays, replica.slot, prompt, output, request.placed_s)
        for hook in self.placed:
            hook(request, replica)

    def _route(self, endpoint: Endpoint, policy: int) -> tuple[int, int]:
        """Return the first request of *endpoint* and its instance by the router; (-1, -1) if none has room."""
        topology, queue = self.topology, self.queue
        if policy not in LOOK_AHEAD:
            return kernels.dispatch(
                topology.fleet, topology.arrays, queue.arrays, endpoint.index, policy, self._candidates
            )
        known = policy == LEAST_DELAY and endpoint.spec.policy.exact_prefixes and self.blocks.know(endpoint)
        slot, instance = kernels.dispatch_ahead(
            topology.fleet,
            topology.arrays,
            queue.arrays,
            self.accounts.maps,
            queue.affinity,
            endpoint.index,
            policy,
            self._candidates,
        )
        if known:
            self.blocks.forget(endpoint)
        return slot, instance

    def _pull(self, endpoint: Endpoint) -> tuple[int, int, Pulled | None]:
        """Return the slot that an instance of *endpoint* pulls from its virtual queue, the instance, and the reason."""
        topology, queue = self.topology, self.queue
        now_s = queue.clock()
        slot, instance = kernels.pull(topology.fleet, topology.arrays, queue.arrays, endpoint.index, now_s)
        if slot < 0:
            return -1, -1, None
        why = queue.why_pulled(slot, now_s)
        self._send(endpoint, slot, instance)
        return slot, instance, why

    def _send(self, endpoint: Endpoint, slot: int, instance: int) -> None:
        topology, waiting = self.topology, self.queue.arrays
        prompt, output = int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot])
        kernels.write_loads(topology.fleet, topology.arrays, endpoint.index, prompt, output, instance, self._candidates)
        kernels.send(topology.fleet, topology.arrays, waiting, slot, instance)

    def pump_all(self) -> None:
        self.queue.keep_order()
        for endpoint in self.topology.endpoints:
            if self.queue.count(endpoint):
                self.pump(endpoint)

    def _first_token_s(self, request: Request, instance: int) -> float:
        """Return the time limit of the first token of *request* at *instance*: a long prompt has longer."""
        tuned = self.topology.tuned
        prompt_s, _ = plain_cost_s(self.topology.fleet, instance, request.asked.prompt_tokens)
        return max(tuned.FIRST_TOKEN_S, tuned.FIRST_TOKEN_FACTOR * prompt_s)

    def _explain(self, request: Request, endpoint: Endpoint, replica: Replica, pulled: Pulled | None) -> Reasons:
        """Return the reasons for *replica*: what the last decision weighed."""
        topology, name = self.topology, endpoint.spec.policy.routing
        policy = JOIN_SHORTEST_QUEUE if pulled is not None else POLICY_CODES[name]
        rows = (self._candidates.round(4) if policy in LOOK_AHEAD else self._loads).tolist()
        seen = {topology.by_slot[int(row[0])].spec.name: row for row in rows if row[0] >= 0}  # it has room for more
        here, weighs = seen[replica.spec.name], policy == LEAST_DELAY
        return Reasons(
            name,
            self.queue.count(endpoint),
            request.asked.prompt_tokens,
            seen,
            topology.round_trip_ms(replica),
            int(here[columns.CACHED]) if weighs else None,
            (KV_EVENTS if here[columns.KNOWN] else ESTIMATE) if weighs else "",
            pulled,
            _rank_of(request),
            TIERS[request.adapter_tier] if request.adapter >= 0 else "",
        )


CANDIDATES = 8  # shown in a trace


def _rank_of(request: Request) -> RunRank | None:
    """Return the rank of the run of *request*; None without one."""
    standing = request.standing
    if standing is None:
        return None
    return RunRank(standing.rank_s, standing.attained_s, standing.mean_s, standing.worst_s, standing.began_s == FIRST_S)
