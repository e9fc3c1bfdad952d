"""Life cycle of instances, for callers in Python; the changes themselves are compiled (`state_changes`).

Delays are the cluster's; spot reclaims are drawn (SageServe 7.1: median one minute, at most five).
"""

import math
from dataclasses import astuple
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import astuple as struct_astuple
from numpy.typing import NDArray

from scheduling.fleet.arrays import assign_endpoint
from scheduling.fleet.carried import set_front_end
from scheduling.lookahead.maps import leave
from scheduling.routing.adapters import forget_adapters
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.routing.routers import prefilled, release
from scheduling.scaling.spot import Donated, first_to_redeploy
from scheduling.simulation.cluster.build import give_memory
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.event_queue import reset_time
from scheduling.simulation.cluster.loop import change
from scheduling.simulation.cluster.state_changes import (
    CANCEL,
    COMING,
    DRAIN,
    PUT,
    SCALE_IN,
    SCALE_OUT,
    START,
    SWAP,
    TO_CALLER,
)
from scheduling.simulation.cluster.world import State, World
from scheduling.simulation.engine.prefix_cache import clear_cache
from scheduling.simulation.engine.state import FREE_SEQUENCES, IDLE, LEAVING, NONE, SEGMENT, configure
from scheduling.simulation.scenario.fleet import Delays

NEVER: Final = float("inf")
SPOT_SPREAD: Final = 0.6
"""Standard deviation of the logarithm of a reclaim: one in 270 takes more than five medians."""
FEWEST_DRAWN: Final = 64
MOST_DRAWN: Final = 8192
"""Limit of reclaims drawn ahead: the number doubles each time, for the loop pauses when none are left."""


