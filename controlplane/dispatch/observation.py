"""What scaling observes of endpoints, from the memory of the process that owns the regions."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from controlplane.dispatch import stages
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.token_accounts import Outlook
from controlplane.fleet.lifecycle.stages import stage_of
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.control.views import Stages, Views
from scheduling.scaling import EndpointView
from scheduling.scaling.view import demand_rate, demand_seconds


class Demand(stages.Stage):
    """Counts what is asked of endpoints, served or not: scaling follows it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def admit(self, arrival: stages.Arrival) -> None:
        if arrival.own is not None and not (arrival.again or arrival.asked.own_region):
            arrival.own.count_demand(arrival.asked, self.clock())


class Observation:
    """The live fleet as `control.views` observes it.

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
        self.changes = Views(self, clock, lambda: (topology.fleet, topology.arrays))
        self._waiting, self._outlook, self._short = waiting, outlook, short

    def replicas(self) -> dict[int, list[Replica]]:
        """Return instances by index of their own endpoint; donated ones belong to the endpoint that donated them."""
        members = defaultdict[int, list[Replica]](list)
        for replica in self.topology.replicas.values():
            members[(replica.endpoint.base or replica.endpoint).index].append(replica)
        return members

    def views(self) -> dict[int, EndpointView]:
        """Return every endpoint that gets requests as strategies see it, by index."""
        return self.changes()

    def stages(self) -> Stages:
        now_s, wall_s, accepting = self.clock(), self.wall_clock(), self.topology.fleet.accepting
        rows = [
            (
                (one.endpoint.base or one.endpoint).index,
                stage_of(one.spec.state, wall_s - one.spec.state_changed_at, bool(accepting[one.slot])),
                now_s - (wall_s - one.spec.state_changed_at),
            )
            for one in self.topology.replicas.values()
            # Instances asleep on shared GPUs are woken by a swap, not by scaling.
            if not (one.spec.swap_group and one.spec.state == InstanceState.SLEEPING)
        ]
        endpoint, stage, since_s = zip(*rows, strict=True) if rows else ((), (), ())
        return np.array(endpoint, np.int64), np.array(stage, np.int64), np.array(since_s, np.float64)

    def scheduled(self, endpoint: Endpoint) -> int:
        """Return the scheduled minimum of *endpoint* that instances which start now are ready for."""
        spec = endpoint.spec
        return min(spec.schedule.minimum(self.wall_clock(), spec.start_s), spec.max_instances)

    def loads(self) -> Iterator[tuple[int, EndpointView]]:
        now_s = self.clock()
        for endpoint in self.topology.endpoints:
            if self.topology.serves(endpoint):
                outlook, spec = self._outlook(endpoint), endpoint.spec
                view = EndpointView(
                    endpoint.model,
                    endpoint.region,
                    spot_other=self.spot_other.get((endpoint.model, endpoint.region), 0),
                    min_instances=max(spec.min_instances, self.scheduled(endpoint)),
                    max_instances=spec.max_instances,
                    waiting=self._waiting(endpoint),
                    tokens_per_s=demand_tokens_per_s(endpoint, now_s, now_s - self.began_s),
                    overloaded_instances=outlook[0],
                    peak_kv_sum=outlook[1],
                    peak_kv_most=outlook[2],
                    short_instances=self._short(endpoint),
                    requests_at_once=spec.max_num_seqs,
                )
                yield endpoint.index, view


def demand_tokens_per_s(endpoint: Endpoint, now_s: float, passed_s: float) -> float:
    """Return tokens a second requested over the last minute, or since the start, *passed_s* ago."""
    first, last = demand_seconds(now_s)
    return float(demand_rate(sum(tokens for second, tokens in endpoint.demand if first <= second < last), passed_s))
