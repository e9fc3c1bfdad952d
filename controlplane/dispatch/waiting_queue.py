"""The waiting queue: one waiting set with a heap per endpoint, request groups where the ordering is QLM's, and shares of
tenants where it is a fair one.

It is the only owner of the waiting set. A request carries its prefix hashes, where the gateway has sent them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.kernels import enqueue, free_slot, may_balance, waiting_tokens
from controlplane.dispatch.live_fleet.inventory import FAILED, SwapGroupSpec
from controlplane.dispatch.live_fleet.topology import Endpoint, Request, Topology
from controlplane.dispatch.port import Asked, Pulled
from controlplane.dispatch.stages import Stage
from controlplane.fleet.lifecycle.states import AWAKE, COMING
from controlplane.tunable import weights_of
from scheduling.applications.standings import follows_runs, key_in_run
from scheduling.compiled import uncompiled
from scheduling.fleet.profile import Profile
from scheduling.queueing.fair_shares import NO_SHARES, OUTPUT_WEIGHT
from scheduling.queueing.groups import FREE_GROUPS, GROUP_ORDERS
from scheduling.queueing.ordering import (
    BY_RUN,
    BY_SERVICE,
    FAIR,
    HERMES,
    ORDERINGS,
    QLM,
    SLACK,
    VTC,
    due_in_run,
    first_due_s,
    queue_key,
    run_due_s,
)
from scheduling.queueing.snapshot import Snapshot
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS, Swap, note_phase, share_queues
from scheduling.queueing.virtual_queues import fit_groups, reassign
from scheduling.queueing.waiting_set import (
    allocate_waiting,
    charge,
    claim,
    grow_waiting,
    in_order,
    push,
    regroup,
    rekey,
    remove,
    rerank,
    settle,
    withdraw,
)
from scheduling.routing.cached_blocks import with_room
from scheduling.routing.prefix_affinity import allocate_affinity, grow_affinity

QUEUE_KEY = uncompiled(queue_key)


class WaitingQueue(Stage):
    """All waiting requests. *clock* is the dispatcher's, and that of the waiting set."""

    def __init__(self, topology: Topology, clock: Callable[[], float]) -> None:
        self.topology = topology
        self.arrays = allocate_waiting(topology.arrays.cursor.size, 1024, topology.fleet.endpoint.size)
        # One place more than slots, for a prompt that no request has (`prewarming`).
        self.affinity = allocate_affinity(topology.fleet.endpoint.size, 1025)
        topology.on_growth.append(self._grow)
        self.clock = clock
        self._ordering: dict[int, int] = {}  # by endpoint: ordering of the keys in its heap
        self._held: dict[int, Request] = {}  # by slot of the waiting set
        self._tenants: dict[int, int] = {}  # tenants' numbers in the waiting set, by id
        self.by_tenant: Counter[tuple[int, str]] = Counter()
        """Waiting requests by (tenant, model)."""

    def __len__(self) -> int:
        return len(self._held)

    def grouped(self, endpoint: Endpoint) -> bool:
        """Whether requests for *endpoint* are in request groups."""
        return ORDERINGS[endpoint.spec.policy.ordering] == QLM

    @property
    def group_count(self) -> int:
        """Return the number of waiting request groups."""
        groups = self.arrays.groups
        return int(groups.groups.size - groups.counters[FREE_GROUPS])

    def sweep(self) -> None:
        self.keep_order()

    def keep_order(self) -> None:
        """Put waiting requests in their endpoint's current order, and in groups whose instances still pull.

        Call after any change of the topology, and every second.
        """
        any_grouped, limits = False, dict[int, int]()
        for endpoint in self.topology.endpoints:
            ordering, before = ORDERINGS[endpoint.spec.policy.ordering], self._ordering.get(endpoint.index)
            grouped = ordering == QLM
            self.arrays.shares.ordering[endpoint.index] = ordering if ordering in FAIR else NO_SHARES
            if before is not None and before != ordering:
                self._order_again(endpoint)
            groups, within = self.arrays.groups, GROUP_ORDERS[endpoint.spec.policy.group_order]
            if grouped != (groups.limit[endpoint.index] > 0) or (grouped and groups.within[endpoint.index] != within):
                groups.within[endpoint.index] = within
                limits[endpoint.index] = self._limit(endpoint) if grouped else 0
            elif grouped:
                groups.limit[endpoint.index] = self._limit(endpoint)
            self._ordering[endpoint.index] = ordering
            any_grouped = any_grouped or grouped
        if limits:
            regroup(self.arrays, limits)
            for index in limits:
                for request in self.of(self.topology.endpoints[index]):
                    self._rank(request, self.topology.endpoints[index])
                    self._note_group(request)
        self._share_queues()
        if any_grouped:
            reassign(self.topology.fleet, self.topology.arrays, self.arrays)

    def _order_again(self, endpoint: Endpoint) -> None:
        """Give what waits for *endpoint* keys by its new ordering."""
        arrays, at = self.arrays, endpoint.index
        fair = arrays.shares.ordering[at] != NO_SHARES
        arrays.shares.counter[at], arrays.shares.clock[at] = 0.0, 0.0
        for request in sorted(self.of(endpoint), key=lambda each: int(arrays.sequence[each.slot])):
            slot = request.slot
            arrays.shares.cost[slot] = 0.0
            # What waits has been served nothing yet, so tenants begin alike.
            own = float(arrays.shares.counter[at, arrays.tenant[slot]]) if fair else self._key_at(request, endpoint)
            rekey(arrays, slot, own)
            self._charge(request, endpoint)

    def _push(self, request: Request, endpoint: Endpoint) -> None:
        """Queue *request*, which has a slot and is in no queue, for *endpoint*."""
        push(self.arrays, endpoint.index, request.slot, self._key_at(request, endpoint))
        self._charge(request, endpoint)
        self._rank(request, endpoint)

    def _charge(self, request: Request, endpoint: Endpoint) -> None:
        """Charge the tenant of *request*, which has just been queued for *endpoint*, where tenants have shares."""
        arrays, slot = self.arrays, request.slot
        if arrays.shares.ordering[endpoint.index] != NO_SHARES:
            prompt, output = int(arrays.prompt_tokens[slot]), int(arrays.output_tokens[slot])
            charge(arrays, slot, float(endpoint.spec.profile.service_time_s(prompt, output)))

    def _rank(self, request: Request, endpoint: Endpoint) -> None:
        """Give *request*, which has just been queued for *endpoint*, its rank where request groups leave by that."""
        if not (self.grouped(endpoint) and follows_runs(endpoint.policy)):
            return
        arrays, slot, standing = self.arrays, request.slot, request.standing
        began_s, rank_s = (
            (standing.began_s, standing.rank_s)
            if standing is not None
            else (
                float(arrays.arrival_s[slot]),
                endpoint.spec.profile.service_time_s(int(arrays.prompt_tokens[slot]), int(arrays.output_tokens[slot])),
            )
        )
        stretch = endpoint.spec.policy.ordering_stretch
        rerank(arrays, slot, float(QUEUE_KEY(HERMES, began_s, math.inf, 0, rank_s, stretch)))

    def settle(self, request: Request, output_tokens: int) -> None:
        """Charge the tenant of *request*, which leaves its instance, for its output in place of what was expected of it."""
        shares, at = self.arrays.shares, request.endpoint.index
        if shares.ordering[at] == VTC:
            tenant = self._tenant(request.asked)
            expected = request.expected_tokens - request.expected_prompt
            more = OUTPUT_WEIGHT * (output_tokens - expected) / float(shares.weight[tenant])
            settle(self.arrays, at, tenant, more, -math.inf)

    def weight(self, asked: Asked) -> float:
        """Return the weight of the tenant of *asked*."""
        return weights_of(self.topology.tuned.TENANT_WEIGHTS).get(asked.tenant, 1.0)

    def _tenant(self, asked: Asked) -> int:
        """Return the number of the tenant of *asked*, whose weight is up to date."""
        number = self._tenants.setdefault(asked.tenant_id, len(self._tenants))
        if number >= self.arrays.shares.weight.size:
            self.arrays = grow_waiting(self.arrays, self.arrays.key.size, tenants=2 * (number + 1))
        self.arrays.shares.weight[number] = self.weight(asked)
        return number

    def _share_queues(self) -> None:
        """Share one virtual queue among instances on the same GPUs.

        Only where all are of endpoints with request groups whose models are swapped by queue, and the floor, which requests
        swaps, is on. A stopped one is included: its start is a swap like any other.
        """
        topology, sharing = self.topology, list[dict[int, Swap]]()
        self._note_phases()
        for group in topology.swap_groups if topology.tuned.FLOOR else ():
            swaps = {one.instance_id: Swap(one.sleep_s, one.load_s) for one in group.members if one.state != FAILED}
            replicas = [topology.replicas[key] for key in swaps if key in topology.replicas]
            endpoints = [replica.endpoint for replica in replicas]
            if all(self.grouped(endpoint) and endpoint.spec.policy.swap_by_queue for endpoint in endpoints):
                sharing.append({replica.slot: swaps[replica.spec.instance_id] for replica in replicas})
        share_queues(self.arrays.groups, sharing)

    def _note_phases(self) -> None:
        """Note the swap phase of instances that share GPUs.

        For one that comes up, the time is counted from when its swap was seen, with the duration of earlier ones.
        """
        arrays, replicas, phases = self.arrays.groups, self.topology.replicas, dict[int, tuple[int, float]]()
        for group in self.topology.swap_groups:
            for member in group.members:
                if (replica := replicas.get(member.instance_id)) is not None:
                    known_s = float(arrays.swap_s[replica.slot])
                    load_s = known_s if known_s < math.inf else member.load_s
                    phases[replica.slot] = _phase(group, member.instance_id, member.state), load_s
        for slot in np.flatnonzero(arrays.phase).tolist():
            phases.setdefault(slot, (STAYS, 0.0))
        now_s = self.clock()
        for slot, (phase, load_s) in phases.items():
            note_phase(arrays, slot, phase, now_s + (load_s if phase == COMES else 0.0))

    def _limit(self, endpoint: Endpoint) -> int:
        topology = self.topology
        batches = endpoint.spec.policy.group_batches
        return int(fit_groups(topology.fleet, topology.arrays, self.arrays.groups, endpoint.index, batches))

    def _key_at(self, request: Request, endpoint: Endpoint) -> float:
        """Return the queue key of *request*, which has a slot, at *endpoint*."""
        arrays, slot = self.arrays, request.slot
        prompt, output = int(arrays.prompt_tokens[slot]), int(arrays.output_tokens[slot])
        return self._queue_key(request, endpoint, float(arrays.arrival_s[slot]), prompt, output)

    def _queue_key(self, request: Request, endpoint: Endpoint, arrival_s: float, prompt: int, output: int) -> float:
        ordering, asked = ORDERINGS[endpoint.spec.policy.ordering], request.asked
        if ordering in FAIR:
            return float(claim(self.arrays, endpoint.index, self._tenant(asked)))
        if ordering in BY_RUN and request.standing is not None:
            return key_in_run(ordering, request.standing, asked.priority, endpoint.spec.policy.ordering_stretch)
        key = _queue_key(endpoint, arrival_s, asked, prompt, output)
        if request.standing is not None and ordering == QLM and follows_runs(endpoint.policy):
            return uncompiled(due_in_run)(key, arrival_s, request.standing.due_s, request.standing.worst_s)
        return key

    def may_balance(self, endpoint: Endpoint) -> bool:
        """Whether the earliest due request for *endpoint* may be given to any instance, even from another's queue."""
        topology = self.topology
        return may_balance(topology.fleet, topology.arrays, self.arrays, endpoint.index)

    def why_pulled(self, slot: int, now_s: float) -> Pulled:
        """Return why the request in *slot* is pulled."""
        groups = self.arrays.groups
        group: Any = groups.groups[groups.members[slot].group]
        return Pulled(
            int(groups.queues[group.queue].groups),
            int(group.number),
            int(group.count),
            float(self.arrays.key[slot]) - now_s,
        )

    def count(self, endpoint: Endpoint) -> int:
        """Return the number of requests that wait for *endpoint*."""
        return int(self.arrays.size[endpoint.index])

    def prompt_tokens(self, endpoint: Endpoint) -> int:
        """Return the prompt tokens that wait for *endpoint*."""
        return int(waiting_tokens(self.arrays, endpoint.index)) if self.count(endpoint) else 0

    def of(self, endpoint: Endpoint) -> list[Request]:
        """Return the requests that wait for *endpoint*, in any order."""
        slots = self.arrays.heap[endpoint.index, : self.count(endpoint)] if self.count(endpoint) else ()
        return [self._held[int(slot)] for slot in slots]

    def at(self, slot: int) -> Request:
        """Return the request that waits in *slot*."""
        return self._held[slot]

    def is_lost(self, slot: int) -> bool:
        """Whether the request in *slot* can no longer be in time, and was deferred (`virtual_queues.defer_late`)."""
        arrays = self.arrays
        return bool(arrays.deadline_s[slot] - arrays.arrival_s[slot] > self._held[slot].asked.allowed_s + 1e-3)

    def lost(self, seen: Snapshot) -> NDArray[np.bool_]:
        """Return a mask of the groups of *seen* whose requests can no longer be in time."""
        groups: Any = self.arrays.groups.groups[seen.places]
        there = (groups["number"] == seen.numbers) & (groups["endpoint"] >= 0)
        first = groups["first"].tolist()
        return np.array([at and self.is_lost(slot) for at, slot in zip(there.tolist(), first, strict=True)], np.bool_)

    def in_order(self, endpoint: Endpoint, most: int | None = None) -> list[Request]:
        """Return the requests that wait for *endpoint*, the first *most*, in the order in which they would leave."""
        return [self._held[slot] for slot in in_order(self.arrays, endpoint.index, most).tolist()]

    def still_waiting(self, endpoint: Endpoint) -> Iterator[Request]:
        """Yield those, without what has left or moved before it is yielded."""
        for request in self.in_order(endpoint):
            if request.slot >= 0 and request.endpoint is endpoint:
                yield request

    def add(self, request: Request, endpoint: Endpoint) -> None:
        """Queue *request* for *endpoint*, with a queue key by the ordering there."""
        if len(self._held) >= self.arrays.key.size:
            self._grow(2 * self.arrays.key.size)
        asked = request.asked
        arrival_s = asked.arrived_s
        # A prompt estimated larger than any instance must not block the queue for ever: vLLM knows better.
        room = endpoint.largest_kv_tokens
        prompt, output = asked.prompt_tokens, request.predicted_tokens
        if room and prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        request.expected_tokens, request.counted_tokens = prompt + output, 0
        request.expected_prompt = prompt
        tenant = self._tenant(asked)
        key = self._queue_key(request, endpoint, arrival_s, prompt, output)
        request.slot = enqueue(
            self.arrays,
            endpoint.index,
            key,
            arrival_s,
            arrival_s + asked.allowed_s,
            asked.priority,
            prompt,
            output,
            tenant,
            -1,
            request.run,
            request.adapter,
        )
        self._charge(request, endpoint)
        self._rank(request, endpoint)
        self._held[request.slot] = request
        if self.arrays.groups.limit[endpoint.index] > 0:
            self._note_group(request)
        else:
            request.group = -1
        self.by_tenant[asked.tenant_id, asked.model] += 1
        request.endpoint = endpoint
        self.note_prefix(request)

    def move(self, request: Request, target: Endpoint) -> None:
        """Move *request*, which waits, to the queue of *target*, with a queue key by the ordering there."""
        withdraw(self.arrays, request.slot)
        remove(self.arrays, request.slot)
        self._push(request, target)
        self._note_group(request)
        request.endpoint = target

    def _note_group(self, request: Request) -> None:
        groups = self.arrays.groups
        group = int(groups.members["group"][request.slot])
        request.group = int(groups.groups["number"][group]) if group >= 0 else -1

    def take_out(self, slot: int) -> Request:
        """Return the request in *slot*, which has left the queue, and may have been popped already."""
        request = self._held.pop(slot)
        self.by_tenant[request.asked.tenant_id, request.asked.model] -= 1
        # A lost request has been put off since it was queued.
        asked, arrays = request.asked, self.arrays
        request.queue_key_s = float(arrays.key[slot] - arrays.arrival_s[slot]) + asked.arrived_at
        free_slot(self.arrays, slot)
        request.slot = -1
        return request

    def _grow(self, slots: int = 0) -> None:
        """Make room for all endpoints and instances, and for *slots* requests: kernels index without a check."""
        topology, slots = self.topology, max(slots, self.arrays.key.size)
        instances = topology.fleet.endpoint.size
        self.arrays = grow_waiting(self.arrays, slots, topology.arrays.cursor.size, instances)
        self.affinity = grow_affinity(self.affinity, instances, slots + 1)

    def fit_blocks(self, more: int) -> None:
        """Grow the index of cached blocks so that *more* fit."""
        blocks = with_room(self.affinity.blocks, more)
        if blocks is not self.affinity.blocks:
            self.affinity = self.affinity._replace(blocks=blocks)

    def note_prefix(self, request: Request) -> None:
        """Pass the prefix of *request*, which waits, to the router by delay; other routers do not use it."""
        hashes = request.asked.prefix_hashes
        self.affinity.noted_count[request.slot] = len(hashes)
        if hashes:
            self.affinity.noted[request.slot, : len(hashes)] = hashes
            self.affinity.block_tokens[request.slot] = request.asked.block_tokens


