"""Groups that may change places at no cost stand by due time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import Order, Problem, begin, broken_rules
from scheduling.queueing.reordering.scheduler import reorder
from scheduling.queueing.reordering.search.sequences import order_of, terms_of
from scheduling.queueing.reordering.search.ties import by_due_time
from scheduling.queueing.reordering.searching import rows_of
from tests.examples import costly
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems


def alike(due_s, queues=2, service_s=10.0):
    """Groups of one model and of one size."""
    count = len(due_s)
    return Problem(
        requests=np.full(count, 8),
        model=np.zeros(count, np.int64),
        due_s=np.array(due_s, float),
        service_s=np.full((count, 1), service_s),
        own_s=np.full((count, 1), service_s),
        queue_type=np.zeros(queues, np.int64),
        free_s=np.zeros(queues),
        loaded=np.zeros(queues, np.int64),
        swap_s=np.full((1, 1), np.inf),
        drain_s=np.zeros((1, 1)),
        fixed=np.full(count, -1),
        hold_s=np.zeros(count),
    )


def exchanged(problem, order, kappa_s):
    """*order* of movable groups after `by_due_time`, and by its plain twin."""
    terms = terms_of(problem, kappa_s, *begin(problem)[1:])
    state, cost = rows_of(terms, order)
    by_due_time(terms, state, cost)
    return order_of(state), Order.of(plain.by_due_time(problem, order.queues(), kappa_s))


@costly(25)
@given(small_problems(), st.floats(0.0, 30.0), st.integers(0, 99))
def test_an_order_by_due_time_can_be_carried_out_and_is_worth_as_much(problem, kappa_s, seed):
    problem = problem._replace(fixed=np.full_like(problem.fixed, -1), hold_s=np.zeros_like(problem.hold_s))
    order = reorder(problem, moves=50, seed=seed).order
    score = evaluate(problem, order, kappa_s)
    made, _ = exchanged(problem, order, kappa_s)
    assert broken_rules(problem, made) == broken_rules(problem, order)
    again = evaluate(problem, made, kappa_s)
    assert again.objective <= score.objective * (1 + 1e-8) + 1e-8
    assert (again.left_over, again.swaps) <= (score.left_over, score.swaps)
    assert sorted(made.groups.tolist()) == sorted(order.groups.tolist())


@costly(25)
@given(st.lists(st.integers(-30, 90), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_the_kernel_does_as_its_plain_twin(due_s, random):
    problem = alike(due_s)
    groups = list(range(len(due_s)))
    random.shuffle(groups)
    cut = random.randint(0, len(groups))
    made, twin = exchanged(problem, Order.of([groups[:cut], groups[cut:]]), 5.0)
    assert made.queues() == twin.queues()


@given(st.permutations(range(7)))
def test_groups_that_are_in_time_anyway_are_served_as_they_are_due(shuffled):
    problem = alike([1000.0 + at for at in range(7)])
    made, _ = exchanged(problem, Order.of([shuffled[:4], shuffled[4:]]), 5.0)
    starts_s = evaluate(problem, made, 5.0).start_s
    assert starts_s.tolist() == sorted(starts_s.tolist())


def test_who_is_in_time_does_not_give_way_to_who_is_late_for_good():
    made, _ = exchanged(alike([-50.0, 12.0, 2000.0], queues=1), Order.of([[1, 2, 0]]), 60.0)
    assert made.queues()[0][0] == 1


def test_what_is_fixed_or_held_stays():
    problem = alike([40.0, 30.0, 20.0, 10.0, -5.0], queues=1)
    problem.fixed[0], problem.hold_s[1] = 0, 5.0
    order = reorder(problem, Order.of([[0, 1, 2, 3, 4]]), moves=200).order
    assert order.queues()[0][0] == 0
    assert broken_rules(problem, order) == []
