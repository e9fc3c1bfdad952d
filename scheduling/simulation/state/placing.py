"""Places the state of a live fleet in the arrays of a new simulation. It is the only reader of `FleetState`.

A gateway sees which tokens have streamed, but not what engines compute of prompts: one without a token begins again. Each
instance takes a place of its model, region and GPU type in the cluster; the requests of an instance for which there is no
place wait again. Policies may differ from those of the live fleet: what waits is ordered again where the ordering is
another, and grouped again where other endpoints have request groups.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import uncompiled
from scheduling.control.reordering import Reordering
from scheduling.fleet.arrays import MEMORY_SLOTS, index_members, memory_tokens
from scheduling.fleet.carried import carried
from scheduling.fleet.kv_cost import OFFLOADED
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import (
    GROUP,
    Condition,
    EndpointState,
    FleetState,
    GroupsState,
    HeldRequest,
    InstanceState,
    RunningRequest,
    WaitingRequest,
)
from scheduling.lookahead.maps import advance, enter
from scheduling.queueing.fair_shares import NO_SHARES
from scheduling.queueing.groups import FREE_GROUPS, KNOWN_CLASSES, NEXT_NUMBER, put_before
from scheduling.queueing.held import OPPORTUNISTIC
from scheduling.queueing.ordering import FCFS, ORDERINGS, QLM, engine_priority
from scheduling.queueing.swapping.sharing import COMES, LEAVES, WAITS, note_phase
from scheduling.queueing.waiting_set import FREE_COUNT, rekey, rerank
from scheduling.routing.adapters import use_adapter
from scheduling.routing.models import RULES, ModelRule
from scheduling.routing.prefix_affinity import BLOCK_TOKENS, learn, note
from scheduling.routing.regions import SWEEP_S
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.cluster import loop
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.dispatcher import count_blocks
from scheduling.simulation.cluster.event_queue import reset_time
from scheduling.simulation.cluster.state_changes import BEGIN, COMING, EVICT, GIVE, QUEUE, RESUME, SHARING
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.prefix_cache import warm_prefix
from scheduling.simulation.engine.state import FREE_SEQUENCES, GIVEN, NONE
from scheduling.simulation.workload.requests import Requests

FIRST_PLACED = (Condition.READY, Condition.DRAINING, Condition.LOADING)


@dataclass(frozen=True)
class Fork:
    """The state of a fleet, and its requests as those of a simulation of *cluster*."""

    state: FleetState
    cluster: Cluster
    requests: Requests
    """Those whose endpoints the cluster has, in order of arrival."""
    row_of: list[int]
    """By `state.requests`: row of `requests`, -1 for none."""
    adapters: dict[str, int]
    """Numbers of LoRA adapters."""
    prompts: list[NDArray[np.int64]]
    """Hashes of the blocks of `state.prompts` as engines have them; empty where no engine caches prefixes."""
    block_tokens: int
    """Tokens in each of these."""

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Return the cluster's instance for each of the fleet's that has one."""
        free: defaultdict[tuple[str, str, str, bool], list[int]] = defaultdict(list)
        for at, spec in enumerate(self.cluster.instances):
            free[spec.model, spec.region, spec.gpu_type, spec.sharing is not None].append(at)
        rank = {condition: at for at, condition in enumerate(FIRST_PLACED)}
        taken = {}
        for at, one in sorted(enumerate(self.state.instances), key=lambda each: rank.get(each[1].state, len(rank))):
            if places := free[one.model, one.region, one.gpu, bool(one.swap_group)]:
                taken[at] = places.pop(0)
        return taken

    @cached_property
    def running(self) -> list[tuple[int, RunningRequest]]:
        """Return (row, request), in order of dispatch."""
        return [each for each in zip(self.row_of, self.state.running, strict=False) if each[0] >= 0]

    @cached_property
    def waiting(self) -> list[tuple[int, WaitingRequest]]:
        """Return (row, request), in order of arrival at their queues; -1 for one that the simulation has not."""
        return list(zip(self.row_of[len(self.state.running) :], self.state.waiting, strict=False))

    @cached_property
    def lost(self) -> list[tuple[int, RunningRequest]]:
        """Return those of `running` whose instance has no place: they wait again, after `waiting`."""
        return [each for each in self.running if each[1].instance not in self.place_of]

    @property
    def held(self) -> list[int]:
        """Return rows of the requests that the queue manager holds, in order of arrival."""
        return sorted(row for row in self.row_of[len(self.state.running) + len(self.state.waiting) :] if row >= 0)

    @cached_property
    def endpoints(self) -> list[EndpointState]:
        """Return the states of the cluster's endpoints, then of their donated instances."""
        known = {(one.model, one.region, one.spot): one for one in self.state.endpoints}
        keys = [(*key, spot) for spot in (False, True) for key in self.cluster.endpoints]
        return [known.get(key) or EndpointState(*key) for key in keys]

    @property
    def asked_tokens(self) -> NDArray[np.float64]:
        """Return the tokens asked for, endpoints x seconds before 0, oldest first."""
        asked = [one.asked_tokens for one in self.endpoints[: len(self.cluster.endpoints)]]
        none = [0.0] * max(1, *map(len, asked))
        return np.array([each or none for each in asked], np.float64)

    @cached_property
    def groups(self) -> GroupsState | None:
        """Return the request groups; None where they are formed again from what waits."""
        cluster, groups = self.cluster, self.state.groups
        ordered = [ORDERINGS[cluster.policy(key).ordering] == QLM for key in cluster.endpoints]
        was = [ORDERINGS.get(one.ordering) == QLM for one in self.endpoints[: len(ordered)]]
        return groups if ordered == was and not self.lost else None

    @property
    def slots(self) -> int:
        """Return the slots of the waiting set that it needs, and one for the next request."""
        return 2 + max(len(self.waiting) + len(self.lost), len(self.groups.groups) if self.groups else 0)

    def resume(self, reordering: Reordering, places: int) -> None:
        """Give *reordering* the memory of the live one; there are *places* for groups."""
        if self.groups is not None:
            made, in_use = self.groups.tried
            reordering.tried, reordering.tried_s = (made, places - in_use), self.groups.tried_s
            reordering.short_instances = {at: one.short for at, one in enumerate(self.endpoints) if one.short}


