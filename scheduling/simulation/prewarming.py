"""Prewarming in a simulation, by the live dispatcher's own rule."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.prewarming import (
    AGAIN_S,
    HERMES,
    LOOK_S,
    LRU,
    OPEN_S,
    AdapterPrewarming,
    LikelyCall,
    due,
    first_waiting,
    wakes,
)
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.application_runs import ApplicationRuns
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.lifecycle import Lives
from scheduling.simulation.cluster.state_changes import COMING, WITHOUT_GPUS
from scheduling.simulation.cluster.world import State, World
from scheduling.simulation.engine.prefix_cache import warm_prefix
from scheduling.simulation.workload.requests import Requests


class SimulatedPrewarming:
    """Call `look` at `next_s`, with up-to-date fleet arrays. An adapter that is loaded so costs an instance no time."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: ApplicationRuns | None, lives: Lives) -> None:
        self._cluster, self._requests, self._runs = cluster, requests, runs
        sleeps = any(spec.state == State.ASLEEP or spec.sharing is not None for spec in cluster.instances)
        self._models = ModelPrewarming(cluster, lives) if runs is not None and sleeps else None
        self._adapters = AdapterPrewarming()
        self._unseen = np.flatnonzero(requests.adapter >= 0)
        """Requests with an adapter that no instance was seen to have."""
        self._has_adapters = bool(self._unseen.size)
        self._prefixes = PrefixPrewarming(cluster, requests, runs) if runs is not None and runs.prompts else None
        self.next_s = LOOK_S

    @property
    def needed(self) -> bool:
        """Whether anything can be cold, and is prewarmed."""
        things = self._cluster.backends or self._has_adapters or self._prefixes or self._models
        return self._cluster.prewarming != LRU and bool(things)

    def look(self, world: World, now_s: float) -> None:
        self.next_s += LOOK_S
        by, likely = self._cluster.prewarming, list[LikelyCall]()
        if self._runs is not None:
            self._runs.known_prompts.begin()
        if by == HERMES and self._runs is not None:
            sleeping = self._models.sleeping() if self._models is not None else {}
            likely = self._runs.likely_calls(world, now_s, sleeping)
            self._runs.prewarm(likely, now_s)
        if self._has_adapters:
            placed = world.outcomes["attempts"][self._unseen] > 0
            for row in self._unseen[placed].tolist():
                self._adapters.use(int(world.outcomes["instance"][row]), int(self._requests.adapter[row]))
            self._unseen = self._unseen[~placed]
            self._adapters.look(world.fleet, world.endpoints, world.waiting, lambda endpoint: by, likely)
        if self._prefixes is not None:
            self._prefixes.look(world, likely, now_s)
        if self._models is not None:
            self._models.look(world, likely, now_s)

    def counters(self) -> dict[str, int]:
        counts = {f"prewarmed_{name}": count for name, count in self._adapters.counts.items()}
        counts = counts if self._has_adapters else {}
        if self._prefixes is not None:
            counts |= {f"prefix_{name}": count for name, count in self._prefixes.counts.items()}
        if self._models is not None:
            counts |= {f"model_{name}": count for name, count in self._models.counts.items()}
        return counts


class ModelPrewarming:
    """Models without an instance that is awake: one wakes before a likely call; on shared GPUs by a swap, while they idle.

    `counts` has those `warmed`, those of them `used` by a call afterwards, and those `wasted`: ten minutes passed without,
    or they fell asleep again.
    """

    def __init__(self, cluster: Cluster, lives: Lives) -> None:
        self._cluster, self._lives = cluster, lives
        self._woken_s: dict[int, float] = {}
        """By endpoint: when one was woken, that no call has used yet."""
        self._again_s: dict[int, float] = {}
        self.counts: Counter[str] = Counter(warmed=0, used=0, wasted=0)

    def sleeping(self) -> dict[int, float]:
        """Return the seconds to wake an instance of each endpoint that has none awake, where one sleeps."""
        wakes_s = dict[int, float]()
        states, lives, endpoints = self._lives.state, self._lives.world.lives, len(self._cluster.endpoints)
        endpoint_of = (self._lives.world.fleet.endpoint % endpoints).tolist()
        for at, endpoint in enumerate(endpoint_of):
            life: Any = lives.instances[at]
            if life.swap_group >= 0 and states[at] in (State.ASLEEP, State.EMPTY):
                load_s = life.local_weights_s if states[at] == State.EMPTY else life.reload_s
                load_s = float(life.wake_s if life.in_memory else load_s)
                wakes_s[endpoint] = load_s + self._sleep_s(int(life.swap_group))
            elif states[at] == State.ASLEEP:
                wakes_s[endpoint] = self._cluster.delays.wake_s
        for at, endpoint in enumerate(endpoint_of):
            if COMING >> int(states[at]) & 1:
                wakes_s.pop(endpoint, None)
        return wakes_s

    def _holder(self, group: int) -> int:
        """Return the instance that has the GPUs of a swap group; -1 for none."""
        mine = np.flatnonzero(self._lives.world.lives.instances["swap_group"] == group).tolist()
        return next((at for at in mine if not WITHOUT_GPUS >> int(self._lives.state[at]) & 1), -1)

    def _sleep_s(self, group: int) -> float:
        holder = self._holder(group)
        return 0.0 if holder < 0 else float(self._lives.world.lives.instances["sleep_s"][holder])

    def look(self, world: World, likely: Sequence[LikelyCall], now_s: float) -> None:
        """Wake what *likely* calls need."""
        self._settle(world, now_s)
        for endpoint in self.sleeping():
            again_s = self._again_s.get(endpoint, -np.inf)
            if wakes(likely, endpoint, now_s, again_s, woken=endpoint in self._woken_s) and self._wake(world, endpoint):
                self._woken_s[endpoint], self._again_s[endpoint] = now_s, now_s + AGAIN_S
                self.counts["warmed"] += 1

    def _wake(self, world: World, endpoint: int) -> bool:
        """Wake an instance of *endpoint*; return whether one wakes."""
        members = world.endpoints.members[world.endpoints.first[endpoint] : world.endpoints.first[endpoint + 1]]
        for at in members.tolist():
            group = int(world.lives.instances["swap_group"][at])
            if group < 0 and self._lives.state[at] == State.ASLEEP:
                return self._lives.start(at)
            if group >= 0 and self._is_idle(world, group):
                return self._lives.swap_to(at)
        return False

    def _is_idle(self, world: World, group: int) -> bool:
        """Whether nothing runs on the GPUs of *group*, and nothing waits for any of its models."""
        holder, groups = self._holder(group), world.lives.instances["swap_group"]
        endpoints = np.unique(world.fleet.endpoint[groups == group])
        if world.waiting.size[endpoints].any():
            return False
        return holder < 0 or (self._lives.state[holder] == State.READY and not world.fleet.running[holder])

    def _settle(self, world: World, now_s: float) -> None:
        for endpoint, woken_s in list(self._woken_s.items()):
            serves = (world.fleet.endpoint % len(self._cluster.endpoints) == endpoint) & (
                COMING >> self._lives.state.astype(np.int64) & 1 != 0
            )
            if world.endpoints.asked_at_s[endpoint] > woken_s:
                self.counts["used"] += 1
            elif now_s - woken_s < OPEN_S and serves.any():
                continue
            else:
                self.counts["wasted"] += 1
            del self._woken_s[endpoint]


