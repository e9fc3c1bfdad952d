"""Request eviction (QLM sections 5 and 6): running requests leave an instance to keep the head of its virtual queue in
time.

`wanted` is a pure function of the arrays that both clocks hold. It looks at the first group of each instance's virtual
queue, and at the requests that the instance holds beyond its sequences. If one of them would be late by the time that
running work ends (RWT), requests of a class that can wait longer leave for it: first those that have emitted nothing,
then those that lose least by it. What they lose, the restore of their KV from CPU memory or its recomputation
(`fleet.kv_cost`), is charged to the request that gains: it is weighed against the seconds of lateness saved.

Evictions cannot cycle: only a request with a later deadline is evicted, each request at most `limit` times, and at most
a quarter of an instance's sequences per pass.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.kv_cost import eviction_cost_s, prefill_s
from scheduling.queueing.running import (
    Ends,
    Room,
    Running,
    by_instance,
    ends_of,
    has_room,
    room_for,
    room_of,
    step_s,
)
from scheduling.queueing.virtual_queues import head
from scheduling.queueing.waiting_set import WaitingArrays

MOST_EVICTIONS: Final = 100
"""Per request, whatever the setting."""
GIVEN: Final = -1
MOST_SHARE: Final = 0.25
"""Share of an instance's sequences that may leave in one pass."""


class Eviction(NamedTuple):
    """Requests that leave one instance in favour of one that waits."""

    rows: tuple[int, ...]
    """`Running.row` of each victim."""
    instance: int
    group: int
    """Number of the group that gains; GIVEN for a request that its instance already holds and keeps waiting."""
    gain_s: float
    """Lateness saved."""
    cost_s: float
    """To restore or recompute the lost tokens."""
    lost_tokens: int


class Given(NamedTuple):
    """Input of the kernels besides fleet and queues."""

    running: Running
    first: NDArray[np.int64]
    """(instances + 1,): where each instance starts in `victims` and `waits`."""
    victims: NDArray[np.int64]
    """Indices into `running` by instance, in the order in which they leave."""
    waits: NDArray[np.int64]
    """The same, in the order of queue keys, in which they start."""
    cost_s: NDArray[np.float64]
    """By index into `running`: what it loses."""
    step_s: NDArray[np.float64]
    """By instance: time until victims have left."""
    ends: Ends


class Chosen(NamedTuple):
    """Evictions as the kernels write them; as many rows as there are running requests."""

    counters: NDArray[np.int64]
    """Number of evictions, and of victims over all of them."""
    victims: NDArray[np.int64]
    """Indices into `running`, eviction by eviction."""
    last: NDArray[np.int64]
    """By eviction: end of its victims."""
    instance: NDArray[np.int64]
    group: NDArray[np.int64]
    """Number of the group, or GIVEN."""
    gain_s: NDArray[np.float64]
    cost_s: NDArray[np.float64]
    removed: NDArray[np.uint8]
    """By index into `running`: 1 once it is a victim, or yields to one that waits at its instance."""


@compiled_internal
def _may_leave(running: Running, at: int, limit: int) -> bool:
    return running.evictable[at] and not running.leaving[at] and running.evictions[at] < limit


@compiled_internal
def _outranks(due_s: float, allowed_s: float, priority: int, running: Running, at: int) -> bool:
    """Whether the request at *at* yields to one of that deadline, time allowed and priority: due later, and lesser."""
    if running.due_s[at] <= due_s or running.priority[at] < priority:
        return False
    return bool(running.priority[at] > priority or running.allowed_s[at] > allowed_s)


@compiled_internal
def _choose(chosen: Chosen, instance: int, group: int, gain_s: float, cost_s: float) -> None:
    """End an eviction whose victims are written."""
    count = chosen.counters[0]
    chosen.last[count] = chosen.counters[1]
    chosen.instance[count], chosen.group[count] = instance, group
    chosen.gain_s[count], chosen.cost_s[count] = gain_s, cost_s
    chosen.counters[0] = count + 1


@compiled_internal
def _most(fleet: FleetArrays, instance: int) -> int:
    return max(1, int(MOST_SHARE * float(fleet.max_num_seqs[instance])))