class Lives:
    """States of all instances, and the only way to change them. Callers check that a change is valid."""

    def __init__(self, cluster: Cluster, world: World, seed: int) -> None:
        self.delays: Delays = cluster.delays
        self.redeploys = 0
        self.world = world
        self._cluster = cluster
        self._catalog = cluster.engines()
        self._run_state: Any = world.run_state[0]
        self._random = np.random.default_rng(seed)

    @property
    def state(self) -> NDArray[np.int8]:
        """`State` by instance."""
        return self.world.lives.instances["state"]

    def state_s(self, now_s: float) -> NDArray[np.float64]:
        """Return the seconds that each instance spent in each state up to *now_s*."""
        spent_s = self.world.lives.spent_s.copy()
        spent_s[np.arange(self.state.size), self.state] += now_s - self.world.lives.instances["since_s"]
        return spent_s

    def changes(self) -> NDArray[Any]:
        """Return the CHANGE records in order of time."""
        return self.world.lives.changes[: self._run_state.changes].copy()

    def make_room(self) -> None:
        """Ensure room for one more change, and one more drawn reclaim."""
        lives = self.world.lives
        if self._run_state.changes == lives.changes.size:
            lives = lives._replace(changes=np.concatenate([lives.changes, np.zeros_like(lives.changes)]))
        if self._run_state.reclaims == lives.reclaims_s.size:
            count = min(max(FEWEST_DRAWN, 2 * lives.reclaims_s.size), MOST_DRAWN)
            # One by one: the exponential of an array may differ from that of its elements in the last bit.
            drawn = [math.exp(SPOT_SPREAD * each) for each in self._random.standard_normal(count)]
            drawn_s = np.minimum(self.delays.spot_median_s * np.array(drawn), self.delays.spot_max_s)
            lives = lives._replace(reclaims_s=drawn_s)
            self._run_state.reclaims = 0
        if lives is not self.world.lives:
            self.world = self.world._replace(lives=lives)

    def _change(self, what: int, subject: int, state: int = NONE, endpoint: int = -1, lasts_s: float = NEVER) -> int:
        self.make_room()
        return int(change(self.world, what, subject, int(state), endpoint, float(lasts_s)))

    def drain(self, instance: int, goal: State, lasts_s: float = NEVER, endpoint: int = -1) -> None:
        """Drain *instance*, then set it to *goal* for *lasts_s*, at another *endpoint* if given."""
        if self._change(DRAIN, instance, goal, endpoint, lasts_s) == TO_CALLER:
            self.settle(instance)

    def settle(self, instance: int) -> None:
        """Complete the move of the drained *instance* to another endpoint."""
        life: Any = self.world.lives.instances[instance]
        goal, endpoint, lasts_s = State(life.goal), int(life.goal_endpoint), float(life.goal_s)
        life.goal_endpoint = -1
        self.move(instance, endpoint)
        self._change(PUT, instance, goal, lasts_s=lasts_s)

    def move(self, instance: int, endpoint: int) -> None:
        """Assign the idle *instance* to *endpoint*, with the engine of its model on this GPU type."""
        fleet, policies = self.world.fleet, self.world.policies
        key = model, _ = self._cluster.endpoints[endpoint]
        config = self._catalog[model, self._cluster.instances[instance].gpu_type]
        count = len(self._cluster.endpoints)
        before = int(fleet.endpoint[instance]) % count
        coming = bool(COMING >> int(self.state[instance]) & 1)
        policies[before].serving -= coming
        policies[endpoint].serving += coming
        assign_endpoint(fleet, self.world.endpoints, instance, endpoint)
        fleet.model[instance] = self._cluster.models.index(model)
        policy = self._cluster.policy(key)
        fleet.max_num_seqs[instance] = 1 if policy.batching.mode == "none" else config.max_num_seqs
        fleet.kv_capacity_tokens[instance] = fleet.memory_tokens[instance] = config.kv_capacity_tokens
        fleet.profile[instance] = astuple(config.profile)
        give_memory(fleet, instance, config)
        fleet.given_tokens[instance] = 0.0
        set_front_end(fleet, instance, config.front_end, policy.room_margin)
        fleet.look_ahead[instance] = struct_astuple(policy.look_ahead)
        fleet.ahead_limit[instance] = policies[endpoint].requests_ahead_limit
        fleet.round_trips[instance] = 0.0
        fleet.round_trips[instance, ROUND_TRIP_S] = policy.round_trip_s
        configure(self.world.engines, instance, config)
        for each in (before, endpoint):
            capacities = fleet.kv_capacity_tokens[fleet.endpoint % count == each]
            policies["largest_kv_tokens"][each::count] = capacities.max(initial=0)

    def start(self, instance: int) -> bool:
        """Bring *instance* up from its resting state; return False if it is not resting."""
        return self._change(START, instance) >= 0

    def redeploy(self, instance: int, endpoint: int, *, remote: bool) -> None:
        self.redeploys += 1
        self.drain(instance, State.LOADING, self.redeploy_s(endpoint, remote=remote), endpoint)

    def redeploy_s(self, endpoint: int, *, remote: bool = False) -> float:
        """Return the seconds to load the model of *endpoint* on another's instance; *remote*: its weights are elsewhere."""
        if remote:
            return self.delays.remote_weights_s
        return float(self.world.lives.redeploy_s[endpoint])

    def swap_to(self, instance: int) -> bool:
        """Give *instance* the GPUs of its swap group; return False if it cannot have them now."""
        return self._change(SWAP, instance) >= 0

    def fail(self, instance: int, repair_s: float) -> bool:
        """Fail *instance*; return whether its GPUs go to another endpoint, to which `settle` moves it once it is empty."""
        life: Any = self.world.lives.instances[instance]
        given = int(life.goal_endpoint) >= 0 and State(life.goal) == State.LOADING
        life.goal_endpoint, life.loading_s = life.goal_endpoint if given else -1, life.local_weights_s
        self._change(PUT, instance, State.FAILED, lasts_s=repair_s)
        return given

    def lose(self, instance: int, lasts_s: float) -> None:
        """Keep the empty place of *instance* unusable for *lasts_s*."""
        self._change(PUT, instance, State.LOST, lasts_s=lasts_s)

    def scale_out(self, endpoint: int) -> bool:
        """Add an instance to *endpoint* from the nearest source; return False if there is none."""
        changed = self._change(SCALE_OUT, endpoint)
        if changed == TO_CALLER:
            self.reach_out(endpoint)
        return changed != NONE

    def reach_out(self, endpoint: int) -> None:
        """Redeploy the spot instance of another model in the region of *endpoint* that `first_to_redeploy` picks to it."""
        lives = self.world.lives
        alone = lives.instances["swap_group"] < 0
        lent = np.flatnonzero((lives.fits[endpoint] != 0) & (self.state == State.SPOT) & alone)
        takes_s = self.redeploy_s(endpoint)
        donated = [
            Donated(float(lives.instances["usd_per_hour"][at]), takes_s, int(self.world.fleet.running[at]))
            for at in lent
        ]
        self.redeploy(int(lent[first_to_redeploy(donated)]), endpoint, remote=False)

    def scale_in(self, endpoint: int) -> bool:
        """Drain the least loaded ready instance of *endpoint* into spot; return False if there is none."""
        return self._change(SCALE_IN, endpoint) >= 0

    def cancel(self, endpoint: int) -> bool:
        """Empty the instance of *endpoint* that is starting and farthest from ready; return False if there is none."""
        return self._change(CANCEL, endpoint) >= 0


