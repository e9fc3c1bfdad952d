"""Virtual queues (QLM section 4): for each instance the request groups that it serves, in order.

A virtual queue holds references to groups, and a group references to requests: the waiting set alone owns the requests. An
instance with room pulls from the first group of its queue (`pull`). New groups are put at once where they are served first,
each queue by due time (`insert_loose`: earliest due first, earliest completion); the global scheduler (`reordering`)
improves the order later.

Instances that share their GPUs share one queue, with groups of all their models (`groups.share_queues`). The one that is
awake pulls while the first group is of its model; if it is of another, a swap is due (`control.swaps`), so it gets no
more requests. A new group goes where its model is served anyway, unless that makes a group that it overtakes late
(`place_in_shared`).

Two things are not in the paper. An instance whose queue has nothing for it takes the request of its endpoint that is due
first, from any queue (`may_balance`), so that none idles while requests wait; the router chooses among several. And so,
when nothing waits, requests are routed as under every other order.
"""

import math
from typing import Final

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.kv_cost import prefill_s
from scheduling.queueing.groups import (
    BUCKETS,
    FREE_GROUPS,
    KNOWN_CLASSES,
    NONE,
    GroupArrays,
    limit_of,
    put_before,
    unqueue,
)
from scheduling.queueing.swapping.service import due_at, group_s, request_s
from scheduling.queueing.swapping.timeline import place_in_shared
from scheduling.queueing.waiting_set import WaitingArrays, peek, push, remove
from scheduling.routing.requests_ahead import close_ahead, open_ahead
from scheduling.routing.routers import has_room

SECOND_DUE: Final = 10.0
"""A late request is due again after this multiple of the time that its class allows."""


@compiled
def fit_groups(
    fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, endpoint: int, batches: float
) -> int:
    """Update the time per token at *endpoint*; return the most requests of a group there, as `limit_of`."""
    usual, count = arrays.mean_tokens[endpoint], 0
    prompt_s = output_s = 0.0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        half = 0.5 * usual
        prefill_s = request_s(fleet, instance, half, 0.0)
        prompt_s += prefill_s
        output_s += request_s(fleet, instance, half, half) - prefill_s
        count += 1
    known = usual > 0.0 and count > 0
    arrays.token_s[endpoint, 0] = prompt_s / (0.5 * usual * count) if known else 0.0
    arrays.token_s[endpoint, 1] = output_s / (0.5 * usual * count) if known else 0.0
    return int(limit_of(fleet, endpoints, arrays, endpoint, batches))


@compiled
def head(arrays: GroupArrays, queue: int) -> int:
    """Return the first group of the virtual *queue*; -1 for none."""
    return int(arrays.queues[queue].first)


@compiled_internal
def _first_pulled(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int
) -> tuple[int, int]:
    arrays, chosen, slot, earliest_s = waiting.groups, NONE, NONE, math.inf
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if fleet.accepting[instance] == 0:
            continue
        group = head(arrays, int(arrays.queue_of[instance]))
        if group < 0 or arrays.groups[group].endpoint != endpoint:
            continue
        first = int(arrays.groups[group].first)
        due_s = waiting.key[first]
        if due_s >= earliest_s:
            continue
        if has_room(fleet, instance, int(waiting.prompt_tokens[first]), int(waiting.output_tokens[first])):
            chosen, slot, earliest_s = instance, first, due_s
    return slot, chosen


@compiled
def pull(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, now_s: float
) -> tuple[int, int]:
    """Return the slot and instance of the next request that an instance of *endpoint* pulls from its queue; (-1, -1) for
    none.

    It is the instance with room whose head is due first; if none has room, one that may have a request ahead
    (`requests_ahead`). Nothing is dispatched: `dispatch.send` does that. If none pulls, the request that is due first may
    still go to any instance (`may_balance`), by `dispatch.dispatch`. Requests that are
    late already are deferred first (`defer_late`).
    """
    defer_late(fleet, endpoints, waiting, endpoint, now_s)
    slot, instance = _first_pulled(fleet, endpoints, waiting, endpoint)
    if slot < 0 and open_ahead(fleet, endpoints, endpoint):
        slot, instance = _first_pulled(fleet, endpoints, waiting, endpoint)
        close_ahead(fleet, endpoints, endpoint)
    return slot, instance


@compiled
def may_balance(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int) -> bool:
    """Whether the router may send the first request due of *endpoint* to any of its instances.

    It may if the request is in no virtual queue yet, or if an accepting instance has no work in its queue; but not while it
    is pinned to its queue.
    """
    slot = peek(waiting, endpoint)
    if slot < 0:
        return False
    arrays = waiting.groups
    if arrays.members[slot].group < 0:
        return True  # it arrived before its endpoint had groups
    group = arrays.groups[arrays.members[slot].group]
    if group.pinned != 0:
        return False
    if group.queue < 0:
        return True
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if fleet.accepting[instance] != 0 and head(arrays, int(arrays.queue_of[instance])) < 0:
            return True
    return False


