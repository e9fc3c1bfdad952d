"""Prewarming of LoRA adapters in a simulation, by the live dispatcher's own rule."""

from functools import partial

import numpy as np

from scheduling.applications.prewarming import HERMES, LOOK_S, AdapterPrewarming, load_time_s
from scheduling.simulation.application_runs import ApplicationRuns
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import World
from scheduling.simulation.workload.requests import Requests


class SimulatedPrewarming:
    """Call `look` at `next_s`, with up-to-date fleet arrays. What is loaded so costs an instance no time."""

    def __init__(self, cluster: Cluster, requests: Requests) -> None:
        self._cluster, self._requests = cluster, requests
        self._prewarming = AdapterPrewarming()
        self._unseen = np.flatnonzero(requests.adapter >= 0)
        """Requests with an adapter that no instance was seen to have."""
        self.next_s = LOOK_S

    def look(self, world: World, runs: ApplicationRuns | None, now_s: float) -> None:
        self.next_s += LOOK_S
        placed = world.outcomes["attempts"][self._unseen] > 0
        for row in self._unseen[placed].tolist():
            self._prewarming.use(int(world.outcomes["instance"][row]), int(self._requests.adapter[row]))
        self._unseen = self._unseen[~placed]
        by, likely = self._cluster.prewarming, []
        if by == HERMES and runs is not None:
            load_s = partial(load_time_s, world.fleet, world.endpoints)
            likely = runs.likely_calls(world, load_s, self._cluster.prewarm_k, now_s)
        self._prewarming.look(world.fleet, world.endpoints, world.waiting, lambda endpoint: by, likely)

    def counters(self) -> dict[str, int]:
        return {f"prewarmed_{name}": count for name, count in self._prewarming.counts.items()}
