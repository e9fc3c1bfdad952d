"""Prewarming in a simulation, by the live dispatcher's own rule."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.prewarming import (
    BY_GRAPH,
    LOOK_S,
    LRU,
    AdapterPrewarming,
    LikelyCall,
    PrefillTime,
    due,
    first_waiting,
)
from scheduling.simulation.application_runs import ApplicationRuns
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.prefix_cache import cached_blocks, warm_prefix
from scheduling.simulation.workload.requests import Requests


class SimulatedPrewarming:
    """Call `look` at `next_s`, with up-to-date fleet arrays. An adapter that is loaded so costs an instance no time."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: ApplicationRuns | None) -> None:
        self._cluster, self._requests, self._runs = cluster, requests, runs
        self._adapters = AdapterPrewarming()
        self._unseen = np.flatnonzero(requests.adapter >= 0)
        """Requests with an adapter that no instance was seen to have."""
        self._has_adapters = bool(self._unseen.size)
        self._prefixes = PrefixPrewarming(cluster, requests, runs) if runs is not None and runs.prompts else None
        self.next_s = LOOK_S

    @property
    def needed(self) -> bool:
        """Whether anything can be cold, and is prewarmed."""
        things = self._cluster.backends or self._has_adapters or self._prefixes
        return self._cluster.prewarming != LRU and bool(things)

    def look(self, world: World, now_s: float) -> None:
        self.next_s += LOOK_S
        by, likely = self._cluster.prewarming, list[LikelyCall]()
        if by in BY_GRAPH and self._runs is not None:
            likely = self._runs.likely_calls(world, now_s, by)
            self._runs.prewarm(likely, now_s)
        if self._has_adapters:
            placed = world.outcomes["attempts"][self._unseen] > 0
            for row in self._unseen[placed].tolist():
                self._adapters.use(int(world.outcomes["instance"][row]), int(self._requests.adapter[row]))
            self._unseen = self._unseen[~placed]
            self._adapters.look(world.fleet, world.endpoints, world.waiting, lambda endpoint: by, likely)
        if self._prefixes is not None:
            self._prefixes.look(world, likely, now_s)

    def counters(self) -> dict[str, int]:
        counts = {f"prewarmed_{name}": count for name, count in self._adapters.counts.items()}
        counts = counts if self._has_adapters else {}
        if self._prefixes is not None:
            counts |= {f"prefix_{name}": count for name, count in self._prefixes.time.counts.items()}
        return counts


class PrefixPrewarming:
    """System prompts of units, which a request of one token brings into the prefix cache of an instance."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: ApplicationRuns) -> None:
        self._runs, self._first = runs, requests.prefix_first
        self._cluster, self.time = cluster, PrefillTime()
        self._shares: NDArray[np.bool_] = (requests.run >= 0) & (np.diff(self._first) > 0)
        self._unseen = np.flatnonzero(self._shares)
        """Calls that no instance was seen to have."""

    def look(self, world: World, likely: Sequence[LikelyCall], now_s: float) -> None:
        """Warm the prompts of the first waiting calls and of *likely* ones, as far as free memory and time go."""
        self._note(world)
        soon: dict[int, list[tuple[str, int]]] = {}
        for call in due(likely, "prefix"):
            if isinstance(call.target.name, tuple):
                soon.setdefault(call.target.endpoint, []).append(call.target.name)
        endpoints, engines = world.endpoints, world.engines.instances
        for endpoint in range(world.waiting.size.size):
            first = first_waiting(world.waiting, endpoint, self._shares[world.held])
            prompts = [self._runs.prompt_of(int(world.held[slot])) for slot in first] + soon.get(endpoint, [])
            members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]]
            fleet = world.fleet
            room = fleet.running[members] < fleet.max_num_seqs[members]
            able = members[(fleet.accepting[members] != 0) & (engines["prefix_caching"][members] != 0) & room].tolist()
            free, chosen = int(engines["free_blocks"][able].sum()), list[tuple[str, int]]()
            for prompt in dict.fromkeys(prompts) if able else ():
                free -= self._blocks(prompt)[1]
                if free < 0:
                    break
                chosen.append(prompt)
            for prompt in reversed(chosen):  # what is used first is pushed out last
                self._warm(world, endpoint, able, prompt, now_s)

    def _blocks(self, prompt: tuple[str, int]) -> tuple[int, int]:
        """Return where the hashes of *prompt* begin, and how many there are."""
        request = self._runs.prompts[prompt]
        return int(self._first[request]), int(self._first[request + 1] - self._first[request])

    def _warm(self, world: World, endpoint: int, able: list[int], prompt: tuple[str, int], now_s: float) -> None:
        """Warm *prompt* where most of it is, then where the fewest requests run."""
        first, count = self._blocks(prompt)
        cached = {at: cached_blocks(world.engines, at, first, count) for at in able}
        instance = min(able, key=lambda at: (-cached[at], int(world.fleet.running[at]), at))
        profile = self._cluster.reference_profile(self._cluster.endpoints[endpoint % len(self._cluster.endpoints)])
        if count >= int(world.engines.instances["free_blocks"][instance]):
            return
        if tokens := (count - cached[instance]) * int(world.engines.instances["block_size_tokens"][instance]):
            takes_s, running = profile.service_time_s(tokens, 1), int(world.fleet.running[instance])
            if not self.time.take(instance, prompt, takes_s, running, self._cluster.prewarm_share, now_s):
                return
        warm_prefix(world.engines, instance, first, count)

    def _note(self, world: World) -> None:
        placed = world.outcomes["attempts"][self._unseen] > 0
        for row in self._unseen[placed].tolist():
            self.time.use(int(world.outcomes["instance"][row]), self._runs.prompt_of(row))
        self._unseen = self._unseen[~placed]
        for instance, prompt in self.time.unused():
            first, count = self._blocks(prompt)
            if cached_blocks(world.engines, instance, first, count) < count:
                self.time.waste(instance, prompt)
