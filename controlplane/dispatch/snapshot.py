"""State of the fleet, read from the process that owns the queues: the start of a fork (`queues.commands`)."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from controlplane.dispatch import kernels
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request
from controlplane.dispatch.observation import Observation
from controlplane.fleet.lifecycle.states import COMING
from controlplane.fleet.lifecycle.states import InstanceState as Lifecycle
from scheduling.fleet.state import (
    GROUP,
    LONG_AGO_S,
    Condition,
    EndpointState,
    FleetState,
    GroupsState,
    GroupState,
    HeldRequest,
    Holder,
    InstanceState,
    PromptState,
    RunningRequest,
    WaitingRequest,
)
from scheduling.queueing.fair_shares import NO_SHARES
from scheduling.queueing.groups import KNOWN_CLASSES, NEXT_NUMBER
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS
from scheduling.routing.prefix_affinity import UNKNOWN, held
from scheduling.routing.regions import asked_work_s, backlog_s
from scheduling.scaling.view import DEMAND_WINDOW_S

EPOCH_S: Final = 1e9
"""Larger numbers in a strategy's memory are times."""
MOST_PROMPTS: Final = 2_000
"""Starts of prompts in a state; those of further requests are not known."""
MOST_PROMPT_BYTES: Final = 8 * 1024
"""Hashes of a prompt's tokens: of 16 tokens a block, the first 16,384."""

CONDITIONS: Final = {
    Lifecycle.PROVISIONING: Condition.LOADING,
    Lifecycle.LOADING: Condition.LOADING,
    Lifecycle.READY: Condition.READY,
    Lifecycle.DRAINING: Condition.DRAINING,
    Lifecycle.DONATED: Condition.SPOT,
    Lifecycle.RECLAIMING: Condition.RECLAIMING,
    Lifecycle.SLEEPING: Condition.ASLEEP,
    Lifecycle.STOPPED: Condition.EMPTY,
    Lifecycle.FAILED: Condition.FAILED,
}