def _phase(group: SwapGroupSpec, instance_id: int, state: str) -> int:
    """Return the swap phase of a member of *group* in *state*."""
    if not group.in_progress or state == FAILED:
        return STAYS
    if instance_id != group.target:
        return LEAVES if state in AWAKE else STAYS
    return COMES if state in COMING else STAYS if state in AWAKE else WAITS


def _queue_key(endpoint: Endpoint, arrival_s: float, asked: Asked, prompt_tokens: int, output_tokens: int) -> float:
    """Return the queue key of a request at *endpoint*, by its ordering and the profile it uses."""
    spec = endpoint.spec
    ordering = ORDERINGS[spec.policy.ordering]
    due_s, service_s = first_due_of(spec.profile, asked, prompt_tokens, output_tokens), 0.0
    if ordering in BY_SERVICE or ordering == SLACK:
        service_s = spec.profile.service_time_s(prompt_tokens, 1 if ordering == SLACK else output_tokens)
    if ordering in BY_RUN:
        ttft_s, end_s = (math.inf if each is None else each for each in (asked.due_s, asked.end_s))
        due_s = uncompiled(run_due_s)(ttft_s, end_s, spec.profile.service_time_s(prompt_tokens, output_tokens))
    return QUEUE_KEY(ordering, arrival_s, arrival_s + due_s, asked.priority, service_s, spec.policy.ordering_stretch)


def first_due_of(profile: Profile, asked: Asked, prompt_tokens: int, output_tokens: int) -> float:
    """Return seconds from arrival until the first token of *asked* is due, given its expected tokens; infinity for never."""
    ttft_s = math.inf if asked.due_s is None else asked.due_s
    if asked.end_s is None:
        return ttft_s
    return uncompiled(first_due_s)(ttft_s, asked.end_s, profile.decode_time_s(prompt_tokens, output_tokens))
