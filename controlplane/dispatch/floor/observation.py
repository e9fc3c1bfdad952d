"""What the floor sees of an endpoint: its load as strategies see it, from memory alone, and what was asked of it lately."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.dispatch.live_fleet.lookahead import Outlook
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Submit
from controlplane.dispatch.wire import DEMAND_S
from controlplane.fleet.lifecycle.states import COMING, InstanceState
from scheduling.routing.regions import pressure
from scheduling.scaling import EndpointView

LEAST_S = 5.0  # of demand: less says nothing; one step of the simulator's
COMING_LIMIT_S = 1800.0  # what has been loading for so long is not on its way any more


@dataclass(slots=True)
class EndpointMemory:
    """What the floor remembers of one endpoint; times on the gateway's clock."""

    changed_s: float
    members: int = 0
    easy_since_s: float | None = None
    busy: bool = False
    restoring: bool = False  # the minimum is being brought back
    refused_since_s: float | None = None  # moves to more could not be made since
    retry_s: float = -math.inf  # when the next is tried
    demand: deque[tuple[int, int]] = field(default_factory=deque)  # (second, tokens asked for)


class Observation:
    """*waiting* says how many requests are held for an endpoint, *outlook* what its look-ahead maps predict."""

    def __init__(
        self,
        topology: Topology,
        waiting: Callable[[Endpoint], int],
        outlook: Callable[[Endpoint], Outlook],
        clock: Callable[[], float],
    ) -> None:
        self.topology = topology
        self.clock = clock
        self._began_s = clock()
        self._waiting, self._outlook = waiting, outlook
        self._memory: dict[int, EndpointMemory] = {}  # by index of the endpoint

    def memory(self, endpoint: int) -> EndpointMemory:
        """What is remembered of the endpoint with that index."""
        memory = self._memory.get(endpoint)
        if memory is None:
            memory = self._memory[endpoint] = EndpointMemory(changed_s=self.clock())
        return memory

    def arrived(self, asked: Submit) -> None:
        """Count a request's tokens as demand of the endpoint that its caller would have first, wherever it is served."""
        candidates = self.topology.candidates(asked.model, asked.region)
        if not candidates.size:
            return
        demand = self.memory(int(candidates[0])).demand
        second, tokens = int(self.clock()), asked.prompt_tokens + int(asked.predicted_tokens)
        if demand and demand[-1][0] == second:
            demand[-1] = (second, demand[-1][1] + tokens)
        else:
            demand.append((second, tokens))

    def view(self, endpoint: Endpoint, members: list[Replica], now_s: float) -> EndpointView:
        """*endpoint* as strategies see it, from memory alone."""
        topology = self.topology
        fleet, memory = topology.fleet, self.memory(endpoint.index)
        accepting = [replica.slot for replica in members if fleet.accepting[replica.slot]]
        wall_s = time.time()
        coming = sum(
            replica.spec.state in COMING and wall_s - replica.spec.state_changed_at < COMING_LIMIT_S
            for replica in members
        )
        draining = sum(replica.spec.state == InstanceState.DRAINING for replica in members)
        # Somebody added or drained: that is a change as if it were our own.
        if len(accepting) + coming - draining != memory.members:
            if len(accepting) + coming - draining > memory.members or draining:
                memory.changed_s = max(memory.changed_s, now_s - 1.0)
            memory.members = len(accepting) + coming - draining
        ready_at = max(
            (one.spec.state_changed_at for one in members if one.spec.state == InstanceState.READY), default=-math.inf
        )
        waiting, outlook = self._waiting(endpoint), self._outlook(endpoint)
        kv_capacity = int(fleet.kv_capacity_tokens[accepting].sum())
        return EndpointView(
            model=endpoint.model,
            region=endpoint.region,
            ready=len(accepting),
            coming=coming,
            draining=draining,
            spot=sum(replica.spec.state == InstanceState.SLEEPING for replica in members),
            spot_other=0,
            min_instances=endpoint.spec.min_instances,
            max_instances=endpoint.spec.max_instances,
            use=float(pressure(fleet, topology.arrays, endpoint.index, waiting)),
            waiting=waiting,
            kv_use=int(fleet.kv_tokens[accepting].sum()) / kv_capacity if kv_capacity else 0.0,
            tokens_per_s=demand_tokens_per_s(memory, now_s, now_s - self._began_s),
            since_change_s=now_s - memory.changed_s,
            overloaded_instances=outlook.overloaded_instances,
            peak_kv_sum=outlook.peak_kv_sum,
            peak_kv_most=outlook.peak_kv_most,
            since_ready_s=wall_s - ready_at,
        )


def demand_tokens_per_s(memory: EndpointMemory, now_s: float, passed_s: float) -> float:
    """Tokens a second that were asked for over the last minute, or since the begin, *passed_s* ago."""
    while memory.demand and memory.demand[0][0] < now_s - DEMAND_S:
        memory.demand.popleft()
    return sum(tokens for _, tokens in memory.demand) / min(DEMAND_S, max(passed_s, LEAST_S))
