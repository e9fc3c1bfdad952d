"""Timeline of the virtual queue of instances that share GPUs: the model that is up, and the time of each change.

The instance with the GPUs drains (`service.drain_s`) and leaves them, and another starts, as measured. A swap in progress
counts with what is left of it. So a group waits for the service of those before it, for each change of model among them,
and for the change to its own.
"""

import math

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.queueing.groups import NONE, GroupArrays
from scheduling.queueing.swapping.service import batch_of, drain_s, due_at, group_s
from scheduling.queueing.swapping.sharing import COMES, LEAVES, WAITS
from scheduling.queueing.waiting_set import WaitingArrays


@compiled
def having(fleet: FleetArrays, arrays: GroupArrays, queue: int, now_s: float) -> tuple[int, float, float]:
    """Return (instance, seconds until it serves, its running requests) of the holder of the GPUs that *queue* shares.

    After a swap in progress, the next holder; (-1, 0, 0) if there is none.
    """
    target = leaves = NONE
    for instance in range(arrays.queue_of.size):
        if arrays.queue_of[instance] != queue or arrays.swap_s[instance] == math.inf:
            continue
        if fleet.accepting[instance] != 0:
            return instance, 0.0, float(fleet.running[instance])
        if arrays.phase[instance] == LEAVES:
            leaves = instance
        elif arrays.phase[instance] in (WAITS, COMES):
            target = instance
    if target == NONE:
        return NONE, 0.0, 0.0
    if arrays.phase[target] == COMES:
        return target, max(0.0, arrays.up_s[target] - now_s), 0.0
    running = 0.0 if leaves == NONE else float(fleet.running[leaves])
    return target, change_s(fleet, arrays, leaves, running, target), 0.0


@compiled
def change_s(fleet: FleetArrays, arrays: GroupArrays, before: int, running: float, after: int) -> float:
    """Seconds until *after* serves instead of *before* (-1: no holder), which drains *running* requests."""
    load_s = float(arrays.swap_s[after])
    if before == NONE:
        return load_s
    return drain_s(fleet, arrays, before, running) + float(arrays.sleep_s[before]) + load_s


@compiled_inline
def _more(fleet: FleetArrays, arrays: GroupArrays, instance: int, running: float, requests: float) -> float:
    """Return the most requests that *instance* runs after it has been given *requests* more."""
    return min(batch_of(fleet, arrays, instance), running + requests)


@compiled_inline
def member_of(endpoints: EndpointArrays, arrays: GroupArrays, queue: int, endpoint: int) -> int:
    """Return the instance that serves *endpoint* from the virtual *queue*; -1 for none."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        if arrays.queue_of[endpoints.members[at]] == queue:
            return int(endpoints.members[at])
    return NONE


@compiled_internal
def place_in_shared(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, group: int, queue: int, instance: int
) -> tuple[float, float, int]:
    """Like `virtual_queues.place_in`, for a *queue* shared by instances of several models: changes of model count.

    *group* joins those of its model, by due time, if no group that it overtakes becomes late by that (then no swap is made
    for it); otherwise it goes to the end. During a swap nothing is put before the model that starts, or it would be swapped
    out without having served. Takes O(groups of the queue).
    """
    arrays, own, due_s = waiting.groups, int(waiting.groups.groups[group].endpoint), due_at(waiting, group)
    now_s = max(float(arrays.groups[group].opened_s), float(arrays.moment_s[0]))
    own_s, first = group_s(fleet, arrays, group, instance), int(arrays.queues[queue].first)
    began, wait_s, runs = having(fleet, arrays, queue, now_s)
    serves = NONE if began == NONE else int(fleet.endpoint[began])
    comes = began == NONE or fleet.accepting[began] == 0
    coming = serves if serves != NONE or first < 0 else int(arrays.groups[first].endpoint)
    # The last group that *group* may not overtake.
    barrier, time_s, up, running, at = NONE, wait_s, began, runs, first
    while at >= 0:
        this = arrays.groups[at]
        member = member_of(endpoints, arrays, queue, int(this.endpoint))
        member = instance if member < 0 else member
        comes = comes and this.endpoint == coming
        if member != up:
            time_s += change_s(fleet, arrays, up, running, member)
            up, running = member, 0.0
        if this.endpoint == own:
            passes = due_at(waiting, at) > due_s
        else:
            passes = not comes and now_s + time_s + own_s <= due_at(waiting, at)
        if this.pinned != 0 or not passes:
            barrier = at
        time_s += group_s(fleet, arrays, at, member)
        running = _more(fleet, arrays, member, running, float(this.count))
        at = int(this.following)
    # Behind that: after its own group model, before the first of them, or at once if its model is served there.
    after = first if barrier < 0 else int(arrays.groups[barrier].following)
    if (serves if barrier < 0 else int(arrays.groups[barrier].endpoint)) != own:
        while after >= 0 and arrays.groups[after].endpoint != own:
            after = int(arrays.groups[after].following)
    behind, up, running, at = 0.0, began, runs, first
    while at >= 0 and at != after:
        member = member_of(endpoints, arrays, queue, int(arrays.groups[at].endpoint))
        member = instance if member < 0 else member
        if member != up:
            wait_s += change_s(fleet, arrays, up, running, member)
            up, running = member, 0.0
        wait_s += group_s(fleet, arrays, at, member)
        running = _more(fleet, arrays, member, running, float(arrays.groups[at].count))
        at = int(arrays.groups[at].following)
    if instance != up:
        wait_s += change_s(fleet, arrays, up, running, instance)
    while at >= 0:
        behind += arrays.groups[at].count
        at = int(arrays.groups[at].following)
    return wait_s, behind, after
