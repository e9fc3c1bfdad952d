"""A simulated fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the world."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held_work import Release
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.regions import first_with_room
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.occupancy import COLUMNS, occupancy
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.workload.requests import Requests


class Simulated(Protocol):
    """The simulation that a fleet is of."""

    cluster: Cluster
    requests: Requests
    waits: Any

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


class SimulatedFleet:
    """*simulation* as a `control.fleet.Fleet`; rows are its requests."""

    def __init__(self, simulation: Simulated) -> None:
        self.simulation, cluster = simulation, simulation.cluster
        self.models, self.requests = cluster.models, simulation.requests
        self._own = len(cluster.endpoints)
        engines = [cluster.reference_engine(key) for key in cluster.endpoints]
        own = [
            SimulatedEndpoint(*key, cluster.policy(key), engine.profile, engine.front_end)
            for key, engine in zip(cluster.endpoints, engines, strict=True)
        ]
        self.endpoints = own * (simulation.world.policies.size // self._own)
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
