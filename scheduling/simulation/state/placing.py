"""Writes a fork, the state of a live fleet on the instances of a cluster, into the arrays of a new simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import uncompiled
from scheduling.control.reordering import Reordering
from scheduling.fleet.arrays import MEMORY_SLOTS, index_members, memory_tokens
from scheduling.fleet.carried import carried
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import BacklogState, GroupState
from scheduling.lookahead.maps import advance, enter
from scheduling.queueing.fair_shares import NO_SHARES
from scheduling.queueing.groups import FREE_GROUPS, KNOWN_CLASSES, NEXT_NUMBER, GroupArrays, put_before
from scheduling.queueing.swapping.sharing import COMES, LEAVES, WAITS, note_phase
from scheduling.queueing.waiting_set import charge, claim, enqueue, rerank
from scheduling.routing.adapters import use_adapter
from scheduling.routing.prefix_affinity import BLOCK_TOKENS, learn, note
from scheduling.routing.regions import SWEEP_S
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.cluster import loop
from scheduling.simulation.cluster.dispatcher import count_blocks
from scheduling.simulation.cluster.event_queue import reset_time
from scheduling.simulation.cluster.state_changes import BEGIN, COMING, EVICT, GIVE, SHARING
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.prefix_cache import warm_prefix
from scheduling.simulation.engine.state import FREE_SEQUENCES, GIVEN, NONE, sequences_in_use
from scheduling.simulation.workload.requests import Requests


class Where(StrEnum):
    """Where an instance has a request."""

    RUNNING = "running"
    WAITING = "waiting"
    """In the engine's own queue."""
    SENT = "sent"
    """On its way there."""


@dataclass(slots=True)
class ForkedRequest:
    """A request that an instance was given."""

    request: int
    """Row of `Fork.requests`."""
    where: Where
    expected_prompt: int
    expected_tokens: int
    produced_tokens: int
    """Output tokens; with the first one, prefill is over."""
    computed_tokens: int
    """Prompt tokens whose KV is there."""
    priority: int
    number: int
    """Order of dispatch, over all instances."""
    ahead: int | None
    """Iterations since it entered the look-ahead map of its instance; None where it is in none."""
    reaches_s: float
    """The instance."""

    @property
    def decoding(self) -> bool:
        return self.produced_tokens > 0


@dataclass(slots=True)
class ForkedInstance:
    state: int
    spot: bool = False
    """It is donated, or the requests that it served then leave."""
    since_s: float = 0.0
    ends_s: float = math.inf
    goal: int = 0
    """State after draining, and how long that lasts."""
    goal_s: float = 0.0
    loading_s: float | None = None
    """None: as the cluster says, also of round trips."""
    round_trips: NDArray[np.float64] | None = None
    given_tokens: Sequence[float] = ()
    """Of the requests that it was given; empty before the first."""
    requests: list[ForkedRequest] = field(default_factory=list)
    """Running ones in order of admission, then waiting ones in order, then those on their way."""
    adapters: list[int] = field(default_factory=list)
    """LoRA adapters that it holds, most recently used first."""
    cached: list[NDArray[np.int64]] = field(default_factory=list)
    """Starts of prompts in its prefix cache, those used longest ago first."""
    given: list[tuple[NDArray[np.int64], int]] = field(default_factory=list)
    """Starts of prompts that it was given, with the tokens given since, those given longest ago first: for the router."""
    begins_s: float = 0.0
    """When the iteration in progress began, with the requests that had arrived by then."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A request that waits at an endpoint."""

    request: int
    endpoint: int
    key: float
    """NaN: by the share of its tenant, which starts with nothing."""
    prompt_tokens: int
    output_tokens: int
    rank: float = 0.0
    """Inside its request group."""
    put_off_s: float | None = None
    """Seconds after its arrival when it counts as due; None: as it was promised."""


