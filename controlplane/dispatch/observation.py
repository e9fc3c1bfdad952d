"""Views of endpoints for scaling, from the memory of the process that owns the regions."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.dispatch import stages
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.token_accounts import Outlook
from controlplane.fleet.lifecycle.stages import stage_of
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.scaling import EndpointView
from scheduling.scaling.view import (
    Load,
    Stage,
    count_of_one,
    demand_rate,
    demand_seconds,
    endpoint_view,
    use_now,
)


class Demand(stages.Stage):
    """Counts what is asked of endpoints, served or not: scaling follows it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def admit(self, arrival: stages.Arrival) -> None:
        if arrival.own is not None:
            arrival.own.count_demand(arrival.asked, self.clock())


@dataclass(slots=True)
class EndpointMemory:
    """Instances and last change of an endpoint at the last view; times on the gateway's clock."""

    changed_s: float
    changed_delta: int = 0
    serving: int = 0  # ready or starting
    draining: int = 0

    def moved(self, delta: int, now_s: float) -> None:
        """Record that scaling changes the endpoint by *delta*, before rows and instances show it."""
        self.changed_s, self.changed_delta = now_s, delta
        if delta > 0:
            self.serving += delta
        else:
            self.draining -= delta


class Observation:
    """Views of endpoints.

    *waiting* counts held requests, *outlook* returns the look-ahead, *short* the instances that the global scheduler lacks.
    """

    def __init__(
        self,
        topology: Topology,
        waiting: Callable[[Endpoint], int],
        outlook: Callable[[Endpoint], Outlook],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        *,
        short: Callable[[Endpoint], int] = lambda endpoint: 0,
    ) -> None:
        self.topology = topology
        self.clock, self.wall_clock = clock, wall_clock
        self.began_s = clock()
        self.spot_other: Mapping[tuple[str, str], int] = {}
        """By (model, region): donated instances of other models that it could take."""
        self.strategies: dict[str, dict[str, float]] = {}
        """Memory of the strategy of each model."""
        self._waiting, self._outlook, self._short = waiting, outlook, short
        self._memory: dict[int, EndpointMemory] = {}  # by index of the endpoint

    def memory(self, endpoint: int) -> EndpointMemory:
        """Return the memory of the endpoint with that index."""
        memory = self._memory.get(endpoint)
        if memory is None:
            memory = self._memory[endpoint] = EndpointMemory(changed_s=self.clock())
        return memory

    def members(self) -> dict[int, list[Replica]]:
        """Return instances by index of their own endpoint; donated ones belong to the endpoint that lent them."""
        members = defaultdict[int, list[Replica]](list)
        for replica in self.topology.replicas.values():
            members[(replica.endpoint.base or replica.endpoint).index].append(replica)
        return members

    def view(self, endpoint: Endpoint, members: list[Replica], now_s: float) -> EndpointView:
        """Return *endpoint* as strategies see it."""
        topology = self.topology
        fleet, memory = topology.fleet, self.memory(endpoint.index)
        wall_s = self.wall_clock()
        # Instances asleep on shared GPUs are woken by a swap, not by scaling.
        members = [one for one in members if not (one.spec.swap_group and one.spec.state == InstanceState.SLEEPING)]
        stages = [
            stage_of(one.spec.state, wall_s - one.spec.state_changed_at, bool(fleet.accepting[one.slot]))
            for one in members
        ]
        since_s = [now_s - (wall_s - one.spec.state_changed_at) for one in members]
        instances = count_of_one(stages, since_s)
        # A change by an operator, a plan or a restart counts, too.
        serving, draining = instances.ready + instances.coming, instances.draining
        if serving > memory.serving or draining > memory.draining:
            moving = [at for at, stage in zip(since_s, stages, strict=True) if stage in (Stage.COMING, Stage.DRAINING)]
            memory.changed_s = max(memory.changed_s, min(now_s, max(moving or since_s)))
            memory.changed_delta = 1 if serving > memory.serving else -1
        memory.serving, memory.draining = serving, draining
        waiting = self._waiting(endpoint)
        use, kv_use = use_now(fleet, topology.arrays, endpoint.index, waiting, now_s)
        tokens_per_s = demand_tokens_per_s(endpoint, now_s, now_s - self.began_s)
        return endpoint_view(
            endpoint.model,
            endpoint.region,
            instances,
            (endpoint.spec.min_instances, endpoint.spec.max_instances),
            Load(use, kv_use, waiting, tokens_per_s, *self._outlook(endpoint), endpoint.spec.max_num_seqs),
            now_s,
            memory.changed_s,
            self.spot_other.get((endpoint.model, endpoint.region), 0),
            self._short(endpoint),
            memory.changed_delta,
        )


def demand_tokens_per_s(endpoint: Endpoint, now_s: float, passed_s: float) -> float:
    """Return tokens a second requested over the last minute, or since the start, *passed_s* ago."""
    first, last = demand_seconds(now_s)
    return float(demand_rate(sum(tokens for second, tokens in endpoint.demand if first <= second < last), passed_s))
