"""Request groups (QLM section 4): what waits, gathered by endpoint, SLO class and expected tokens, so that the order of
hundreds of groups is decided rather than that of hundreds of thousands of requests.

A group holds references: its members are slots of the waiting set, linked in the order in which they leave, first come
first served or shortest first. A request joins the open group of its kind as it comes and leaves it as it is given out,
each in O(1) by arrival (in the size of the group by length); a group that has had delta x B requests is closed, or sooner
where its class allows little time, and the next of its kind opens another. So a group never mixes models or classes, which
k-means does (docs/queueing.md compares them), and all groups can be made anew from the waiting set at any
time (`regrouping`).

Endpoints whose `limit` is 0 have no groups: their requests leave by queue key alone.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal, record
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, memory_tokens
from scheduling.struct_of_arrays import struct_of_arrays

NONE: Final = -1
CLASSES: Final = 16
"""SLO classes that are kept separate, by priority and time allowed; more share the last."""
INPUT_EDGES: Final = (1024, 8192)
OUTPUT_EDGES: Final = (128, 512)
"""Tokens at which expected lengths fall into another group."""
BUCKETS: Final = (len(INPUT_EDGES) + 1) * (len(OUTPUT_EDGES) + 1)
KINDS: Final = CLASSES * BUCKETS
"""Of group, at one endpoint."""

TIME_SHARE: Final = 0.125
"""A group is closed once an instance takes this share of the time that its class allows to serve it: a group is late as a
whole, and one that takes longer than it may is late by itself. The paper has one size for all classes."""
MEAN_WEIGHT: Final = 0.01
"""Of the last request in `GroupArrays.mean_tokens`."""

# Orders inside a group.
BY_ARRIVAL: Final = 0
BY_LENGTH: Final = 1
GROUP_ORDERS: Final = {"arrival": BY_ARRIVAL, "length": BY_LENGTH}
"""By the name that settings and scenarios use."""

# Places in `GroupArrays.counters`.
FREE_GROUPS: Final = 0
NEXT_NUMBER: Final = 1
KNOWN_CLASSES: Final = 2

MEMBER = record([("group", np.int32), ("following", np.int32), ("preceding", np.int32)])
"""By slot of the waiting set: its group, and the slots after and before it there; -1 for none."""

GROUP = record(
    [
        ("endpoint", np.int32),  # -1 while the group is free
        ("kind", np.int32),  # class and buckets
        ("first", np.int32),  # member that leaves first
        ("last", np.int32),
        ("queue", np.int32),  # virtual queue, -1 for none yet; then its neighbours there
        ("following", np.int32),
        ("preceding", np.int32),
        ("pinned", np.uint8),  # an operator wants it to stay where it is
        ("count", np.int64),  # members
        ("joined", np.int64),  # that ever were
        ("number", np.int64),  # its own, never used again
        ("prompt_tokens", np.float64),  # expected, of all members
        ("output_tokens", np.float64),
        ("opened_s", np.float64),
        ("hold_until_s", np.float64),
    ]
)

QUEUE = record([("first", np.int32), ("last", np.int32), ("groups", np.int32)])
"""By virtual queue: first and last group, -1 for none, and how many there are."""


@struct_of_arrays
class GroupArrays(NamedTuple):
    """All groups, and the virtual queues that they stand in."""

    members: NDArray[np.void]
    """MEMBER, by slot of the waiting set."""
    groups: NDArray[np.void]
    """GROUP."""
    queues: NDArray[np.void]
    """QUEUE."""
    queue_of: NDArray[np.int32]
    """By instance: the virtual queue that it pulls from. Those that share their GPUs have one together
    (`swapping.sharing`)."""
    swap_s: NDArray[np.float64]
    """By instance: seconds until it serves once it has the GPUs that it shares; infinity where its virtual queue is its
    own."""
    sleep_s: NDArray[np.float64]
    """By instance: seconds until it has left those GPUs when nothing runs on it any more."""
    phase: NDArray[np.uint8]
    """By instance: where it is in a swap, a constant of `swapping.sharing`."""
    up_s: NDArray[np.float64]
    """By instance that comes up: when it serves; live, of one that has the GPUs since then, that moment."""
    limit: NDArray[np.int64]
    """By endpoint: requests after which a group is closed; 0 where requests are not grouped."""
    token_s: NDArray[np.float64]
    """endpoints x 2: seconds of an instance that a prompt token and an output token take, of requests of the usual size; 0
    where that is not known."""
    within: NDArray[np.uint8]
    """By endpoint: BY_ARRIVAL or BY_LENGTH."""
    mean_tokens: NDArray[np.float64]
    """By endpoint: prompt and expected output of a request, smoothed over the last ones; 0 before the first."""
    mean_output: NDArray[np.float64]
    """The same of the output alone."""
    moment_s: NDArray[np.float64]
    """One element: when a request joined a group last."""
    open: NDArray[np.int32]
    """endpoints x KINDS: the group that is joined; -1 for none."""
    class_priority: NDArray[np.int64]
    class_due_ms: NDArray[np.int64]
    """By SLO class: what it was known by, its priority and the time that it allows."""
    free: NDArray[np.int32]
    """A stack of the groups not in use, `counters[FREE_GROUPS]` high."""
    counters: NDArray[np.int64]


def allocate_groups(endpoints: int, slots: int, instances: int) -> GroupArrays:
    """No groups, for a waiting set of *slots* over *endpoints*, and *instances* with a virtual queue each."""
    groups = np.zeros(slots, GROUP)
    for name in ("endpoint", "first", "last", "queue", "following", "preceding"):
        groups[name] = NONE
    members, queues = np.zeros(slots, MEMBER), np.zeros(instances, QUEUE)
    members["group"] = members["following"] = members["preceding"] = NONE
    queues["first"] = queues["last"] = NONE
    return GroupArrays(
        members=members,
        groups=groups,
        queues=queues,
        queue_of=np.arange(instances, dtype=np.int32),
        swap_s=np.full(instances, np.inf),
        sleep_s=np.zeros(instances),
        phase=np.zeros(instances, np.uint8),
        up_s=np.zeros(instances),
        limit=np.zeros(endpoints, np.int64),
        token_s=np.zeros((endpoints, 2)),
        within=np.zeros(endpoints, np.uint8),
        mean_tokens=np.zeros(endpoints),
        mean_output=np.zeros(endpoints),
        moment_s=np.full(1, -np.inf),
        open=np.full((endpoints, KINDS), NONE, np.int32),
        class_priority=np.zeros(CLASSES, np.int64),
        class_due_ms=np.zeros(CLASSES, np.int64),
        free=np.arange(slots - 1, -1, -1, dtype=np.int32),
        counters=np.array([slots, 0, 0], np.int64),
    )


def grow_groups(old: GroupArrays, endpoints: int, slots: int, instances: int) -> GroupArrays:
    """A copy with room for more; every group keeps its number and its place. Nothing may become less."""
    grown = allocate_groups(endpoints, slots, instances)
    for name in set(GroupArrays._fields) - {"free", "counters", "queue_of"}:
        array: NDArray[np.generic] = getattr(old, name)
        getattr(grown, name)[: array.shape[0]] = array
    grown.queue_of[: old.queue_of.size] = old.queue_of
    free, added = int(old.counters[FREE_GROUPS]), slots - old.groups.size
    grown.free[:added] = np.arange(slots - 1, old.groups.size - 1, -1)
    grown.free[added : added + free] = old.free[:free]
    grown.counters[:] = old.counters
    grown.counters[FREE_GROUPS] = free + added
    return grown


@compiled
def limit_of(fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, endpoint: int, batches: float) -> int:
    """Requests in a group of *endpoint* at the most: *batches* (QLM's delta) of what its instances run at once.

    That is what their memory holds of requests of the usual size, and at the most what they are set to (equation 16).
    """
    total, count = 0.0, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        batch, memory = float(fleet.max_num_seqs[instance]), float(memory_tokens(fleet, instance))
        if memory > 0.0 and arrays.mean_tokens[endpoint] > 0.0:
            batch = min(batch, memory / arrays.mean_tokens[endpoint])
        total += batch
        count += 1
    return max(1, int(batches * total / max(count, 1) + 0.5))


@compiled
def class_of(arrays: GroupArrays, priority: int, due_ms: int) -> int:
    """The SLO class of requests with that *priority* and time allowed."""
    known = arrays.counters[KNOWN_CLASSES]
    for at in range(known):
        if arrays.class_priority[at] == priority and arrays.class_due_ms[at] == due_ms:
            return at
    if known == CLASSES:
        return CLASSES - 1
    arrays.class_priority[known], arrays.class_due_ms[known] = priority, due_ms
    arrays.counters[KNOWN_CLASSES] = known + 1
    return int(known)


@compiled
def kind_of(arrays: GroupArrays, priority: int, due_s: float, prompt_tokens: int, output_tokens: int) -> int:
    """The kind of group for a request, *due_s* after its arrival."""
    due_ms = int(due_s * 1000.0 + 0.5) if due_s < 1e15 else -1
    kind = class_of(arrays, priority, due_ms)
    bucket = 0
    for edge in INPUT_EDGES:
        bucket += prompt_tokens >= edge
    kind = kind * (len(INPUT_EDGES) + 1) + bucket
    bucket = 0
    for edge in OUTPUT_EDGES:
        bucket += output_tokens >= edge
    return int(kind * (len(OUTPUT_EDGES) + 1) + bucket)


@compiled_internal
def _is_full(arrays: GroupArrays, group: int) -> bool:
    """Whether nobody may join *group* any more."""
    this = arrays.groups[group]
    most = int(arrays.limit[this.endpoint])
    if this.joined >= most:
        return True
    due_ms = arrays.class_due_ms[this.kind // BUCKETS]
    if due_ms < 0:
        return False
    token_s = arrays.token_s[this.endpoint]
    takes_s = this.prompt_tokens * token_s[0] + this.output_tokens * token_s[1]
    return bool(1000.0 * takes_s >= TIME_SHARE * due_ms and takes_s > 0.0)


@compiled_internal
def _link(nodes: NDArray[np.void], ends: Any, node: int, before: int, after: int) -> None:
    """Let *node* stand between *before* and *after* (-1: none) in the list whose *ends* are `first` and `last`."""
    nodes[node].preceding, nodes[node].following = before, after
    if before < 0:
        ends.first = node
    else:
        nodes[before].following = node
    if after < 0:
        ends.last = node
    else:
        nodes[after].preceding = node


@compiled_internal
def _unlink(nodes: NDArray[np.void], ends: Any, node: int) -> None:
    """Take *node* out of that list."""
    before, after = int(nodes[node].preceding), int(nodes[node].following)
    if before < 0:
        ends.first = after
    else:
        nodes[before].following = after
    if after < 0:
        ends.last = before
    else:
        nodes[after].preceding = before
    nodes[node].preceding = nodes[node].following = NONE


@compiled_inline
def note_tokens(arrays: GroupArrays, endpoint: int, prompt_tokens: float, output_tokens: float, now_s: float) -> None:
    """A request of so many tokens joins a group of *endpoint* at *now_s*."""
    tokens, mean = prompt_tokens + output_tokens, arrays.mean_tokens[endpoint]
    weight = 1.0 if mean == 0.0 else MEAN_WEIGHT
    arrays.mean_tokens[endpoint] = mean + weight * (tokens - mean)
    arrays.mean_output[endpoint] += weight * (output_tokens - arrays.mean_output[endpoint])
    arrays.moment_s[0] = max(arrays.moment_s[0], now_s)


@compiled_internal
def open_group(arrays: GroupArrays, endpoint: int, kind: int, now_s: float) -> int:
    """A new group without members, from now on the one of its *kind* that is joined."""
    free = arrays.counters[FREE_GROUPS] - 1
    group = int(arrays.free[free])
    arrays.counters[FREE_GROUPS] = free
    new = arrays.groups[group]
    new.endpoint, new.kind, new.first, new.last = endpoint, kind, NONE, NONE
    new.queue = new.following = new.preceding = NONE
    new.pinned, new.count, new.joined = 0, 0, 0
    new.number = arrays.counters[NEXT_NUMBER]
    new.prompt_tokens = new.output_tokens = 0.0
    new.opened_s, new.hold_until_s = now_s, -np.inf
    arrays.counters[NEXT_NUMBER] += 1
    arrays.open[endpoint, kind] = group
    return group


@compiled
def join(
    arrays: GroupArrays,
    sequence: NDArray[np.int64],
    slot: int,
    endpoint: int,
    kind: int,
    prompt_tokens: float,
    output_tokens: float,
    lengths: NDArray[np.int64],
    now_s: float,
) -> int:
    """Let *slot* join the open group of its *kind* at *endpoint*, or open one: the group.

    One that comes back stands before those that came after it: *sequence* is the order of arrival by slot, *lengths* the
    expected output.
    """
    note_tokens(arrays, endpoint, prompt_tokens, output_tokens, now_s)
    group = int(arrays.open[endpoint, kind])
    if group < 0 or _is_full(arrays, group):
        group = open_group(arrays, endpoint, kind, now_s)
    this = arrays.groups[group]
    before = int(this.last)
    if arrays.within[endpoint] == BY_LENGTH:
        while before >= 0 and lengths[before] > lengths[slot]:
            before = int(arrays.members[before].preceding)
    else:
        while before >= 0 and sequence[before] > sequence[slot]:
            before = int(arrays.members[before].preceding)
    after = int(this.first) if before < 0 else int(arrays.members[before].following)
    arrays.members[slot].group = group
    _link(arrays.members, this, slot, before, after)
    this.count += 1
    this.joined += 1
    this.prompt_tokens += prompt_tokens
    this.output_tokens += output_tokens
    return group


@compiled
def quit_group(arrays: GroupArrays, slot: int, prompt_tokens: float, output_tokens: float) -> None:
    """Take *slot*, which is in a group, out of it. The last one out takes the group with it."""
    group = int(arrays.members[slot].group)
    this = arrays.groups[group]
    _unlink(arrays.members, this, slot)
    arrays.members[slot].group = NONE
    this.count -= 1
    this.prompt_tokens -= prompt_tokens
    this.output_tokens -= output_tokens
    if this.count == 0:
        end_group(arrays, group)


@compiled
def end_group(arrays: GroupArrays, group: int) -> None:
    """Take *group* out of use."""
    this = arrays.groups[group]
    unqueue(arrays, group)
    if arrays.open[this.endpoint, this.kind] == group:
        arrays.open[this.endpoint, this.kind] = NONE
    this.endpoint = NONE
    free = arrays.counters[FREE_GROUPS]
    arrays.free[free] = group
    arrays.counters[FREE_GROUPS] = free + 1


@compiled
def unqueue(arrays: GroupArrays, group: int) -> None:
    """Take *group* out of its virtual queue, if it is in one."""
    this = arrays.groups[group]
    if this.queue < 0:
        return
    queue = arrays.queues[this.queue]
    _unlink(arrays.groups, queue, group)
    queue.groups -= 1
    this.queue = NONE


@compiled
def put_before(arrays: GroupArrays, group: int, queue: int, after: int) -> None:
    """Let *group* stand in the virtual *queue* just before the group *after*; at its end for -1. It is in none yet."""
    where = arrays.queues[queue]
    before = int(where.last) if after < 0 else int(arrays.groups[after].preceding)
    arrays.groups[group].queue = queue
    _link(arrays.groups, where, group, before, after)
    where.groups += 1


@compiled
def put_first(arrays: GroupArrays, queue: int, endpoint: int) -> int:
    """Let the groups of *endpoint* stand before all others of the virtual *queue*, in the order that they have; what is
    pinned stays, and so does what stands before it. How many were moved."""
    after, group, moved = NONE, int(arrays.queues[queue].first), 0
    while group >= 0:
        this = arrays.groups[group]
        following = int(this.following)
        if this.pinned != 0:
            after = NONE
        elif this.endpoint != endpoint:
            after = group if after < 0 else after
        elif after >= 0:
            unqueue(arrays, group)
            put_before(arrays, group, queue, after)
            moved += 1
        group = following
    return moved