@dataclass(frozen=True, slots=True)
class ForkedEndpoint:
    cursor: int
    asked_work_s: float
    backlog_s: float
    changed_s: float
    changed_delta: int


@dataclass(frozen=True, slots=True)
class ForkedGroup:
    seen: GroupState
    endpoint: int
    queue: int
    """Virtual queue, by the number of its instance; -1 for none."""
    members: list[int]
    """Indices in `Fork.waiting`."""


@dataclass(frozen=True, slots=True)
class ForkedGroups:
    groups: list[ForkedGroup]
    mean_tokens: list[float]
    mean_output: list[float]
    limit: list[int]
    token_s: list[tuple[float, float]]
    classes: list[tuple[int, int]]
    next_number: int
    tried: tuple[int, int]
    tried_s: float
    short_instances: dict[int, int]


@dataclass(frozen=True, slots=True)
class Fork:
    """A fleet at time 0, by the numbers of a cluster."""

    requests: Requests
    """Waiting and running ones, in order of arrival."""
    outcomes: NDArray[np.void]
    """`cluster.world.OUTCOME` of each."""
    instances: list[ForkedInstance]
    endpoints: list[ForkedEndpoint]
    waiting: list[Queued]
    """In order of arrival at their queues, which breaks ties."""
    groups: ForkedGroups | None
    """None: formed again from what waits."""
    swept_s: float
    swap_targets: list[int]
    """By swap group: the instance that wakes once the awake one sleeps, -1 for none."""
    asked_tokens: NDArray[np.float64]
    """endpoints x seconds before 0, oldest first."""
    held: Sequence[int] = ()
    """Of `requests`, those that the queue manager holds, in order of arrival."""
    backlogs: Sequence[BacklogState] = ()
    look_s: float = 0.0
    """When it looks next."""
    falls_back: NDArray[np.bool_] | None = None
    """Of *requests*, whether the fallback of its model may still serve each,"""
    expected_wait_s: NDArray[np.float64] | None = None
    """and its wait as estimated when it came. None: no model has a fallback."""

    @property
    def slots(self) -> int:
        """Slots of the waiting set that it needs, and one for the next request."""
        return 2 + max(len(self.waiting), len(self.groups.groups) if self.groups else 0)


def place(world: World, fork: Fork) -> None:
    """Write *fork* into *world*, which has its requests as the first ones, and slots for all that wait."""
    run_state = world.run_state[0]
    run_state.arrived = fork.requests.count
    world.outcomes[: fork.requests.count] = fork.outcomes
    if world.fallback.size and fork.falls_back is not None and fork.expected_wait_s is not None:
        world.may_fall_back[: fork.requests.count] &= fork.falls_back
        world.expected_wait_s[: fork.requests.count] = fork.expected_wait_s
    own = world.lives.fits.shape[0]
    lends = world.policies.size > own
    for at, instance in enumerate(fork.instances):
        _place_life(world, at, instance)
        if lends and world.lives.instances[at]["swap_group"] < 0:
            world.fleet.endpoint[at] = world.fleet.endpoint[at] % own + own * instance.spot
            world.fleet.accepting[at] = instance.state == (State.SPOT if instance.spot else State.READY)
    index_members(world.fleet, world.endpoints)
    world.lives.groups["target"][: len(fork.swap_targets)] = fork.swap_targets
    _place_swaps(world, fork)
    lives = world.lives.instances
    serves = np.where(lives["swap_group"] >= 0, SHARING, COMING) >> lives["state"].astype(np.int64) & 1
    world.policies["serving"] = np.bincount(world.fleet.endpoint % own, serves, world.policies.size).astype(np.int64)
    for at, endpoint in enumerate(fork.endpoints[: world.policies.size]):
        world.endpoints.cursor[at] = endpoint.cursor
        world.endpoints.asked_work_s[at], world.endpoints.asked_at_s[at] = endpoint.asked_work_s, 0.0
        world.endpoints.clear_at_s[at] = endpoint.backlog_s
        if endpoint.changed_delta:
            world.policies["scaled_s"][at] = endpoint.changed_s
    _Engines(world, fork).place()
    _place_waiting(world, fork)
    for sequence in sequences_in_use(world.engines).tolist() if lends else ():
        instance = fork.instances[int(world.engines.sequences["instance"][sequence])]
        if instance.spot and instance.state != State.SPOT:
            loop.change(world, EVICT, sequence)
    run_state.first_sweep_s = (fork.swept_s + SWEEP_S) % SWEEP_S
    if fork.waiting and run_state.sweep_node >= 0:
        run_state.sweep_s = max(0.0, fork.swept_s + SWEEP_S)
        reset_time(world.events, int(run_state.sweep_node), float(run_state.sweep_s))


