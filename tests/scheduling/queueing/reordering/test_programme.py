"""The mixed-integer programme: its optimum is that of all orders, and what the scalable search finds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import broken_rules
from scheduling.queueing.reordering.programme import NoAnswer, solve
from scheduling.queueing.reordering.scheduler import reorder
from tests.examples import at_night_but, costly
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic


@costly(25)
@given(small_problems(most_groups=4), st.sampled_from([0.0, 10.0]))
def test_its_optimum_is_the_least_of_all_orders(problem, kappa_s):
    solved = solve(problem, kappa_s, 60.0)
    assert broken_rules(problem, solved.order) == []
    assert evaluate(problem, solved.order, kappa_s).objective == pytest.approx(solved.objective, abs=1e-3)
    assert solved.objective == pytest.approx(plain.least_objective(problem, kappa_s), abs=1e-3)


@pytest.mark.parametrize(("groups", "seed"), at_night_but([(8, 1)], [(8, 0), (8, 1), (9, 2)]))
def test_the_search_finds_the_least_of_all_orders_of_two_queues(groups, seed):
    """More groups than the programme proves in two minutes on any machine, so all orders are enumerated here."""
    problem = synthetic(2, groups, 1.0, seed, models=3, a10=0.5)
    answer = reorder(problem, moves=100_000, kappa_s=0.0)
    assert broken_rules(problem, answer.order) == []
    least = plain.least_below(problem, 0.0, answer.after.objective * (1.0 + 1e-9))
    assert answer.after.objective == pytest.approx(least, rel=1e-6)


@costly(25)
@given(small_problems(most_groups=4), st.sampled_from([0.0, 10.0]))
def test_the_least_is_the_same_where_dear_orders_are_given_up(problem, kappa_s):
    least = plain.least_objective(problem, kappa_s)
    assert plain.least_below(problem, kappa_s, math.inf) == pytest.approx(least, abs=1e-9)
    assert plain.least_below(problem, kappa_s, least / 2) == least / 2


def test_groups_that_are_fixed_come_first():
    problem = synthetic(2, 5, 1.0, seed=2, models=2, a10=0.0)
    problem.fixed[3] = 1
    order = solve(problem).order
    assert order.queues()[1][0] == 3


def test_a_group_that_no_instance_serves_is_named():
    problem = synthetic(2, 3, 1.0, seed=2, models=1, a10=0.0)
    problem.service_s[1] = np.inf
    with pytest.raises(NoAnswer, match="group 1"):
        solve(problem)
