"""Plain Python twin of `scheduling.queueing.eviction`."""

from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.kv_cost import prefill_s
from scheduling.queueing.eviction import GIVEN, MOST_SHARE, Eviction
from scheduling.queueing.running import Running, left_s, step_s
from scheduling.queueing.virtual_queues import head
from scheduling.queueing.waiting_set import WaitingArrays


class Room:
    """Start times of waiting requests on *instance*, one after another, as its running requests end."""

    def __init__(self, fleet: FleetArrays, running: Running, ends_s: NDArray[np.float64], instance: int) -> None:
        mine = np.flatnonzero(running.instance == instance)
        self.sequences = int(fleet.max_num_seqs[instance]) - int(fleet.running[instance])
        self.tokens = int(fleet.kv_capacity_tokens[instance]) - int(fleet.kv_tokens[instance])
        self.time_s = 0.0
        """Time up to which ended requests are counted."""
        done = running.prompt_tokens[mine] + running.emitted_tokens[mine]
        self.held_tokens = dict(
            zip(mine.tolist(), np.maximum(running.expected_tokens[mine], done).tolist(), strict=True)
        )
        """KV tokens still held, by position in *running*."""
        self._ends = [(float(ends_s[at]), int(at)) for at in mine[np.lexsort((mine, ends_s[mine]))]]

    def copy(self) -> "Room":
        """Copy that can be modified."""
        other = copy(self)
        other.held_tokens, other._ends = dict(self.held_tokens), list(self._ends)
        return other

    def has(self, tokens: int) -> bool:
        """Whether a request of *tokens* fits now."""
        return self.sequences > 0 and self.tokens >= tokens

    def release(self, at: int) -> None:
        """Release the request at that position of `running`: it ended or was evicted."""
        self.sequences += 1
        self.tokens += self.held_tokens.pop(at)

    def take(self, tokens: int) -> float:
        """Return the start time of the next request in line, of *tokens*, and take its room; infinity for never."""
        while not self.has(tokens) and self._ends:
            end_s, at = self._ends.pop(0)
            if at in self.held_tokens:
                self.time_s = max(self.time_s, end_s)
                self.release(at)
        if not self.has(tokens):
            return float("inf")
        self.sequences -= 1
        self.tokens -= tokens
        return self.time_s


class Claim(NamedTuple):
    """Queue key, allowed time from arrival to deadline, and priority of a waiting request."""

    due_s: float
    allowed_s: float
    priority: int

    def outranks(self, running: Running, at: int) -> bool:
        """Whether the request at that position can be evicted for it: due later, in a class with more time or lower
        priority.
        """
        if running.due_s[at] <= self.due_s or running.priority[at] < self.priority:
            return False
        return bool(running.priority[at] > self.priority or running.allowed_s[at] > self.allowed_s)


def wanted(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    running: Running,
    limit: NDArray[np.int64],
    now_s: float,
) -> list[Eviction]:
    """Return the evictions due now. *limit* is per endpoint: maximum evictions of one request, 0 for none."""
    ends_s, steps_s = left_s(fleet, running), step_s(fleet, running)
    chosen: list[Eviction] = []
    for endpoint in np.flatnonzero((limit > 0) & (waiting.groups.limit > 0) & (waiting.size > 0)).tolist():
        for instance in endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]].tolist():
            if not fleet.accepting[instance]:
                continue
            may = running.evictable & ~running.leaving & (running.evictions < limit[endpoint])
            may &= running.instance == instance
            soon_s = float(steps_s[instance])
            if ahead := _make_room_for_assigned(fleet, running, may, ends_s, instance, now_s, soon_s):
                chosen += ahead
                continue
            group = head(waiting.groups, int(waiting.groups.queue_of[instance]))
            if group < 0 or waiting.groups.groups["endpoint"][group] != endpoint:
                continue
            room = Room(fleet, running, ends_s, instance)
            chosen += _for_group(fleet, waiting, running, may, room, instance, group, now_s, soon_s)
    return chosen


def _most(fleet: FleetArrays, instance: int) -> int:
    return max(1, int(MOST_SHARE * float(fleet.max_num_seqs[instance])))


