"""Putting a state into the arrays of a simulation that has not begun.

Engines are put together sequence by sequence; what they compute at the moment is taken over, or, where nobody can know it
(the engines of a living fleet), begun with what has reached them by then.
"""

import math
from typing import Any

import numpy as np

from scheduling.lookahead.maps import advance, enter
from scheduling.queueing.swapping.sharing import COMES, LEAVES, WAITS, note_phase
from scheduling.queueing.waiting_set import enqueue
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.cluster.event_queue import reset_time
from scheduling.simulation.cluster.lifecycle import Lives
from scheduling.simulation.cluster.state_changes import COMING, SHARING
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import FREE_SEQUENCES, GIVEN, LEAVING, NONE
from scheduling.simulation.state.groups import place_groups
from scheduling.simulation.state.records import FleetState, InstanceState, Running, Where
from scheduling.simulation.state.work import begin_work, give_work


def place(lives: Lives, state: FleetState) -> None:
    """Put *state* into the world of *lives*; its requests are the first of those there, and there are slots for all.

    ValueError if it is of another fleet.
    """
    world = lives.world
    if len(state.instances) != world.fleet.endpoint.size or len(state.endpoints) != world.policies.size:
        raise ValueError(
            f"a state of {len(state.instances)} instances and {len(state.endpoints)} endpoints is not one of a fleet of"
            f" {world.fleet.endpoint.size} and {world.policies.size}"
        )
    run_state = world.run_state[0]
    run_state.now_s, run_state.arrived = state.now_s, state.requests.count
    world.outcomes[: state.requests.count] = state.outcomes
    for at, instance in enumerate(state.instances):
        _place_life(lives, at, instance)
    for group, target in enumerate(state.swap_targets):
        lives.world.lives.groups[group]["target"] = target
    _place_phases(lives.world, state)
    if state.reclaims_s:
        lives.world = lives.world._replace(lives=lives.world.lives._replace(reclaims_s=np.array(state.reclaims_s)))
    if state.kept_tokens is not None:
        kept = np.zeros(lives.world.outcomes.size, np.int32)
        kept[: state.requests.count] = state.kept_tokens
        lives.world = lives.world._replace(kept_tokens=kept)
    world = lives.world
    _count_serving(world)
    for at, endpoint in enumerate(state.endpoints):
        policy: Any = world.policies[at]
        world.endpoints.cursor[at] = endpoint.cursor
        world.endpoints.asked_work_s[at], world.endpoints.asked_at_s[at] = endpoint.asked_work_s, state.now_s
        policy.scaled_s, policy.batch_opened_s = endpoint.scaled_s, endpoint.batch_opened_s
        reset_time(world.events, 2 * world.fleet.endpoint.size + world.link.shape[1] + at, endpoint.batch_due_s)
    _Engines(world, state).place()
    _place_waiting(world, state)
    _place_travelling(world, state)
    if state.sweep_s < math.inf and run_state.sweep_node >= 0:
        run_state.sweep_s = state.sweep_s
        reset_time(world.events, int(run_state.sweep_node), state.sweep_s)


def _place_life(lives: Lives, at: int, instance: InstanceState) -> None:
    if instance.moved or int(lives.world.fleet.endpoint[at]) != instance.endpoint:
        lives.move(at, instance.endpoint)
    world = lives.world
    life: Any = world.lives.instances[at]
    for name in ("state", "since_s", "goal", "goal_endpoint", "goal_s"):
        life[name] = getattr(instance, name)
    if instance.loading_s is not None:
        life.loading_s = instance.loading_s
    if instance.in_memory is not None and life.swap_group >= 0:
        group: Any = world.lives.groups[life.swap_group]
        group.held_bytes += (int(instance.in_memory) - int(life.in_memory)) * life.weights_bytes
        life.in_memory = instance.in_memory
    if instance.models:
        lives.used[at] = list(instance.models)
    if instance.round_trips is not None:
        world.fleet.round_trips[at] = instance.round_trips
    if instance.limits is not None:
        world.fleet.max_num_seqs[at], world.fleet.kv_capacity_tokens[at] = instance.limits
    world.fleet.accepting[at] = instance.state == State.READY
    world.fleet.placed_tokens[at] = instance.placed_tokens
    reset_time(world.events, world.fleet.endpoint.size + at, instance.ends_s)


def _place_phases(world: World, state: FleetState) -> None:
    """Where the instances that share their GPUs are in a swap."""
    arrays = world.waiting.groups
    for at, life in enumerate(world.lives.instances):
        this: Any = life
        if this.swap_group < 0:
            continue
        target = int(world.lives.groups[this.swap_group]["target"])
        if this.state in (State.WAKING, State.LOADING):
            note_phase(arrays, at, COMES, state.instances[at].ends_s)
        elif target == at:
            note_phase(arrays, at, WAITS, 0.0)
        elif target >= 0 and this.state in (State.DRAINING, State.FALLING_ASLEEP):
            note_phase(arrays, at, LEAVES, 0.0)


