"""Running requests as the global scheduler sees them: the progress of each, and when an instance has room for more.

It is the same under both clocks. Times are seconds from now, except deadlines, which are on the clock of the waiting set.
"""

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import FleetArrays, at_once
from scheduling.queueing.swapping.service import USUAL_STEP_S

OVERRUN_SHARE: Final = 0.5
"""Share of its emitted tokens that a request past its expected output is assumed to emit still."""


class Running(NamedTuple):
    """Requests at instances; one element each."""

    row: NDArray[np.int64]
    """Of the request table."""
    instance: NDArray[np.int64]
    due_s: NDArray[np.float64]
    """Queue key: a moment on the clock of the waiting set."""
    allowed_s: NDArray[np.float64]
    """From its arrival to its deadline; infinity for none."""
    priority: NDArray[np.int64]
    """As in vLLM: lower is earlier."""
    prompt_tokens: NDArray[np.int64]
    """Prompt at its instance, including tokens emitted before an eviction."""
    emitted_tokens: NDArray[np.int64]
    """Emitted by that instance; 0 while it waits there or is in prefill."""
    expected_tokens: NDArray[np.int64]
    """Prompt and output, as reserved there."""
    evictions: NDArray[np.int64]
    evictable: NDArray[np.bool_]
    """Whether another instance can continue it."""
    leaving: NDArray[np.bool_]
    """Whether it is being evicted."""

    @property
    def lost_tokens(self) -> NDArray[np.int64]:
        """Return the tokens to recompute if it is evicted; 0 for one that has emitted nothing."""
        return np.where(self.emitted_tokens > 0, self.prompt_tokens + self.emitted_tokens, 0)


def running_of(rows: Iterable[tuple[Any, ...]]) -> Running:
    """Return arrays of *rows*, one request each, in the order of the fields."""
    columns = list(zip(*rows, strict=True)) or [()] * len(Running._fields)
    kinds = {"due_s": np.float64, "allowed_s": np.float64, "evictable": np.bool_, "leaving": np.bool_}
    return Running(
        *(np.array(column, kinds.get(name, np.int64)) for name, column in zip(Running._fields, columns, strict=True))
    )


def step_s(fleet: FleetArrays, running: Running) -> NDArray[np.float64]:
    """Return, by instance, the decode step of its running batch by its profile."""
    size, context = fleet.endpoint.size, running.prompt_tokens + running.emitted_tokens
    sequences = np.minimum(np.bincount(running.instance, minlength=size), fleet.max_num_seqs)
    tokens = np.bincount(running.instance, weights=context, minlength=size)
    constant_s, of_sequence_s, of_token_s = fleet.profile[:, 4:7].T
    return np.where(constant_s > 0, constant_s + of_sequence_s * sequences + of_token_s * tokens, USUAL_STEP_S)


def left_s(fleet: FleetArrays, running: Running) -> NDArray[np.float64]:
    """Return, by request, the time until it ends if it emits the expected tokens; one step for a leaving request."""
    more = running.expected_tokens - running.prompt_tokens - running.emitted_tokens
    tokens = np.where(more > 0, more, np.maximum(1.0, OVERRUN_SHARE * running.emitted_tokens))
    return np.where(running.leaving, 1.0, tokens) * step_s(fleet, running)[running.instance]


class Ends(NamedTuple):
    """Ends of running requests, by instance."""

    first: NDArray[np.int64]
    """(instances + 1,)"""
    place: NDArray[np.int64]
    """Indices into `Running`, those of an instance in order of their ends."""
    at_s: NDArray[np.float64]
    """By index into `Running`."""
    held_tokens: NDArray[np.int64]
    """By index into `Running`: KV tokens freed at its end."""
    gone: NDArray[np.uint8]
    """By index into `Running`: 1 once it has ended or was evicted. Scratch of kernels."""


def ends_of(fleet: FleetArrays, running: Running) -> Ends:
    """Return the ends of *running*, none of which has ended yet."""
    at_s = left_s(fleet, running)
    return Ends(
        by_instance(fleet, running),
        np.lexsort((at_s, running.instance)),
        at_s,
        np.maximum(running.expected_tokens, running.prompt_tokens + running.emitted_tokens),
        np.zeros(running.row.size, np.uint8),
    )


def by_instance(fleet: FleetArrays, running: Running) -> NDArray[np.int64]:
    """Return (instances + 1,): where each instance starts in an order of *running* by instance."""
    first = np.zeros(fleet.endpoint.size + 1, np.int64)
    np.cumsum(np.bincount(running.instance, minlength=fleet.endpoint.size), out=first[1:])
    return first


class Room(NamedTuple):
    """Room of an instance for one request after another, as running ones end."""

    sequences: int
    """Free sequences at `time_s`."""
    tokens: int
    """Free KV tokens at `time_s`."""
    time_s: float
    """Time up to which ended requests are counted."""
    at: int
    """Index in `Ends.place` of the next to end."""


@compiled_internal
def room_of(fleet: FleetArrays, ends: Ends, instance: int) -> Room:
    """Return the current room of *instance*."""
    free = at_once(fleet, instance) - int(fleet.running[instance])
    tokens = int(fleet.kv_capacity_tokens[instance]) - int(fleet.kv_tokens[instance])
    return Room(free, tokens, 0.0, int(ends.first[instance]))


@compiled_internal
def room_for(room: Room, ends: Ends, instance: int, tokens: int) -> Room:
    """Return *room* when a request of *tokens*, next in line, starts; `has_room` is false if it never does."""
    sequences, free, time_s, at = room
    last = int(ends.first[instance + 1])
    while at < last and not (sequences > 0 and free >= tokens):
        place = ends.place[at]
        at += 1
        if ends.gone[place] == 0:
            time_s = max(time_s, ends.at_s[place])
            sequences += 1
            free += int(ends.held_tokens[place])
    return Room(sequences, free, time_s, at)


@compiled_internal
def has_room(room: Room, tokens: int) -> bool:
    """Whether there is room for a request of *tokens*."""
    return room.sequences > 0 and room.tokens >= tokens


@compiled
def write_starts(fleet: FleetArrays, ends: Ends, tokens: NDArray[np.float64], starts_s: NDArray[np.float64]) -> None:
    """Write, by instance, when it has room for a request of its *tokens*; infinity for never."""
    for instance in range(starts_s.size):
        needed = int(tokens[instance])
        room = room_for(room_of(fleet, ends, instance), ends, instance, needed)
        starts_s[instance] = room.time_s if has_room(room, needed) else math.inf