def resume_reordering(reordering: Reordering, groups: ForkedGroups, places: int) -> None:
    """Give *reordering* the memory of the forked one; there are *places* for groups."""
    made, in_use = groups.tried
    reordering.tried, reordering.tried_s = (made, places - in_use), groups.tried_s
    reordering.short_instances = dict(groups.short_instances)


def _place_life(world: World, at: int, instance: ForkedInstance) -> None:
    life: Any = world.lives.instances[at]
    for name in ("state", "since_s", "goal", "goal_s"):
        life[name] = getattr(instance, name)
    life.goal_endpoint = -1
    if instance.loading_s is not None:
        life.loading_s = instance.loading_s
    if instance.round_trips is not None:
        world.fleet.round_trips[at] = instance.round_trips
    if instance.given_tokens:
        world.fleet.given_tokens[at] = instance.given_tokens
        world.fleet.carried[at] = carried(world.fleet, at)
    world.fleet.accepting[at] = instance.state == State.READY
    reset_time(world.events, world.fleet.endpoint.size + at, instance.ends_s)


def _place_swaps(world: World, fork: Fork) -> None:
    """The phase of each instance that shares its GPUs."""
    arrays = world.waiting.groups
    for at, life in enumerate(world.lives.instances):
        this: Any = life
        if this.swap_group < 0:
            continue
        target = int(world.lives.groups[this.swap_group]["target"])
        if this.state in (State.WAKING, State.LOADING):
            note_phase(arrays, at, COMES, fork.instances[at].ends_s)
        elif target == at:
            note_phase(arrays, at, WAITS, 0.0)
        elif target >= 0 and this.state in (State.DRAINING, State.FALLING_ASLEEP):
            note_phase(arrays, at, LEAVES, 0.0)