@compiled_internal
def _make_room_for_assigned(
    fleet: FleetArrays, given: Given, limit: int, instance: int, now_s: float, chosen: Chosen
) -> int:
    """Evict running requests so that requests already assigned to *instance* can start, in the order of their keys; return
    the number evicted.
    """
    running, ends, removed = given.running, given.ends, chosen.removed
    first, last = given.first[instance], given.first[instance + 1]
    mine, waiting = 0, 0
    for place in range(first, last):
        at = given.waits[place]
        if not running.leaving[at]:
            mine += 1
            waiting += running.emitted_tokens[at] == 0
    beyond = mine - int(fleet.max_num_seqs[instance])
    if beyond <= 0 or waiting < beyond:
        return 0
    before, next_end, soon_s = waiting - beyond, int(ends.first[instance]), given.step_s[instance]
    count, most = 0, _most(fleet, instance)
    for place in range(first, last):
        at = given.waits[place]
        if running.leaving[at] or running.emitted_tokens[at] > 0:
            continue
        if before > 0:  # a sequence is free for it
            before -= 1
            continue
        while next_end < ends.first[instance + 1]:
            streams = ends.place[next_end]
            if removed[streams] == 0 and not running.leaving[streams] and running.emitted_tokens[streams] > 0:
                break
            next_end += 1
        if next_end == ends.first[instance + 1] or count == most:
            break
        gives_way = ends.place[next_end]
        due_s, start_s = running.due_s[at], ends.at_s[gives_way]
        slack_s = due_s - now_s - prefill_s(fleet, instance, float(running.prompt_tokens[at]))
        if start_s > soon_s and start_s > slack_s:
            victim = -1
            for one in range(first, last):
                this = given.victims[one]
                if running.emitted_tokens[this] == 0 or removed[this] != 0 or not _may_leave(running, this, limit):
                    continue
                if _outranks(due_s, running.allowed_s[at], running.priority[at], running, this):
                    victim = this
                    break
            if victim < 0:
                break
            gain_s = start_s - max(soon_s, slack_s)
            cost_s = float(given.cost_s[victim])
            if gain_s <= cost_s:
                break
            chosen.victims[chosen.counters[1]] = victim
            chosen.counters[1] += 1
            _choose(chosen, instance, GIVEN, gain_s, cost_s)
            count += 1
            gives_way = victim
        removed[gives_way] = 1
    return count


@compiled_internal
def _leaving_for(
    waiting: WaitingArrays,
    given: Given,
    limit: int,
    instance: int,
    slot: int,
    sequences: int,
    tokens: int,
    chosen: Chosen,
) -> int:
    """Write the first victims that free the *sequences* and *tokens* that the request in *slot* lacks; return their
    number, 0 if they do not suffice.

    A victim is due later, and of a class that allows more time or has lower priority.
    """
    running, ends = given.running, given.ends
    allowed_s = waiting.deadline_s[slot] - waiting.arrival_s[slot]
    count, end = 0, chosen.counters[1]
    for place in range(given.first[instance], given.first[instance + 1]):
        if sequences <= 0 and tokens <= 0:
            break
        at = given.victims[place]
        # A request that has ended by then has already passed its room to one that waits for it.
        if ends.gone[at] != 0 or chosen.removed[at] != 0 or not _may_leave(running, at, limit):
            continue
        if _outranks(waiting.key[slot], allowed_s, waiting.priority[slot], running, at):
            chosen.victims[end + count] = at
            count += 1
            sequences -= 1
            tokens -= int(ends.held_tokens[at])
    return count if sequences <= 0 and tokens <= 0 else 0


