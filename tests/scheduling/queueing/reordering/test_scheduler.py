"""The global scheduler: every order can be carried out, small ones are the best of all, none is worse than the fallback."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import Order, Problem, broken_rules, contiguous
from scheduling.queueing.reordering.rules import CANDIDATES, PROGRAMME, RULES, SEARCH
from scheduling.queueing.reordering.scheduler import LEAST_GAIN, order_by, reorder
from tests.examples import costly
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic

MOVES = 20_000
kappas = st.sampled_from([0.0, 1.0, 25.0])


@costly(100)
@given(small_problems(most_groups=5, most_queues=2), kappas)
def test_small_orders_are_the_best_of_all(problem, kappa_s):
    answer = reorder(problem, moves=MOVES, kappa_s=kappa_s)
    assert broken_rules(problem, answer.order) == []
    assert plain.objective(problem, answer.order.queues(), kappa_s) == pytest.approx(answer.after.objective)
    assert answer.after.objective == pytest.approx(plain.least_objective(problem, kappa_s))


@given(small_problems(most_groups=12, most_queues=4), kappas, st.randoms(use_true_random=False))
def test_no_rule_is_better_also_where_an_order_is_there(problem, kappa_s, random):
    """For any previous order and any number of moves."""
    groups = list(range(problem.requests.size))
    random.shuffle(groups)
    queues = problem.queue_type.size
    known = [[each for each in groups[queue::queues] if np.isfinite(problem.service_s[each, problem.queue_type[queue]])]
             for queue in range(queues)]  # fmt: skip
    answer = reorder(problem, Order.of(known), moves=1, kappa_s=kappa_s)
    if answer.before.objective > 0.0 or answer.before.left_over:
        for name in CANDIDATES:
            ruled = evaluate(problem, order_by(name, problem), kappa_s)
            best = answer.after.left_over, answer.after.objective * (1 - LEAST_GAIN)
            assert best <= (ruled.left_over, ruled.objective + 1e-9)


@costly(10, many=60)
@given(small_problems(most_groups=5, most_queues=2), kappas)
def test_the_programme_finds_the_best_order(problem, kappa_s):
    sought = reorder(problem, moves=200, kappa_s=kappa_s)
    answer = reorder(problem, moves=200, kappa_s=kappa_s, by=PROGRAMME)
    least = plain.least_objective(problem, kappa_s)
    assert broken_rules(problem, answer.order) == []
    assert answer.after.objective <= sought.after.objective
    assert answer.after.objective == pytest.approx(least, rel=2 * LEAST_GAIN, abs=1e-3)


def test_many_groups_are_the_search_s_alone():
    problem = synthetic(4, 60, 1.0, 3)
    answer, sought = (reorder(problem, moves=500, by=name) for name in (PROGRAMME, SEARCH))
    assert answer.order.queues() == sought.order.queues()


def test_a_rule_that_keeps_all_in_time_is_taken_as_it_is():
    """EDF keeps slack for later arrivals; another order that is as good now need not."""
    problem = synthetic(3, 12, 0.5, 1, models=1)._replace(due_s=np.linspace(1e5, 2e5, 12))
    problem.due_s[11] = problem.free_s.max() + problem.own_s[11].max() + 1.0  # it must go first
    answer = reorder(problem, Order.of([list(range(12)), [], []]), moves=5_000)
    assert answer.before.objective > 0.0
    assert answer.after.objective == 0.0
    assert answer.order.queues() == order_by("edf-earliest-completion", problem).queues()


def test_one_group_alone_goes_where_it_starts_in_time():
    """Both queues would end at the same time; the group is in time only without a swap before it."""
    problem = Problem(
        requests=np.array([1]),
        model=np.array([1]),
        due_s=np.array([0.0]),
        service_s=np.array([[1.0, 2.0]]),
        own_s=np.zeros((1, 2)),
        queue_type=np.array([0, 1]),
        free_s=np.zeros(2),
        loaded=np.array([0, 0]),
        swap_s=np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        drain_s=np.zeros((2, 3)),
        fixed=np.array([-1]),
    )
    assert reorder(problem, moves=1_000, kappa_s=0.0).order.queues() == [[], [0]]


@given(small_problems(most_groups=12, most_queues=4, whole=False), kappas, st.randoms(use_true_random=False))
def test_any_order_can_be_carried_out_and_is_scored_as_its_twin_does(problem, kappa_s, random):
    n, queues = problem.requests.size, problem.queue_type.size
    problem.fixed[:] = [random.choice([-1, -1, -1, random.randrange(queues)]) for _ in range(n)]
    cold = reorder(problem, moves=500, kappa_s=kappa_s)
    known = [[group for group in row if random.random() < 0.7] for row in cold.order.queues()]
    random.shuffle(known)
    for order in (
        cold.order,
        reorder(problem, Order.of(known), moves=500, kappa_s=kappa_s).order,
        *(reorder(problem, by=name).order for name in RULES),
    ):
        can = np.isfinite(problem.service_s[np.arange(n), problem.queue_type[problem.fixed]])
        if all(can[problem.fixed >= 0]) and np.isfinite(problem.swap_s).all():
            assert broken_rules(problem, order) == []
        score = evaluate(problem, order, kappa_s)
        times, swaps = plain.served(problem, order.queues())
        assert score.swaps == swaps
        assert score.objective == pytest.approx(plain.objective(problem, order.queues(), kappa_s))
        groups = list(times)
        assert score.start_s[groups] == pytest.approx([times[group][0] for group in groups])
        assert score.late_s[groups] == pytest.approx([times[group][1] for group in groups])
        assert score.left_over == sum(problem.requests[g] for g in range(n) if g not in times)


@given(small_problems(most_groups=12, most_queues=3), st.integers(0, 3))
def test_never_worse_than_its_fallbacks_and_the_same_again(problem, seed):
    answer = reorder(problem, moves=300, seed=seed, kappa_s=5.0)
    for name in ("fcfs", "edf-earliest-completion"):
        assert answer.after.objective <= evaluate(problem, order_by(name, problem), 5.0).objective + 1e-6
    again = reorder(problem, moves=300, seed=seed, kappa_s=5.0)
    assert again.order.queues() == answer.order.queues()


def test_nothing_changes_while_no_group_is_late():
    problem = synthetic(4, 20, 0.5, seed=3)
    problem.due_s[:] = np.inf
    previous = order_by("fcfs", problem)
    answer = reorder(problem, previous, moves=1000)
    assert not answer.changed
    assert answer.moves == 0
    assert answer.order.queues() == previous.queues()


def test_new_groups_go_where_they_cost_least_and_gone_ones_are_left_out():
    problem = synthetic(4, 20, 0.5, seed=3)
    problem.due_s[:] = np.inf
    rows = order_by("fcfs", problem).queues()
    gone = rows[1].pop()
    answer = reorder(problem, Order.of(rows), moves=1000)
    assert not answer.changed
    assert sorted(answer.order.groups.tolist()) == list(range(20))
    for row, before in zip(answer.order.queues(), rows, strict=True):
        assert [group for group in row if group != gone] == before


def test_without_deadlines_queues_are_even():
    problem = synthetic(5, 60, 1.0, seed=2)
    problem.due_s[1:] = np.inf
    problem.due_s[0] = -1.0
    score = evaluate(problem, reorder(problem, moves=50_000).order, 0.0)
    assert score.end_s.max() - score.end_s.min() < 2 * problem.service_s[np.isfinite(problem.service_s)].max()


def test_better_than_every_rule_on_both_counts():
    problem = synthetic(10, 200, 1.0, seed=5)
    answer = reorder(problem, moves=300_000)
    for name in RULES:
        score = evaluate(problem, order_by(name, problem), 0.0)
        assert answer.after.attainment > score.attainment
        assert answer.after.lateness_s < score.lateness_s


def test_a_stale_order_with_impossible_places_is_mended():
    problem = synthetic(4, 40, 1.0, seed=1)
    a10 = int(np.flatnonzero(problem.queue_type == 1)[0])
    biggest = np.flatnonzero(~np.isfinite(problem.service_s[:, 1]))
    rows = [[] for _ in range(4)]
    rows[a10] = [int(biggest[0]), int(biggest[0]), 999, -4]
    answer = reorder(problem, Order.of(rows), moves=1000)
    assert broken_rules(problem, answer.order) == []


def test_says_when_only_more_instances_help():
    problem = synthetic(4, 40, 1.0, seed=1)
    problem.due_s[:] = 1.0 + problem.due_s * 0.2
    answer = reorder(problem, moves=20_000)
    assert answer.shortage.seconds > 0
    assert "Only more instances help" in answer.reason
    problem.due_s[:] += 5000.0
    assert reorder(problem, moves=20_000).shortage.seconds == 0


@costly(40)
@given(small_problems(most_groups=4, most_queues=2))
def test_the_shortage_is_never_more_than_there_is(problem):
    answer = reorder(problem, moves=MOVES, kappa_s=1.0)
    if answer.shortage.seconds > 0:
        due = np.where(problem.due_s > 0, problem.due_s, np.inf)  # what is over is late under any fleet
        assert plain.least_objective(problem._replace(due_s=due), 1.0) > 0


def test_wrong_problems_are_refused():
    problem = synthetic(2, 5, 1.0, seed=0)
    with pytest.raises(ValueError, match="shape"):
        contiguous(problem._replace(due_s=np.zeros(4)))
    with pytest.raises(ValueError, match="model"):
        contiguous(problem._replace(model=np.full(5, 9)))
    with pytest.raises(ValueError, match="negative"):
        contiguous(problem._replace(free_s=np.full(2, np.nan)))
    with pytest.raises(ValueError, match="no queue"):
        reorder(problem._replace(queue_type=np.zeros(0, int), free_s=np.zeros(0), loaded=np.zeros(0, int)))


@pytest.mark.parametrize("seed", range(3))
def test_models_of_the_fleet_that_no_group_is_of_change_nothing(seed):
    """The gateway knows all models, the simulator only those of its requests: both give the same next order."""
    problem = synthetic(4, 60, 1.3, seed)
    before = Order.of([row[: len(row) // 2] for row in order_by("edf-earliest-completion", problem).queues()])
    more = {name: np.hstack([getattr(problem, name), np.full((2, 12), np.inf)]) for name in ("swap_s", "drain_s")}
    more["drain_s"][:, 4:] = 0.0
    answers = [reorder(one, before, moves=20_000) for one in (problem, problem._replace(**more))]
    assert answers[0].changed
    assert answers[0].order.queues() == answers[1].order.queues()


def test_an_order_in_which_every_group_is_fixed_stays_as_it_is():
    problem = synthetic(2, 20, 1.0, seed=0, models=1, a10=0.0)
    problem.due_s[:], problem.fixed[:] = 1.0, np.arange(20) % 2
    for previous in (None, Order.of([[], []])):
        answer = reorder(problem, previous, moves=20_000)
        assert answer.before.objective > 0.0
        assert sorted(answer.order.groups.tolist()) == list(range(20))