class _Engines:
    """Puts the requests of instances into their engines, the fleet arrays and the look-ahead maps."""

    def __init__(self, world: World, fork: Fork) -> None:
        self.world, self.fork = world, fork

    def place(self) -> None:
        sent: list[tuple[float, int, int, int]] = []
        for at, instance in enumerate(self.fork.instances):
            listed = [(one, self._take(at, one)) for one in instance.requests]
            self._place_loads(at, listed)
            self._place_adapters(at, instance)
            self._place_maps(at, listed)
            self._link_running(at, [each for each in listed if each[0].where is Where.RUNNING])
            self._place_cache(at, instance)
            endpoint = int(self.world.fleet.endpoint[at])
            if self.world.policies[endpoint]["routing"] == LEAST_DELAY:
                for _, slot in listed:
                    count_blocks(self.world, endpoint, slot)
            self._begin(at, instance, [slot for one, slot in listed if one.where is Where.WAITING])
            sent += [(one.reaches_s, one.number, endpoint, slot) for one, slot in listed if one.where is Where.SENT]
        numbers = [one.number for instance in self.fork.instances for one in instance.requests]
        self.world.engines.counters[GIVEN] = max(numbers, default=-1) + 1
        self._send(sorted(sent))

    def _take(self, at: int, one: ForkedRequest) -> int:
        """A record for *one*, which instance *at* has."""
        engines, requests = self.world.engines, self.fork.requests
        engines.counters[FREE_SEQUENCES] -= 1
        slot = int(engines.free_sequences[engines.counters[FREE_SEQUENCES]])
        this: Any = engines.sequences[slot]
        for name in (
            "request", "expected_prompt", "expected_tokens", "produced_tokens", "computed_tokens", "decoding", "priority",
            "number", "reaches_s",
        ):  # fmt: skip
            this[name] = getattr(one, name)
        this.streaming, this.offset = one.decoding, one.produced_tokens
        this.instance, this.again, this.published, this.evicted, this.load_s = at, 0, 0, 0, 0.0
        this.prompt_tokens = requests.prompt_tokens[one.request]
        this.output_tokens = requests.output_tokens[one.request]
        region = int(self.world.policies[self.world.fleet.endpoint[at]]["region"])
        back_s = self.world.latency_s[region, requests.region[one.request]]
        this.origin_s = requests.arrival_s[one.request] - back_s
        this.previous = this.next = this.next_joining = NONE
        return slot

    def _place_loads(self, at: int, listed: list[tuple[ForkedRequest, int]]) -> None:
        fleet, sequences = self.world.fleet, self.world.engines.sequences
        fleet.running[at] = len(listed)
        for one, slot in listed:
            done = int(sequences["prompt_tokens"][slot]) + one.produced_tokens if one.decoding else 0
            fleet.kv_tokens[at] += max(one.expected_tokens, done)
            fleet.remaining_tokens[at] += max(one.expected_tokens - done, 0)
            fleet.queued_prompt_tokens[at] += 0 if one.decoding else one.expected_prompt

    def _place_adapters(self, at: int, instance: ForkedInstance) -> None:
        fleet, most = self.world.fleet, int(self.world.fleet.adapter_slots[at, MEMORY_SLOTS])
        for adapter in reversed(instance.adapters[:most]):
            use_adapter(fleet, at, adapter, 0)
        for one in instance.requests:
            if (adapter := int(self.fork.requests.adapter[one.request])) >= 0:
                use_adapter(fleet, at, adapter, 1)

    def _place_cache(self, at: int, instance: ForkedInstance) -> None:
        """Fill the prefix cache of instance *at*, as far as there is free memory, and what the router knows of it."""
        engines, fleet, affinity = self.world.engines, self.world.fleet, self.world.affinity
        engine: Any = engines.instances[at]
        if not engine.prefix_caching:
            return
        for hashes in instance.cached:
            warm_prefix(engines, at, hashes, 0, min(hashes.size, max(0, int(engine.free_blocks) - 1)))
        endpoint = int(fleet.endpoint[at])
        if self.world.policies[endpoint]["routing"] != LEAST_DELAY:
            return
        spare, present = affinity.noted_count.size - 1, int(uncompiled(memory_tokens)(fleet, at))
        for hashes, age_tokens in instance.given:
            note(affinity, spare, hashes, 0, hashes.size, int(affinity.counters[BLOCK_TOKENS]))
            fleet.placed_tokens[at] = max(0, present - age_tokens)
            learn(fleet, affinity, endpoint, spare, at)
        fleet.placed_tokens[at] = present

    def _place_maps(self, at: int, listed: list[tuple[ForkedRequest, int]]) -> None:
        maps, sequences = self.world.engines.ahead, self.world.engines.sequences
        if not maps.clock.size:
            return
        advance(maps, at, max((one.ahead for one, _ in listed if one.ahead is not None), default=0))
        for one, slot in listed:
            if one.ahead is not None:
                prompt = int(sequences["prompt_tokens"][slot])
                enter(maps, slot, at, prompt, one.expected_tokens - one.expected_prompt, one.ahead)

    def _link_running(self, at: int, listed: list[tuple[ForkedRequest, int]]) -> None:
        """The batch of instance *at*: its lists, the heap of those due, and the blocks that they hold."""
        engines = self.world.engines
        engine: Any = engines.instances[at]
        size = int(engine.block_size_tokens)
        before, due = NONE, []
        for one, slot in listed:
            this: Any = engines.sequences[slot]
            this.previous = before
            if before == NONE:
                engine.first_running = slot
            else:
                engines.sequences[before]["next"] = slot
            before = slot
            this.admission = engine.admissions
            engine.admissions += 1
            tokens = int(this.prompt_tokens + one.produced_tokens)
            held = one.computed_tokens
            if one.decoding:
                held = tokens - 1
                engines.residues[at, held % size] += 1
                due.append((_due_in(one, this), slot))
                engine.context_tokens += tokens
                engine.within += tokens < one.expected_tokens
            engine.free_blocks -= -(-held // size)
        engine.last_running, engine.running, engine.decoding = before, len(listed), len(due)
        for place, (iterations, slot) in enumerate(sorted(due)):
            engines.due[at, place], engines.due_sequence[at, place] = iterations, slot

    def _begin(self, at: int, instance: ForkedInstance, waiting: list[int]) -> None:
        """Begin the iteration of instance *at*; then let the sequences that came since wait there."""
        engines = self.world.engines
        engine: Any = engines.instances[at]
        early = [slot for slot in waiting if engines.sequences[slot]["reaches_s"] <= instance.begins_s]
        first = early or ([] if engine.running else waiting[:1])
        for before, slot, after in zip([NONE, *first], first, [*first[1:], NONE], strict=False):
            engines.sequences[slot]["previous"], engines.sequences[slot]["next"] = before, after
        if first:
            engine.first_waiting, engine.last_waiting, engine.waiting = first[0], first[-1], len(first)
        if first or engine.running:
            begins_s = instance.begins_s if early or engine.running else 0.0
            loop.enter(self.world, float(begins_s), NONE, NONE, loop.CONTROL, BEGIN, at, NONE)
        for slot in waiting:
            if slot not in first:
                loop.enter(self.world, 0.0, NONE, NONE, loop.CONTROL, GIVE, slot, at)

    def _send(self, sent: list[tuple[float, int, int, int]]) -> None:
        """Requests on their way, in the order in which they reach their instances."""
        world = self.world
        for endpoint in range(world.policies.size):
            slots = [slot for _, _, to, slot in sent if to == endpoint]
            if not slots:
                continue
            for slot, following in zip(slots, [*slots[1:], NONE], strict=True):
                world.engines.sequences[slot]["next"] = following
            world.sent[:, endpoint] = slots[0], slots[-1]
            node = 2 * world.fleet.endpoint.size + world.link.shape[1] + world.sent.shape[1] + endpoint
            reset_time(world.events, node, float(world.engines.sequences[slots[0]]["reaches_s"]))


def _due_in(one: ForkedRequest, this: Any) -> int:
    """Iterations until *this* has all its tokens, or exceeds those expected (`engine.progress.milestone`)."""
    expected = int(this.expected_tokens - this.prompt_tokens)
    if one.produced_tokens < expected < this.output_tokens:
        return expected - one.produced_tokens
    return int(this.output_tokens) - one.produced_tokens


def _place_waiting(world: World, fork: Fork) -> None:
    waiting, requests, limits = world.waiting, fork.requests, world.waiting.groups.limit.copy()
    if fork.groups is not None:
        waiting.groups.limit[:] = 0  # requests join no new group
    slots = []
    for one in fork.waiting:
        arrival_s = float(requests.arrival_s[one.request])
        allowed_s = min(requests.deadline_s[one.request], requests.end_s[one.request])
        due_s = arrival_s + float(allowed_s if one.put_off_s is None else one.put_off_s)
        tenant, fair = int(requests.tenant[one.request]), waiting.shares.ordering[one.endpoint] != NO_SHARES
        slot = enqueue(
            waiting,
            one.endpoint,
            float(claim(waiting, one.endpoint, tenant)) if math.isnan(one.key) else one.key,
            arrival_s,
            due_s,
            int(requests.priority[one.request]),
            one.prompt_tokens,
            one.output_tokens,
            tenant,
            -1,
            -1,
            int(requests.adapter[one.request]),
        )
        rerank(waiting, slot, one.rank)
        if fair:
            charge(waiting, slot, _service_s(world.policies[one.endpoint], one.prompt_tokens, one.output_tokens))
            waiting.shares.clock[one.endpoint] = waiting.key[waiting.heap[one.endpoint, 0]]
        world.held[slot] = one.request
        slots.append(slot)
        policy: Any = world.policies[one.endpoint]
        policy.expires_s = min(policy.expires_s, arrival_s + float(requests.hold_s[one.request]))
        if policy.routing == LEAST_DELAY:
            cache, affinity = world.engines.cache, world.affinity
            first, last = cache.first[one.request : one.request + 2].tolist() if cache.first.size > 1 else (0, 0)
            note(affinity, slot, cache.hashes, first, last, int(affinity.counters[BLOCK_TOKENS]))
        world.outcomes[one.request]["state"] = Outcome.WAITING
    if fork.groups is not None:
        _place_groups(waiting.groups, fork.groups, slots)
        # A group that is full in the fleet is full here too, before the first sweep.
        own = len(fork.groups.limit)
        waiting.groups.limit[:] = limits
        waiting.groups.limit[:own] = np.where(limits[:own] > 0, fork.groups.limit, limits[:own])
        waiting.groups.token_s[:own] = fork.groups.token_s


def _service_s(policy: Any, prompt_tokens: int, output_tokens: int) -> float:
    """Return the time that a request takes alone by the profile of *policy*, an ENDPOINT record."""
    profile = Profile(*(float(policy[each.name]) for each in fields(Profile)))
    return profile.service_time_s(prompt_tokens, output_tokens)


def _place_groups(arrays: GroupArrays, forked: ForkedGroups, slots: list[int]) -> None:
    """Write the groups into the empty *arrays*; *slots* are those of `Fork.waiting`."""
    for place, group in enumerate(forked.groups):
        this: Any = arrays.groups[place]
        for name in (
            "kind",
            "number",
            "joined",
            "prompt_tokens",
            "output_tokens",
            "opened_s",
            "pinned",
        ):
            this[name] = getattr(group.seen, name)
        this.endpoint = group.endpoint
        members = [slots[at] for at in group.members]
        this.first, this.last, this.count = members[0], members[-1], len(members)
        for before, slot, after in zip([NONE, *members], members, [*members[1:], NONE], strict=False):
            arrays.members[slot] = (place, after, before)
        if group.seen.is_open:
            arrays.open[group.endpoint, group.seen.kind] = place
    for place, group in sorted(enumerate(forked.groups), key=lambda each: (each[1].queue, each[1].seen.rank)):
        if group.queue >= 0:
            put_before(arrays, place, group.queue, NONE)
    own = len(forked.mean_tokens)  # those of donated instances, which have no groups, come after them
    arrays.mean_tokens[:own], arrays.mean_output[:own] = forked.mean_tokens, forked.mean_output
    arrays.moment_s[0] = 0.0
    for at, (priority, due_ms) in enumerate(forked.classes):
        arrays.class_priority[at], arrays.class_due_ms[at] = priority, due_ms
    free = np.arange(arrays.groups.size - 1, len(forked.groups) - 1, -1)
    arrays.free[: free.size] = free
    arrays.counters[FREE_GROUPS], arrays.counters[NEXT_NUMBER] = free.size, forked.next_number
    arrays.counters[KNOWN_CLASSES] = len(forked.classes)
