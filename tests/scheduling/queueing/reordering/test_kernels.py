"""The kernels of the search against their plain twins: list scheduling, and what moves are said to cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.compiled import compiled
from scheduling.queueing.reordering.annealing import MIX, allocate_best, anneal, best_order
from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.listing import LATE_LOOKED_AT, LOOKED_AT, allocate_listing, list_groups
from scheduling.queueing.reordering.moves import price_exchange, price_swap, swap
from scheduling.queueing.reordering.problem import Order
from scheduling.queueing.reordering.rules import fcfs
from scheduling.queueing.reordering.scheduler import rows_of
from scheduling.queueing.reordering.sequences import Sequences, Terms, order_of, terms_of
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic

KAPPA_S = 300.0


def terms_for(queues, groups, load, seed, models=4):
    problem = synthetic(queues, groups, load, seed, models)
    return problem, terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)


@given(
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.integers(1, 150),
    st.sampled_from([0.7, 1.0, 1.6]),
    st.floats(0.02, 2.0),
    st.floats(-1.0, 7.0),
)
def test_groups_are_listed_as_the_index_says(seed, queues, groups, load, near, give_up):
    _, terms = terms_for(queues, groups, load, seed)
    random = np.random.default_rng(seed)
    affinity, near_s = random.normal(0.0, 0.5, (2, 4)), near * random.uniform(50.0, 200.0, 4)
    swap_s = near * random.uniform(10.0, 60.0)
    listing = allocate_listing(terms)
    count, cost = list_groups(terms, listing, affinity, near_s, swap_s, give_up, np.inf)
    chosen, same = plain.listed(terms, affinity, near_s, swap_s, give_up, LOOKED_AT, LATE_LOOKED_AT)
    assert list(zip(listing.chosen[:count].tolist(), listing.queue[:count].tolist(), strict=True)) == chosen
    assert cost == pytest.approx(same)
    if cost < np.inf:
        assert list_groups(terms, listing, affinity, near_s, swap_s, give_up, cost * 0.99)[1] == (
            np.inf if cost else 0.0
        )


@compiled
def price(
    terms: Terms, state: Sequences, a: int, at: int, b: int, there: int, most: float, one_model: bool
) -> tuple[float, float]:
    if one_model:
        return price_swap(terms, state, a, at, b, there, most)
    return price_exchange(terms, state, a, at, 1, b, there, 1, most)


@compiled
def swapped(terms: Terms, state: Sequences, a: int, at: int, b: int, there: int) -> None:
    swap(terms, state, a, at, b, there)


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(2, 80), st.sampled_from([0.7, 1.0, 1.6]))
def test_a_swap_costs_what_the_orders_differ_by(seed, queues, groups, load):
    problem, terms = terms_for(queues, groups, load, seed, models=2)
    random = np.random.default_rng(seed)
    state, _ = rows_of(terms, fcfs(terms))
    for _ in range(20):
        rows = order_of(state).queues()
        before = evaluate(problem, Order.of(rows), KAPPA_S).objective
        a, b = random.choice(queues, 2, replace=False).tolist()
        if not rows[a] or not rows[b]:
            continue
        at, there = int(random.integers(len(rows[a]))), int(random.integers(len(rows[b])))
        one, other = rows[a][at], rows[b][there]
        rows[a][at], rows[b][there] = other, one
        exact, _ = price(terms, state, a, at, b, there, np.inf, False)
        after = plain.objective(problem, rows, KAPPA_S)
        rounding = 1e-9 * max(1.0, before)
        assert exact == pytest.approx(after - before, abs=rounding)
        if terms.model[one] == terms.model[other]:
            quick, balance = price(terms, state, a, at, b, there, np.inf, True)
            assert quick == pytest.approx(exact, abs=rounding)
            if quick < np.inf:
                too_little = quick + balance - 10 * rounding
                assert price(terms, state, a, at, b, there, too_little, True)[0] == np.inf
                swapped(terms, state, a, at, b, there)
                assert order_of(state).queues() == rows


@given(small_problems(most_groups=12, most_queues=4, whole=False), st.integers(0, 2**63), st.sampled_from([0.0, 25.0]))
def test_annealing_knows_the_cost_of_what_it_has_done(problem, seed, kappa_s):
    """Whatever was moved: the sum of what moves cost is what the order costs, and all kept about it is as if anew."""
    terms = terms_of(problem, kappa_s, problem.free_s, problem.loaded)
    state, cost = rows_of(terms, fcfs(terms))
    if terms.movable.size * terms.kind.size < 2:
        return  # there is no move
    best = allocate_best(state, cost, float(terms.balance[0] * (state.end**2).sum()))
    random = np.array([seed], np.uint64)
    anneal(terms, state, best, MIX, random, 2_000, 100.0, 1.0)
    order = order_of(state)
    score = evaluate(problem, order, kappa_s)
    assert best.cost[0] == pytest.approx(score.objective, abs=1e-4)
    assert best.cost[1] == pytest.approx(float(terms.balance[0] * (score.end_s**2).sum()), abs=1e-4)
    assert best.cost[2] == pytest.approx(evaluate(problem, best_order(best), kappa_s).objective, abs=1e-4)
    assert best.cost[2] <= cost + 1e-4
    anew, _ = rows_of(terms, order)
    for queue, length in enumerate(state.length.tolist()):
        for name in ("ready", "start", "late", "cost", "late_weight", "rise", "fall", "group", "loaded"):
            kept, fresh = state.row[name][queue], anew.row[name][queue]
            last = length if name in ("start", "late", "group") else length + 1
            assert kept[:last] == pytest.approx(fresh[:last])
