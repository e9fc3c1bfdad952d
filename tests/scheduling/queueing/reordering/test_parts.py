"""Orders in parts that are searched side by side: nothing is lost, and each part is the problem that it was in the whole."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.queueing.reordering.problem import broken_rules
from scheduling.queueing.reordering.scheduler import reorder, warm_up
from scheduling.queueing.reordering.search import parts as parts_module
from scheduling.queueing.reordering.search.allotting import best_allotment
from scheduling.queueing.reordering.search.listing import allocate_listing
from scheduling.queueing.reordering.search.parts import join, served_most, split
from scheduling.queueing.reordering.search.sequences import terms_of
from scheduling.queueing.reordering.searching import rows_of
from tests.scheduling.queueing.reordering.problems import synthetic

KAPPA_S = 60.0


@given(st.integers(0, 10_000), st.integers(4, 10), st.integers(20, 120), st.integers(2, 4))
def test_parts_are_the_whole_and_cost_as_much(seed, queues, groups, most):
    problem = synthetic(queues, groups, 1.0, seed)
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)
    order = best_allotment(terms, allocate_listing(terms), lambda listed: listed / 50, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "LEAST_GROUPS", 1)
        parts = split(terms, order, most)
    assert len(parts) <= most
    if not parts:
        return
    models = [set(served_most(terms, order)[part.queues].tolist()) for part in parts]
    assert sum(map(len, models)) == len(set.union(*models))  # queues of one model stay together
    assert sorted(np.concatenate([part.queues for part in parts]).tolist()) == list(range(queues))
    again = join(parts, [part.order for part in parts])
    assert again.queues() == order.queues()
    assert sum(rows_of(part.terms, part.order)[1] for part in parts) == pytest.approx(rows_of(terms, order)[1])
    for its, groups_of in ((part.terms, part.groups) for part in parts):
        ranks = terms.rank[groups_of[its.movable]]
        assert np.all(np.diff(ranks) > 0)  # by model, then deadline
        assert np.array_equal(its.rank[its.movable], np.arange(groups_of.size))
        for model in range(its.first.size - 1):
            assert np.all(its.model[its.movable[its.first[model] : its.first[model + 1]]] == model)


def test_a_part_that_would_be_small_is_none():
    problem = synthetic(6, 90, 1.0, 0)
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)
    order = best_allotment(terms, allocate_listing(terms), lambda listed: listed / 50, 0)
    assert split(terms, order, 2) == []


@pytest.mark.nightly
@settings(max_examples=5)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_threads_search_side_by_side(seed, threads):
    """Long enough that models are listed anew and there are parts; by a clock of each thread's own and by the wall's."""
    warm_up()  # or what is compiled first takes all of the time
    problem = synthetic(20, 400, 1.1, seed)
    cold = reorder(problem, None, 0.06, seed=seed, threads=threads, clock=time.thread_time)
    warm = reorder(problem, cold.order, 0.06, seed=seed, threads=threads)
    for answer in (cold, warm):
        assert broken_rules(problem, answer.order) == []
        assert answer.after.objective <= answer.before.objective
    assert cold.moves > 0  # not of the other: a busy machine may use up its 60 ms of wall time elsewhere
    assert warm.after.objective <= cold.after.objective * (1 + 1e-9)


def test_a_budget_in_moves_gives_the_same_in_any_number_of_threads():
    problem = synthetic(10, 300, 1.0, 3)
    answers = [reorder(problem, moves=5000, threads=threads).order.queues() for threads in (None, 1, 4)]
    assert answers[0] == answers[1] == answers[2]
