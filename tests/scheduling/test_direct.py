"""Kernels called by their entry point behave as through Numba, for all arguments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import TypingError

from scheduling.compiled import compiled, direct
from scheduling.dispatch import dispatch
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot, grow_waiting
from scheduling.routing.candidates import NO_ROWS
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, release


@compiled
def total(numbers: np.ndarray, factor: float) -> float:
    """Return the sum of *numbers*, times *factor*."""
    sum_ = 0.0
    for at in range(numbers.shape[0]):
        sum_ += numbers[at]
    return sum_ * factor


def world():
    fleet, endpoints, waiting = allocate_fleet(4), allocate_endpoints(2, 4), allocate_waiting(2, 4)
    fleet.endpoint[:] = (0, 0, 1, 1)
    fleet.accepting[:], fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = 1, 3, 10_000
    index_members(fleet, endpoints)
    return fleet, endpoints, waiting


calls = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 3000), st.integers(1, 500), st.booleans()), min_size=1, max_size=40
)


def played(steps, enqueue, dispatch, release, free_slot):
    """Return the result of *steps* (endpoint, prompt, output, whether one ends first);
    the waiting set grows on the way.
    """
    fleet, endpoints, waiting = world()
    seen, running = [], []
    for number, (endpoint, prompt, output, ends) in enumerate(steps):
        if ends and running:
            instance, tokens = running.pop(0)
            release(fleet, instance, tokens, 0)
        if waiting.size.sum() == waiting.key.size:
            waiting = grow_waiting(waiting, 2 * waiting.key.size, 2, 0)
        enqueue(waiting, endpoint, float(number), 0.0, 1.0, 0, prompt, output, 1, -1, -1, -1)
        for at in (0, 1):
            while True:
                slot, instance = dispatch(fleet, endpoints, waiting, at, JOIN_SHORTEST_QUEUE, NO_ROWS)
                seen.append((slot, instance))
                if slot < 0:
                    break
                running.append((instance, int(waiting.prompt_tokens[slot] + waiting.output_tokens[slot])))
                free_slot(waiting, slot)
    return seen, fleet.kv_tokens.tolist(), waiting.size.tolist()


@given(calls)
def test_decisions_are_the_same(steps):
    kernels = enqueue, dispatch, release, free_slot
    assert played(steps, *map(direct, kernels)) == played(steps, *kernels)


def test_an_argument_of_another_type_or_layout_is_not_taken_for_the_known_one():
    fast, numbers = direct(total), np.arange(4.0)
    rows = np.arange(12.0).reshape(3, 4)
    for _ in range(2):
        assert fast(numbers, 2.0) == 12.0
        assert fast(numbers, 2) == 12.0
        assert fast(np.arange(4), 2.0) == 12.0  # whole numbers
        assert fast(np.arange(4, dtype=np.float32), 2.0) == 12.0
        assert fast(rows[:, 1], 1.0) == 15.0  # not contiguous


def test_another_layout_behind_the_same_first_argument_is_not_taken_for_the_known_one():
    @compiled
    def both(first: np.ndarray, second: np.ndarray) -> float:
        return first[0] + second[1]

    fast, numbers = direct(both), np.ones(2)
    for second in (np.arange(2.0), np.arange(2), np.arange(4.0).reshape(2, 2)[:, 0], np.arange(2.0)):
        assert fast(numbers, second) == 1.0 + second[1]


def test_another_first_argument_is_looked_at_again():
    fast, (fleet, *_), (other, *_) = direct(release), world(), world()
    for one in (fleet, fleet, other, fleet, other, other):
        one.kv_tokens[0], one.running[0], one.remaining_tokens[0] = 10, 1, 10
        fast(one, 0, 10, 0)
        assert one.kv_tokens[0] == 0
    with pytest.raises(TypingError):
        fast(tuple(fleet)[:3], 0, 10, 0)