class Snapshot:
    """Callable that returns the state.

    *report* makes the dispatcher count streamed tokens, and returns when each request (by number) last streamed one, on the
    dispatcher's clock.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        observation: Observation,
        report: Callable[[], Mapping[int, float]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.dispatcher, self.observation, self.report = dispatcher, observation, report
        self.wall_clock = wall_clock
        # Of the state that is read: its time, its prompts by what is known of them, its instances' numbers by slot.
        self._now_s = 0.0
        self._prompts: dict[tuple[Any, ...], tuple[int, PromptState]] = {}
        self._numbers: dict[int, int] = {}

    def __call__(self) -> FleetState:
        """Return the state; takes some 5 ms for a thousand requests, and 30 ms more where routers consider prompts."""
        heard = self.report()
        dispatcher, topology = self.dispatcher, self.dispatcher.topology
        self._now_s = now_s = dispatcher.clock()
        replicas = sorted(topology.replicas.values(), key=lambda one: one.name)
        self._prompts, self._numbers = {}, {one.slot: at for at, one in enumerate(replicas)}
        waiting, places = self._waiting()
        state = FleetState(
            at=self.wall_clock(),
            instances=[self._instance(one, heard) for one in replicas],
            running=[
                self._running(request, self._numbers[one.slot])
                for _, request, one in sorted(
                    (_placed(each), each, one)
                    for one in replicas
                    for each in one.requests
                    if not topology.is_dark(one.spec.region)
                )
            ],
            waiting=waiting,
            endpoints=[self._endpoint(each) for each in sorted(topology.endpoints, key=lambda one: one.is_spot)],
            groups=self._groups(places),
            swept_s=dispatcher.outcomes.swept_s - now_s,
            held=[HeldRequest(**self._request(one)) for one in dispatcher.holding.requests()],
            backlogs=dispatcher.holding.work.backlogs(now_s),
            look_s=max(0.0, dispatcher.holding.acted_s + LOOK_S - now_s),
            memory=self._memory(),
            ended=dispatcher.waits.control.ended_state(),
        )
        state.prompts = [prompt for _, prompt in self._prompts.values()]
        return state

    def _memory(self) -> dict[str, float]:
        """Return the memory of strategies, with times relative to now."""
        at_s = self.wall_clock()
        return {
            name: value - at_s if value > EPOCH_S else value
            for memory in self.observation.strategies.values()
            for name, value in memory.items()
            if math.isfinite(value)
        }

    def _prompt(self, request: Request) -> int | None:
        """Return the index of the start of the prompt of *request*, None for one without a whole block."""
        asked, endpoint = request.asked, request.endpoint
        recorded, tokens = asked.prefix_hashes, asked.token_blocks[:MOST_PROMPT_BYTES]
        if not recorded and not tokens:
            return None
        key = endpoint.index, recorded, tokens
        if (known := self._prompts.get(key)) is not None:
            return known[0]
        if len(self._prompts) >= MOST_PROMPTS:
            return None
        hashes, block = np.array(recorded, np.int64).tobytes(), asked.token_block_size if tokens else 0
        by_prefix = asked.model in self.dispatcher.topology.by_prefix
        holders = self._holders(request, tokens) if by_prefix else []
        prompt = PromptState(hashes, asked.block_tokens, tokens, block, holders)
        self._prompts[key] = len(self._prompts), prompt
        return len(self._prompts) - 1

    def _holders(self, request: Request, tokens: bytes) -> list[Holder]:
        """Return which instances have the start of the prompt of *request*, whose blocks of *tokens* are known or empty."""
        asked, endpoint, queue, topology = (
            request.asked,
            request.endpoint,
            self.dispatcher.queue,
            self.dispatcher.topology,
        )
        affinity, recorded = queue.affinity, asked.prefix_hashes
        spare = affinity.noted_count.size - 1
        affinity.noted[spare, : len(recorded)] = recorded
        affinity.noted_count[spare], affinity.block_tokens[spare] = len(recorded), asked.block_tokens
        holders = {
            slot: Holder(self._numbers[slot], given_tokens, age_tokens)
            for slot, given_tokens, age_tokens in held(topology.fleet, affinity, endpoint.index, spare)
            if slot in self._numbers
        }
        if tokens:
            blocks, block = np.frombuffer(bytearray(tokens), np.int64), asked.token_block_size
            kernels.know(topology.arrays, affinity, endpoint.index, blocks, 0, blocks.size, block)
            for one in topology.members(endpoint):
                if (known := int(affinity.known[one.slot])) != UNKNOWN and one.slot in self._numbers:
                    before = holders.pop(one.slot, None)
                    age_tokens = before.age_tokens if before else int(topology.fleet.kv_capacity_tokens[one.slot])
                    if known:
                        holders[one.slot] = Holder(self._numbers[one.slot], known, age_tokens, by_events=True)
            kernels.forget_known(topology.arrays, affinity, endpoint.index)
        return list(holders.values())

    def _instance(self, replica: Replica, heard: Mapping[int, float]) -> InstanceState:
        fleet, wall_s = self.dispatcher.topology.fleet, self.wall_clock()
        spec, state = replica.spec, Lifecycle(replica.spec.state)
        arrays, slot = self.dispatcher.queue.arrays.groups, replica.slot
        phase = int(arrays.phase[slot]) if slot < arrays.phase.size else STAYS
        ends_s = None
        if phase == COMES:
            ends_s = max(0.0, float(arrays.up_s[slot]) - self._now_s)
        elif state in COMING:
            ends_s = max(0.0, spec.start_began_at + (spec.start_s or 0.0) - wall_s)
        round_trips = fleet.round_trips[slot].tolist()
        round_trips[1] -= self._now_s  # a moment
        return InstanceState(
            name=spec.name,
            model=spec.model,
            region=spec.region,
            gpu=spec.gpu_type,
            # A dark region serves nothing, for as long as anybody knows.
            state=Condition.FAILED if self.dispatcher.topology.is_dark(spec.region) else CONDITIONS[state],
            spot=replica.endpoint.is_spot,
            since_s=spec.state_changed_at - wall_s,
            ends_s=ends_s,
            swap_group=spec.swap_group,
            leaves=phase == LEAVES,
            waits=phase == WAITS,
            up_s=float(arrays.up_s[slot]) - self._now_s if spec.swap_group and slot < arrays.up_s.size else 0.0,
            reachable=replica.reachable,
            kv_tokens=int(fleet.kv_capacity_tokens[slot]),
            round_trips=round_trips,
            adapters=[self.dispatcher.topology.adapter_names[at - 1] for at in fleet.adapters[slot].tolist() if at],
            given_tokens=fleet.given_tokens[slot].tolist(),
            iteration_s=self._iteration_s(replica, heard),
        )

    def _iteration_s(self, replica: Replica, heard: Mapping[int, float]) -> float | None:
        """Return the end of the last observed iteration: every request that decodes there gets a token then."""
        numbers = [each.asked.number for each in replica.requests]
        ended_s = max([replica.request_ended_s, *(heard[number] for number in numbers if number in heard)])
        return ended_s - self._now_s if ended_s > -math.inf else None

    def _request(self, request: Request) -> dict[str, Any]:
        """Return the fields that running and waiting requests share."""
        asked = request.asked
        return {
            "request_id": asked.request_id,
            "model": asked.model,
            "region": self.dispatcher.topology.own_region(asked.model, asked.region) or request.endpoint.region,
            "served_in": request.endpoint.region,
            "slo_class": asked.slo_class,
            "tenant": asked.tenant,
            "arrival_s": asked.arrived_s - self._now_s,
            "prompt_tokens": asked.prompt_tokens,
            "predicted_tokens": request.predicted_tokens,
            "sequences": asked.sequences,
            "attempts": request.attempts,
            "adapter": asked.adapter,
            "priority": None if asked.interactive else asked.priority,
            "asked_model": asked.asked_model,
            "model_rule": asked.model_rule,
            "falls_back": bool(asked.fallback),
            "prompt": self._prompt(request),
        }

    def _running(self, request: Request, instance: int) -> RunningRequest:
        maps, ahead = self.dispatcher.accounts.maps, None
        if request.ahead >= 0:
            ahead = int(maps.clock[maps.instance[request.ahead]] - maps.began[request.ahead])
        return RunningRequest(
            **self._request(request),
            instance=instance,
            placed_s=request.placed_s - self._now_s,
            queue_key_s=request.queue_key_s - request.asked.arrived_at + request.asked.arrived_s - self._now_s,
            streamed=request.asked.streamed,
            output_tokens=request.output_tokens,
            cached_tokens=request.cached_tokens,
            expected_prompt=request.expected_prompt,
            expected_tokens=request.expected_tokens,
            ahead=ahead,
        )

    def _waiting(self) -> tuple[list[WaitingRequest], dict[int, int]]:
        """Return waiting requests in order of arrival at their queues, and the index of each by slot of the waiting set."""
        queue, arrays = self.dispatcher.queue, self.dispatcher.queue.arrays
        slots = np.flatnonzero(arrays.position >= 0)
        slots = slots[np.argsort(arrays.sequence[slots])]
        fair = arrays.shares.ordering[arrays.endpoint[slots]] != NO_SHARES
        keys_s = np.where(fair, arrays.key[slots], arrays.key[slots] - self._now_s)
        allowed_s = arrays.deadline_s[slots] - arrays.arrival_s[slots]
        columns = (keys_s, arrays.rank[slots] - self._now_s, allowed_s)
        requests = [
            WaitingRequest(
                **self._request(queue.at(slot)),
                key_s=key_s,
                rank_s=rank_s,
                put_off_s=put_off_s if queue.is_lost(slot) else None,
                spot=queue.at(slot).endpoint.is_spot,
                waits=self.dispatcher.waits.control.waiting_state(queue.at(slot).row),
            )
            for slot, key_s, rank_s, put_off_s in zip(slots.tolist(), *map(np.ndarray.tolist, columns), strict=True)
        ]
        return requests, {slot: at for at, slot in enumerate(slots.tolist())}

    def _endpoint(self, endpoint: Endpoint) -> EndpointState:
        topology, (changed_s, changed_delta) = (
            self.dispatcher.topology,
            self.observation.changes.changed(endpoint.index),
        )
        at, arrays, groups = endpoint.index, topology.arrays, self.dispatcher.queue.arrays.groups
        asked = np.zeros(DEMAND_WINDOW_S)
        for second, tokens in endpoint.demand:
            before = int(self._now_s) - 1 - second
            if 0 <= before < DEMAND_WINDOW_S:
                asked[DEMAND_WINDOW_S - 1 - before] += tokens
        return EndpointState(
            model=endpoint.model,
            region=endpoint.region,
            ordering=endpoint.spec.policy.ordering,
            cursor=self._numbers.get(int(arrays.cursor[at])),
            changed_s=max(changed_s - self._now_s, LONG_AGO_S),
            changed_delta=changed_delta,
            asked_tokens=asked.tolist(),
            asked_work_s=float(asked_work_s(arrays, at, self._now_s)),
            backlog_s=float(backlog_s(arrays, at, self._now_s)),
            spot=endpoint.is_spot,
            mean_tokens=float(groups.mean_tokens[at]),
            mean_output=float(groups.mean_output[at]),
            group_limit=int(groups.limit[at]),
            token_s=tuple(groups.token_s[at].tolist()),
            short=self.dispatcher.reordering.control.short_instances.get(at, 0),
            waits=self.dispatcher.waits.control.learned_state(at),
        )

    def _groups(self, places: dict[int, int]) -> GroupsState | None:
        """Return request groups; *places* are indices of waiting requests by slot."""
        arrays = self.dispatcher.queue.arrays.groups
        if not arrays.limit.any():
            return None
        endpoints = self.dispatcher.topology.fleet.endpoint
        pulling = {
            (int(arrays.queue_of[slot]), int(endpoints[slot])): at
            for slot, at in self._numbers.items()
            if slot < arrays.queue_of.size
        }
        own = {endpoint.index: at for at, endpoint in enumerate(self.dispatcher.topology.own_endpoints)}
        listed = [place for queue in arrays.queues["first"].tolist() for place in _chain(arrays.groups, queue)]
        listed += np.flatnonzero((arrays.groups["endpoint"] >= 0) & (arrays.groups["queue"] < 0)).tolist()
        groups = []
        for place in listed:
            this: Any = arrays.groups[place]
            values = {name: this[name].item() for name in GROUP}
            group = GroupState(
                **values | {"opened_s": values["opened_s"] - self._now_s, "pinned": bool(this.pinned)},
                endpoint=own[int(this.endpoint)],
                is_open=int(arrays.open[this.endpoint, this.kind]) == place,
                instance=pulling.get((int(this.queue), int(this.endpoint))),
                members=[places[slot] for slot in _chain(arrays.members, int(this.first))],
            )
            groups.append(group)
        known, reordering = int(arrays.counters[KNOWN_CLASSES]), self.dispatcher.reordering.control
        made, left = reordering.tried
        return GroupsState(
            groups=groups,
            classes=list(
                zip(arrays.class_priority[:known].tolist(), arrays.class_due_ms[:known].tolist(), strict=True)
            ),
            next_number=int(arrays.counters[NEXT_NUMBER]),
            tried=(made, arrays.groups.size - left),
            tried_s=max(reordering.tried_s - self._now_s, LONG_AGO_S),
        )


def _chain(nodes: Any, first: int) -> list[int]:
    """Return *first* and what follows it in a list of groups or of members of one; nothing for -1."""
    chain = []
    while first >= 0:
        chain.append(first)
        first = int(nodes["following"][first])
    return chain


def _placed(request: Request) -> tuple[float, float, int]:
    """Return the sort key for dispatch order; requests of one moment by their queue keys."""
    return request.placed_s, request.queue_key_s, request.asked.number