class PrefixPrewarming:
    """System prompts of units, which an instance computes once it has memory for them."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: ApplicationRuns) -> None:
        self._runs, self._first, self._models = runs, requests.prefix_first, requests.model
        self._cluster, self._prompts = cluster, runs.known_prompts
        self._shares: NDArray[np.bool_] = (requests.run >= 0) & (np.diff(self._first) > 0)
        self._unseen = np.flatnonzero(self._shares)
        """Calls that no instance was seen to have."""

    @property
    def counts(self) -> Counter[str]:
        return self._prompts.time.counts

    def look(self, world: World, likely: Sequence[LikelyCall], now_s: float) -> None:
        """Warm the prompts of the first waiting calls and of *likely* ones."""
        self._note(world, now_s)
        soon: dict[int, list[Any]] = {}
        for call in due(likely, "prefix"):
            soon.setdefault(call.target.endpoint, []).append(call.target.name)
        for endpoint in range(world.waiting.size.size):
            if world.policies[endpoint]["routing"] != LEAST_DELAY:
                continue
            waiting = [int(world.held[slot]) for slot in first_waiting(world.waiting, endpoint)]
            names = [self._runs.prompt_of(request) for request in waiting if self._shares[request]]
            for name in [*names, *soon.get(endpoint, ())]:
                self._warm(world, endpoint, name, now_s)
        for instance in list(self._prompts.warming):
            self._compute(world, instance, now_s)

    def _warm(self, world: World, endpoint: int, name: tuple[str, int], now_s: float) -> None:
        key = self._cluster.endpoints[endpoint % len(self._cluster.endpoints)]
        known = self._prompts.known.get(name)
        if known is None or known.model != key[0]:
            return
        profile, share = self._cluster.reference_profile(key), self._cluster.prewarm_share
        arrays = world.fleet, world.endpoints, world.affinity
        self._prompts.place(*arrays, endpoint, name, profile, share, now_s)

    def _compute(self, world: World, instance: int, now_s: float) -> None:
        """Have *instance* compute the prompt that it warms, if it has memory for it."""
        name: Any = self._prompts.warming[instance].prompt
        request = self._runs.prompts[name]
        first, count = int(self._first[request]), int(self._first[request + 1] - self._first[request])
        endpoint, accepts = int(world.fleet.endpoint[instance]), bool(world.fleet.accepting[instance])
        caches = bool(world.engines.instances["prefix_caching"][instance])
        if not (accepts and caches):
            self._prompts.end(world.fleet, world.affinity, endpoint, instance, now_s, failed=True)
        elif warm_prefix(world.engines, instance, world.engines.cache.hashes, first, count) >= 0:
            self._prompts.end(world.fleet, world.affinity, endpoint, instance, now_s)

    def _note(self, world: World, now_s: float) -> None:
        placed = world.outcomes["attempts"][self._unseen] > 0
        for row in self._unseen[placed].tolist():
            self._prompts.time.use(int(world.outcomes["instance"][row]), self._runs.prompt_of(row))
        self._unseen = self._unseen[~placed]
        for instance in self._prompts.overdue(now_s):
            endpoint = int(world.fleet.endpoint[instance])
            self._prompts.end(world.fleet, world.affinity, endpoint, instance, now_s, failed=True)
        self._prompts.waste(world.fleet, world.affinity, dict(enumerate(world.fleet.endpoint.tolist())), now_s)