@compiled_internal
def _for_group(
    fleet: FleetArrays,
    waiting: WaitingArrays,
    given: Given,
    limit: int,
    instance: int,
    group: int,
    now_s: float,
    chosen: Chosen,
) -> None:
    """Evict requests of *instance* for those of *group*, in order."""
    ends, soon_s = given.ends, given.step_s[instance]
    most, room = _most(fleet, instance), room_of(fleet, ends, instance)
    sequences, free_tokens = (
        room.sequences,
        room.tokens,
    )  # what the requests before leave of the room that victims free
    slot = int(waiting.groups.groups[group].first)
    number = int(waiting.groups.groups[group].number)
    for _ in range(int(fleet.max_num_seqs[instance])):
        if slot < 0 or most == 0:
            break
        tokens = int(waiting.prompt_tokens[slot] + waiting.output_tokens[slot])
        slack_s = waiting.key[slot] - now_s - prefill_s(fleet, instance, float(waiting.prompt_tokens[slot]))
        then = room_for(room, ends, instance, tokens)
        start_s = then.time_s if has_room(then, tokens) else math.inf
        if start_s > soon_s and start_s > slack_s:
            count = _leaving_for(waiting, given, limit, instance, slot, 1 - sequences, tokens - free_tokens, chosen)
            end = chosen.counters[1]
            gain_s, cost_s = start_s - max(soon_s, slack_s), 0.0
            for at in chosen.victims[end : end + count]:
                cost_s += given.cost_s[at]
            if not 0 < count <= most or gain_s <= cost_s:
                break
            chosen.counters[1] += count
            _choose(chosen, instance, number, gain_s, cost_s)
            for at in chosen.victims[end : end + count]:
                held = int(ends.held_tokens[at])
                sequences, free_tokens = sequences + 1, free_tokens + held
                room = Room(room.sequences + 1, room.tokens + held, room.time_s, room.at)
                ends.gone[at] = chosen.removed[at] = 1
            most -= count
        if start_s <= soon_s or start_s > slack_s:
            sequences, free_tokens = sequences - 1, free_tokens - tokens
        then = room_for(room, ends, instance, tokens)
        for place in range(room.at, then.at):
            ends.gone[ends.place[place]] = 1
        room = then
        if has_room(then, tokens):
            room = Room(then.sequences - 1, then.tokens - tokens, then.time_s, then.at)
        slot = int(waiting.groups.members[slot].following)


@compiled
def write_costs(fleet: FleetArrays, endpoints: EndpointArrays, running: Running, cost_s: NDArray[np.float64]) -> None:
    """Write, by index into *running*, the seconds that each request loses if it is evicted."""
    for at in range(running.row.size):
        if running.emitted_tokens[at] > 0:
            tokens = float(running.prompt_tokens[at] + running.emitted_tokens[at])
            cost_s[at] = eviction_cost_s(fleet, endpoints, int(running.instance[at]), tokens)


@compiled
def _choose_all(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    given: Given,
    limit: NDArray[np.int64],
    now_s: float,
    chosen: Chosen,
) -> None:
    """Write all evictions."""
    for endpoint in range(limit.size):
        if limit[endpoint] <= 0 or waiting.groups.limit[endpoint] <= 0 or waiting.size[endpoint] <= 0:
            continue
        for member in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
            instance = int(endpoints.members[member])
            if fleet.accepting[instance] == 0:
                continue
            most = int(limit[endpoint])
            if _make_room_for_assigned(fleet, given, most, instance, now_s, chosen):
                continue
            # Requests marked as yielding to a waiting one are available again.
            for place in range(given.first[instance], given.first[instance + 1]):
                chosen.removed[given.victims[place]] = 0
            group = head(waiting.groups, int(waiting.groups.queue_of[instance]))
            if group >= 0 and waiting.groups.groups[group].endpoint == endpoint:
                _for_group(fleet, waiting, given, most, instance, group, now_s, chosen)


def wanted(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    running: Running,
    limit: NDArray[np.int64],
    now_s: float,
) -> list[Eviction]:
    """Return the evictions. *limit* is by endpoint: evictions per request at most, 0 for none."""
    size, lost, streams = running.row.size, running.lost_tokens, running.emitted_tokens > 0
    cost_s = np.zeros(size)
    write_costs(fleet, endpoints, running, cost_s)
    given = Given(
        running,
        by_instance(fleet, running),
        np.lexsort((running.row, -running.due_s, lost, cost_s, streams, running.instance)),
        np.lexsort((running.row, running.due_s, running.instance)),
        cost_s,
        step_s(fleet, running),
        ends_of(fleet, running),
    )
    chosen = Chosen(
        counters=np.zeros(2, np.int64),
        victims=np.zeros(size, np.int64),
        last=np.zeros(size, np.int64),
        instance=np.zeros(size, np.int64),
        group=np.zeros(size, np.int64),
        gain_s=np.zeros(size),
        cost_s=np.zeros(size),
        removed=np.zeros(size, np.uint8),
    )
    limit = np.ascontiguousarray(
        limit
    )  # in a simulation it is a column of records: another type to Numba, compiled again
    _choose_all(fleet, endpoints, waiting, given, limit, now_s, chosen)
    evictions, begin = [], 0
    for at in range(int(chosen.counters[0])):
        victims = chosen.victims[begin : chosen.last[at]]
        begin = chosen.last[at]
        evictions.append(
            Eviction(
                tuple(running.row[victims].tolist()),
                int(chosen.instance[at]),
                int(chosen.group[at]),
                float(chosen.gain_s[at]),
                float(chosen.cost_s[at]),
                int(lost[victims].sum()),
            )
        )
    return evictions
