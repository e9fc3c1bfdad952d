"""What workers do to the instances of a virtual fleet: each state lasts as long as the cluster's delays say."""

import math
from dataclasses import replace

import numpy as np

from controlplane.dispatch.live_fleet.inventory import SwapGroupSpec, SwapMemberSpec
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.compiled import uncompiled
from scheduling.control.swaps import Swaps
from scheduling.fleet.sleep_level import IN_MEMORY, Member, count_swap, sleep_level
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.lifecycle import SPOT_SPREAD
from scheduling.simulation.cluster.world import State
from tests.clocks.fleet import CHANGE, Engine, VirtualFleet

S = InstanceState
LIVE = {
    State.READY: S.READY, State.DRAINING: S.DRAINING, State.SPOT: S.DONATED, State.RECLAIMING: S.RECLAIMING,
    State.LOADING: S.LOADING, State.STARTING: S.PROVISIONING, State.FALLING_ASLEEP: S.DRAINING, State.ASLEEP: S.SLEEPING,
    State.WAKING: S.LOADING, State.EMPTY: S.STOPPED, State.FAILED: S.FAILED,
}  # fmt: skip
WITHOUT_GPUS = (State.ASLEEP, State.EMPTY)
NEVER = math.inf
SLEEP_S = 0.54


class Launcher:
    """Has the methods by which a simulation's instances are changed, under the same names."""

    def __init__(self, fleet: VirtualFleet, cluster: Cluster, seed: int = 0) -> None:
        self.fleet, self.cluster, self.delays = fleet, cluster, cluster.delays
        self.states = [spec.state for spec in cluster.instances]
        self.since_s = [0.0] * len(self.states)
        self.goals: dict[int, list[tuple[State, float]]] = {}
        """States of an instance once it is drained, each with its duration,"""
        self.models: dict[int, str] = {}
        """and the model that it then has, where that is another."""
        self.target: int | None = None
        """Instance that gets the GPUs of the group once the other sleeps."""
        self.changes: list[tuple[float, int, State]] = []
        self.random = np.random.default_rng(seed)
        self.shares = [number for number, spec in enumerate(cluster.instances) if spec.sharing is not None]
        self.members = [Member(spec.sharing.weights_bytes if spec.sharing else 0.0) for spec in cluster.instances]
        if self.shares:
            for number in self.shares:
                self.members[number].in_memory = self.states[number] == State.ASLEEP and self._keeps(number)
            fleet.swap_groups = self.groups
            self.swaps = Swaps(fleet.dispatcher.fleet, fleet.dispatcher.prewarming.control.early)
            fleet.on_tick.append(self._swap)
            fleet.apply()
        fleet.on_idle.append(self._settle)
        fleet.on_tick.append(self._wake)

    def start(self, number: int) -> None:
        delays, state, ready = self.delays, self.states[number], (State.READY, NEVER)
        if state == State.EMPTY:
            self._pass(number, (State.STARTING, delays.start_s), (State.LOADING, delays.remote_weights_s), ready)
        elif state == State.SPOT:
            drawn_s = delays.spot_median_s * math.exp(SPOT_SPREAD * self.random.standard_normal())
            self._pass(number, (State.RECLAIMING, min(drawn_s, delays.spot_max_s)), ready)
        elif state == State.ASLEEP:
            self._pass(number, (State.WAKING, delays.wake_s), ready)
        else:
            del self.goals[number]
            self._pass(number, ready)

    wake = start

    def drain(self, number: int) -> None:
        self._drain(number, (State.SPOT, NEVER))

    def stop(self, number: int) -> None:
        self._drain(number, (State.EMPTY, NEVER))

    def sleep(self, number: int) -> None:
        sharing = self.cluster.instances[number].sharing
        lasts_s = SLEEP_S if sharing is None else sharing.sleep_s
        self._drain(number, (State.FALLING_ASLEEP, lasts_s), (State.ASLEEP, NEVER))

    def redeploy(self, number: int, endpoint: int) -> None:
        self.models[number], _ = self.cluster.endpoints[endpoint]
        self._drain(number, (State.LOADING, self.delays.local_weights_s), (State.READY, NEVER))

    def fail(self, number: int, repair_s: float) -> None:
        self.goals.pop(number, None)
        self._note(number, State.FAILED)
        self.fleet.lose(number)
        if repair_s < NEVER:
            loading = (State.LOADING, self.delays.local_weights_s), (State.READY, NEVER)
            self.fleet.at(self.fleet.now_s + repair_s, CHANGE, self._pass, number, *loading)

    def _drain(self, number: int, *goal: tuple[State, float]) -> None:
        self.goals[number] = list(goal)
        if self.fleet.has(number):
            self._pass(number, (State.DRAINING, NEVER))
        else:
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Continue with an instance that is drained."""
        if number not in self.goals or self.fleet.has(number):
            return
        goal, model = self.goals.pop(number), self.models.pop(number, None)
        server = self.fleet.servers[number]
        if model is not None and model != server.spec.model:  # another instance takes its GPUs
            key = model, self.cluster.instances[number].gpu_type
            server.engine = Engine(self.cluster.engines()[key])
            self.fleet.removed = server
            self.fleet.apply()
            self.fleet.removed, spec = None, server.spec
            server.spec = replace(spec, instance_id=spec.instance_id + 100, name=spec.name + "'", model=model)
        self._pass(number, *goal)

    def _note(self, number: int, state: State) -> None:
        self.states[number], self.since_s[number] = state, self.fleet.now_s
        self.changes.append((self.fleet.now_s, number, state))

    def _pass(self, number: int, first: tuple[State, float], *then: tuple[State, float]) -> None:
        """Have an instance pass through states, each with its duration."""
        (state, lasts_s), lent = first, self.states[number] == State.SPOT
        self._note(number, state)
        if state != State.ASLEEP:
            self.members[number].in_memory = False
        if state == State.FALLING_ASLEEP and number in self.shares:
            self.members[number].in_memory = self._keeps(number)
        engine = self.fleet.servers[number].engine
        if state not in (State.READY, State.DRAINING, State.RECLAIMING):
            self.fleet.servers[number].engine = Engine(engine.config)
        self.target = None if self.target == number and state == State.READY else self.target
        gives_up = state == State.ASLEEP and self.target is not None
        spec = self.fleet.servers[number].spec
        if gives_up:  # one row and the other change at once
            self.fleet.servers[number].spec = replace(spec, state=LIVE[state])
            self._take_gpus(self.target)
        elif spec.state != LIVE[state]:
            self.fleet.put(number, LIVE[state])
        if lent:
            self.fleet.dispatcher.spot.reclaim(self.fleet.replica(number), late=False)
        if lasts_s < NEVER:
            self.fleet.at(self.fleet.now_s + lasts_s, CHANGE, self._next, number, state, *then)

    def _next(self, number: int, state: State, *then: tuple[State, float]) -> None:
        if self.states[number] == state:
            self._pass(number, *then)

    # What the floor decides

    def _wake(self) -> None:
        """Wake models whose calls probably follow."""
        prewarming = self.fleet.dispatcher.prewarming.control
        for number, state in enumerate(self.states):
            spec = self.fleet.servers[number].spec
            endpoint = self.fleet.topology.endpoint(spec.model, spec.region)
            alone = state == State.ASLEEP and number not in self.shares
            if alone and endpoint is not None and prewarming.early(endpoint.index):
                self.start(number)

    def groups(self) -> tuple[SwapGroupSpec, ...]:
        return (SwapGroupSpec("pair", tuple(map(self._member, self.shares)), self.target),)

    def _holder(self) -> int | None:
        return next((each for each in self.shares if self.states[each] not in WITHOUT_GPUS), None)

    def _keeps(self, number: int) -> bool:
        """Whether its weights stay in CPU memory when it sleeps."""
        memory_bytes = float(self.cluster.instances[number].sharing.memory_bytes)
        return uncompiled(sleep_level)(self.members, number, memory_bytes) == IN_MEMORY

    def _load_s(self, number: int) -> float:
        """Return how long it takes to come up: a stopped instance starts."""
        if self.states[number] == State.EMPTY:
            return self.delays.local_weights_s
        asleep, sharing = self.states[number] == State.ASLEEP, self.cluster.instances[number].sharing
        warm = self.members[number].in_memory if asleep else self._keeps(number)
        return sharing.wake_s if warm else sharing.reload_s

    def _member(self, number: int) -> SwapMemberSpec:
        spec, holder, load_s = self.cluster.instances[number], self._holder(), self._load_s(number)
        sleep_s = 0.0 if holder is None else self.cluster.instances[holder].sharing.sleep_s
        return SwapMemberSpec(
            number, f"i{number}", spec.model, spec.region, LIVE[self.states[number]], self.since_s[number],
            load_s + sleep_s, spec.sharing.sleep_s, load_s,
        )  # fmt: skip

    def _swap(self) -> None:
        for slot, _ in self.swaps.wanted():
            self.target = self.fleet.topology.by_slot[slot].spec.instance_id
            self.sleep(self._holder())

    def _take_gpus(self, number: int) -> None:
        state, load_s = State.LOADING if self.states[number] == State.EMPTY else State.WAKING, self._load_s(number)
        uncompiled(count_swap)(self.members, number)
        self._pass(number, (state, load_s), (State.READY, NEVER))
