"""Request groups (QLM section 4): waiting requests by endpoint, SLO class and expected tokens, so that hundreds of
groups are ordered instead of hundreds of thousands of requests.

A group holds references: its members are slots of the waiting set, linked in the order in which they leave: first come
first served, shortest first, or lowest rank of the application run first. A request joins the open group of its kind on
arrival and leaves it on dispatch, each in O(1) by arrival (O(group size) by length or rank). A group is closed after
delta x B requests, or sooner where its class allows little time, and the next request of its kind opens another. So a
group never mixes models or classes, as k-means does (docs/papers/queueing.md), and all groups can be rebuilt from
the waiting set at any time (`waiting_set.regroup`).

Endpoints whose `limit` is 0 have no groups: their requests leave by queue key alone.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal, record
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once, memory_tokens
from scheduling.struct_of_arrays import struct_of_arrays

NONE: Final = -1
CLASSES: Final = 16
"""SLO classes that are kept separate, by priority and time allowed; further ones share the last."""
INPUT_EDGES: Final = (1024, 8192)
OUTPUT_EDGES: Final = (128, 512)
"""Upper bounds, in tokens, of the buckets of expected output."""
BUCKETS: Final = (len(INPUT_EDGES) + 1) * (len(OUTPUT_EDGES) + 1)
KINDS: Final = CLASSES * BUCKETS
"""Kinds of group at one endpoint."""

TIME_SHARE: Final = 0.125
"""Share of the time allowed by its class that serving a group may take from an instance; then it is closed.