def _count_serving(world: World) -> None:
    """How many instances serve each endpoint or soon will, as the states say, and the KV tokens of its largest one."""
    lives = world.lives.instances
    bits = np.where(lives["swap_group"] >= 0, SHARING, COMING)
    serves = bits >> lives["state"].astype(np.int64) & 1
    world.policies["serving"] = np.bincount(world.fleet.endpoint, serves, world.policies.size).astype(np.int64)
    world.policies["largest_kv_tokens"] = 0
    np.maximum.at(world.policies["largest_kv_tokens"], world.fleet.endpoint, world.fleet.kv_capacity_tokens)


class _Engines:
    """Puts what instances have into their engines, the fleet arrays and the look-ahead maps."""

    def __init__(self, world: World, state: FleetState) -> None:
        self.world, self.state = world, state
        self.numbers = 0

    def place(self) -> None:
        """All instances."""
        sent: list[tuple[float, int, int, int]] = []
        for at, instance in enumerate(self.state.instances):
            slots = [self._take(at, one) for one in instance.requests]
            listed = list(zip(instance.requests, slots, strict=True))
            self._place_loads(at, instance, listed)
            self._place_maps(at, listed)
            self._link_running(at, [each for each in listed if each[0].where is Where.RUNNING])
            waiting = [slot for one, slot in listed if one.where is Where.WAITING]
            sent += [
                (one.reaches_s, one.number, instance.endpoint, slot) for one, slot in listed if one.where is Where.SENT
            ]
            self._begin(at, instance, waiting)
        self.world.engines.counters[GIVEN] = self.numbers
        self._send(sorted(sent))

    def _take(self, at: int, one: Running) -> int:
        """A record for *one*, which instance *at* has."""
        engines, requests = self.world.engines, self.state.requests
        engines.counters[FREE_SEQUENCES] -= 1
        slot = int(engines.free_sequences[engines.counters[FREE_SEQUENCES]])
        this: Any = engines.sequences[slot]
        region = int(self.world.policies[self.world.fleet.endpoint[at]]["region"])
        for name in ("request", "expected_prompt", "expected_tokens", "produced_tokens", "computed_tokens"):
            this[name] = getattr(one, name)
        for name in ("decoding", "streaming", "again", "priority", "number"):
            this[name] = getattr(one, name)
        this.instance, this.published, this.evicted = at, 0, one.leaving
        engines.instances[at]["leaving"] += one.leaving
        engines.counters[LEAVING] += one.leaving
        kept = 0 if self.state.kept_tokens is None else int(self.state.kept_tokens[one.request])
        this.prompt_tokens = requests.prompt_tokens[one.request] + kept
        this.output_tokens = requests.output_tokens[one.request] - kept
        this.offset = one.produced_tokens
        back_s = self.world.latency_s[region, requests.region[one.request]]
        this.origin_s = requests.arrival_s[one.request] - back_s
        this.previous = this.next = this.next_joining = NONE
        this.reaches_s = one.reaches_s
        self.numbers = max(self.numbers, one.number + 1)
        return slot

    def _place_loads(self, at: int, instance: InstanceState, listed: list[tuple[Running, int]]) -> None:
        fleet, sequences = self.world.fleet, self.world.engines.sequences
        held = left = queued = 0
        for one, slot in listed:
            done = int(sequences["prompt_tokens"][slot]) + one.produced_tokens if one.streaming else 0
            held += max(one.expected_tokens, done)
            left += max(one.expected_tokens - done, 0)
            queued += 0 if one.streaming else one.expected_prompt
        fleet.running[at] = len(listed)
        fleet.kv_tokens[at], fleet.remaining_tokens[at], fleet.queued_prompt_tokens[at] = instance.loads or (
            held,
            left,
            queued,
        )

    def _place_maps(self, at: int, listed: list[tuple[Running, int]]) -> None:
        ahead, sequences = self.world.engines.ahead, self.world.engines.sequences
        if not ahead.clock.size:
            return
        furthest = max((one.ahead for one, _ in listed if one.ahead is not None), default=0)
        advance(ahead, at, furthest)
        for one, slot in listed:
            if one.ahead is not None:
                prompt = int(sequences["prompt_tokens"][slot])
                enter(ahead, slot, at, prompt, one.expected_tokens - one.expected_prompt, one.ahead)

    def _link_running(self, at: int, listed: list[tuple[Running, int]]) -> None:
        """The batch of instance *at*: lists, the heap of those due, and the blocks that they hold."""
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
                due.append((self._due_in(one, this), slot))
                engine.context_tokens += tokens
                engine.within += tokens < one.expected_tokens
            if one.prefilling:
                engine.partial = slot
            engine.free_blocks -= -(-held // size)
        engine.last_running, engine.running, engine.decoding = before, len(listed), len(due)
        for place, (iterations, slot) in enumerate(sorted(due)):
            engines.due[at, place], engines.due_sequence[at, place] = iterations, slot
        joining = sorted((one.joins, slot) for one, slot in listed if one.joins >= 0)
        for (_, slot), following in zip(joining, [*(slot for _, slot in joining[1:]), NONE], strict=False):
            engines.sequences[slot]["next_joining"] = following
        if joining:
            engine.joining, engine.last_joining = joining[0][1], joining[-1][1]

    def _due_in(self, one: Running, this: Any) -> int:
        """Iterations until *this* has all its tokens, or exceeds those expected (`engine.progress.milestone`)."""
        if one.due_in is not None:
            return one.due_in
        expected = int(this.expected_tokens - this.prompt_tokens)
        if one.produced_tokens < expected < this.output_tokens:
            return expected - one.produced_tokens
        return int(this.output_tokens) - one.produced_tokens

    def _begin(self, at: int, instance: InstanceState, waiting: list[int]) -> None:
        """What instance *at* computes, and the sequences that wait there."""
        engines = self.world.engines
        engine: Any = engines.instances[at]
        now_s, work = self.state.now_s, instance.work
        if work is None:
            early = [slot for slot in waiting if engines.sequences[slot]["reaches_s"] <= instance.begins_s]
            self._link_waiting(at, early or ([] if engine.running else waiting[:1]))
            late = [slot for slot in waiting if not self._is_linked(at, slot)]
            if engine.running or engine.waiting:
                begins_s = instance.begins_s if early or engine.running else now_s
                begin_work(self.world, at, float(begins_s))
            for slot in late:
                give_work(self.world, at, slot, float(now_s))
            return
        self._link_waiting(at, waiting)
        for name in (each for each in work.__slots__ if each != "ends_s"):
            engine[name] = getattr(work, name)
        engines.exceeding[at] = work.next_s < math.inf and work.step_within < work.step_decodes
        reset_time(self.world.events, at, work.ends_s)

    def _is_linked(self, at: int, slot: int) -> bool:
        engines = self.world.engines
        one = int(engines.instances[at]["first_waiting"])
        while one not in (NONE, slot):
            one = int(engines.sequences[one]["next"])
        return one == slot

    def _link_waiting(self, at: int, slots: list[int]) -> None:
        engines = self.world.engines
        engine: Any = engines.instances[at]
        for before, slot, after in zip([NONE, *slots], slots, [*slots[1:], NONE], strict=False):
            engines.sequences[slot]["previous"], engines.sequences[slot]["next"] = before, after
        if slots:
            engine.first_waiting, engine.last_waiting, engine.waiting = slots[0], slots[-1], len(slots)

    def _send(self, sent: list[tuple[float, int, int, int]]) -> None:
        """Those on their way, by when they reach their instances."""
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


def _place_waiting(world: World, state: FleetState) -> None:
    waiting, requests, limits = world.waiting, state.requests, world.waiting.groups.limit.copy()
    if state.groups is not None:
        waiting.groups.limit[:] = 0  # the groups are put together below, as they were
    slots = []
    for one in state.waiting:
        arrival_s = float(requests.arrival_s[one.request])
        due_s = arrival_s + float(min(requests.deadline_s[one.request], requests.end_s[one.request]))
        slot = enqueue(
            waiting,
            one.endpoint,
            one.key,
            arrival_s,
            due_s,
            int(requests.priority[one.request]),
            one.prompt_tokens,
            one.output_tokens,
            -1,
            -1,
            -1,
            -1,
        )
        world.held[slot] = one.request
        slots.append(slot)
        policy: Any = world.policies[one.endpoint]
        policy.expires_s = min(policy.expires_s, arrival_s + float(requests.hold_s[one.request]))
        if policy.routing == LEAST_DELAY:
            world.affinity.noted_count[slot] = 0
        world.outcomes[one.request]["state"] = Outcome.WAITING
        world.outcomes[one.request]["endpoint"] = one.endpoint
    if state.groups is not None:
        place_groups(waiting.groups, state.groups, slots, state.now_s)
        waiting.groups.limit[:] = limits


def _place_travelling(world: World, state: FleetState) -> None:
    regions = world.latency_s.shape[0]
    last: dict[int, int] = {}
    for request, endpoint in state.travelling:
        origin, region = int(state.requests.region[request]), int(world.policies[endpoint]["region"])
        link = origin * regions + region
        world.outcomes[request]["endpoint"] = endpoint
        world.travelling[request] = NONE
        if link in last:
            world.travelling[last[link]] = request
        else:
            world.link[0, link] = request
            reaches_s = float(state.requests.arrival_s[request] + world.latency_s[origin, region])
            reset_time(world.events, 2 * world.fleet.endpoint.size + link, reaches_s)
        world.link[1, link] = last[link] = request
