"""The kernels of the search against their plain twins: list scheduling, insertion, and what annealing has done."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.annealing import allocate_best, anneal
from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.listing import IN_TIME, LATE, allocate_listing, list_groups
from scheduling.queueing.reordering.problem import Order
from scheduling.queueing.reordering.rows import order_of, rows_of, terms_of
from scheduling.queueing.reordering.rules import fcfs
from scheduling.queueing.reordering.scheduler import Budget, _Search
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic

KAPPA_S = 300.0


def terms_for(problem, kappa_s=KAPPA_S):
    return terms_of(problem, kappa_s, problem.free_s, problem.loaded, 1000.0)


@given(
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.integers(1, 150),
    st.sampled_from([0.7, 1.0, 1.6]),
    st.floats(0.02, 2.0),
    st.floats(-1.0, 7.0),
)
def test_groups_are_listed_as_the_index_says(seed, queues, groups, load, near, give_up):
    terms = terms_for(synthetic(queues, groups, load, seed))
    random = np.random.default_rng(seed)
    near_s = near * random.uniform(50.0, 200.0, 4)
    swap_s = near * random.uniform(10.0, 60.0)
    listing = allocate_listing(terms)
    listing.weights[:] = [*np.log(near_s), *[give_up] * 4, np.log(swap_s)]
    count, cost = list_groups(terms, listing, terms.kind.size, 0, 4, 0, np.inf)
    chosen, same = plain.listed(terms, near_s, swap_s, give_up, IN_TIME, LATE, listing.unserved[0])
    assert list(zip(listing.chosen[:count].tolist(), listing.queue[:count].tolist(), strict=True)) == chosen
    assert cost == pytest.approx(same)
    if 0.0 < cost < np.inf:
        assert list_groups(terms, listing, terms.kind.size, 0, 4, 0, cost * 0.99)[1] == np.inf


@given(
    small_problems(most_groups=12, most_queues=4, whole=False),
    st.integers(0, 2**63),
    st.sampled_from([0.0, 25.0]),
)
def test_annealing_tracks_the_cost_of_its_moves(problem, seed, kappa_s):
    """After any moves, the sum of their costs equals the cost of the order, and the rows equal freshly built ones."""
    terms = terms_for(problem, kappa_s)
    rows, _ = rows_of(terms, fcfs(terms))
    if terms.movable.size * terms.kind.size < 2:
        return  # there is no move
    best = allocate_best(rows)
    anneal(terms, rows, best, np.array([seed], np.uint64), 2_000, 100.0, 1.0)
    order = order_of(rows.length, rows.group)
    score = evaluate(problem, order, kappa_s)
    balance = float(terms.balance[0] * (score.end_s**2).sum())
    assert best.cost[:2] == pytest.approx([score.objective, score.objective + balance], abs=1e-4)
    fresh, its = rows_of(terms, order)
    assert best.cost[1] == pytest.approx(its, abs=1e-4)
    for queue, length in enumerate(rows.length.tolist()):
        for name, last in (("ready", length + 1), ("cost", length + 1), ("group", length)):
            assert getattr(rows, name)[queue, :last] == pytest.approx(getattr(fresh, name)[queue, :last])
    assert np.array_equal(rows.place[order.groups], fresh.place[order.groups])
    kept = order_of(best.length, best.group)
    assert best.cost[2] == pytest.approx(evaluate(problem, kept, kappa_s).objective, abs=1e-4)
    assert best.cost[3] == pytest.approx(rows_of(terms, kept)[1], abs=1e-4)
    assert best.cost[2] <= evaluate(problem, fcfs(terms), kappa_s).objective + 1e-4


@given(small_problems(most_groups=7, most_queues=3), st.sampled_from([0.0, 25.0]), st.integers(0, 6))
def test_a_new_group_goes_where_it_costs_least(problem, kappa_s, new):
    terms = terms_for(problem, kappa_s)
    group = new % problem.requests.size
    without = Order.of([[each for each in queue if each != group] for queue in fcfs(terms).queues()])
    rows, cost = rows_of(terms, without, np.array([group]))
    everywhere = []
    for queue, groups in enumerate(without.queues()):
        for at in range(len(groups) + 1):
            tried = without.queues()
            tried[queue].insert(at, group)
            everywhere.append(rows_of(terms, Order.of(tried))[1])
    assert cost == pytest.approx(min(everywhere))
    assert group in order_of(rows.length, rows.group).groups


def test_groups_of_a_class_are_sorted_by_due_time_where_that_costs_nothing():
    """All are in time in any order, or all are late by far."""
    for due_s in (np.linspace(9e5, 1e6, 30), np.linspace(-1e6, -9e5, 30)):
        problem = synthetic(3, 30, 1.0, 4, models=1, a10=0.0)._replace(due_s=due_s)
        problem.requests[:], problem.service_s[:], problem.own_s[:] = 100, 50.0, 20.0
        search = _Search(problem, KAPPA_S, Budget(0.0, 0, lambda: 0.0), 0)
        search.terms.free[:] = 0.0
        mixed = search.complete(Order.of([[queue + 3 * (at ^ 1) for at in range(10)] for queue in range(3)]))
        order = search.by_due_time(mixed)
        assert search.cost(order) == pytest.approx(search.cost(mixed))
        start_s = evaluate(problem._replace(free_s=np.zeros(3)), order, KAPPA_S).start_s
        assert np.all(np.diff(start_s[np.argsort(due_s)]) >= -1e-6)