A group is late as a whole, and one that takes longer than its class allows makes itself late. The paper has one size
for all classes.
"""
MEAN_WEIGHT: Final = 0.01
"""Weight of the newest request in `GroupArrays.mean_tokens`."""

# Orders within a group.
BY_ARRIVAL: Final = 0
BY_LENGTH: Final = 1
BY_RANK: Final = 2
GROUP_ORDERS: Final = {"arrival": BY_ARRIVAL, "length": BY_LENGTH, "hermes": BY_RANK}
"""By the name in settings and scenarios."""

# Indices into `GroupArrays.counters`.
FREE_GROUPS: Final = 0
NEXT_NUMBER: Final = 1
KNOWN_CLASSES: Final = 2

MEMBER = record([("group", np.int32), ("following", np.int32), ("preceding", np.int32)])
"""By slot of the waiting set: its group, and the next and previous slot there; -1 for none."""

GROUP = record(
    [
        ("endpoint", np.int32),  # -1 while the group is free
        ("kind", np.int32),  # class and buckets
        ("first", np.int32),  # member that leaves first
        ("last", np.int32),
        ("queue", np.int32),  # virtual queue, -1 for none yet; then its neighbours in it
        ("following", np.int32),
        ("preceding", np.int32),
        ("pinned", np.uint8),  # kept in position by an operator
        ("count", np.int64),  # members
        ("joined", np.int64),  # members ever
        ("number", np.int64),  # unique, never reused
        ("prompt_tokens", np.float64),  # expected, over all members
        ("output_tokens", np.float64),
        ("opened_s", np.float64),
    ]
)

QUEUE = record([("first", np.int32), ("last", np.int32), ("groups", np.int32)])
"""Virtual queue: first and last group, -1 for none, and their number."""


@struct_of_arrays
class GroupArrays(NamedTuple):
    """All groups, and the virtual queues that hold them."""

    members: NDArray[np.void]
    """MEMBER, by slot of the waiting set."""
    groups: NDArray[np.void]
    """GROUP."""
    queues: NDArray[np.void]
    """QUEUE."""
    queue_of: NDArray[np.int32]
    """By instance: the virtual queue that it pulls from.

    Instances that share their GPUs share one (`swapping.sharing`).
    """
    swap_s: NDArray[np.float64]
    """By instance: seconds from getting its shared GPUs until it serves; infinity if its virtual queue is not shared.
    """
    sleep_s: NDArray[np.float64]
    """By instance: seconds from its last running request until it has left those GPUs."""
    phase: NDArray[np.uint8]
    """By instance: phase of a swap, a constant of `swapping.sharing`."""
    up_s: NDArray[np.float64]
    """By instance that is starting: when it serves; live, if it already has the GPUs, when it got them."""
    limit: NDArray[np.int64]
    """By endpoint: requests after which a group is closed; 0 if requests are not grouped."""
    token_s: NDArray[np.float64]
    """endpoints x 2: seconds of an instance per prompt and output token at the usual size; 0 if unknown."""
    within: NDArray[np.uint8]
    """By endpoint: BY_ARRIVAL, BY_LENGTH or BY_RANK."""
    mean_tokens: NDArray[np.float64]
    """By endpoint: smoothed prompt and expected output tokens of a request; 0 before the first."""
    mean_output: NDArray[np.float64]
    """The same for the output alone."""
    moment_s: NDArray[np.float64]
    """One element: when a request last joined a group."""
    open: NDArray[np.int32]
    """endpoints x KINDS: the open group; -1 for none."""
    class_priority: NDArray[np.int64]
    class_due_ms: NDArray[np.int64]
    """By SLO class: its key, made of priority and time allowed."""
    free: NDArray[np.int32]
    """Stack of unused groups, `counters[FREE_GROUPS]` high."""
    counters: NDArray[np.int64]


def allocate_groups(endpoints: int, slots: int, instances: int) -> GroupArrays:
    """Return arrays without groups, for *slots* of a waiting set, *endpoints* and *instances* with a queue each."""
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
    """Return a larger copy; every group keeps its number and index. No size may shrink."""
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


@compiled_internal
def limit_of(fleet: FleetArrays, endpoints: EndpointArrays, arrays: GroupArrays, endpoint: int, batches: float) -> int:
    """Return the most requests in a group of *endpoint*: *batches* (QLM's delta) of what its instances run at once.

    A batch is what their memory holds of requests of the usual size, at most the configured sequences (equation 16).
    """
    total, count = 0.0, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        batch, memory = float(at_once(fleet, instance)), float(memory_tokens(fleet, instance))
        if memory > 0.0 and arrays.mean_tokens[endpoint] > 0.0:
            batch = min(batch, memory / arrays.mean_tokens[endpoint])
        total += batch
        count += 1
    return max(1, int(batches * total / max(count, 1) + 0.5))


@compiled_internal
def class_of(arrays: GroupArrays, priority: int, due_ms: int) -> int:
    """Return the SLO class of requests with that *priority* and time allowed."""
    known = arrays.counters[KNOWN_CLASSES]
    for at in range(known):
        if arrays.class_priority[at] == priority and arrays.class_due_ms[at] == due_ms:
            return at
    if known == CLASSES:
        return CLASSES - 1
    arrays.class_priority[known], arrays.class_due_ms[known] = priority, due_ms
    arrays.counters[KNOWN_CLASSES] = known + 1
    return int(known)


@compiled_internal
def kind_of(arrays: GroupArrays, priority: int, due_s: float, prompt_tokens: int, output_tokens: int) -> int:
    """Return the kind of group for a request that is due *due_s* after its arrival."""
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
    """Whether *group* is closed to further requests."""
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
    """Insert *node* between *before* and *after* (-1: none) in the list whose *ends* are `first` and `last`."""
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
    """Remove *node* from that list."""
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
    """Record that a request of these tokens joins a group of *endpoint* at *now_s*."""
    tokens, mean = prompt_tokens + output_tokens, arrays.mean_tokens[endpoint]
    weight = 1.0 if mean == 0.0 else MEAN_WEIGHT
    arrays.mean_tokens[endpoint] = mean + weight * (tokens - mean)
    arrays.mean_output[endpoint] += weight * (output_tokens - arrays.mean_output[endpoint])
    arrays.moment_s[0] = max(arrays.moment_s[0], now_s)


@compiled_internal
def open_group(arrays: GroupArrays, endpoint: int, kind: int, now_s: float) -> int:
    """Return a new, empty group, which becomes the open one of its *kind*."""
    free = arrays.counters[FREE_GROUPS] - 1
    group = int(arrays.free[free])
    arrays.counters[FREE_GROUPS] = free
    new = arrays.groups[group]
    new.endpoint, new.kind, new.first, new.last = endpoint, kind, NONE, NONE
    new.queue = new.following = new.preceding = NONE
    new.pinned, new.count, new.joined = 0, 0, 0
    new.number = arrays.counters[NEXT_NUMBER]
    new.prompt_tokens = new.output_tokens = 0.0
    new.opened_s = now_s
    arrays.counters[NEXT_NUMBER] += 1
    arrays.open[endpoint, kind] = group
    return group


@compiled_internal
def _link_in_order(
    arrays: GroupArrays,
    sequence: NDArray[np.int64],
    lengths: NDArray[np.int64],
    ranks: NDArray[np.float64],
    slot: int,
    group: int,
) -> None:
    """Insert *slot* where it leaves *group* by the order there."""
    this = arrays.groups[group]
    before, within = int(this.last), arrays.within[this.endpoint]
    while before >= 0:
        if within == BY_LENGTH:
            later = lengths[before] > lengths[slot]
        elif within == BY_RANK and ranks[before] != ranks[slot]:
            later = ranks[before] > ranks[slot]
        else:
            later = sequence[before] > sequence[slot]
        if not later:
            break
        before = int(arrays.members[before].preceding)
    after = int(this.first) if before < 0 else int(arrays.members[before].following)
    _link(arrays.members, this, slot, before, after)


@compiled_internal
def move_member(
    arrays: GroupArrays,
    sequence: NDArray[np.int64],
    lengths: NDArray[np.int64],
    ranks: NDArray[np.float64],
    slot: int,
) -> None:
    """Move *slot*, whose rank has changed, inside its group."""
    group = int(arrays.members[slot].group)
    _unlink(arrays.members, arrays.groups[group], slot)
    _link_in_order(arrays, sequence, lengths, ranks, slot, group)


@compiled_internal
def join(
    arrays: GroupArrays,
    sequence: NDArray[np.int64],
    slot: int,
    endpoint: int,
    kind: int,
    prompt_tokens: float,
    output_tokens: float,
    lengths: NDArray[np.int64],
    ranks: NDArray[np.float64],
    now_s: float,
) -> int:
    """Add *slot* to the open group of its *kind* at *endpoint*, opening one if needed; return the group.

    A request that returns goes before those that arrived after it: *sequence* is the order of arrival by slot,
    *lengths* the expected output, *ranks* the ranks of application runs.
    """
    note_tokens(arrays, endpoint, prompt_tokens, output_tokens, now_s)
    group = int(arrays.open[endpoint, kind])
    if group < 0 or _is_full(arrays, group):
        group = open_group(arrays, endpoint, kind, now_s)
    this = arrays.groups[group]
    arrays.members[slot].group = group
    _link_in_order(arrays, sequence, lengths, ranks, slot, group)
    this.count += 1
    this.joined += 1
    this.prompt_tokens += prompt_tokens
    this.output_tokens += output_tokens
    return group


@compiled_internal
def quit_group(arrays: GroupArrays, slot: int, prompt_tokens: float, output_tokens: float) -> None:
    """Remove *slot* from its group; the last member to leave ends the group."""
    group = int(arrays.members[slot].group)
    this = arrays.groups[group]
    _unlink(arrays.members, this, slot)
    arrays.members[slot].group = NONE
    this.count -= 1
    this.prompt_tokens -= prompt_tokens
    this.output_tokens -= output_tokens
    if this.count == 0:
        end_group(arrays, group)


@compiled_internal
def end_group(arrays: GroupArrays, group: int) -> None:
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
    """Remove *group* from its virtual queue, if any."""
    this = arrays.groups[group]
    if this.queue < 0:
        return
    queue = arrays.queues[this.queue]
    _unlink(arrays.groups, queue, group)
    queue.groups -= 1
    this.queue = NONE


@compiled
def put_before(arrays: GroupArrays, group: int, queue: int, after: int) -> None:
    """Insert *group*, which is in no queue, into the virtual *queue* before the group *after*, or at the end for -1."""
    where = arrays.queues[queue]
    before = int(where.last) if after < 0 else int(arrays.groups[after].preceding)
    arrays.groups[group].queue = queue
    _link(arrays.groups, where, group, before, after)
    where.groups += 1


@compiled
def put_first(arrays: GroupArrays, queue: int, endpoint: int) -> int:
    """Move the groups of *endpoint* to the front of the virtual *queue*, keeping their order; return the number moved.

    Pinned groups, and those before them, stay.
    """
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
