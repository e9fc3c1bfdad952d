"""What the floor sees of an endpoint: its load as strategies see it, from memory alone, and what was asked of it lately."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.dispatch.live_fleet.lookahead import Outlook
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Submit
from controlplane.fleet.lifecycle.stages import stage_of
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.scaling import EndpointView
from scheduling.scaling.owner import UNCHANGED, Change, Mover
from scheduling.scaling.view import (
    DEMAND_WINDOW_S,
    Load,
    Stage,
    count_of_one,
    demand_rate,
    demand_seconds,
    endpoint_view,
    use_now,
)


@dataclass(slots=True)
class EndpointMemory:
    """What the floor remembers of one endpoint; times on the gateway's clock."""

    changed_s: float
    last: Change = UNCHANGED  # what that was
    serving: int = 0  # ready or coming, at the last look
    draining: int = 0
    easy_since_s: float | None = None
    busy: bool = False
    restoring: bool = False  # the minimum is being brought back
    refused_since_s: float | None = None  # moves to more could not be made since
    retry_s: float = -math.inf  # when the next is tried
    demand: deque[tuple[int, int]] = field(default_factory=deque)  # (second, tokens asked for)

    def moved(self, delta: int, now_s: float) -> None:
        """The floor itself changes the endpoint by *delta*: when that is seen, it is no change by others."""
        self.changed_s, self.last = now_s, Change(Mover.FLOOR, delta)
        if delta > 0:
            self.serving += delta
        else:
            self.draining -= delta


class Observation:
    """*waiting* says how many requests are held for an endpoint, *outlook* what its look-ahead maps predict, *short* how
    many instances the global scheduler misses there."""

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
        self._began_s = clock()
        self._waiting, self._outlook, self._short = waiting, outlook, short
        self._memory: dict[int, EndpointMemory] = {}  # by index of the endpoint

    def memory(self, endpoint: int) -> EndpointMemory:
        """What is remembered of the endpoint with that index."""
        memory = self._memory.get(endpoint)
        if memory is None:
            memory = self._memory[endpoint] = EndpointMemory(changed_s=self.clock())
        return memory

    def arrived(self, asked: Submit) -> None:
        """Count a request's tokens as demand of the endpoint that its caller would have first, wherever it is served.

        Of interactive classes: forecasts are of those, and what is asked is held against them (SageServe 6.4, 6.5.1).
        """
        candidates = self.topology.candidates(asked.model, asked.region)
        if not candidates.size or not asked.interactive:
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
        wall_s = self.wall_clock()
        # Who sleeps on shared GPUs is woken by a swap, not by scaling.
        members = [one for one in members if not (one.spec.swap_group and one.spec.state == InstanceState.SLEEPING)]
        stages = [
            stage_of(one.spec.state, wall_s - one.spec.state_changed_at, bool(fleet.accepting[one.slot]))
            for one in members
        ]
        since_s = [now_s - (wall_s - one.spec.state_changed_at) for one in members]
        instances = count_of_one(stages, since_s)
        # Somebody added or drained: that is a change as if it were our own.
        serving, draining = instances.ready + instances.coming, instances.draining
        if serving > memory.serving or draining > memory.draining:
            moving = [at for at, stage in zip(since_s, stages, strict=True) if stage in (Stage.COMING, Stage.DRAINING)]
            memory.changed_s = max(memory.changed_s, min(now_s, max(moving or since_s)))
            memory.last = Change(Mover.ANOTHER, 1 if serving > memory.serving else -1)
        memory.serving, memory.draining = serving, draining
        waiting = self._waiting(endpoint)
        use, kv_use = use_now(fleet, topology.arrays, endpoint.index, waiting, now_s)
        tokens_per_s = demand_tokens_per_s(memory, now_s, now_s - self._began_s)
        return endpoint_view(
            endpoint.model,
            endpoint.region,
            instances,
            (endpoint.spec.min_instances, endpoint.spec.max_instances),
            Load(use, kv_use, waiting, tokens_per_s, *self._outlook(endpoint)),
            now_s,
            memory.changed_s,
            short_instances=self._short(endpoint),
            last=memory.last,
        )


def demand_tokens_per_s(memory: EndpointMemory, now_s: float, passed_s: float) -> float:
    """Tokens a second that were asked for over the last minute, or since the begin, *passed_s* ago."""
    first, last = demand_seconds(now_s)
    while memory.demand and memory.demand[0][0] < int(now_s) - DEMAND_WINDOW_S:
        memory.demand.popleft()
    return float(demand_rate(sum(tokens for second, tokens in memory.demand if first <= second < last), passed_s))