def place(world: World, fork: Fork) -> None:
    """Write *fork* into *world*, which has its requests as the first ones, and slots for all that wait."""
    _Placing(world, fork).place()


class _Placing:
    def __init__(self, world: World, fork: Fork) -> None:
        self.world, self.fork, self.state, self.requests = world, fork, fork.state, fork.requests
        self.own = world.lives.fits.shape[0]
        self.lends = world.policies.size > self.own
        self.instances = [(at, self.state.instances[at], place) for at, place in fork.place_of.items()]
        self.starts: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        """By instance of the fleet: blocks of the starts of prompts that it has, with the tokens given since."""
        for blocks, prompt in zip(fork.prompts, self.state.prompts, strict=False):
            for one in prompt.holders:
                start, mine = blocks[: one.tokens // fork.block_tokens].tobytes(), self.starts[one.instance]
                mine[start] = min(one.age_tokens, mine.get(start, one.age_tokens))
        self.running: defaultdict[int, list[tuple[int, RunningRequest]]] = defaultdict(list)
        """By place: slots of sequences there, in order of dispatch."""

    def place(self) -> None:
        self.world.run_state[0].arrived = self.requests.count
        self._outcomes()
        for _, seen, place in self.instances:
            self._life(seen, place)
        index_members(self.world.fleet, self.world.endpoints)
        for at, one in enumerate(self.fork.endpoints[: self.world.policies.size]):
            self._endpoint(at, one)
        self._sequences()
        self._swaps()
        for at, seen, place in self.instances:
            self._loads(seen, place)
            self._engine(at, seen, place)
        self._send()
        self._queues()
        self._leave_reclaimed()

    def _outcomes(self) -> None:
        world = self.world
        for row, one in zip(self.fork.row_of, self.state.requests, strict=True):
            if row < 0:
                continue
            outcome: Any = world.outcomes[row]
            outcome.model_rule = RULES.index(ModelRule(one.model_rule) if one.model_rule else None)
            if not isinstance(one, HeldRequest):
                outcome.attempts = one.attempts
            if world.fallback.size:
                world.may_fall_back[row] &= one.falls_back

    def _life(self, seen: InstanceState, place: int) -> None:
        fleet, life, sharing = self.world.fleet, self.world.lives.instances[place], self.fork.cluster.instances[place]
        state = State[seen.state]
        life.state, life.since_s = state, min(seen.since_s, -1e-9)
        if state == State.DRAINING:
            sleeps = seen.leaves and sharing.sharing is not None
            life.goal, life.goal_s = (State.FALLING_ASLEEP, life.sleep_s) if sleeps else (State.EMPTY, inf)
        round_trip_s = fleet.round_trips[place, ROUND_TRIP_S]
        fleet.round_trips[place] = seen.round_trips
        fleet.round_trips[place, ROUND_TRIP_S] = round_trip_s
        if seen.given_tokens:
            fleet.given_tokens[place] = seen.given_tokens
            fleet.carried[place] = carried(fleet, place)
        fleet.accepting[place] = state == State.READY
        if self.lends and sharing.sharing is None:
            fleet.endpoint[place] = fleet.endpoint[place] % self.own + self.own * seen.spot
            fleet.accepting[place] = state == (State.SPOT if seen.spot else State.READY)
        self._until(place, _ends_s(seen))

    def _until(self, place: int, ends_s: float) -> None:
        """Let the state of an instance end at *ends_s*."""
        reset_time(self.world.events, self.world.fleet.endpoint.size + place, ends_s)

    def _endpoint(self, at: int, one: EndpointState) -> None:
        world, cursor = self.world, -1 if one.cursor is None else self.fork.place_of.get(one.cursor, -1)
        world.endpoints.cursor[at], world.endpoints.clear_at_s[at] = cursor, one.backlog_s
        world.endpoints.asked_work_s[at], world.endpoints.asked_at_s[at] = one.asked_work_s, 0.0
        if one.changed_delta:
            world.policies["scaled_s"][at] = one.changed_s

    def _swaps(self) -> None:
        """Let swaps in progress continue: the instance that waits for the GPUs wakes once the leaving one sleeps, which is
        at once without work.
        """
        world, lives, arrays = self.world, self.world.lives.instances, self.world.waiting.groups
        sharing = [
            (seen, place, int(lives["swap_group"][place])) for _, seen, place in self.instances if seen.swap_group
        ]
        waits = {group: place for seen, place, group in sharing if seen.waits}
        for seen, place, group in sharing:
            arrays.up_s[place] = seen.up_s
            if seen.leaves and group in waits:
                world.lives.groups["target"][group] = target = waits[group]
                note_phase(arrays, place, LEAVES, 0.0)
                note_phase(arrays, target, WAITS, 0.0)
                if not self.running[place]:
                    lives["state"][place] = State.FALLING_ASLEEP
                    for each in (place, target):
                        self._until(each, float(lives["goal_s"][place]))
            elif seen.state is Condition.LOADING:
                note_phase(arrays, place, COMES, _ends_s(seen))
        serves = np.where(lives["swap_group"] >= 0, SHARING, COMING) >> lives["state"].astype(np.int64) & 1
        served = np.bincount(world.fleet.endpoint % self.own, serves, world.policies.size)
        world.policies["serving"] = served.astype(np.int64)

    # What instances run

    def _sequences(self) -> None:
        """Make records of the requests that instances have; those without a token are computed from the beginning."""
        # Answers that are not streamed, whose tokens are estimated, fill no batch beyond its size.
        decoding = Counter(one.instance for one in self.state.running if one.streamed and one.output_tokens)
        for number, (row, one) in enumerate(self.fork.running):
            if (place := self.fork.place_of.get(one.instance)) is None:
                continue
            spec = self.fork.cluster.instances[place]
            reaches_s = one.placed_s + float(self.world.fleet.round_trips[place, ROUND_TRIP_S])
            produced = _produced(one, spec.engine.profile, reaches_s)
            if produced and not one.streamed:
                produced *= decoding[one.instance] < spec.engine.max_num_seqs
                decoding[one.instance] += 1
            self.running[place].append((self._sequence(place, row, one, produced, number, reaches_s), one))

    def _sequence(self, place: int, row: int, one: RunningRequest, produced: int, number: int, reaches_s: float) -> int:
        world, engines, requests = self.world, self.world.engines, self.requests
        engines.counters[FREE_SEQUENCES] -= 1
        engines.counters[GIVEN] = number + 1
        slot = int(engines.free_sequences[engines.counters[FREE_SEQUENCES]])
        this: Any = engines.sequences[slot]
        this.request, this.instance, this.number, this.reaches_s = row, place, number, reaches_s
        this.expected_prompt, this.expected_tokens = one.expected_prompt, one.expected_tokens
        this.prompt_tokens, this.output_tokens = requests.prompt_tokens[row], requests.output_tokens[row]
        this.produced_tokens = min(produced, this.output_tokens - 1)
        this.streaming = this.produced_tokens > 0
        this.computed_tokens = this.prompt_tokens * this.streaming
        endpoint = int(world.fleet.endpoint[place])
        ordering = ORDERINGS.get(self.fork.endpoints[endpoint].ordering, FCFS)
        this.priority = uncompiled(engine_priority)(ordering, int(requests.priority[row]), one.queue_key_s)
        back_s = world.latency_s[int(world.policies["region"][endpoint]), requests.region[row]]
        this.origin_s = requests.arrival_s[row] - back_s
        this.previous = this.next = this.next_joining = NONE
        outcome: Any = world.outcomes[row]
        outcome.state, outcome.instance, outcome.endpoint = Outcome.RUNNING, place, endpoint % self.own
        outcome.attempts, outcome.queue_s = max(1, one.attempts), one.placed_s - one.arrival_s
        return slot

    def _loads(self, seen: InstanceState, place: int) -> None:
        """Count the requests of an instance, and let those that decode continue."""
        world, fleet, maps = self.world, self.world.fleet, self.world.engines.ahead
        sequences = [(world.engines.sequences[slot], slot, one) for slot, one in self.running[place]]
        decoding = [(this, slot, _ahead(one, this)) for this, slot, one in sequences if this.streaming]
        fleet.running[place] = len(sequences)
        this: Any
        for this, slot, _ in sequences:
            done = int(this.prompt_tokens + this.produced_tokens) if this.streaming else 0
            fleet.kv_tokens[place] += max(int(this.expected_tokens), done)
            fleet.remaining_tokens[place] += max(int(this.expected_tokens) - done, 0)
            fleet.queued_prompt_tokens[place] += 0 if this.streaming else this.expected_prompt
            if world.policies["routing"][fleet.endpoint[place]] == LEAST_DELAY:
                count_blocks(world, int(fleet.endpoint[place]), slot)
        for name in reversed(seen.adapters[: int(fleet.adapter_slots[place, MEMORY_SLOTS])]):
            use_adapter(fleet, place, self.fork.adapters[name], 0)
        for this, _, _ in sequences:
            if (adapter := int(self.requests.adapter[this.request])) >= 0:
                use_adapter(fleet, place, adapter, 1)
        if maps.clock.size:
            advance(maps, place, max((ahead for _, _, ahead in decoding), default=0))
        for this, slot, ahead in decoding:
            if maps.clock.size:
                expected = int(this.expected_tokens - this.expected_prompt)
                enter(maps, slot, place, int(this.prompt_tokens), expected, ahead)
            loop.enter(world, 0.0, NONE, NONE, loop.CONTROL, RESUME, slot, place)

    def _engine(self, at: int, seen: InstanceState, place: int) -> None:
        """Begin the iteration in progress: when the last observed one ended, or else now. It is not over: one that should
        be ends at once. Prompts that had reached the instance by then are part of it, and others wait there.
        """
        world, engine = self.world, self.fork.cluster.instances[place].engine
        self._cache(at, place)
        record: Any = world.engines.instances[place]
        pending = [(world.engines.sequences[slot], slot) for slot, _ in self.running[place]]
        pending = [(this, slot) for this, slot in pending if not this.streaming and this.reaches_s <= 0.0]
        begins_s = 0.0 if seen.iteration_s is None else seen.iteration_s
        if pending and not record.running:
            first_s = min(float(this.reaches_s) for this, _ in pending)
            begins_s = first_s if seen.iteration_s is None else max(begins_s, first_s)
        left = sum(int(this.prompt_tokens) for this, _ in pending if this.reaches_s <= begins_s)
        computed = min(left, engine.max_num_batched_tokens - int(record.running))
        step_s = engine.profile.step_time_s(computed, int(record.running), int(record.context_tokens))
        begins_s = min(max(begins_s, -0.999 * step_s), -1e-6)
        early = [slot for this, slot in pending if this.reaches_s <= begins_s]
        for slot in early:
            loop.enter(world, begins_s, NONE, NONE, loop.CONTROL, GIVE, slot, place)
        if early or record.running:
            record.reads = len(early)
            loop.enter(world, begins_s, NONE, NONE, loop.CONTROL, BEGIN, place, NONE)
        for _, slot in pending:
            if slot not in early:
                loop.enter(world, 0.0, NONE, NONE, loop.CONTROL, GIVE, slot, place)

    def _cache(self, at: int, place: int) -> None:
        """Fill the prefix cache of instance *at* of the fleet, as far as there is free memory, and what the router knows."""
        world, fleet, affinity, prompts = self.world, self.world.fleet, self.world.affinity, self.fork.prompts
        engine: Any = world.engines.instances[place]
        if not engine.prefix_caching or not prompts:
            return
        held = sorted(self.starts[at].items(), key=lambda each: -each[1])
        hashes = [(np.frombuffer(start, np.int64).copy(), age_tokens) for start, age_tokens in held]
        to_come = self._to_come(place)
        for blocks, _ in hashes:
            among = np.isin(blocks, to_come)
            cached = int(among.argmax()) if among.any() else blocks.size
            warm_prefix(world.engines, place, blocks[:cached], 0, min(cached, max(0, int(engine.free_blocks) - 1)))
        endpoint = int(fleet.endpoint[place])
        if world.policies["routing"][endpoint] != LEAST_DELAY:
            return
        spare, memory = affinity.noted_count.size - 1, int(uncompiled(memory_tokens)(fleet, place))
        present = max(memory, int(fleet.offload[place, OFFLOADED]))
        for blocks, age_tokens in hashes:
            note(affinity, spare, blocks, 0, blocks.size, int(affinity.counters[BLOCK_TOKENS]))
            fleet.placed_tokens[place] = max(0, present - age_tokens)
            learn(fleet, affinity, endpoint, spare, place)
        fleet.placed_tokens[place] = present

    def _to_come(self, place: int) -> NDArray[np.int64]:
        """Return hashes of the blocks that an instance has still to compute for the requests that it was given."""
        begun, still = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for _, one in self.running[place]:
            if one.prompt is not None and one.output_tokens:
                begun.append(self.fork.prompts[one.prompt])
            elif one.prompt is not None:
                still.append(self.fork.prompts[one.prompt][one.cached_tokens // self.fork.block_tokens :])
        return np.setdiff1d(np.concatenate(still), np.concatenate(begun))

    def _send(self) -> None:
        """Let requests on their way reach their instances."""
        world, sequences = self.world, self.world.engines.sequences
        sent = [slot for listed in self.running.values() for slot, _ in listed]
        sent = [slot for slot in sent if sequences["reaches_s"][slot] > 0.0 and not sequences["streaming"][slot]]
        last: dict[int, int] = {}
        for slot in sorted(
            sent, key=lambda each: (float(sequences["reaches_s"][each]), int(sequences["number"][each]))
        ):
            endpoint = int(world.fleet.endpoint[sequences["instance"][slot]])
            if endpoint in last:
                sequences["next"][last[endpoint]] = slot
            else:
                world.sent[0, endpoint] = slot
                node = 2 * world.fleet.endpoint.size + world.link.shape[1] + world.sent.shape[1] + endpoint
                reset_time(world.events, node, float(sequences["reaches_s"][slot]))
            world.sent[1, endpoint] = last[endpoint] = slot

    def _leave_reclaimed(self) -> None:
        """Let the requests of donated instances that are being reclaimed leave."""
        for _, seen, place in self.instances:
            if self.lends and seen.spot and seen.state is not Condition.SPOT:
                for slot, _ in self.running[place]:
                    loop.change(self.world, EVICT, slot)

    # What waits

    def _queues(self) -> None:
        world, fork, arrays = self.world, self.fork, self.world.waiting.groups
        limits, slots = arrays.limit.copy(), list[int]()
        if fork.groups is not None:
            arrays.limit[:] = 0  # requests join no new group
        for row, one in fork.waiting:
            slots.append(self._queue(row, one) if row >= 0 else NONE)
        for row, lost in fork.lost:
            self._enqueue(row, fork.cluster.endpoints.index((lost.model, lost.served_in)))
        if fork.groups is not None:
            arrays.limit[:] = limits
            self._groups(fork.groups, slots)
        swept_s, run_state = self.state.swept_s, world.run_state[0]
        run_state.first_sweep_s = (swept_s + SWEEP_S) % SWEEP_S
        if (fork.waiting or fork.lost) and run_state.sweep_node >= 0:
            run_state.sweep_s = max(0.0, swept_s + SWEEP_S)
            reset_time(world.events, int(run_state.sweep_node), float(run_state.sweep_s))

    def _enqueue(self, row: int, endpoint: int) -> int:
        """Queue a request as if it came now; return its slot."""
        loop.enter(self.world, 0.0, NONE, NONE, loop.CONTROL, QUEUE, row, endpoint)
        return int(self.world.waiting.free_slots[self.world.waiting.counters[FREE_COUNT]])

    def _queue(self, row: int, one: WaitingRequest) -> int:
        """Queue a request, at its place in the live queue if that is ordered alike; return its slot."""
        waiting, endpoint = self.world.waiting, self.fork.cluster.endpoints.index((one.model, one.served_in))
        if one.spot and self.requests.held[row] & OPPORTUNISTIC:
            endpoint += self.own
        slot = self._enqueue(row, endpoint)
        was = ORDERINGS.get(self.fork.endpoints[endpoint].ordering)
        if one.key_s is None or was != self.world.policies["ordering"][endpoint]:
            return slot
        rekey(waiting, slot, one.key_s)
        rerank(waiting, slot, one.rank_s)
        if one.put_off_s is not None and self.fork.groups is not None:
            waiting.deadline_s[slot] = waiting.arrival_s[slot] + one.put_off_s
        if waiting.shares.ordering[endpoint] != NO_SHARES:
            waiting.shares.counter[endpoint, waiting.tenant[slot]] = one.key_s + waiting.shares.cost[slot]
            waiting.shares.clock[endpoint] = waiting.key[waiting.heap[endpoint, 0]]
        return slot

    def _groups(self, groups: GroupsState, slots: list[int]) -> None:
        """Write *groups* and the virtual queues; *slots* are those of `Fork.waiting`."""
        arrays, fork, keys = self.world.waiting.groups, self.fork, self.fork.cluster.endpoints
        for endpoint, seen in enumerate(fork.endpoints[: self.own]):
            arrays.mean_tokens[endpoint], arrays.mean_output[endpoint] = seen.mean_tokens, seen.mean_output
            if arrays.limit[endpoint]:  # a group that is full in the fleet is full here too, before the first sweep
                arrays.limit[endpoint], arrays.token_s[endpoint] = seen.group_limit, seen.token_s
        place = 0
        for one in groups.groups:
            key = self.state.endpoints[one.endpoint].model, self.state.endpoints[one.endpoint].region
            if key not in keys:
                continue
            this: Any = arrays.groups[place]
            for name in GROUP:
                this[name] = getattr(one, name)
            members = [slots[at] for at in one.members]
            this.endpoint, this.first, this.last, this.count = keys.index(key), members[0], members[-1], len(members)
            for before, slot, after in zip([NONE, *members], members, [*members[1:], NONE], strict=False):
                arrays.members[slot] = (place, after, before)
            if one.is_open:
                arrays.open[this.endpoint, one.kind] = place
            pulls = fork.place_of.get(NONE if one.instance is None else one.instance, NONE)
            if pulls >= 0:
                put_before(arrays, place, int(arrays.queue_of[pulls]), NONE)
            place += 1
        arrays.moment_s[0] = 0.0
        for at, (priority, due_ms) in enumerate(groups.classes):
            arrays.class_priority[at], arrays.class_due_ms[at] = priority, due_ms
        free = np.arange(arrays.groups.size - 1, place - 1, -1)
        arrays.free[: free.size] = free
        arrays.counters[FREE_GROUPS], arrays.counters[NEXT_NUMBER] = free.size, groups.next_number
        arrays.counters[KNOWN_CLASSES] = len(groups.classes)


def _ends_s(seen: InstanceState) -> float:
    """Return when the state of *seen* ends; infinity if nothing times it."""
    return inf if seen.ends_s is None else max(0.0, seen.ends_s)


def _ahead(one: RunningRequest, this: Any) -> int:
    """Return iterations of *one* in its look-ahead map, which a request enters with its first token.

    A gateway has answers that do not stream in the map from the start, since it does not see their first token.
    """
    return int(this.produced_tokens) - 1 if one.ahead is None else one.ahead


def _produced(one: RunningRequest, profile: Profile, reaches_s: float) -> int:
    """Return output tokens of *one* so far; for an answer that does not stream, an estimate by its profile."""
    if one.streamed:
        return one.output_tokens // max(1, one.sequences)
    left_s = -reaches_s - profile.service_time_s(one.prompt_tokens, 1)
    step_s = profile.decode_a_s + profile.decode_b_s_per_sequence + profile.decode_c_s_per_token * one.prompt_tokens
    return 0 if left_s < 0 else min(1 + int(left_s / step_s), max(1, one.predicted_tokens))
