"""Virtual queues (QLM section 4): for each instance the request groups that it serves, in order.

A virtual queue holds references to groups, and a group references to requests: the waiting set alone owns who waits.
An instance pulls from the first group of its own queue whenever it has room (`pull`). New groups are put at once where they
are served first, each queue by due time (`insert_loose`: earliest due first, earliest completion); the global scheduler
(`reordering`) puts all of them in a better order later.

Instances that share their GPUs have one queue together, with groups of all their models (`groups.share_queues`). Who is
awake pulls while the first group is of its model; where it is of another the instance is to be swapped
(`scaling.swapping`), so it is given nothing more. A new group goes where its model is served anyway, as long as nobody
that it passes is late for it (`place_in_shared`).

Two things are ours. An instance whose queue has nothing for it takes what is due first of its endpoint, whatever queue that
stands in (`may_balance`), so that none idles while requests wait; the router chooses among several. And so, where
nothing waits, requests go as the endpoint's router says, as under every other order.
"""

import math
from typing import Final

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
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
from scheduling.queueing.running import prefill_s
from scheduling.queueing.swapping.service import due_at, group_s, request_s
from scheduling.queueing.swapping.timeline import place_in_shared
from scheduling.queueing.waiting_set import WaitingArrays, peek, push, remove
from scheduling.routing.requests_ahead import close_ahead, open_ahead
from scheduling.routing.routers import has_room

SECOND_DUE: Final = 10.0
"""A request that cannot be in time any more is due after so many times what its class allows."""


@compiled
def fit_groups(
    fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, endpoint: int, batches: float
) -> int:
    """Reckon anew how long tokens take at *endpoint*; requests in a group of its at the most, as `limit_of`."""
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
def head(arrays: GroupArrays, queue: int, now_s: float) -> int:
    """The first group of the virtual *queue* that no operator holds; -1 for none."""
    group = int(arrays.queues[queue].first)
    while group >= 0 and arrays.groups[group].hold_until_s > now_s:
        group = int(arrays.groups[group].following)
    return group


@compiled
def _first_pulled(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, now_s: float
) -> tuple[int, int]:
    arrays, chosen, slot, earliest_s = waiting.groups, NONE, NONE, math.inf
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if fleet.accepting[instance] == 0:
            continue
        group = head(arrays, int(arrays.queue_of[instance]), now_s)
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
    """The slot and instance of the next request that an instance of *endpoint* pulls from its own queue; (-1, -1) for none.

    Of the instances with room that whose head is due first; where none has room, those that may have one ahead
    (`requests_ahead`). Nothing is given out: `dispatch.send` does that. Where it says no, what is due first may still go to
    any instance (`may_balance`), by `dispatch.dispatch`. What is lost is put off before (`put_off`).
    """
    put_off(fleet, endpoints, waiting, endpoint, now_s)
    slot, instance = _first_pulled(fleet, endpoints, waiting, endpoint, now_s)
    if slot < 0 and open_ahead(fleet, endpoints, endpoint):
        slot, instance = _first_pulled(fleet, endpoints, waiting, endpoint, now_s)
        close_ahead(fleet, endpoints, endpoint)
    return slot, instance


@compiled
def may_balance(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, now_s: float
) -> bool:
    """Whether what is due first of *endpoint* may go to any of its instances, as the router says.

    It may where it stands in no virtual queue yet, and where an instance that accepts work has nothing of its own to do;
    but not while it is held, or pinned to its queue.
    """
    slot = peek(waiting, endpoint)
    if slot < 0:
        return False
    arrays = waiting.groups
    if arrays.members[slot].group < 0:
        return True  # it came before its endpoint had groups
    group = arrays.groups[arrays.members[slot].group]
    if group.hold_until_s > now_s or group.pinned != 0:
        return False
    if group.queue < 0:
        return True
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if fleet.accepting[instance] != 0 and head(arrays, int(arrays.queue_of[instance]), now_s) < 0:
            return True
    return False


@compiled
def place_in(
    fleet: FleetArrays, waiting: WaitingArrays, group: int, queue: int, instance: int
) -> tuple[float, float, int]:
    """Seconds until *group* would begin in the *queue* of *instance*, by due time among what is there, how many requests
    would wait behind it, and before which group it would stand (-1: at the end).

    A group that is pinned keeps its place, so nothing is put before one that stands first.
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
    """2 for an instance that accepts work, 1 for one that a swap can bring up, 0 for any other."""
    return 2 if fleet.accepting[instance] != 0 else 1 if arrays.swap_s[instance] < math.inf else 0


@compiled
def insert(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, group: int) -> bool:
    """Put *group*, which stands in no queue, where all together wait the least more; False without any instance.

    Each of its own requests waits for what is before it, and each behind it for all of it.
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


@compiled
def put_off(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, now_s: float) -> None:
    """Let what waits for *endpoint* and cannot be in time any more stand behind what can: it joins a group of a later due
    time, `SECOND_DUE` times as long after it came, and so on.

    Else each that is late already makes the next one late, until all are. It is not put off for ever: one whose class
    allows a second comes before those of a class that allows an hour. What is held or pinned stays.
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
        if group.pinned != 0 or group.hold_until_s > now_s:
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
    """Put the groups of *endpoint* that requests may join and that stand in no virtual queue into one."""
    arrays = waiting.groups
    for kind in range(arrays.counters[KNOWN_CLASSES] * BUCKETS):
        group = int(arrays.open[endpoint, kind])
        if group >= 0 and arrays.groups[group].queue < 0:
            insert(fleet, endpoints, waiting, group)


@compiled
def _is_pulled(fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, group: int) -> bool:
    """Whether an instance of its endpoint pulls *group* from where it stands, at once or after a swap; or will where none of
    them accepts work or can be swapped to."""
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
    """Give groups whose instance died, left or takes no work to the others of their endpoint, and those that stand nowhere.

    How many were moved. A pin does not outlast the instance.
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
