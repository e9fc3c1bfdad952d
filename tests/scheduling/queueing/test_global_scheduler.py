import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduling.control.reordering import AGAIN_S, Reordering
from scheduling.queueing import global_scheduler
from scheduling.queueing.global_scheduler import merge, solve
from scheduling.queueing.reordering.problem import Order, broken_rules
from scheduling.queueing.snapshot import snapshot
from scheduling.queueing.swapping.service import due_at
from scheduling.queueing.virtual_queues import insert_loose
from scheduling.queueing.waiting_set import allocate_waiting, free_slot, remove
from scheduling.scaling.floor import floor_move
from tests.examples import costly
from tests.scheduling.queueing.still import Still
from tests.scheduling.queueing.test_groups import ask, fleet_of, living, members, queue_of
from tests.scheduling.scaling.views import view

MOVES = 2_000


def queues(count, dues, *, limit=1):
    """Return *count* instances and a group for each of *dues*, placed in order of arrival."""
    fleet, endpoints = fleet_of(count, seqs=1)
    waiting = allocate_waiting(1, 4 * len(dues) + 4, count)
    waiting.groups.limit[0] = limit
    for due_s in dues:
        ask(waiting, due_s=due_s, output=50)
        insert_loose(fleet, endpoints, waiting, 0)
    return fleet, endpoints, waiting


def numbers(waiting, queue):
    return [int(waiting.groups.groups[group].number) for group in queue_of(waiting, queue)]


def reversed_answer(seen):
    """Return an answer with each queue reversed."""
    answer = solve(seen, moves=1)
    return answer._replace(changed=True, order=Order.of([groups[::-1] for groups in seen.previous.queues()]))


def test_nothing_waits_nothing_is_asked():
    fleet, endpoints, waiting = queues(2, [])
    assert snapshot(fleet, endpoints, waiting, 0.0) is None
    assert Reordering(Still(fleet, endpoints, waiting)).snapshot() is None


def test_a_snapshot_says_what_waits_where_and_until_when():
    fleet, endpoints, waiting = queues(2, [60.0, 1.0, 30.0], limit=1)
    seen = snapshot(fleet, endpoints, waiting, 0.5)
    assert sorted(seen.problem.due_s.tolist()) == [0.5, 29.5, 59.5]
    assert seen.problem.requests.tolist() == [1, 1, 1]
    assert not broken_rules(seen.problem, seen.previous)
    assert [seen.numbers[groups].tolist() for groups in seen.previous.queues()] == [
        numbers(waiting, queue) for queue in (0, 1)
    ]
    # One sequence at once, 51 tokens of memory at most: 50 steps of 20 ms and the prefill.
    assert np.allclose(seen.problem.service_s, 50 * (0.02 + 1e-4) + 0.02)


def test_an_answer_is_merged_not_obeyed():
    fleet, endpoints, waiting = queues(1, [10.0, 20.0, 30.0, 40.0])
    before = numbers(waiting, 0)
    seen = snapshot(fleet, endpoints, waiting, 0.0)
    gone = members(waiting, queue_of(waiting, 0)[1])[0]
    remove(waiting, gone)
    free_slot(waiting, gone)
    new = ask(waiting, due_s=5.0)
    insert_loose(fleet, endpoints, waiting, 0)
    assert merge(fleet, endpoints, waiting, seen, reversed_answer(seen)) > 0
    kept = [before[3], before[2], before[0]]
    stands = numbers(waiting, 0)
    assert [number for number in stands if number in kept] == kept
    assert len(stands) == 4
    assert stands[0] == int(waiting.groups.groups[waiting.groups.members[new].group].number)  # due first: served first


def test_pinned_groups_keep_their_place():
    fleet, endpoints, waiting = queues(1, [10.0, 20.0, 30.0, 40.0])
    first, second, third, fourth = queue_of(waiting, 0)
    waiting.groups.groups[second].pinned = 1
    merge(fleet, endpoints, waiting, seen := snapshot(fleet, endpoints, waiting, 0.0), reversed_answer(seen))
    assert queue_of(waiting, 0) == [fourth, second, third, first]


def test_a_second_look_without_change_is_not_taken():
    fleet, endpoints, waiting = queues(1, [0.1] * 6)
    still = Still(fleet, endpoints, waiting)
    reordering = Reordering(still, moves=MOVES)
    reordering.act()
    still.now_s = 1.0
    assert reordering.snapshot() is None
    still.now_s = AGAIN_S
    assert reordering.snapshot() is not None


def test_it_says_how_many_instances_are_missing_when_no_order_helps():
    fleet, endpoints, waiting = queues(1, [3.0] * 3, limit=3)
    reordering = Reordering(Still(fleet, endpoints, waiting), moves=MOVES)
    reordering.act()
    assert reordering.short_instances == {}
    for _ in range(9):
        ask(waiting, due_s=3.0, output=50)
        insert_loose(fleet, endpoints, waiting, 0)
    reordering.act()
    # Twelve requests of a second each, one at once: three groups of three are due behind the first.
    assert reordering.short_instances[0] >= 2
    one = view(ready=1, waiting=12, min_instances=1, since_change_s=60.0)
    assert floor_move(0, one) is None
    wanted = floor_move(0, one._replace(short_instances=reordering.short_instances[0]))
    assert wanted.delta == 1
    assert "no order of the queue is in time without" in wanted.reason


@costly(25, many=60)
@given(st.integers(1, 4), st.lists(st.floats(0.1, 30.0), min_size=1, max_size=12), st.integers(0, 9))
def test_every_group_stays_in_one_queue_and_none_is_lost(count, dues, now_s):
    fleet, endpoints, waiting = queues(count, dues)
    groups = living(waiting)
    reordering = Reordering(Still(fleet, endpoints, waiting, float(now_s)), moves=MOVES)
    seen = reordering.snapshot()
    answer = reordering.solve(seen)
    reordering.merge(seen, answer)
    assert sorted(group for queue in range(count) for group in queue_of(waiting, queue)) == groups
    for queue in range(count):
        for group in queue_of(waiting, queue):
            assert waiting.groups.groups[group].queue == queue
            assert due_at(waiting, group) in dues
        backwards, group = [], int(waiting.groups.queues[queue].last)
        while group >= 0:
            backwards.append(group)
            group = int(waiting.groups.groups[group].preceding)
        assert backwards[::-1] == queue_of(waiting, queue)
    assert answer.after.objective <= answer.before.objective


def test_after_warming_up_a_look_compiles_nothing():
    kernels = (global_scheduler._put_in_order, global_scheduler._insert_each, insert_loose)
    global_scheduler.warm_up()
    before = [len(kernel.signatures) for kernel in kernels]
    fleet, endpoints, waiting = queues(2, [3.0, 1.0, 2.0])
    seen = snapshot(fleet, endpoints, waiting, 0.0)
    assert merge(fleet, endpoints, waiting, seen, reversed_answer(seen)) > 0
    assert [len(kernel.signatures) for kernel in kernels] == before
