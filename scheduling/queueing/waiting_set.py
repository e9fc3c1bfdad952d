"""The waiting set: every held request, for each endpoint an indexed heap of queue keys, and the request groups.

`WaitingArrays` has one element per *slot*. `enqueue` takes a slot, `free_slot` returns it; in between the request may be
popped, pushed again, moved to another endpoint, re-keyed or evicted, each in O(log n). Requests leave a heap by (key,
sequence): lowest key first, then first come. First come, first served is `key = arrival_s`.

A request that waits for an endpoint with groups is also in one of them, for as long as it waits: heap and groups change
together.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.queueing.fair_shares import NO_SHARES, ShareArrays, allocate_shares, cost_of, grow_shares
from scheduling.queueing.groups import (
    BY_RANK,
    NONE,
    GroupArrays,
    allocate_groups,
    grow_groups,
    join,
    kind_of,
    move_member,
    put_before,
    quit_group,
    unqueue,
)
from scheduling.queueing.ordering import VTC
from scheduling.struct_of_arrays import struct_of_arrays

FREE_COUNT: Final = 0
NEXT_SEQUENCE: Final = 1


@struct_of_arrays
class WaitingArrays(NamedTuple):
    """Requests by slot, and the heaps of slots by endpoint."""

    heap: NDArray[np.int32]
    """endpoints x slots: row e holds, in heap order, the `size[e]` slots that wait for endpoint e."""
    size: NDArray[np.int64]
    """Waiting requests by endpoint."""
    position: NDArray[np.int32]
    """Position of a slot in the heap of its endpoint; -1 if it is in none."""
    endpoint: NDArray[np.int32]
    """The endpoint that the request waits for, or waited for last."""
    key: NDArray[np.float64]
    sequence: NDArray[np.int64]
    """Order of arrival over the whole set: the tie-break. -1 while the slot is free."""
    rank: NDArray[np.float64]
    """Order inside a request group by application run: queue key of the run under `hermes`; at first the arrival."""
    arrival_s: NDArray[np.float64]
    deadline_s: NDArray[np.float64]
    """Absolute time; infinity for none."""
    priority: NDArray[np.int64]
    """As in vLLM: lower is earlier."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """Predicted."""
    tenant: NDArray[np.int64]
    application: NDArray[np.int64]
    run: NDArray[np.int64]
    """Row numbers of the tenant, the application and its run; -1 for none."""
    adapter: NDArray[np.int64]
    """Number of its LoRA adapter, -1 for none."""
    instance: NDArray[np.int32]
    """Instance that it was dispatched to; -1 while it waits."""
    free_slots: NDArray[np.int32]
    """Stack of free slots, `counters[FREE_COUNT]` high."""
    counters: NDArray[np.int64]
    """Number of free slots, and the sequence number of the next arrival."""
    groups: GroupArrays
    shares: ShareArrays


def allocate_waiting(endpoints: int, capacity: int, instances: int = 1) -> WaitingArrays:
    """Return an empty waiting set for *endpoints*, with *capacity* slots in total, and virtual queues of *instances*."""
    return WaitingArrays(
        heap=np.zeros((endpoints, capacity), np.int32),
        size=np.zeros(endpoints, np.int64),
        position=np.full(capacity, -1, np.int32),
        endpoint=np.full(capacity, -1, np.int32),
        key=np.zeros(capacity),
        sequence=np.full(capacity, -1, np.int64),
        rank=np.zeros(capacity),
        arrival_s=np.zeros(capacity),
        deadline_s=np.full(capacity, np.inf),
        priority=np.zeros(capacity, np.int64),
        prompt_tokens=np.zeros(capacity, np.int64),
        output_tokens=np.zeros(capacity, np.int64),
        tenant=np.full(capacity, -1, np.int64),
        application=np.full(capacity, -1, np.int64),
        run=np.full(capacity, -1, np.int64),
        adapter=np.full(capacity, -1, np.int64),
        instance=np.full(capacity, -1, np.int32),
        free_slots=np.arange(capacity - 1, -1, -1, dtype=np.int32),
        counters=np.array([capacity, 0], np.int64),
        groups=allocate_groups(endpoints, capacity, instances),
        shares=allocate_shares(endpoints, capacity, 1),
    )


def grow_waiting(
    waiting: WaitingArrays,
    capacity: int,
    endpoints: int | None = None,
    instances: int | None = None,
    tenants: int | None = None,
) -> WaitingArrays:
    """Return a copy with *capacity* slots (and *endpoints* heaps, virtual queues for *instances*, shares of *tenants*).

    Every request keeps its slot and its position in the queue.
    """
    old_endpoints, old_capacity = waiting.heap.shape
    endpoints = old_endpoints if endpoints is None else endpoints
    instances = waiting.groups.queues.size if instances is None else instances
    if capacity < old_capacity or endpoints < old_endpoints:
        raise ValueError(
            f"a waiting set of {old_endpoints} endpoints and {old_capacity} slots"
            f" cannot grow to {endpoints} and {capacity}"
        )
    grown = allocate_waiting(endpoints, capacity)
    for name in set(WaitingArrays._fields) - {"heap", "free_slots", "counters", "groups", "shares"}:
        old: NDArray[np.generic] = getattr(waiting, name)
        getattr(grown, name)[: old.size] = old
    grown.heap[:old_endpoints, :old_capacity] = waiting.heap
    free, added = int(waiting.counters[FREE_COUNT]), capacity - old_capacity
    grown.free_slots[:added] = np.arange(capacity - 1, old_capacity - 1, -1)
    grown.free_slots[added : added + free] = waiting.free_slots[:free]
    grown.counters[:] = free + added, waiting.counters[NEXT_SEQUENCE]
    tenants = waiting.shares.weight.size if tenants is None else tenants
    return grown._replace(
        groups=grow_groups(waiting.groups, endpoints, capacity, instances),
        shares=grow_shares(waiting.shares, endpoints, capacity, tenants),
    )


def in_order(
    waiting: WaitingArrays, endpoint: int, most: int | None = None, among: NDArray[np.bool_] | None = None
) -> NDArray[np.int32]:
    """Return the slots that wait for *endpoint*, in the order in which they would leave; the first *most*, those *among*."""
    slots = waiting.heap[endpoint, : waiting.size[endpoint]]
    slots = slots if among is None else slots[among[slots]]
    if most is not None and slots.size > most:  # without sorting all
        slots = slots[waiting.key[slots] <= np.partition(waiting.key[slots], most)[most]]
    return slots[np.lexsort((waiting.sequence[slots], waiting.key[slots]))][:most]


@compiled_internal
def _before(waiting: WaitingArrays, one: int, other: int) -> bool:
    if waiting.key[one] != waiting.key[other]:
        return bool(waiting.key[one] < waiting.key[other])
    return bool(waiting.sequence[one] < waiting.sequence[other])


@compiled_internal
def _sift_up(waiting: WaitingArrays, endpoint: int, at: int) -> None:
    slot = waiting.heap[endpoint, at]
    while at > 0:
        parent = (at - 1) >> 1
        above = waiting.heap[endpoint, parent]
        if not _before(waiting, slot, above):
            break
        waiting.heap[endpoint, at] = above
        waiting.position[above] = at
        at = parent
    waiting.heap[endpoint, at] = slot
    waiting.position[slot] = at


@compiled_internal
def _sift_down(waiting: WaitingArrays, endpoint: int, at: int) -> None:
    slot = waiting.heap[endpoint, at]
    size = waiting.size[endpoint]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(waiting, waiting.heap[endpoint, child + 1], waiting.heap[endpoint, child]):
            child += 1
        below = waiting.heap[endpoint, child]
        if not _before(waiting, below, slot):
            break
        waiting.heap[endpoint, at] = below
        waiting.position[below] = at
        at = child
    waiting.heap[endpoint, at] = slot
    waiting.position[slot] = at


@compiled_internal
def _check_key(waiting: WaitingArrays, endpoint: int, key: float) -> None:
    if endpoint < 0 or endpoint >= waiting.size.size:
        raise ValueError("no such endpoint; grow the waiting set first")
    if np.isnan(key):
        raise ValueError("the key is not a number")


@compiled
def push(waiting: WaitingArrays, endpoint: int, slot: int, key: float) -> None:
    """Make *slot* wait for *endpoint* with *key*. Its sequence is kept, so a request that returns keeps its position.

    Raise ValueError if it waits already, if there is no such endpoint, or if the key is not a number.
    """
    _check_key(waiting, endpoint, key)
    if waiting.position[slot] >= 0:
        raise ValueError("the request waits already")
    waiting.endpoint[slot] = endpoint
    waiting.key[slot] = key
    waiting.instance[slot] = -1
    at = waiting.size[endpoint]
    waiting.size[endpoint] = at + 1
    waiting.heap[endpoint, at] = slot
    _sift_up(waiting, endpoint, at)
    if waiting.groups.limit[endpoint] > 0:
        join_group(waiting, slot)


@compiled_internal
def join_group(waiting: WaitingArrays, slot: int) -> None:
    """Add *slot*, which waits for an endpoint with groups and is in none, to its group."""
    prompt, output = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
    due_s = waiting.deadline_s[slot] - waiting.arrival_s[slot]
    kind = kind_of(waiting.groups, waiting.priority[slot], due_s, prompt, output)
    join(
        waiting.groups,
        waiting.sequence,
        slot,
        waiting.endpoint[slot],
        kind,
        float(prompt),
        float(output),
        waiting.output_tokens,
        waiting.rank,
        waiting.arrival_s[slot],
    )


@compiled
def _join_again(waiting: WaitingArrays, slots: NDArray[np.int32]) -> None:
    """Remove the waiting *slots* from their groups, and add those whose endpoint has groups in this order."""
    for at in range(slots.size):
        slot = slots[at]
        if waiting.groups.members[slot].group >= 0:
            quit_group(waiting.groups, slot, float(waiting.prompt_tokens[slot]), float(waiting.output_tokens[slot]))
    for at in range(slots.size):
        if waiting.groups.limit[waiting.endpoint[slots[at]]] > 0:
            join_group(waiting, slots[at])


def regroup(waiting: WaitingArrays, limits: Mapping[int, int]) -> None:
    """Rebuild the groups of some endpoints from their waiting requests; *limits* has the largest group by endpoint, 0 for
    none.
    """
    slots = np.concatenate([waiting.heap[endpoint, : waiting.size[endpoint]] for endpoint in limits])
    for endpoint, limit in limits.items():
        waiting.groups.limit[endpoint] = limit
    _join_again(waiting, slots[np.argsort(waiting.sequence[slots])])


@compiled
def peek(waiting: WaitingArrays, endpoint: int) -> int:
    """Return the first slot in the queue of *endpoint*; -1 if none waits."""
    if waiting.size[endpoint] == 0:
        return -1
    return int(waiting.heap[endpoint, 0])


@compiled
def remove(waiting: WaitingArrays, slot: int) -> bool:
    """Remove *slot* from its heap; False if it does not wait. The slot stays taken."""
    at = waiting.position[slot]
    if at < 0:
        return False
    endpoint = waiting.endpoint[slot]
    last = waiting.size[endpoint] - 1
    waiting.size[endpoint] = last
    waiting.position[slot] = -1
    if waiting.groups.members[slot].group >= 0:
        quit_group(waiting.groups, slot, float(waiting.prompt_tokens[slot]), float(waiting.output_tokens[slot]))
    if at != last:
        moved = waiting.heap[endpoint, last]
        waiting.heap[endpoint, at] = moved
        waiting.position[moved] = at
        _sift_up(waiting, endpoint, at)
        _sift_down(waiting, endpoint, waiting.position[moved])
    return True


@compiled
def pop(waiting: WaitingArrays, endpoint: int) -> int:
    """Remove and return the first slot in the queue of *endpoint*; -1 if none waits. The slot stays taken."""
    slot = peek(waiting, endpoint)
    if slot >= 0:
        remove(waiting, slot)
    return slot


@compiled
def leave(waiting: WaitingArrays, slot: int) -> None:
    """Remove *slot*, which waits, from its heap for an instance."""
    waiting.shares.clock[waiting.endpoint[slot]] = waiting.key[slot]
    remove(waiting, slot)


@compiled
def rekey(waiting: WaitingArrays, slot: int, key: float) -> bool:
    """Change the key of *slot*; False if it does not wait. Raise ValueError if the key is not a number."""
    if np.isnan(key):
        raise ValueError("the key is not a number")
    at = waiting.position[slot]
    if at < 0:
        return False
    endpoint = waiting.endpoint[slot]
    waiting.key[slot] = key
    _sift_up(waiting, endpoint, at)
    _sift_down(waiting, endpoint, waiting.position[slot])
    return True


@compiled
def rerank(waiting: WaitingArrays, slot: int, rank: float) -> None:
    """Change the rank of *slot*, which moves inside its request group where that leaves by rank.

    A group is due when the member that leaves first is. If it is due sooner now, it moves forward in its virtual queue, past
    unpinned groups of its endpoint that are due later.
    """
    groups = waiting.groups
    waiting.rank[slot] = rank
    group = int(groups.members[slot].group)
    if group < 0 or groups.within[waiting.endpoint[slot]] != BY_RANK:
        return
    this = groups.groups[group]
    due_s = waiting.key[this.first]
    move_member(groups, waiting.sequence, waiting.output_tokens, waiting.rank, slot)
    queue = int(this.queue)
    if queue < 0 or this.pinned != 0 or waiting.key[this.first] >= due_s:
        return
    due_s, after, at = waiting.key[this.first], NONE, int(this.preceding)
    while at >= 0:
        other = groups.groups[at]
        if other.pinned != 0 or other.endpoint != this.endpoint or waiting.key[other.first] <= due_s:
            break
        after, at = at, int(other.preceding)
    if after >= 0:
        unqueue(groups, group)
        put_before(groups, group, queue, after)


@compiled
def enqueue(
    waiting: WaitingArrays,
    endpoint: int,
    key: float,
    arrival_s: float,
    deadline_s: float,
    priority: int,
    prompt_tokens: int,
    output_tokens: int,
    tenant: int,
    application: int,
    run: int,
    adapter: int,
) -> int:
    """Take a slot for a new request that waits for *endpoint*; return it, or -1 if all are taken (then grow).

    Raise ValueError as `push`; then no slot is taken.
    """
    free = waiting.counters[FREE_COUNT]
    if free == 0:
        return -1
    slot = waiting.free_slots[free - 1]
    _check_key(waiting, endpoint, key)
    waiting.sequence[slot] = waiting.counters[NEXT_SEQUENCE]
    waiting.counters[FREE_COUNT] = free - 1
    waiting.counters[NEXT_SEQUENCE] += 1
    waiting.arrival_s[slot] = waiting.rank[slot] = arrival_s
    waiting.deadline_s[slot] = deadline_s
    waiting.priority[slot] = priority
    waiting.prompt_tokens[slot] = prompt_tokens
    waiting.output_tokens[slot] = output_tokens
    waiting.tenant[slot] = tenant
    waiting.application[slot] = application
    waiting.run[slot] = run
    waiting.adapter[slot] = adapter
    waiting.shares.cost[slot] = 0.0
    push(waiting, endpoint, slot, key)
    return int(slot)


@compiled
def claim(waiting: WaitingArrays, endpoint: int, tenant: int) -> float:
    """Return the virtual start of the next request of *tenant* at *endpoint*, its queue key under `vtc` and `wfq`.

    A tenant that was idle has no claim to the past: its counter is lifted to the least of those that wait (VTC algorithm 2),
    and under `wfq` to the start of the request that left last.
    """
    shares = waiting.shares
    since = shares.clock[endpoint]
    if shares.ordering[endpoint] == VTC and waiting.size[endpoint] > 0:
        since = waiting.key[waiting.heap[endpoint, 0]]
    return float(max(shares.counter[endpoint, tenant], since))


@compiled
def charge(waiting: WaitingArrays, slot: int, service_s: float) -> None:
    """Charge the tenant of *slot*, which has just begun to wait by the key of `claim`, for what is expected of it.

    *service_s* is its expected service time.
    """
    shares, endpoint, tenant = waiting.shares, int(waiting.endpoint[slot]), int(waiting.tenant[slot])
    prompt, output = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
    cost = cost_of(shares, endpoint, float(prompt), float(output), service_s) / shares.weight[tenant]
    shares.cost[slot] = cost
    shares.counter[endpoint, tenant] = waiting.key[slot] + cost


@compiled
def withdraw(waiting: WaitingArrays, slot: int) -> None:
    """Take back what the tenant of the waiting *slot* was charged: it leaves this queue unserved."""
    cost = waiting.shares.cost[slot]
    if waiting.shares.ordering[waiting.endpoint[slot]] != NO_SHARES and cost > 0.0:
        waiting.shares.cost[slot] = 0.0
        settle(waiting, int(waiting.endpoint[slot]), int(waiting.tenant[slot]), -cost, waiting.key[slot])


@compiled
def settle(waiting: WaitingArrays, endpoint: int, tenant: int, more: float, after: float) -> None:
    """Charge *tenant* *more* than expected, over its weight: its requests at *endpoint* with keys above *after* shift."""
    waiting.shares.counter[endpoint, tenant] += more
    if more == 0.0:
        return
    shifted = False
    for at in range(waiting.size[endpoint]):
        slot = waiting.heap[endpoint, at]
        if waiting.tenant[slot] == tenant and waiting.key[slot] > after:
            waiting.key[slot] += more
            shifted = True
    if shifted:
        for at in range((waiting.size[endpoint] >> 1) - 1, -1, -1):
            _sift_down(waiting, endpoint, at)


@compiled
def free_slot(waiting: WaitingArrays, slot: int) -> None:
    """Free *slot* for another request, removing it from its heap if it still waits.

    Its fields stay readable until the slot is taken again. Raise ValueError if it is free already.
    """
    if waiting.sequence[slot] < 0:
        raise ValueError("the slot is free already")
    if waiting.position[slot] >= 0:
        withdraw(waiting, slot)
    remove(waiting, slot)
    waiting.sequence[slot] = -1
    free = waiting.counters[FREE_COUNT]
    waiting.free_slots[free] = slot
    waiting.counters[FREE_COUNT] = free + 1
