"""The life of instances: started, loaded, drained, lent out as spot and taken back, asleep, failed, with another model.

Plain Python: an instance changes its state some hundred times in a week, and the compiled loop calls here when one does.
Delays are the cluster's; that of a spot reclaim is drawn (SageServe 7.1: median one minute, at most five).
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet import assign_endpoint
from scheduling.simulation.cluster import Cluster, Delays
from scheduling.simulation.events import reset_time
from scheduling.simulation.prefixes import empty_cache
from scheduling.simulation.state import configure
from scheduling.simulation.world import State, World

NEVER: Final = float("inf")
SPOT_SPREAD: Final = 0.6
"""Standard deviation of the logarithm of a reclaim: one in 270 takes more than five medians."""

READY: Final = int(State.READY)  # as a number: members of an enumeration are slow to come by
AT_HAND: Final = (int(State.DRAINING), int(State.SPOT), int(State.ASLEEP))
"""States from which an instance of the same model is back the soonest, in order."""
COMING: Final = frozenset({State.STARTING, State.LOADING, State.READY, State.RECLAIMING, State.WAKING, State.SWAPPING})
"""States of an instance that serves its endpoint or is on the way to it."""
SERVING: Final = frozenset({State.READY, State.DRAINING})
"""States in which an instance keeps what its prefix cache holds."""
RIPENS: Final = {
    State.RECLAIMING: State.READY,
    State.LOADING: State.READY,
    State.WAKING: State.READY,
    State.SWAPPING: State.READY,
    State.FALLING_ASLEEP: State.ASLEEP,
    State.STARTING: State.LOADING,
    State.FAILED: State.LOADING,
}
"""What a state becomes when its time is over."""

Change = tuple[float, int, int, int, int]
CHANGE: Final = np.dtype(
    [("time_s", np.float64), ("instance", np.int32), ("endpoint", np.int32), ("before", np.int8), ("after", np.int8)]
)
"""One change of an instance's state."""


