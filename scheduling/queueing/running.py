"""What runs, as the global scheduler sees it: how far each request is, and when an instance has room for the next ones.

The same under both clocks. Times are seconds from now, but for deadlines, which are on the clock of the waiting set.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.arrays import FleetArrays
from scheduling.queueing.swapping.service import USUAL_PREFILL_S, USUAL_STEP_S

OVERRUN_SHARE: Final = 0.5
"""Of what it has emitted, that a request emits which has more than was expected of it: nobody knows better by then."""


class Running(NamedTuple):
    """Requests that instances have; one element each."""

    number: NDArray[np.int64]
    """By which the clock knows it."""
    instance: NDArray[np.int64]
    due_s: NDArray[np.float64]
    """Its queue key: a moment on the clock of the waiting set."""
    allowed_s: NDArray[np.float64]
    """From its arrival to its deadline; infinity for none."""
    priority: NDArray[np.int64]
    """As in vLLM: lower is earlier."""
    prompt_tokens: NDArray[np.int64]
    """As its instance has it: with what it emitted before it was evicted."""
    emitted_tokens: NDArray[np.int64]
    """By that instance; 0 while it waits there or its prompt is computed."""
    expected_tokens: NDArray[np.int64]
    """Prompt and output, as they are reserved there."""
    evictions: NDArray[np.int64]
    evictable: NDArray[np.bool_]
    """Whether it can be gone on with elsewhere."""
    leaving: NDArray[np.bool_]
    """It is being evicted."""

    @property
    def lost_tokens(self) -> NDArray[np.int64]:
        """What is computed again if it is evicted now. One that has emitted nothing counts as not begun."""
        return np.where(self.emitted_tokens > 0, self.prompt_tokens + self.emitted_tokens, 0)


def running_of(rows: Iterable[tuple[Any, ...]]) -> Running:
    """*rows* hold one request each, in the order of the fields."""
    columns = list(zip(*rows, strict=True)) or [()] * len(Running._fields)
    kinds = {"due_s": np.float64, "allowed_s": np.float64, "evictable": np.bool_, "leaving": np.bool_}
    return Running(
        *(np.array(column, kinds.get(name, np.int64)) for name, column in zip(Running._fields, columns, strict=True))
    )


def step_s(fleet: FleetArrays, running: Running) -> NDArray[np.float64]:
    """By instance: the decode step of what it runs, by its profile."""
    size, context = fleet.endpoint.size, running.prompt_tokens + running.emitted_tokens
    sequences = np.minimum(np.bincount(running.instance, minlength=size), fleet.max_num_seqs)
    tokens = np.bincount(running.instance, weights=context, minlength=size)
    constant_s, of_sequence_s, of_token_s = fleet.profile[:, 4:7].T
    return np.where(constant_s > 0, constant_s + of_sequence_s * sequences + of_token_s * tokens, USUAL_STEP_S)


def left_s(fleet: FleetArrays, running: Running) -> NDArray[np.float64]:
    """By request: until it has ended, if it emits what is expected of it; one that leaves has a step."""
    more = running.expected_tokens - running.prompt_tokens - running.emitted_tokens
    tokens = np.where(more > 0, more, np.maximum(1.0, OVERRUN_SHARE * running.emitted_tokens))
    return np.where(running.leaving, 1.0, tokens) * step_s(fleet, running)[running.instance]


def prefill_s(fleet: FleetArrays, instance: int, tokens: float) -> float:
    """Seconds of *instance* that computing a prompt of *tokens* takes."""
    least_s, constant_s, linear_s, square_s = fleet.profile[instance, :4].tolist()
    if fleet.profile[instance, 4] <= 0.0:
        return USUAL_PREFILL_S * tokens
    return max(least_s, constant_s + linear_s * tokens + square_s * tokens * tokens) if tokens > 0 else 0.0


class Room:
    """When *instance* has room for one request after another, as what it runs ends."""

    def __init__(self, fleet: FleetArrays, running: Running, ends_s: NDArray[np.float64], instance: int) -> None:
        mine = np.flatnonzero(running.instance == instance)
        self.sequences = int(fleet.max_num_seqs[instance]) - int(fleet.running[instance])
        self.tokens = int(fleet.kv_capacity_tokens[instance]) - int(fleet.kv_tokens[instance])
        self.time_s = 0.0
        """Until which what has ended is counted."""
        done = running.prompt_tokens[mine] + running.emitted_tokens[mine]
        self.held_tokens = dict(
            zip(mine.tolist(), np.maximum(running.expected_tokens[mine], done).tolist(), strict=True)
        )
        """By place in *running*: KV tokens of what has not ended."""
        self._ends = [(float(ends_s[at]), int(at)) for at in mine[np.lexsort((mine, ends_s[mine]))]]

    def copy(self) -> "Room":
        """The same, to be asked without being changed."""
        other = copy(self)
        other.held_tokens, other._ends = dict(self.held_tokens), list(self._ends)
        return other

    def has(self, tokens: int) -> bool:
        """Whether there is room now for a request of *tokens*."""
        return self.sequences > 0 and self.tokens >= tokens

    def release(self, at: int) -> None:
        """The request at that place of `running` has ended, or was evicted."""
        self.sequences += 1
        self.tokens += self.held_tokens.pop(at)

    def take(self, tokens: int) -> float:
        """When a request of *tokens* begins that is next in line; infinity for never. It takes its room."""
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
