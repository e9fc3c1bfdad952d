"""Who leaves an instance for whom: on small fleets by hand, and on many by Hypothesis."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.kv_cost import prefill_s
from scheduling.queueing.eviction import GIVEN, MOST_SHARE, wanted
from scheduling.queueing.running import ends_of, left_s, running_of, step_s, write_starts
from scheduling.queueing.snapshot import snapshot
from scheduling.queueing.virtual_queues import insert_loose
from scheduling.queueing.waiting_set import allocate_waiting
from tests.examples import costly
from tests.oracles import eviction as plain
from tests.oracles.eviction import Room
from tests.scheduling.queueing.test_groups import ask, fleet_of

BATCH_S = 3600.0


def runs(
    number, *, instance=0, due_s=BATCH_S, priority=5, prompt=100, emitted=50, output=400, evictions=0, evictable=True
):
    return (number, instance, due_s, due_s, priority, prompt, emitted, prompt + output, evictions, evictable, False)


def situation(rows, dues, *, seqs=4, kv=100_000, output=10, limit=2):
    """Return the evictions for one instance that runs *rows*, with a waiting request for each of *dues*."""
    fleet, endpoints = fleet_of(1, seqs=seqs, kv=kv)
    running = running_of(rows)
    fleet.running[0], fleet.kv_tokens[0] = len(rows), int(running.expected_tokens.sum())
    waiting = allocate_waiting(1, 64, 1)
    waiting.groups.limit[0] = 64
    for due_s in dues:
        ask(waiting, due_s=due_s, output=output)
    insert_loose(fleet, endpoints, waiting, 0)
    given = fleet, endpoints, waiting, running, np.array([limit]), 0.0
    evictions = wanted(*given)
    assert evictions == plain.wanted(*given)
    return fleet, endpoints, waiting, running, evictions


def test_the_one_with_the_least_to_compute_again_leaves_for_what_would_be_late():
    rows = [runs(0), runs(1, emitted=20), runs(2, emitted=300), runs(3)]
    fleet, _, waiting, running, (eviction,) = situation(rows, [2.0])
    assert eviction.rows == (1,)
    assert eviction.lost_tokens == 120
    assert eviction.cost_s == prefill_s(fleet, 0, 120.0)
    # The one that ends first has 100 tokens to come.
    first_end_s = float(left_s(fleet, running).min())
    assert eviction.gain_s == pytest.approx(first_end_s - (2.0 - prefill_s(fleet, 0, float(waiting.prompt_tokens[0]))))
    assert eviction.group == 0


def test_groups_start_when_running_requests_leave_room():
    rows = [runs(n, emitted=399 - 50 * n) for n in range(4)]
    fleet, endpoints, waiting, running, _ = situation(rows, [900.0])
    seen = snapshot(fleet, endpoints, waiting, 0.0, running=running)
    assert seen.problem.free_s.tolist() == [pytest.approx(float(step_s(fleet, running)[0]))]
    assert snapshot(fleet, endpoints, waiting, 0.0).problem.free_s.tolist() == [0.0]


@costly(25, many=150)
@given(
    st.lists(
        st.builds(
            runs, st.just(0), due_s=st.sampled_from([1.0, 4.0, 60.0, BATCH_S]), priority=st.integers(0, 2),
            prompt=st.integers(1, 300), emitted=st.integers(0, 300), output=st.integers(1, 400),
            evictions=st.integers(0, 3), evictable=st.booleans(),
        ),
        max_size=10,
    ),
    st.lists(st.floats(-2.0, 100.0), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(300, 6000),
    st.integers(1, 300),
)  # fmt: skip
def test_what_leaves_may_can_wait_longer_and_gains_more_than_it_costs(rows, dues, seqs, kv, output):
    rows = [(number, *row[1:]) for number, row in enumerate(rows)]
    fleet, _, waiting, running, evictions = situation(rows, dues, seqs=seqs, kv=kv, output=output)
    numbers = [number for eviction in evictions for number in eviction.rows]
    assert len(set(numbers)) == len(numbers) <= max(1, int(seqs * MOST_SHARE))
    dues_of_all = sorted([*dues, *running.due_s.tolist()])
    for eviction in evictions:
        assert eviction.gain_s > eviction.cost_s >= 0.0
        assert math.isfinite(eviction.gain_s)
        for number in eviction.rows:
            assert running.evictable[number]
            assert running.evictions[number] < 2
            assert running.due_s[number] > dues_of_all[0]
    if evictions and evictions[0].group != GIVEN:
        # The one that gains first has room once these have left.
        freed = Room(fleet, running, left_s(fleet, running), 0)
        for eviction in evictions:
            for number in eviction.rows:
                freed.release(number)
        assert freed.sequences > 0
        assert freed.tokens >= int(waiting.prompt_tokens[0]) + output


@costly(60, many=1000)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([1.0, 4.0, 60.0, BATCH_S]), st.integers(0, 2), st.integers(1, 300),
            st.sampled_from([0, 0, 1, 40, 300]), st.integers(1, 400), st.integers(0, 3), st.booleans(), st.integers(0, 5),
        ),
        max_size=40,
    ),
    st.lists(st.tuples(st.floats(-2.0, 100.0), st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=20),
    st.lists(st.integers(1, 8), min_size=3, max_size=3),
    st.integers(300, 20_000),
    st.integers(1, 4),
)  # fmt: skip
def test_what_leaves_several_instances_is_what_plain_python_says(rows, asked, seqs, kv, limit):
    fleet, endpoints = fleet_of(3, kv=kv)
    fleet.max_num_seqs[:] = seqs
    running = running_of(
        (
            number,
            instance,
            due_s,
            due_s / 2,
            priority,
            prompt,
            emitted,
            prompt + output,
            evictions,
            evictable,
            leaves == 0,
        )
        for number, (instance, due_s, priority, prompt, emitted, output, evictions, evictable, leaves) in enumerate(
            rows
        )
    )
    fleet.running[:] = np.minimum(np.bincount(running.instance, minlength=3), seqs)
    fleet.kv_tokens[:] = np.bincount(running.instance, running.prompt_tokens + running.emitted_tokens, 3)
    waiting = allocate_waiting(1, 64, 3)
    waiting.groups.limit[0] = 3
    for due_s, output, priority in asked:
        ask(waiting, due_s=due_s, output=output, priority=priority)
    insert_loose(fleet, endpoints, waiting, 0)
    given_all = fleet, endpoints, waiting, running, np.array([limit]), 0.0
    assert wanted(*given_all) == plain.wanted(*given_all)
    ends = ends_of(fleet, running)
    starts_s, tokens = np.zeros(3), np.array([10.0, 200.0, 1e6])
    write_starts(fleet, ends, tokens, starts_s)
    rooms = [Room(fleet, running, ends.at_s, instance) for instance in range(3)]
    assert starts_s.tolist() == [room.take(int(each)) for room, each in zip(rooms, tokens, strict=True)]
