"""Kernels called by their entry point do what they do through Numba, whatever comes."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import TypingError

from scheduling.compiled import compiled
from scheduling.direct import MOST_LOOKS, Repeated, direct
from scheduling.dispatch import dispatch
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot, grow_waiting
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, release


@compiled
def total(numbers: np.ndarray, factor: float) -> float:
    """The sum of *numbers*, times *factor*."""
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
    """What *steps* (endpoint, prompt, output, whether one ends first) come to; the waiting set grows on the way."""
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
                slot, instance = dispatch(fleet, endpoints, waiting, at, JOIN_SHORTEST_QUEUE)
                seen.append((slot, instance))
                if slot < 0:
                    break
                running.append((instance, int(waiting.prompt_tokens[slot] + waiting.output_tokens[slot])))
                free_slot(waiting, slot)
    return seen, fleet.kv_tokens.tolist(), waiting.size.tolist()


@given(calls)
def test_a_day_of_decisions_is_the_same(steps):
    kernels = enqueue, dispatch, release, free_slot
    assert played(steps, *map(direct, kernels)) == played(steps, *kernels)


def test_an_array_of_another_type_is_not_taken_for_the_known_one():
    fast = direct(total)
    rows = np.arange(12.0).reshape(3, 4)
    for _ in range(2):
        assert fast(np.arange(4.0), 2.0) == 12.0
        assert fast(np.arange(4), 2.0) == 12.0  # whole numbers
        assert fast(np.arange(4, dtype=np.float32), 2.0) == 12.0
        assert fast(rows[:, 1], 1.0) == 15.0  # not contiguous
        assert fast(np.arange(4.0), 2) == 12.0


def test_another_tuple_of_arrays_is_looked_at_anew():
    fast, (fleet, *_), (other, *_) = direct(release), world(), world()
    for one in (fleet, fleet, other, fleet, other, other):
        one.kv_tokens[0], one.running[0], one.remaining_tokens[0] = 10, 1, 10
        fast(one, 0, 10, 0)
        assert one.kv_tokens[0] == 0
    with pytest.raises(TypingError):
        fast(tuple(fleet)[:3], 0, 10, 0)


def test_it_keeps_no_reference_to_what_it_passed_but_the_last():
    fast, (first, *_), (second, *_) = direct(release), world(), world()
    before = sys.getrefcount(first.kv_tokens)
    for _ in range(1000):
        fast(first, 0, 0, 0)
    fast(second, 0, 0, 0)
    after = sys.getrefcount(first.kv_tokens)  # pytest itself holds what an assertion looks at
    assert after == before


def test_arrays_that_change_too_often_still_work():
    fast, (fleet, *_), (other, *_) = direct(release), world(), world()
    for number in range(2 * MOST_LOOKS):
        one = (fleet, other)[number % 2]
        one.kv_tokens[0], one.running[0], one.remaining_tokens[0] = 10, 1, 10
        fast(one, 0, 10, 0)
        assert one.kv_tokens[0] == 0


def test_without_compilation_it_is_the_function_itself():
    assert direct(len) is len


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), min_size=1, max_size=40))
def test_a_kernel_called_repeatedly_does_the_same(calls):
    fast, worlds = Repeated(release), [[world()[0] for _ in range(2)] for _ in range(2)]
    for which, tokens in calls:
        for fleets, call in zip(worlds, (release, fast), strict=True):
            fleets[which].kv_tokens[1] += 2 * tokens
            call(fleets[which], 1, tokens, 0)
    plain, repeated = ([fleet.kv_tokens.tolist() for fleet in fleets] for fleets in worlds)
    assert plain == repeated


def test_a_kernel_of_several_types_is_called_through_numba():
    fast, numbers = Repeated(total), np.ones(4)
    assert fast(numbers, 2.0) == fast(numbers, 2.0) == 8.0
    halves = np.full(4, 0.5, np.float32)
    assert fast(halves, 2.0) == fast(halves, 2.0) == 4.0
    assert fast(numbers, 2.0) == fast(numbers, 2.0) == 8.0
