"""A simulated fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the world."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.prewarming import Warmable
from scheduling.compiled import direct
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import Standing
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.prefix_affinity import Affinity
from scheduling.routing.regions import first_with_room
from scheduling.scaling.spot import spot_policy
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.lifecycle import Lives
from scheduling.simulation.cluster.occupancy import COLUMNS, occupancy
from scheduling.simulation.cluster.state_changes import COMING, WITHOUT_GPUS
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use
from scheduling.simulation.workload.requests import Requests


class Simulated(Protocol):
    """The simulation that a fleet is of."""

    cluster: Cluster
    requests: Requests
    lives: Lives
    waits: Any
    runs: Any

    @property
    def world(self) -> World: ...
    @property
    def now_s(self) -> float: ...
    def control(self, endpoint: int = -1, request: int = -1) -> int: ...


class SimulatedEndpoint(NamedTuple):
    model: str
    region: str
    policy: EndpointPolicy
    profile: Profile
    front_end: FrontEnd
    prewarm_share: float


class SimulatedFleet:
    """*simulation* as a `control.fleet.Fleet`; rows are its requests."""

    def __init__(self, simulation: Simulated) -> None:
        self.simulation, cluster = simulation, simulation.cluster
        self.models, self.requests = cluster.models, simulation.requests
        self._own = len(cluster.endpoints)
        engines = [cluster.reference_engine(key) for key in cluster.endpoints]
        own = [
            SimulatedEndpoint(*key, cluster.policy(key), engine.profile, engine.front_end, cluster.prewarm_share)
            for key, engine in zip(cluster.endpoints, engines, strict=True)
        ]
        donated = [one._replace(policy=spot_policy(one.policy)) for one in own]
        self.endpoints = (own + donated)[: simulation.world.policies.size]
        self._preferred = {
            (model, region): endpoint
            for model, row in zip(cluster.models, cluster.nearest(), strict=True)
            for region, endpoint in zip(cluster.regions, row, strict=True)
        }
        self._occupancy, self._with_room = direct(occupancy), direct(first_with_room)
        self._rows = np.zeros((len(self.endpoints), COLUMNS), np.int64)
        self._free = np.zeros(0, np.bool_)

    @property
    def now_s(self) -> float:
        return self.simulation.now_s

    @property
    def instances(self) -> FleetArrays:
        return self.simulation.world.fleet

    @property
    def members(self) -> EndpointArrays:
        return self.simulation.world.endpoints

    @property
    def waiting(self) -> WaitingArrays:
        return self.simulation.world.waiting

    @property
    def affinity(self) -> Affinity:
        return self.simulation.world.affinity

    def row_at(self, slot: int) -> int:
        return int(self.simulation.world.held[slot])

    def preferred(self, model: str, region: str) -> int:
        return self._preferred.get((model, region), -1)

    def serves(self, endpoint: int) -> bool:
        return endpoint < self._own

    def spot_with_room(self, row: int) -> int:
        """Return `choices.spot_with_room`."""
        if len(self.endpoints) == self._own:
            return -1
        world, requests = self.simulation.world, self.requests
        first, regions = world.candidate_first, len(self.simulation.cluster.regions)
        at = (first.size - 1) // 2 + int(requests.model[row]) * regions + int(requests.region[row])
        donated = world.candidates[first[at] : (first[at] + first[at + 1]) // 2]  # the first half
        return int(self._with_room(world.fleet, world.endpoints, donated, world.waiting.size))

    def occupancy(self) -> NDArray[np.int64]:
        world = self.simulation.world
        if self._free.size != world.engines.sequences.size:
            self._free = np.zeros(world.engines.sequences.size, np.bool_)
        self._occupancy(world, self._free, self._rows)
        return self._rows

    def produced(self, rows: Collection[int] | None = None) -> Callable[[int], int]:
        """As `Fleet.produced`; the fleet arrays must be up to date."""
        engines, produced = self.simulation.world.engines, defaultdict[int, int](int)
        sequences: Any = engines.sequences
        at = sequences_in_use(engines)
        if rows is not None:
            at = at[np.isin(sequences["request"][at], list(rows))]
        if at.size:
            these: Any = sequences[at]
            engine: Any = engines.instances[these["instance"]]
            iteration = engine["iteration"] + np.where(engine["phase"] == SEGMENT, engine["counted"], 0)
            tokens = np.where(these["decoding"] != 0, iteration + these["offset"], these["produced_tokens"])
            tokens = np.where(these["streaming"] != 0, tokens, 0)
            produced.update(zip(these["request"].tolist(), tokens.tolist(), strict=True))
        return produced.__getitem__

    def record_standing(self, rows: Sequence[int], standing: Standing) -> None:
        self.simulation.world.standings[rows] = standing[:5]

    @property
    def prewarm_k(self) -> float:
        return self.simulation.cluster.prewarm_k

    @property
    def any_cold(self) -> bool:
        return True

    def system_prompt(self, row: int) -> Hashable | None:
        return self.simulation.runs.system_prompt(row) if self.simulation.runs is not None else None

    def warm_s(self, kind: str, name: str) -> float | None:
        terms = self.simulation.cluster.backends.get(kind)
        return None if terms is None else terms.warm_s(name)

    def sleeping(self) -> dict[int, float]:
        lives, wakes_s = self.simulation.lives, dict[int, float]()
        states, instances = lives.state.astype(np.int64), lives.world.lives.instances
        endpoint_of, shares = self.instances.endpoint % self._own, instances["swap_group"] >= 0
        for at in np.flatnonzero((states == State.ASLEEP) | ((states == State.EMPTY) & shares)).tolist():
            life: Any = instances[at]
            wakes_s[int(endpoint_of[at])] = self.simulation.cluster.delays.wake_s
            if shares[at]:
                load_s = life.local_weights_s if states[at] == State.EMPTY else life.reload_s
                holder = self.holder(int(life.swap_group))
                sleep_s = 0.0 if holder < 0 else float(instances["sleep_s"][holder])
                wakes_s[int(endpoint_of[at])] = float(life.wake_s if life.in_memory else load_s) + sleep_s
        present = set(endpoint_of[COMING >> states & 1 != 0].tolist()) if wakes_s else ()
        return {endpoint: wake_s for endpoint, wake_s in wakes_s.items() if endpoint not in present}

    def holder(self, group: int) -> int:
        """Return the instance that has the GPUs of a swap group; -1 for none."""
        lives = self.simulation.lives
        mine = np.flatnonzero(lives.world.lives.instances["swap_group"] == group).tolist()
        return next((at for at in mine if not WITHOUT_GPUS >> int(lives.state[at]) & 1), -1)

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        if release is not None:
            self.simulation.world.arrivals.priority[row] = release.priority and max(1, int(self.requests.priority[row]))
        self.simulation.control(endpoint, row)
        if release is not None and self.simulation.waits is not None:
            self.simulation.waits.released(row)

    def expire(self, row: int) -> None:
        world = self.simulation.world
        run_state: Any = world.run_state[0]
        world.outcomes[row]["state"] = Outcome.REFUSED
        for count in ("refused", "expired", "ended"):
            run_state[count] += 1

    def warm(self, instance: int, target: Warmable, leaves: int = -1, *, again: bool = False) -> None:
        """An adapter that is loaded early costs an instance no time; engines compute prompts (`SimulatedPrewarming`)."""