@compiled_internal
def place_in(
    fleet: FleetArrays, waiting: WaitingArrays, group: int, queue: int, instance: int
) -> tuple[float, float, int]:
    """Return the position of *group* in the *queue* of *instance* by due time.

    (seconds until it would start, requests that would wait behind it, the group it would precede, -1: none). A pinned group
    keeps its position, so nothing is put before one that is first.
    """
    arrays, due_s, wait_s = waiting.groups, due_at(waiting, group), 0.0
    at = int(arrays.queues[queue].first)
    while at >= 0 and (arrays.groups[at].pinned != 0 or due_at(waiting, at) <= due_s):
        wait_s += group_s(fleet, arrays, at, instance)
        at = int(arrays.groups[at].following)
    after, behind = at, 0.0
    while at >= 0:
        behind += arrays.groups[at].count
        at = int(arrays.groups[at].following)
    return wait_s, behind, after


@compiled_inline
def _rank(fleet: FleetArrays, arrays: GroupArrays, instance: int) -> int:
    """Return 2 for an instance that accepts work, 1 for one that a swap can start, 0 for any other."""
    return 2 if fleet.accepting[instance] != 0 else 1 if arrays.swap_s[instance] < math.inf else 0


@compiled_internal
def insert(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, group: int) -> bool:
    """Put *group*, which is in no queue, where it adds the least total waiting; False if there is no instance.

    Each of its requests waits for those before it, and each one behind it for all of the group.
    """
    endpoint = int(waiting.groups.groups[group].endpoint)
    chosen, before, least, best = NONE, NONE, math.inf, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        rank = _rank(fleet, waiting.groups, instance)
        if rank < best:
            continue
        queue = int(waiting.groups.queue_of[instance])
        if waiting.groups.swap_s[instance] < math.inf:
            wait_s, behind, after = place_in_shared(fleet, endpoints, waiting, group, queue, instance)
        else:
            wait_s, behind, after = place_in(fleet, waiting, group, queue, instance)
        own_s = group_s(fleet, waiting.groups, group, instance)
        count = float(waiting.groups.groups[group].count)
        more = count * (wait_s + own_s) + behind * own_s
        if more < least or rank > best:
            chosen, before, least, best = queue, after, more, rank
    if chosen < 0:
        return False
    put_before(waiting.groups, group, chosen, before)
    return True


@compiled_internal
def defer_late(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, now_s: float
) -> None:
    """Move requests of *endpoint* that are already late behind those that can be in time.

    They join a group with a later due time, `SECOND_DUE` times as long after arrival, and so on. Otherwise each late
    request delays the next until all are late. They are not put off for ever: one whose class allows a second precedes
    those of a class that allows an hour. Pinned groups stay.
    """
    arrays, first = waiting.groups, endpoints.first[endpoint]
    if first == endpoints.first[endpoint + 1]:
        return
    instance = int(endpoints.members[first])
    while True:
        slot = peek(waiting, endpoint)
        if slot < 0 or arrays.members[slot].group < 0:
            return
        group = arrays.groups[arrays.members[slot].group]
        arrival_s, soonest_s = (
            waiting.arrival_s[slot],
            now_s + prefill_s(fleet, instance, float(waiting.prompt_tokens[slot])),
        )
        allowed_s = waiting.deadline_s[slot] - arrival_s
        if waiting.key[slot] >= soonest_s or allowed_s == math.inf or allowed_s <= 0.0:
            return
        if group.pinned != 0:
            return
        while arrival_s + allowed_s < soonest_s:
            allowed_s *= SECOND_DUE
        remove(waiting, slot)
        waiting.deadline_s[slot] = arrival_s + allowed_s
        push(waiting, endpoint, slot, arrival_s + allowed_s)
        joined = int(arrays.members[slot].group)
        if arrays.groups[joined].queue < 0:
            insert(fleet, endpoints, waiting, joined)


@compiled
def insert_loose(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int) -> None:
    """Put the open groups of *endpoint* that are in no virtual queue into one."""
    arrays = waiting.groups
    for kind in range(arrays.counters[KNOWN_CLASSES] * BUCKETS):
        group = int(arrays.open[endpoint, kind])
        if group >= 0 and arrays.groups[group].queue < 0:
            insert(fleet, endpoints, waiting, group)


@compiled_internal
def _is_pulled(fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, group: int) -> bool:
    """Whether an instance of its endpoint pulls *group* from its queue, at once or after a swap.

    Also true if no instance of the endpoint accepts work or can be swapped in.
    """
    endpoint, queue, best = int(arrays.groups[group].endpoint), int(arrays.groups[group].queue), 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        best = max(best, _rank(fleet, arrays, int(endpoints.members[at])))
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if arrays.queue_of[instance] == queue and (_rank(fleet, arrays, instance) > 0 or best == 0):
            return True
    return False


@compiled
def reassign(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays) -> int:
    """Move groups whose instance died, left or takes no work, and groups in no queue, to other instances of their endpoint.

    Return the number moved. A pin does not outlast the instance.
    """
    arrays, count = waiting.groups, 0
    left = arrays.groups.size - arrays.counters[FREE_GROUPS]
    for group in range(arrays.groups.size):
        if left == 0:
            break
        this = arrays.groups[group]
        if this.endpoint < 0:
            continue
        left -= 1
        if this.queue >= 0:
            if _is_pulled(fleet, endpoints, arrays, group):
                continue
            this.pinned = 0
            unqueue(arrays, group)
        count += insert(fleet, endpoints, waiting, group)
    return count
