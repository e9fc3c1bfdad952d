"""A simulated fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the world."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.prewarming import Warmable
from scheduling.compiled import direct
from scheduling.control.fleet import FallbackTerms, SwapGroup
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import BUSY_SEQUENCES, Profile
from scheduling.fleet.sleep_level import IN_MEMORY, sleep_level
from scheduling.policy import EndpointPolicy
from scheduling.queueing.groups import NONE
from scheduling.queueing.held import HELD, OPPORTUNISTIC
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import NO_DEADLINE_S, Standing, hold_s
from scheduling.queueing.promises import ClassTerms, fallbacks
from scheduling.queueing.running import Running
from scheduling.queueing.swapping.sharing import Swap, share_queues
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.queueing.waits.starting import SPREAD
from scheduling.routing.models import RULES, ModelRule
from scheduling.routing.prefix_affinity import Affinity
from scheduling.routing.regions import choose_region, first_with_room
from scheduling.scaling.spot import spot_policy
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.lifecycle import Lives
from scheduling.simulation.cluster.loop import CONTROL, change
from scheduling.simulation.cluster.occupancy import COLUMNS, occupancy, running
from scheduling.simulation.cluster.state_changes import COMING, WITHDRAW, WITHOUT_GPUS
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use
from scheduling.simulation.workload.requests import Requests

STARTS: Final = (State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING)
AT_REST: Final = (State.ASLEEP, State.EMPTY)
AWAY: Final = (State.FAILED, State.SPOT, State.LOST)
"""States from which no swap brings an instance up."""


class Simulated(Protocol):
    """The simulation that a fleet is of."""

    cluster: Cluster
    requests: Requests
    lives: Lives
    waits: Any
    runs: Any
    holding: Any

    @property
    def world(self) -> World: ...
    @property
    def now_s(self) -> float: ...
    @property
    def states(self) -> NDArray[np.int8]: ...
    @property
    def arrived(self) -> int: ...
    def control(self, endpoint: int = -1, request: int = -1, source: int = CONTROL) -> int: ...
    def evict(self, request: int) -> None: ...


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
            (model, *origin): endpoint
            for model, row in zip(cluster.models, cluster.nearest(), strict=True)
            for origin, endpoint in zip(cluster.origins, row, strict=True)
        }
        self._model = {name: number for number, name in enumerate(cluster.models)}
        self._origin = {origin: number for number, origin in enumerate(cluster.origins)}
        self._longest = cluster.longest_tokens()
        known = {terms.slo_class: terms for terms in cluster.classes}
        self._terms = [(terms, fallbacks(terms, known)) for terms in cluster.classes]
        self._classes = {name: number for number, name in enumerate(known)}
        self._slot = 0
        """Of the request that was last looked for."""
        self._choose_region = direct(choose_region)
        self._occupancy, self._with_room, self._running = direct(occupancy), direct(first_with_room), direct(running)
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

    def preferred(self, model: str, region: str, within: tuple[str, ...] = ()) -> int:
        return self._preferred.get((model, region, within), -1)

    def origin(self, row: int) -> tuple[str, tuple[str, ...]]:
        origin: tuple[str, tuple[str, ...]] = self.simulation.cluster.origins[self.requests.region[row]]
        return origin

    def serves(self, endpoint: int) -> bool:
        return endpoint < self._own

    def spot_with_room(self, row: int) -> int:
        """Return `choices.spot_with_room`."""
        if len(self.endpoints) == self._own:
            return -1
        world, requests = self.simulation.world, self.requests
        first, origins = world.candidate_first, len(self.simulation.cluster.origins)
        at = (first.size - 1) // 2 + int(requests.model[row]) * origins + int(requests.region[row])
        donated = world.candidates[first[at] : (first[at] + first[at + 1]) // 2]  # the first half
        return int(self._with_room(world.fleet, world.endpoints, donated, world.waiting.size))

    def occupancy(self) -> NDArray[np.int64]:
        self._occupancy(self.simulation.world, self._scratch(), self._rows)
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
            produced.update(zip(these["request"].tolist(), self._emitted(these).tolist(), strict=True))
        return produced.__getitem__

    def _emitted(self, sequences: Any) -> NDArray[np.int64]:
        """Return the output tokens so far of *sequences*, records of engines."""
        engine: Any = self.simulation.world.engines.instances[sequences["instance"]]
        iteration = engine["iteration"] + np.where(engine["phase"] == SEGMENT, engine["counted"], 0)
        tokens = np.where(sequences["decoding"] != 0, iteration + sequences["offset"], sequences["produced_tokens"])
        return np.where(sequences["streaming"] != 0, tokens, 0).astype(np.int64)

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

    def _scratch(self) -> NDArray[np.bool_]:
        sequences = self.simulation.world.engines.sequences.size
        if self._free.size != sequences:
            self._free = np.zeros(sequences, np.bool_)
        return self._free

    def slot(self, row: int) -> int:
        world = self.simulation.world
        position, held = world.waiting.position, world.held
        if held.item(self._slot) != row or position.item(self._slot) < 0:
            slots = np.flatnonzero((held == row) & (position >= 0))
            if not slots.size:
                return -1
            self._slot = int(slots[0])
        return self._slot

    def slo_class(self, row: int) -> str:
        number = int(self.requests.slo_class[row])
        return self._terms[number][0].slo_class if self._terms else str(number)

    def max_tokens(self, row: int) -> float:
        return inf

    def terms(self, row: int) -> tuple[ClassTerms, tuple[ClassTerms, ...]]:
        return self._terms[int(self.requests.slo_class[row])]

    def running(self, endpoint: int) -> tuple[int, int]:
        count, produced = self._running(self.simulation.world, self._scratch(), endpoint)
        return int(count), int(produced)

    def serves_in(self, instance: int) -> tuple[float, float] | None:
        simulation, state = self.simulation, State(self.simulation.states[instance])
        if state not in STARTS:
            return None
        times = simulation.world.events.time_s
        left_s = float(times[times.size // 2 + simulation.states.size + instance]) - simulation.now_s
        loading_s = float(simulation.world.lives.instances["loading_s"][instance]) if state == State.STARTING else 0.0
        return (max(0.0, left_s) + loading_s, SPREAD) if left_s < inf else None

    def serving(self, model: str, origin: tuple[str, tuple[str, ...]], opportunistic: bool = False) -> int:
        world, now_s = self.simulation.world, self.simulation.now_s
        at = self._model[model] * world.latency_s.shape[0] + self._origin[origin]
        if opportunistic and len(self.endpoints) > self._own:
            at += (world.candidate_first.size - 1) // 2
        candidates = world.candidates[world.candidate_first[at] : world.candidate_first[at + 1]]
        if not candidates.size:
            return -1
        threshold = float(world.policies["region_threshold"][candidates[0]])
        return int(self._choose_region(world.fleet, world.endpoints, candidates, world.waiting.size, threshold, now_s))

    def fallback_of(self, row: int) -> FallbackTerms | None:
        """As `choices.may_fall_back`; a prompt that no instance of the fallback can hold has none."""
        world, requests, cluster = self.simulation.world, self.requests, self.simulation.cluster
        kept = world.kept_tokens[row] if world.kept_tokens.size > 1 else 0
        held, model = int(requests.held[row]), cluster.models[requests.model[row]]
        begun = world.outcomes["evictions"][row] > 0 or kept > 0
        if begun or held & HELD or not world.may_fall_back[row] or model not in cluster.fallbacks:
            return None
        fallback, wait_s = cluster.fallbacks[model]
        if requests.prompt_tokens[row] >= self._longest[self._model[fallback]]:
            return None
        return FallbackTerms(model, fallback, wait_s, self.origin(row), bool(held & OPPORTUNISTIC))

    def queue_on(self, row: int, terms: ClassTerms) -> None:
        arrivals, requests, holding = self.simulation.world.arrivals, self.requests, self.simulation.holding
        requests.slo_class[row] = self._classes[terms.slo_class]
        requests.priority[row] = arrivals.priority[row] = terms.priority
        arrivals.deadline_s[row] = inf if terms.due_s is None else terms.due_s
        arrivals.end_s[row] = inf if terms.end_s is None else terms.end_s
        deadline_s = inf if terms.deadline_s is None else terms.deadline_s
        arrivals.hold_s[row] = hold_s(deadline_s, self.simulation.cluster.max_hold_s)
        endpoint = self._withdraw(row)
        if holding is not None:
            arrivals.held[row] = holding.held_as(row, terms)
        if holding is not None and arrivals.held[row] & HELD:
            holding.hold(row, endpoint)
        else:
            self._queue_again(row, endpoint)

    def fall_back(self, row: int, endpoint: int, rule: ModelRule) -> None:
        if self.slot(row) >= 0:
            self._withdraw(row)
        self.become(row, rule)
        self.requests.judged[row] = 0
        self._queue_again(row, endpoint)

    def _queue_again(self, row: int, endpoint: int) -> None:
        """Queue *row* at *endpoint*: what decided on that estimates its wait, not the door."""
        self.simulation.control(endpoint, row)
        self.simulation.world.run_state["at_door"] = NONE

    def become(self, row: int, rule: ModelRule) -> None:
        """Make the request of *row* one of the fallback of its model, by *rule*."""
        world, requests, own = self.simulation.world, self.requests, int(self.requests.model[row])
        model = int(world.fallback[own])
        if requests.asked[row] < 0:
            requests.asked[row] = own
        room = max(1, self._longest[model] - int(requests.prompt_tokens[row]))
        for column in (requests.output_tokens, requests.predicted_tokens):
            column[row] = min(int(column[row]), room)
        requests.model[row] = model
        world.may_fall_back[row] = 0
        world.outcomes["model_rule"][row] = RULES.index(rule)

    def _withdraw(self, row: int) -> int:
        """Take the request of *row* out of its queue; return the endpoint of that."""
        slot = self.slot(row)
        endpoint = int(self.waiting.endpoint[slot])
        change(self.simulation.world, WITHDRAW, slot, 0)
        return endpoint

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
            emitted_tokens=self._emitted(these),
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

    def share_queues(self) -> bool:
        """Assign virtual queues to the instances that swaps can bring up; return whether any has another."""
        arrays, states, sharing = self.waiting.groups, self.simulation.states, []
        for members in self.sharing.values():
            up = [instance for instance in members if states[instance] not in AWAY]
            endpoints = [int(self.instances.endpoint[instance]) for instance in up]
            if all(self.endpoints[one].policy.swap_by_queue and arrays.limit[one] > 0 for one in endpoints):
                sharing.append({instance: self.swap_times(instance) for instance in up})
        return bool(sharing) and share_queues(arrays, sharing)

    def swap_times(self, instance: int) -> Swap:
        """Return the time for *instance* to leave its GPUs, and to return from the tier of its weights."""
        lives, state = self.simulation.world.lives, self.simulation.states[instance]
        life: Any = lives.instances[instance]
        if state == State.EMPTY:
            return Swap(float(life.sleep_s), float(life.local_weights_s))
        in_memory = bool(life.in_memory)
        if state != State.ASLEEP:
            memory_bytes = float(lives.groups["memory_bytes"][life.swap_group])
            in_memory = sleep_level(lives.instances, instance, memory_bytes) == IN_MEMORY
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
        self.simulation.world.run_state["expired"] += 1
        self.refuse(row)

    def refuse(self, row: int) -> None:
        """Refuse the request of *row*, which waits nowhere."""
        world = self.simulation.world
        world.outcomes[row]["state"] = Outcome.REFUSED
        for count in ("refused", "ended"):
            world.run_state[count] += 1

    def warm(self, instance: int, target: Warmable, leaves: int = -1, *, again: bool = False) -> None:
        """An adapter that is loaded early costs an instance no time; engines compute prompts (`SimulatedPrewarming`)."""
