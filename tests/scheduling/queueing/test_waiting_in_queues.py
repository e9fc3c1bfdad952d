"""What is ahead of a request in its virtual queue, against lists that are walked from end to end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.virtual_queues import insert_loose
from scheduling.queueing.waiting_set import allocate_waiting
from scheduling.queueing.waits.waiting_in_queues import SAMPLE, ahead_in_queue
from tests.examples import costly
from tests.scheduling.queueing.test_groups import ask, fleet_of, members, queue_of


def plain(waiting, expected, slot):
    """Compute the kernel's result from the definition."""
    group = int(waiting.groups.members["group"][slot])
    ahead = []
    for other in queue_of(waiting, int(waiting.groups.groups["queue"][group])):
        if other == group:
            break
        ahead += members(waiting, other)
    own = members(waiting, group)
    ahead += own[: own.index(slot)]
    return len(ahead), *expected[ahead].sum(axis=0).tolist()


@costly(25, many=100)
@given(
    st.lists(st.tuples(st.sampled_from([2.0, 60.0, 900.0]), st.integers(1, 600)), min_size=1, max_size=40),
    st.integers(1, SAMPLE),
    st.integers(1, 3),
)
def test_it_is_all_of_the_groups_before_and_the_members_before(asked, limit, instances):
    fleet, endpoints = fleet_of(instances)
    waiting = allocate_waiting(1, 64, instances)
    waiting.groups.limit[0] = limit
    slots = []
    for number, (due_s, output) in enumerate(asked):
        slots.append(ask(waiting, due_s=due_s, arrival_s=0.01 * number, output=output))
        insert_loose(fleet, endpoints, waiting, 0)
    expected = np.random.default_rng(len(asked)).integers(1, 100, (64, 3)).astype(float)
    for slot in slots:
        group = int(waiting.groups.members["group"][slot])
        instance = int(waiting.groups.groups["queue"][group])
        counted = ahead_in_queue(fleet, endpoints, waiting, expected, slot, instance, 1.0)
        assert counted == pytest.approx((*plain(waiting, expected, slot), 0.0, 0.0, 0.0))


def test_a_large_group_is_sampled_by_its_first_members():
    fleet, endpoints = fleet_of(1)
    waiting = allocate_waiting(1, 256, 1)
    waiting.groups.limit[0] = 200
    for _ in range(100):
        ask(waiting, due_s=2.0)
    insert_loose(fleet, endpoints, waiting, 0)
    last = ask(waiting, due_s=900.0)
    insert_loose(fleet, endpoints, waiting, 0)
    expected = np.full((256, 3), 7.0)
    counted = ahead_in_queue(fleet, endpoints, waiting, expected, last, 0, 0.0)
    assert counted == pytest.approx((100.0, 700.0, 700.0, 700.0, 0.0, 0.0, 0.0))
