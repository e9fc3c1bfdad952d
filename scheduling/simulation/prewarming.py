"""Prewarming in a simulation, by the live dispatcher's own rule."""

import numpy as np

from scheduling.applications.prewarming import EAGER, HERMES, LOOK_S, AdapterPrewarming
from scheduling.simulation.application_runs import ApplicationRuns
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import World
from scheduling.simulation.workload.requests import Requests


class SimulatedPrewarming:
    """Call `look` at `next_s`, with up-to-date fleet arrays. An adapter that is loaded so costs an instance no time."""

    def __init__(self, cluster: Cluster, requests: Requests) -> None:
        self._cluster, self._requests = cluster, requests
        self._adapters = AdapterPrewarming()
        self._unseen = np.flatnonzero(requests.adapter >= 0)
        """Requests with an adapter that no instance was seen to have."""
        self._has_adapters = bool(self._unseen.size)
        self.next_s = LOOK_S

    def look(self, world: World, runs: ApplicationRuns | None, now_s: float) -> None:
        self.next_s += LOOK_S
        by, likely = self._cluster.prewarming, []
        if by in (HERMES, EAGER) and runs is not None:
            likely = runs.likely_calls(world, now_s, eager=by == EAGER)
            runs.prewarm(likely, now_s)
        if self._has_adapters:
            placed = world.outcomes["attempts"][self._unseen] > 0
            for row in self._unseen[placed].tolist():
                self._adapters.use(int(world.outcomes["instance"][row]), int(self._requests.adapter[row]))
            self._unseen = self._unseen[~placed]
            self._adapters.look(world.fleet, world.endpoints, world.waiting, lambda endpoint: by, likely)

    def counters(self) -> dict[str, int]:
        if not self._has_adapters:
            return {}
        return {f"prewarmed_{name}": count for name, count in self._adapters.counts.items()}
