import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.queueing.waiting_set import (
    allocate_waiting,
    enqueue,
    free_slot,
    grow_waiting,
    in_order,
    peek,
    pop,
    push,
    rekey,
    remove,
)
from tests.oracles.dispatch import PlainQueue

ENDPOINTS = 2
endpoint_numbers = st.integers(0, ENDPOINTS - 1)
keys = st.sampled_from([-1.5, 0.0, 1.0, 2.0, 3.0]) | st.floats(allow_nan=False)  # ties are common


def arrive(waiting, endpoint=0, key=0.0, prompt_tokens=1):
    return enqueue(waiting, endpoint, key, 0.0, np.inf, 0, prompt_tokens, 1, -1, -1, -1, -1)


class HeapAgainstSortedList(RuleBasedStateMachine):
    """Whatever is done to the waiting set, each heap holds what a sorted list would, in its order."""

    def __init__(self):
        super().__init__()
        self.waiting = allocate_waiting(ENDPOINTS, 2)
        self.queues = [PlainQueue() for _ in range(ENDPOINTS)]
        self.taken = {}  # slot -> sequence
        self.arrivals = 0

    def taken_slot(self, data):
        return data.draw(st.sampled_from(sorted(self.taken)))

    def idle_slot(self, data):
        return data.draw(st.sampled_from(sorted(slot for slot in self.taken if self.waiting.position[slot] < 0)))

    @rule(endpoint=endpoint_numbers, key=keys)
    def arrive(self, endpoint, key):
        slot = arrive(self.waiting, endpoint, key)
        if slot < 0:
            assert len(self.taken) == self.waiting.key.size
            self.waiting = grow_waiting(self.waiting, self.waiting.key.size + 3)
            slot = arrive(self.waiting, endpoint, key)
        assert slot not in self.taken
        self.queues[endpoint].push(slot, key, self.arrivals)
        self.taken[slot] = self.arrivals
        self.arrivals += 1

    @rule(endpoint=endpoint_numbers)
    def pop(self, endpoint):
        assert pop(self.waiting, endpoint) == self.queues[endpoint].pop()

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def remove(self, data):
        slot = self.taken_slot(data)
        assert remove(self.waiting, slot) == any(queue.remove(slot) for queue in self.queues)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), key=keys)
    def rekey(self, data, key):
        slot = self.taken_slot(data)
        assert rekey(self.waiting, slot, key) == any(queue.rekey(slot, key) for queue in self.queues)

    @precondition(lambda self: any(self.waiting.position[slot] < 0 for slot in self.taken))
    @rule(data=st.data(), endpoint=endpoint_numbers, key=keys)
    def push_back(self, data, endpoint, key):
        slot = self.idle_slot(data)
        push(self.waiting, endpoint, slot, key)
        self.queues[endpoint].push(slot, key, self.taken[slot])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def leave(self, data):
        slot = self.taken_slot(data)
        free_slot(self.waiting, slot)
        for queue in self.queues:
            queue.remove(slot)
        del self.taken[slot]

    @invariant()
    def heaps_are_the_sorted_lists(self):
        for endpoint, queue in enumerate(self.queues):
            assert in_order(self.waiting, endpoint).tolist() == queue.in_order()
            assert peek(self.waiting, endpoint) == queue.peek()
            assert self.waiting.size[endpoint] == len(queue.entries)

    @invariant()
    def positions_agree(self):
        for endpoint in range(ENDPOINTS):
            for at in range(self.waiting.size[endpoint]):
                slot = self.waiting.heap[endpoint, at]
                assert self.waiting.position[slot] == at
                assert self.waiting.endpoint[slot] == endpoint


TestHeapAgainstSortedList = HeapAgainstSortedList.TestCase


def test_fields_say_what_was_enqueued():
    waiting = allocate_waiting(2, 4)
    slot = enqueue(waiting, 1, 5.0, 4.0, 9.5, -3, 100, 20, 7, 8, 9, 10)
    fields = {name: getattr(waiting, name)[slot].item() for name in waiting._fields[2:-4]}
    assert fields == {
        "position": 0,
        "endpoint": 1,
        "key": 5.0,
        "sequence": 0,
        "arrival_s": 4.0,
        "deadline_s": 9.5,
        "priority": -3,
        "prompt_tokens": 100,
        "output_tokens": 20,
        "tenant": 7,
        "application": 8,
        "run": 9,
        "adapter": 10,
        "rank": 4.0,
        "instance": -1,
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda waiting: arrive(waiting, key=np.nan), "not a number"),
        (lambda waiting: arrive(waiting, endpoint=1), "no such endpoint"),
        (lambda waiting: arrive(waiting, endpoint=-1), "no such endpoint"),
        (lambda waiting: push(waiting, 0, 0, 1.0), "waits already"),
        (lambda waiting: push(waiting, 9, 0, 1.0), "no such endpoint"),
        (lambda waiting: rekey(waiting, 0, np.nan), "not a number"),
        (lambda waiting: free_slot(waiting, 1), "free already"),
    ],
)
def test_wrong_use_is_refused_and_changes_nothing(wrong, message):
    waiting = allocate_waiting(1, 2)
    arrive(waiting, key=1.0)
    before = [array.copy() for array in (*waiting[:-2], *waiting.groups, *waiting.shares)]
    with pytest.raises(ValueError, match=message):
        wrong(waiting)
    assert all(
        (old == new).all() for old, new in zip(before, (*waiting[:-2], *waiting.groups, *waiting.shares), strict=True)
    )


def test_shrinking_is_refused():
    with pytest.raises(ValueError, match="cannot grow"):
        grow_waiting(allocate_waiting(2, 4), 3)
    with pytest.raises(ValueError, match="cannot grow"):
        grow_waiting(allocate_waiting(2, 4), 8, endpoints=1)