class Lives:
    """The states of all instances, and the only way to change them. Callers check that a change makes sense."""

    def __init__(self, cluster: Cluster, world: World, seed: int) -> None:
        self.delays: Delays = cluster.delays
        self.state = np.array([spec.state for spec in cluster.instances], np.int8)
        self.redeploys = self.swaps = 0
        self.world = world
        self._cluster = cluster
        self._catalog = cluster.engines()
        self._caches = bool(cluster.cached_block_sizes())
        self._random = np.random.default_rng(seed)
        self._since_s = np.zeros(self.state.size)
        self._spent_s = np.zeros((self.state.size, len(State)))
        self._goal: dict[int, tuple[State, int, float]] = {}
        """What a draining instance becomes, at which endpoint (-1: its own), and how long that takes."""
        self._loading_s: dict[int, float] = {}
        self._used: list[list[str]] = [[spec.model] for spec in cluster.instances]
        """Models that were on each instance, the last one first."""
        self._changes: list[Change] = []

    def ready(self, instance: int) -> bool:
        return bool(self.state[instance] == READY)

    def state_s(self, now_s: float) -> NDArray[np.float64]:
        """Seconds that each instance spent in each state up to *now_s*."""
        spent_s = self._spent_s.copy()
        spent_s[np.arange(self.state.size), self.state] += now_s - self._since_s
        return spent_s

    def changes(self) -> NDArray[Any]:
        """CHANGE records in order of time."""
        return np.array(self._changes, CHANGE)

    def put(self, instance: int, state: State, now_s: float, lasts_s: float = NEVER) -> None:
        """Put *instance* into *state*; for *lasts_s*, or until somebody decides."""
        fleet = self.world.fleet
        before, endpoint = State(self.state[instance]), int(fleet.endpoint[instance])
        self._spent_s[instance, before] += now_s - self._since_s[instance]
        self._since_s[instance] = now_s
        self.state[instance] = state
        fleet.accepting[instance] = state == State.READY
        self.world.policies[endpoint].serving += (state in COMING) - (before in COMING)
        if self._caches and state not in SERVING:
            empty_cache(self.world.engines, instance)
        reset_time(self.world.events, self.state.size + instance, float(now_s + lasts_s))
        self._changes.append((now_s, instance, endpoint, int(before), int(state)))

    def drain(self, instance: int, now_s: float, goal: State, lasts_s: float = NEVER, endpoint: int = -1) -> None:
        """Let *instance* finish what it has and become *goal*, for *lasts_s*, at another *endpoint* if that moves it."""
        self._goal[instance] = (goal, endpoint, lasts_s)
        if self.world.fleet.running[instance] == 0:
            self.settle(instance, now_s)
        elif self.state[instance] != State.DRAINING:
            self.put(instance, State.DRAINING, now_s)

    def settle(self, instance: int, now_s: float) -> None:
        """A draining instance that holds nothing any more becomes what was decided."""
        goal, endpoint, lasts_s = self._goal.pop(instance)
        if endpoint >= 0:
            model, _ = self._cluster.endpoints[endpoint]
            if goal == State.SWAPPING:
                lasts_s = self.swap_s(instance, model)
            self._move(instance, endpoint)
            self._used[instance] = [model, *(each for each in self._used[instance] if each != model)]
        self.put(instance, goal, now_s, lasts_s)

    def swap_s(self, instance: int, model: str) -> float:
        """How long *model* takes to come onto *instance*: from its GPU, host memory or storage, by who was there last."""
        if model not in self._used[instance]:
            return self.delays.swap_storage_s
        rank = self._used[instance].index(model)
        if rank < self.delays.gpu_models:
            return self.delays.swap_gpu_s
        if rank < self.delays.gpu_models + self.delays.cpu_models:
            return self.delays.swap_cpu_s
        return self.delays.swap_storage_s

    def _move(self, instance: int, endpoint: int) -> None:
        """Let the idle *instance* belong to *endpoint*, with the engine that its model has on this GPU type."""
        fleet, policies = self.world.fleet, self.world.policies
        model, _ = self._cluster.endpoints[endpoint]
        config = self._catalog[model, self._cluster.instances[instance].gpu_type]
        before = int(fleet.endpoint[instance])
        coming = State(self.state[instance]) in COMING
        policies[before].serving -= coming
        policies[endpoint].serving += coming
        assign_endpoint(fleet, self.world.endpoints, instance, endpoint)
        fleet.model[instance] = self._cluster.models.index(model)
        one_by_one = self._cluster.of(self._cluster.batching, self._cluster.endpoints[endpoint]).mode == "none"
        fleet.max_num_seqs[instance] = 1 if one_by_one else config.max_num_seqs
        fleet.kv_capacity_tokens[instance] = config.kv_capacity_tokens
        configure(self.world.engines, instance, config)
        for each in (before, endpoint):
            capacities = fleet.kv_capacity_tokens[fleet.endpoint == each]
            policies[each].largest_kv_tokens = capacities.max(initial=0)

    def ripen(self, instance: int, now_s: float) -> None:
        """The time of the present state of *instance* is over."""
        after = RIPENS[State(self.state[instance])]
        lasts_s = self._loading_s.pop(instance, self.delays.local_weights_s) if after == State.LOADING else NEVER
        self.put(instance, after, now_s, lasts_s)

    def start(self, instance: int, now_s: float) -> bool:
        """Bring *instance* up from whatever rest it is at; False if it is at none."""
        state = State(self.state[instance])
        if state == State.EMPTY:
            self._loading_s[instance] = self.delays.remote_weights_s
            self.put(instance, State.STARTING, now_s, self.delays.start_s)
        elif state == State.SPOT:
            self.put(instance, State.RECLAIMING, now_s, self._spot_s())
        elif state == State.ASLEEP:
            self.put(instance, State.WAKING, now_s, self.delays.wake_s)
        elif state == State.DRAINING and self._goal[instance][1] < 0:
            del self._goal[instance]
            self.put(instance, State.READY, now_s)
        else:
            return False
        return True

    def _spot_s(self) -> float:
        drawn_s = self.delays.spot_median_s * float(np.exp(SPOT_SPREAD * self._random.standard_normal()))
        return min(drawn_s, self.delays.spot_max_s)

    def redeploy(self, instance: int, endpoint: int, now_s: float, *, remote: bool) -> None:
        self.redeploys += 1
        weights_s = self.delays.remote_weights_s if remote else self.delays.local_weights_s
        self.drain(instance, now_s, State.LOADING, weights_s, endpoint)

    def swap(self, instance: int, endpoint: int, now_s: float) -> None:
        self.swaps += 1
        self.drain(instance, now_s, State.SWAPPING, endpoint=endpoint)

    def fail(self, instance: int, now_s: float, repair_s: float) -> None:
        self._goal.pop(instance, None)
        self._loading_s.pop(instance, None)
        self.put(instance, State.FAILED, now_s, repair_s)

    def members(self, endpoint: int) -> NDArray[np.int32]:
        """Instances of *endpoint*, ascending."""
        arrays = self.world.endpoints
        return arrays.members[arrays.first[endpoint] : arrays.first[endpoint + 1]]

    def scale_out(self, endpoint: int, now_s: float) -> bool:
        """One instance more for *endpoint*: False if there is none to be had.

        In order: one that drains only to rest, a spot instance of the same model, one asleep, a spot instance of another
        model in the region (redeployed from local weights), an empty slot.
        """
        members = self.members(endpoint)
        states = self.state[members]
        for wanted in AT_HAND:
            for instance in members[states == wanted].tolist():
                if self.start(instance, now_s):
                    return True
        fleet = self.world.fleet
        model, region = self._cluster.endpoints[endpoint]
        here = (self.state == State.SPOT) & (fleet.region == self._cluster.regions.index(region))
        for instance in np.flatnonzero(here & self._cluster.share_spot).tolist():
            if (model, self._cluster.instances[instance].gpu_type) in self._catalog:
                self.redeploy(instance, endpoint, now_s, remote=False)
                return True
        return any(self.start(instance, now_s) for instance in members[states == State.EMPTY].tolist())

    def scale_in(self, endpoint: int, now_s: float) -> bool:
        """One instance less for *endpoint*: the ready one with the least left to do drains, and is lent out as spot."""
        members = self.members(endpoint)
        ready = members[self.state[members] == READY]
        if not ready.size:
            return False
        self.drain(int(ready[self.world.fleet.remaining_tokens[ready].argmin()]), now_s, State.SPOT)
        return True
