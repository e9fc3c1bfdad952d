"""Rebuild all groups of some endpoints from their waiting requests, with the result of joining them one by one.

Hundreds of thousands of requests join some hundred groups, so the state of an open group that joins need is in one
small record, written to the group when it is full and at the end.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, index, record
from scheduling.queueing.groups import (
    BUCKETS,
    BY_ARRIVAL,
    KINDS,
    NONE,
    TIME_SHARE,
    GroupArrays,
    end_group,
    kind_of,
    note_tokens,
    open_group,
)
from scheduling.queueing.waiting_set import WaitingArrays, join_group

SPARSE: Final = 16
"""Sequence numbers per waiting request above which sorting is quicker than scanning them all."""

OPEN = record(
    [
        ("group", np.int32),  # undefined while the group is empty
        ("last", np.int32),
        ("joined", np.int32),
        ("most_ms", np.float64),  # limit of the instance time that it takes
        ("prompt_tokens", np.float64),
        ("output_tokens", np.float64),
    ]
)
"""Open group by endpoint and kind."""


@compiled
def _dissolve(arrays: GroupArrays, slots: NDArray[np.int32]) -> None:
    """End the groups of *slots* (-1: none), which contain all members of these groups."""
    for at in range(slots.size):
        if slots[at] < 0:
            continue
        mine = arrays.members[slots[at]]
        group = int(mine.group)
        mine.group = mine.preceding = mine.following = NONE
        if group >= 0 and arrays.groups[group].endpoint >= 0:
            end_group(arrays, group)


@compiled_inline
def _close(arrays: GroupArrays, opened: NDArray[np.void], endpoint: int, kind: int) -> None:
    """Write the open group's record to the groups."""
    here = opened[endpoint, kind]
    group = arrays.groups[here.group]
    group.last, group.count, group.joined = here.last, here.joined, here.joined
    group.prompt_tokens, group.output_tokens = here.prompt_tokens, here.output_tokens


@compiled
def _open(arrays: GroupArrays, opened: NDArray[np.void], endpoint: int, kind: int, slot: int, now_s: float) -> None:
    """Open a group with *slot* as its first member."""
    here = opened[endpoint, kind]
    if here.joined > 0:
        _close(arrays, opened, endpoint, kind)
    due_ms = arrays.class_due_ms[kind // BUCKETS]
    here.group, here.last, here.joined = open_group(arrays, endpoint, kind, now_s), NONE, 0
    here.most_ms = TIME_SHARE * due_ms if due_ms >= 0 else math.inf
    here.prompt_tokens = here.output_tokens = 0.0
    arrays.groups[here.group].first = slot


@compiled
def _join_all(waiting: WaitingArrays, slots: NDArray[np.int32], opened: NDArray[np.void]) -> None:
    """Add *slots* (-1: none), in order of arrival and in no group, to their groups.

    *opened* (endpoints, KINDS) is all zeros.
    """
    arrays = waiting.groups
    for at in range(slots.size):
        if slots[at] < 0:
            continue
        slot = index(slots[at])
        endpoint = index(waiting.endpoint[slot])
        most = arrays.limit[endpoint]
        if most <= 0:
            continue
        if arrays.within[endpoint] != BY_ARRIVAL:
            join_group(waiting, slot)
            continue
        now_s, prompt, output = waiting.arrival_s[slot], waiting.prompt_tokens[slot], waiting.output_tokens[slot]
        kind = kind_of(arrays, waiting.priority[slot], waiting.deadline_s[slot] - now_s, prompt, output)
        note_tokens(arrays, endpoint, float(prompt), float(output), now_s)
        here = opened[endpoint, kind]
        token_s = arrays.token_s[endpoint]
        takes_s = here.prompt_tokens * token_s[0] + here.output_tokens * token_s[1]
        if here.joined == 0 or here.joined >= most or (1000.0 * takes_s >= here.most_ms and takes_s > 0.0):
            _open(arrays, opened, endpoint, kind, slot, now_s)
        member, before = arrays.members[slot], here.last
        member.group, member.preceding, member.following = here.group, before, NONE
        if before >= 0:
            arrays.members[index(before)].following = slot
        here.last = slot
        here.joined += 1
        here.prompt_tokens += prompt
        here.output_tokens += output
    for endpoint in range(opened.shape[0]):
        if arrays.limit[endpoint] > 0:
            for kind in range(KINDS):
                if opened[endpoint, kind].joined > 0:
                    _close(arrays, opened, endpoint, kind)


@compiled
def _span(sequence: NDArray[np.int64], slots: NDArray[np.int32]) -> tuple[int, int]:
    """Return the first and last sequence number of *slots*, which are not empty."""
    first = last = sequence[slots[0]]
    for at in range(slots.size):
        mine = sequence[index(slots[at])]
        first, last = min(first, mine), max(last, mine)
    return first, last


@compiled
def _spread(sequence: NDArray[np.int64], slots: NDArray[np.int32], first: int, in_sequence: NDArray[np.int32]) -> None:
    """Write each slot to *in_sequence* at its sequence number less *first*, and -1 everywhere else."""
    in_sequence[:] = NONE
    for at in range(slots.size):
        slot = index(slots[at])
        in_sequence[sequence[slot] - first] = slot


def regroup(waiting: WaitingArrays, limits: Mapping[int, int]) -> None:
    """Rebuild the groups of some endpoints from their waiting requests; *limits* has the largest group by endpoint, 0
    for none.

    All endpoints are rebuilt in one pass by order of arrival: requests that arrived together are adjacent in memory.
    """
    slots = np.concatenate([waiting.heap[endpoint, : waiting.size[endpoint]] for endpoint in limits])
    if slots.size:
        first, last = _span(waiting.sequence, slots)
        if last - first < SPARSE * slots.size:
            in_sequence = np.empty(last - first + 1, np.int32)
            _spread(waiting.sequence, slots, first, in_sequence)
        else:
            in_sequence = slots[np.argsort(waiting.sequence[slots])]
        _dissolve(waiting.groups, in_sequence)
    for endpoint, limit in limits.items():
        waiting.groups.limit[endpoint] = limit
    if slots.size:
        _join_all(waiting, in_sequence, np.zeros((waiting.size.size, KINDS), OPEN))
