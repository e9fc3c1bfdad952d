"""The global scheduler (QLM) in a simulation: once a second it orders the virtual queues and evicts, as live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scheduling.fleet.profile import BUSY_SEQUENCES
from scheduling.queueing.eviction import wanted
from scheduling.queueing.global_scheduler import GlobalScheduler
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.queueing.running import Running
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use

if TYPE_CHECKING:
    from scheduling.simulation.simulator import Simulation


def running_in(world: World) -> tuple[Running, Any]:
    """Return the requests on instances of endpoints with groups, numbered by request, and the sequence of each.

    The fleet arrays must be up to date.
    """
    engines, arrivals = world.engines, world.arrivals
    sequences = sequences_in_use(engines)
    # In order of dispatch, so that the result does not depend on which record a sequence uses.
    sequences = sequences[np.argsort(engines.sequences["number"][sequences])]
    endpoints = world.fleet.endpoint[engines.sequences["instance"][sequences]]
    sequences = sequences[world.waiting.groups.limit[endpoints] > 0]
    these: Any = engines.sequences[sequences]
    requests, instances = these["request"], these["instance"]
    engine: Any = engines.instances[instances]
    iteration = engine["iteration"] + np.where(engine["phase"] == SEGMENT, engine["counted"], 0)
    produced = np.where(these["decoding"] != 0, iteration + these["offset"], these["produced_tokens"])

    def of_each(column: Any) -> Any:
        return column[requests] if column.size > 1 else np.repeat(column, requests.size)

    due_s, end_s = of_each(arrivals.deadline_s).astype(np.float64), of_each(arrivals.end_s).astype(np.float64)
    allowed_s = np.minimum(due_s, end_s)
    if np.isfinite(end_s).any():
        of_endpoint = world.policies[world.fleet.endpoint[instances]]
        a_s, b_s, c_s = (of_endpoint[f"decode_{name}"] for name in ("a_s", "b_s_per_sequence", "c_s_per_token"))
        prompt, output = these["expected_prompt"], these["expected_tokens"] - these["expected_prompt"]
        decode_s = (output - 1.0) * (a_s + BUSY_SEQUENCES * (b_s + c_s * (prompt + 0.5 * output)))
        due_s = np.minimum(due_s, np.maximum(0.0, end_s - decode_s))
    arrival_s = arrivals.arrival_s[requests]
    running = Running(
        number=requests.astype(np.int64),
        instance=instances.astype(np.int64),
        due_s=arrival_s + np.where(np.isfinite(due_s), due_s, NO_DEADLINE_S),
        allowed_s=allowed_s,
        priority=of_each(arrivals.priority).astype(np.int64),
        prompt_tokens=these["prompt_tokens"].astype(np.int64),
        emitted_tokens=np.where(these["streaming"] != 0, produced, 0).astype(np.int64),
        expected_tokens=these["expected_tokens"].astype(np.int64),
        evictions=world.outcomes["evictions"][requests].astype(np.int64),
        evictable=np.ones(requests.size, np.bool_),
        leaving=these["evicted"] != 0,
    )
    return running, sequences


class Scheduling:
    """Call `look` every `GlobalScheduler.EVERY_S`. *by*: a name in `reordering.rules.REORDERINGS`."""

    def __init__(self, by: str) -> None:
        self.scheduler = GlobalScheduler(by=by)
        self.reorderings = 0

    def look(self, simulation: Simulation) -> None:
        """Run the global scheduler on the waiting requests."""
        waiting, now_s = simulation.waiting, simulation.now_s
        grouped = waiting.groups.limit > 0
        if not waiting.size[grouped].any():
            return
        simulation.control()
        limit = simulation.world.policies["eviction_limit"]
        if not limit.any() and not self.scheduler.wants(waiting, now_s):
            return
        running, sequences = running_in(simulation.world)
        reordered = self.scheduler.look(simulation.fleet, simulation.endpoints, waiting, now_s, running)
        if reordered is not None and reordered.moved:
            self.reorderings += 1
            for endpoint in np.flatnonzero(grouped & (waiting.size > 0)).tolist():
                simulation.control(endpoint)
            running, sequences = running_in(simulation.world)
        if limit.any():
            self._evict(simulation, limit, running, sequences)

    @staticmethod
    def _evict(simulation: Simulation, limit: Any, running: Running, sequences: Any) -> None:
        world = simulation.world
        of = dict(zip(running.number.tolist(), sequences.tolist(), strict=True))
        for eviction in wanted(world.fleet, world.endpoints, world.waiting, running, limit, simulation.now_s):
            for number in eviction.numbers:
                simulation.evict_sequence(of[number])
