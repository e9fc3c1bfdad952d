"""A simulated fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the world."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.control.fleet import SwapGroup
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import BUSY_SEQUENCES, Profile
from scheduling.fleet.sleep_level import IN_MEMORY, sleep_level
from scheduling.policy import EndpointPolicy
from scheduling.queueing.groups import NONE
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.queueing.running import Running
from scheduling.queueing.swapping.sharing import Swap
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.regions import first_with_room
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.occupancy import COLUMNS, occupancy
from scheduling.simulation.cluster.state_changes import COMING, WITHOUT_GPUS
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use
from scheduling.simulation.workload.requests import Requests

AT_REST: Final = (State.ASLEEP, State.EMPTY)


class Simulated(Protocol):
    """The simulation that a fleet is of."""

    cluster: Cluster
    requests: Requests
    waits: Any

    @property
    def world(self) -> World: ...
    @property
    def now_s(self) -> float: ...
    @property
    def states(self) -> NDArray[np.int8]: ...
    def control(self, endpoint: int = -1, request: int = -1) -> int: ...
    def evict(self, request: int) -> None: ...


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

    def running_requests(self) -> Running:
        self.simulation.control()
        world = self.simulation.world
        engines, arrivals = world.engines, world.arrivals
        sequences = sequences_in_use(engines)
        # In order of dispatch, so that the result does not depend on which record a sequence uses.
        sequences = sequences[np.argsort(engines.sequences["number"][sequences])]
        endpoints = world.fleet.endpoint[engines.sequences["instance"][sequences]]
        these: Any = engines.sequences[sequences[world.waiting.groups.limit[endpoints] > 0]]
        rows, instances = these["request"], these["instance"]
        engine: Any = engines.instances[instances]
        iteration = engine["iteration"] + np.where(engine["phase"] == SEGMENT, engine["counted"], 0)
        produced = np.where(these["decoding"] != 0, iteration + these["offset"], these["produced_tokens"])

        def of_each(column: Any) -> Any:
            return column[rows] if column.size > 1 else np.repeat(column, rows.size)

        due_s, end_s = of_each(arrivals.deadline_s).astype(np.float64), of_each(arrivals.end_s).astype(np.float64)
        allowed_s = np.minimum(due_s, end_s)
        if np.isfinite(end_s).any():
            of_endpoint = world.policies[world.fleet.endpoint[instances]]
            a_s, b_s, c_s = (of_endpoint[f"decode_{name}"] for name in ("a_s", "b_s_per_sequence", "c_s_per_token"))
            prompt, output = these["expected_prompt"], these["expected_tokens"] - these["expected_prompt"]
            decode_s = (output - 1.0) * (a_s + BUSY_SEQUENCES * (b_s + c_s * (prompt + 0.5 * output)))
            due_s = np.minimum(due_s, np.maximum(0.0, end_s - decode_s))
        return Running(
            row=rows.astype(np.int64),
            instance=instances.astype(np.int64),
            due_s=arrivals.arrival_s[rows] + np.where(np.isfinite(due_s), due_s, NO_DEADLINE_S),
            allowed_s=allowed_s,
            priority=of_each(arrivals.priority).astype(np.int64),
            prompt_tokens=these["prompt_tokens"].astype(np.int64),
            emitted_tokens=np.where(these["streaming"] != 0, produced, 0).astype(np.int64),
            expected_tokens=these["expected_tokens"].astype(np.int64),
            evictions=world.outcomes["evictions"][rows].astype(np.int64),
            evictable=np.ones(rows.size, np.bool_),
            leaving=these["evicted"] != 0,
        )

    def swap_groups(self) -> Iterator[SwapGroup]:
        lives, states = self.simulation.world.lives, self.simulation.states
        for group, instances in self.sharing.items():
            awake = next((one for one in instances if not WITHOUT_GPUS >> int(states[one]) & 1), NONE)
            sleep_s = 0.0 if awake == NONE else self.swap_times(awake).sleep_s
            target = int(lives.groups["target"][group])
            yield SwapGroup(
                name=str(group),
                at_rest={one: sleep_s + self.swap_times(one).load_s for one in instances if states[one] in AT_REST},
                awake=awake,
                is_ready=bool(states[awake] == State.READY) and awake != NONE,
                ready_s=self.now_s - float(lives.instances["since_s"][awake]),
                in_progress=target != NONE,
                target=target,
            )

    def name(self, instance: int) -> str:
        return str(instance)

    def is_served(self, endpoint: int) -> bool:
        members = self.members.members[slice(*self.members.first[endpoint : endpoint + 2])]
        return any(COMING >> int(self.simulation.states[one]) & 1 for one in members)

    @cached_property
    def sharing(self) -> dict[int, list[int]]:
        """The instances that share GPUs, by number of their group."""
        groups: dict[int, list[int]] = {}
        for instance, group in enumerate(self.simulation.world.lives.instances["swap_group"].tolist()):
            if group >= 0:
                groups.setdefault(group, []).append(instance)
        return groups

    def swap_times(self, instance: int) -> Swap:
        """Return the time for *instance* to leave its GPUs, and to return from the tier of its weights."""
        lives, state = self.simulation.world.lives, self.simulation.states[instance]
        life: Any = lives.instances[instance]
        if state == State.EMPTY:
            return Swap(float(life.sleep_s), float(life.local_weights_s))
        in_memory = bool(life.in_memory)
        if state != State.ASLEEP:
            group: Any = lives.groups[life.swap_group]
            level = sleep_level(float(life.weights_bytes), float(group.held_bytes), float(group.memory_bytes))
            in_memory = level == IN_MEMORY
        return Swap(float(life.sleep_s), float(life.wake_s if in_memory else life.reload_s))

    def pump(self, endpoint: int) -> None:
        self.simulation.control(endpoint)

    def evict(self, row: int) -> None:
        self.simulation.evict(row)

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