def _recall(world: World, instance: int) -> int:
    """Remove the requests in transit to *instance*; return the first of their list, NONE for none."""
    own = world.lives.fits.shape[0]
    of_both = (
        _recall_from(world, instance, endpoint)
        for endpoint in range(int(world.fleet.endpoint[instance]) % own, world.policies.size, own)
    )
    return next((first for first in of_both if first != NONE), NONE)


def _recall_from(world: World, instance: int, endpoint: int) -> int:
    """Do so for those that *endpoint* sent."""
    sequences = world.engines.sequences
    at = int(world.sent[0, endpoint])
    kept: list[int] = []
    mine: list[int] = []
    while at != NONE:
        (mine if sequences[at]["instance"] == instance else kept).append(at)
        at = int(sequences[at]["next"])
    for each in (kept, mine):
        for one, following in zip(each, [*each[1:], NONE], strict=False):  # NONE ends the list
            sequences[one]["next"] = following
    if mine:
        world.sent[:, endpoint] = (kept[0], kept[-1]) if kept else NONE
        node = 2 * world.fleet.endpoint.size + world.link.shape[1] + world.sent.shape[1] + endpoint
        reset_time(world.events, node, float(sequences[kept[0]]["reaches_s"]) if kept else np.inf)
    return mine[0] if mine else NONE


class TakenOut(NamedTuple):
    """A request that an instance had, its output tokens so far, and those that were expected of it there."""

    request: int
    emitted_tokens: int
    expected_tokens: int


def take_out(world: World, instance: int) -> list[TakenOut]:
    """Empty *instance*, with up-to-date fleet arrays; return its requests.

    They are in order of admission, then of queue key; those in transit come last.
    """
    engines = world.engines
    engine: Any = engines.instances[instance]
    iteration = int(engine.iteration + (engine.counted if engine.phase == SEGMENT else 0))
    lost: list[TakenOut] = []
    for first in (int(engine.first_running), int(engine.first_waiting), _recall(world, instance)):
        at = first
        while at != NONE:
            this: Any = engines.sequences[at]
            produced = iteration + int(this.offset) if this.decoding else int(this.produced_tokens)
            expected = int(this.expected_tokens - this.expected_prompt)
            lost.append(TakenOut(int(this.request), produced if this.streaming else 0, expected))
            counted = int(this.prompt_tokens) + produced if this.streaming else 0
            release(world.fleet, instance, int(this.expected_tokens), counted)
            if not this.streaming:
                prefilled(world.fleet, instance, int(this.expected_prompt))
            if engines.ahead.clock.size > 0:
                leave(engines.ahead, at)
            engines.free_sequences[engines.counters[FREE_SEQUENCES]] = at
            engines.counters[FREE_SEQUENCES] += 1
            at = int(this.next)
    engines.counters[LEAVING] -= engine.leaving
    engine.leaving = 0
    engine.phase = IDLE
    engine.next_s = np.inf
    engines.exceeding[instance] = 0
    for name in ("running", "waiting", "decoding", "within", "context_tokens"):
        engine[name] = 0
    for name in (
        "partial",
        "joining",
        "first_running",
        "last_running",
        "first_waiting",
        "last_waiting",
        "first_unread",
    ):
        engine[name] = NONE
    engine.free_blocks = engine.kv_blocks
    engines.residues[instance] = 0
    clear_cache(engines, instance)
    forget_adapters(world.fleet, instance)
    reset_time(world.events, instance, np.inf)
    return lost
