"""Prewarming in a simulation: when `scheduling.control.prewarming` acts, and what engines and pools do for it."""

from typing import Final

import numpy as np

from scheduling.applications.prewarming import LRU, PERIOD_S
from scheduling.control.prewarming import Prewarming
from scheduling.control.runs import Runs
from scheduling.simulation.application_runs import ReleasedCalls
from scheduling.simulation.cluster.world import State, World
from scheduling.simulation.engine.prefix_cache import warm_prefix
from scheduling.simulation.simulated_fleet import SimulatedFleet

COUNTED_AS: Final = {"adapter": "prewarmed", "prefix": "prefix", "model": "model"}


class SimulatedPrewarming:
    """Call `act` at `next_s`, with up-to-date fleet arrays."""

    def __init__(self, fleet: SimulatedFleet, runs: ReleasedCalls | None) -> None:
        self._fleet, self._runs, requests, cluster = fleet, runs, fleet.requests, fleet.simulation.cluster
        self.control = Prewarming(fleet, Runs(fleet, {}), cluster.prewarming) if runs is None else runs.prewarming
        with_adapter = requests.adapter >= 0
        self._kinds = {"adapter"} if with_adapter.any() else set[str]()
        if runs is not None and runs.prompts:
            self._kinds.add("prefix")
            with_adapter = with_adapter | (requests.run >= 0)
        if runs is not None and any(spec.state == State.ASLEEP or spec.sharing for spec in cluster.instances):
            self._kinds.add("model")
        self._unseen = np.flatnonzero(with_adapter)
        """Requests with an adapter or a system prompt that no instance was seen to have."""
        self.next_s = PERIOD_S

    @property
    def needed(self) -> bool:
        """Whether anything can be cold, and is prewarmed."""
        cluster = self._fleet.simulation.cluster
        return cluster.prewarming != LRU and bool(cluster.backends or self._kinds)

    def act(self, world: World, now_s: float) -> None:
        self.next_s += PERIOD_S
        placed = world.outcomes["attempts"][self._unseen] > 0
        for row in self._unseen[placed].tolist():
            instance, adapter = int(world.outcomes["instance"][row]), int(self._fleet.requests.adapter[row])
            self.control.placed(instance, adapter, self._fleet.system_prompt(row))
        self._unseen = self._unseen[~placed]
        self.control.act()
        if self._runs is None:
            return
        for kind, pool in self._runs.pools.items():
            wanted: dict[str, int] = {}
            for call in self.control.due(kind):
                name = str(call.target.name)
                wanted[name] = wanted.get(name, 0) + call.calls
            for name, count in wanted.items():
                pool.warm(name, self._fleet.simulation.cluster.backends[kind].warm_s(name), now_s, count)
        for instance in list(self.control.prompts.warming):
            self._compute(world, self._runs, instance)
        for endpoint in self.control.sleeping:
            if self.control.wakes(endpoint) and self._wake(world, endpoint):
                self.control.woken(endpoint)

    def _compute(self, world: World, runs: ReleasedCalls, instance: int) -> None:
        """Have *instance* compute the prompt that it warms, if it has memory for it."""
        request = runs.prompts[self.control.prompts.warming[instance].prompt]  # type: ignore[index]
        first, last = self._fleet.requests.prefix_first[request : request + 2].tolist()
        if not (world.fleet.accepting[instance] and world.engines.instances["prefix_caching"][instance]):
            self.control.prompts.end(instance, failed=True)
        elif warm_prefix(world.engines, instance, world.engines.cache.hashes, first, last - first) >= 0:
            self.control.prompts.end(instance)

    def _wake(self, world: World, endpoint: int) -> bool:
        """Wake an instance of *endpoint*; return whether one wakes."""
        lives = self._fleet.simulation.lives
        for at in world.endpoints.members[slice(*world.endpoints.first[endpoint : endpoint + 2])].tolist():
            group = int(world.lives.instances["swap_group"][at])
            if group < 0 and lives.state[at] == State.ASLEEP:
                return lives.start(at)
            if group >= 0 and self._is_idle(world, group):
                return lives.swap_to(at)
        return False

    def _is_idle(self, world: World, group: int) -> bool:
        """Whether nothing runs on the GPUs of *group*, and nothing waits for any of its models."""
        holder, groups = self._fleet.holder(group), world.lives.instances["swap_group"]
        endpoints = np.unique(world.fleet.endpoint[groups == group])
        if world.waiting.size[endpoints].any():
            return False
        state = self._fleet.simulation.lives.state
        return holder < 0 or (state[holder] == State.READY and not world.fleet.running[holder])

    def counters(self) -> dict[str, int]:
        return {
            f"{COUNTED_AS[kind]}_{name}": count
            for kind in COUNTED_AS
            if kind in self._kinds
            for name, count in self.control.counts[kind].items()
        }