def _make_room_for_assigned(
    fleet: FleetArrays,
    running: Running,
    may: NDArray[np.bool_],
    ends_s: NDArray[np.float64],
    instance: int,
    now_s: float,
    soon_s: float,
) -> list[Eviction]:
    """Return the evictions for requests placed on *instance* beyond its sequences, in order of their keys."""
    mine = np.flatnonzero((running.instance == instance) & ~running.leaving)
    beyond = mine.size - int(fleet.max_num_seqs[instance])
    waits = mine[running.emitted_tokens[mine] == 0]
    if beyond <= 0 or waits.size < beyond:
        return []
    ahead = waits[np.lexsort((running.row[waits], running.due_s[waits]))][-beyond:]
    streams = mine[running.emitted_tokens[mine] > 0]
    ends = sorted((float(ends_s[at]), int(at)) for at in streams)
    lost = running.lost_tokens
    ranks = (running.row[streams], -running.due_s[streams], lost[streams])
    victims = [at for at in streams[np.lexsort(ranks)].tolist() if may[at]]
    chosen: list[Eviction] = []
    for at in ahead.tolist():
        if not ends or len(chosen) == _most(fleet, instance):
            break
        claim = Claim(float(running.due_s[at]), float(running.allowed_s[at]), int(running.priority[at]))
        slack_s = claim.due_s - now_s - prefill_s(fleet, instance, float(running.prompt_tokens[at]))
        start_s, gives_way = ends[0][0], ends[0][1]
        if start_s > soon_s and start_s > slack_s:
            victim = next((each for each in victims if claim.outranks(running, each)), None)
            if victim is None:
                break
            gain_s, cost_s = start_s - max(soon_s, slack_s), prefill_s(fleet, instance, float(lost[victim]))
            if gain_s <= cost_s:
                break
            rows = (int(running.row[victim]),)
            chosen.append(Eviction(rows, instance, GIVEN, gain_s, cost_s, int(lost[victim])))
            gives_way = victim
        victims = [each for each in victims if each != gives_way]
        ends = [each for each in ends if each[1] != gives_way]
    return chosen


def _for_group(
    fleet: FleetArrays,
    waiting: WaitingArrays,
    running: Running,
    may: NDArray[np.bool_],
    room: Room,
    instance: int,
    group: int,
    now_s: float,
    soon_s: float,
) -> list[Eviction]:
    """Return the evictions among *may* for the requests of *group* in order; an eviction takes *soon_s*."""
    places = np.flatnonzero(may)
    lost, streams = running.lost_tokens, running.emitted_tokens > 0
    ranks = (running.row[places], -running.due_s[places], lost[places], streams[places])
    victims: list[int] = places[np.lexsort(ranks)].tolist()
    most = _most(fleet, instance)
    chosen: list[Eviction] = []
    sequences, free_tokens = room.sequences, room.tokens
    slot = int(waiting.groups.groups["first"][group])
    for _ in range(int(fleet.max_num_seqs[instance])):
        if slot < 0 or not most:
            break
        tokens = int(waiting.prompt_tokens[slot] + waiting.output_tokens[slot])
        slack_s = float(waiting.key[slot]) - now_s - prefill_s(fleet, instance, float(waiting.prompt_tokens[slot]))
        start_s = room.copy().take(tokens)
        if start_s > soon_s and start_s > slack_s:
            leaves = _leaving_for(waiting, running, victims, room, slot, 1 - sequences, tokens - free_tokens)
            gain_s = start_s - max(soon_s, slack_s)
            cost_s = sum(prefill_s(fleet, instance, float(lost[at])) for at in leaves)
            if not 0 < len(leaves) <= most or gain_s <= cost_s:
                break
            number, rows = int(waiting.groups.groups["number"][group]), tuple(running.row[leaves].tolist())
            chosen.append(Eviction(rows, instance, number, gain_s, cost_s, int(lost[leaves].sum())))
            for at in leaves:
                sequences, free_tokens = sequences + 1, free_tokens + room.held_tokens[at]
                room.release(at)
                victims.remove(at)
            most -= len(leaves)
        if start_s <= soon_s or start_s > slack_s:
            sequences, free_tokens = sequences - 1, free_tokens - tokens
        room.take(tokens)
        slot = int(waiting.groups.members["following"][slot])
    return chosen


def _leaving_for(
    waiting: WaitingArrays,
    running: Running,
    victims: list[int],
    room: Room,
    slot: int,
    sequences: int,
    tokens: int,
) -> list[int]:
    """Return the first *victims* that free the *sequences* and *tokens* missing for the request in *slot*; none if
    too few.

    A victim is due later and its class allows more time or has lower priority.
    """
    allowed_s = float(waiting.deadline_s[slot] - waiting.arrival_s[slot])
    claim = Claim(float(waiting.key[slot]), allowed_s, int(waiting.priority[slot]))
    leaves: list[int] = []
    for at in victims:
        if sequences <= 0 and tokens <= 0:
            break
        # Room freed by then is already taken by another waiting request.
        if at in room.held_tokens and claim.outranks(running, at):
            leaves.append(at)
            sequences, tokens = sequences - 1, tokens - room.held_tokens[at]
    return leaves if sequences <= 0 and tokens <= 0 else []
