"""The kernels of the search against their plain twins: list scheduling, and what moves are said to cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.compiled import compiled
from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import Order
from scheduling.queueing.reordering.rules import fcfs
from scheduling.queueing.reordering.search.annealing import (
    MIX,
    MIX_OF_FEW,
    MIX_OF_WARM,
    allocate_best,
    anneal,
    best_order,
)
from scheduling.queueing.reordering.search.listing import LATE_LOOKED_AT, LOOKED_AT, allocate_listing, list_groups
from scheduling.queueing.reordering.search.moves import (
    price_exchange,
    price_removal,
    price_rotation,
    price_swap,
    rotate,
    swap,
)
from scheduling.queueing.reordering.search.scanning import (
    MOST_LOOKED_AT,
    NONE,
    OFFSETS,
    Lanes,
    allocate_lanes,
    fill,
    scan_places,
    scan_swaps,
)
from scheduling.queueing.reordering.search.sequences import Sequences, Terms, order_of, terms_of
from scheduling.queueing.reordering.searching import rows_of
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


@compiled
def price_pair(terms: Terms, state: Sequences, queue: int, at: int, there: int, most: float) -> tuple[float, float]:
    return price_rotation(terms, state, queue, at, 1, there, 1, most)


@compiled
def exchanged_in_row(terms: Terms, state: Sequences, queue: int, at: int, there: int) -> None:
    rotate(terms, state, queue, at, 1, there, 1)


@given(
    st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 60), st.sampled_from([0.7, 1.0, 1.6]), st.integers(1, 3)
)
def test_two_groups_of_a_queue_change_places_at_the_cost_that_the_orders_differ_by(seed, queues, groups, load, models):
    """Of one model or of two, neighbours or far from each other, whatever is between them."""
    problem, terms = terms_for(queues, groups, load, seed, models=models)
    random = np.random.default_rng(seed)
    state, cost = rows_of(terms, fcfs(terms))
    for _ in range(20):
        rows = order_of(state).queues()
        queue = int(random.integers(queues))
        if len(rows[queue]) < 2:
            continue
        at, there = sorted(random.choice(len(rows[queue]), 2, replace=False).tolist())
        rows[queue][at], rows[queue][there] = rows[queue][there], rows[queue][at]
        exact, balance = price_pair(terms, state, queue, at, there, np.inf)
        after = plain.objective(problem, rows, KAPPA_S)
        rounding = 1e-9 * max(1.0, cost)
        assert exact == (np.inf if after == np.inf else pytest.approx(after - cost, abs=10 * rounding))
        if exact < np.inf:
            assert price_pair(terms, state, queue, at, there, exact + balance - 20 * rounding)[0] == np.inf
            exchanged_in_row(terms, state, queue, at, there)
            assert order_of(state).queues() == rows
            cost = after


@given(
    small_problems(most_groups=12, most_queues=4, whole=False),
    st.integers(0, 2**63),
    st.sampled_from([0.0, 25.0]),
    st.sampled_from([MIX, MIX_OF_WARM, MIX_OF_FEW]),
)
def test_annealing_knows_the_cost_of_what_it_has_done(problem, seed, kappa_s, mix):
    """Whatever was moved: the sum of what moves cost is what the order costs, and all kept about it is as if anew."""
    terms = terms_of(problem, kappa_s, problem.free_s, problem.loaded)
    state, cost = rows_of(terms, fcfs(terms))
    if terms.movable.size * terms.kind.size < 2:
        return  # there is no move
    best = allocate_best(state, cost, float(terms.balance[0] * (state.end**2).sum()))
    random = np.array([seed], np.uint64)
    lanes = allocate_lanes(terms)
    fill(terms, state, lanes)
    anneal(terms, state, lanes, best, mix, random, 2_000, 100.0, 1.0)
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
    filled = allocate_lanes(terms)
    fill(terms, state, filled)
    for name in ("now", "queue", "kind"):
        assert np.array_equal(getattr(lanes, name), getattr(filled, name)), name


@compiled
def swaps_found(terms: Terms, lanes: Lanes, rank: int, first: int, end: int, temperature: float, drawn: int) -> int:
    return scan_swaps(terms, lanes, rank, first, end, (0, terms.service.shape[0] - 1), temperature, drawn)


@compiled
def places_found(terms: Terms, state: Sequences, lanes: Lanes, rank: int, first: int, end: int, most: float) -> int:
    group = terms.movable[rank]
    a, at = int(state.place[group].queue), int(state.place[group].position)
    removed = price_removal(terms, state, a, at)
    return scan_places(terms, lanes, rank, removed, first, end, (0, terms.service.shape[0] - 1), most, 0)


@compiled
def price_place(terms: Terms, state: Sequences, a: int, at: int, b: int, there: int) -> tuple[float, float]:
    return price_exchange(terms, state, a, at, 1, b, there + 1, 0, np.inf)


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(10, 80), st.sampled_from([0.7, 1.0, 1.6]))
def test_a_scan_misses_nothing_that_may_be_accepted_and_begins_with_the_best(seed, queues, groups, load):
    """What each swap, and each place behind a group of the model, costs exactly, against what the scan returns: it is some
    only where one is worth it, and where its bound is exact it is the one that is farthest below what it may cost."""
    _, terms = terms_for(queues, groups, load, seed, models=2)
    random = np.random.default_rng(seed)
    state, _ = rows_of(terms, fcfs(terms))
    lanes = allocate_lanes(terms)
    fill(terms, state, lanes)
    temperature = float(10.0 ** random.uniform(2, 5))
    for rank in random.choice(terms.movable.size, min(8, terms.movable.size), replace=False).tolist():
        group = int(terms.movable[rank])
        model = int(terms.model[group])
        first, end = int(terms.first[model]), int(terms.first[model + 1])
        a, at = (int(state.place[name][group]) for name in ("queue", "position"))
        for scan in ("swap", "place"):
            drawn = int(random.integers(OFFSETS)) if scan == "swap" else 0
            over = np.full(end - first, np.inf)
            for k, other in enumerate(terms.movable[first:end].tolist()):
                b, there = (int(state.place[name][other]) for name in ("queue", "position"))
                if b != a:
                    exact = (
                        price(terms, state, a, at, b, there, np.inf, True)
                        if scan == "swap"
                        else price_place(terms, state, a, at, b, there)
                    )
                    over[k] = sum(exact) - temperature * lanes.patience[drawn + k]
            chosen = (
                swaps_found(terms, lanes, rank, first, end, temperature, drawn)
                if scan == "swap"
                else places_found(terms, state, lanes, rank, first, end, temperature)
            )
            rounding = 0.1 + 1e-5 * float(np.abs(over[np.isfinite(over)]).max(initial=0.0))
            if chosen == NONE:
                assert over.min(initial=np.inf) > -rounding
            else:
                least = chosen // MOST_LOOKED_AT * temperature / 16.0  # its bound, rounded up by at most one sixteenth
                assert over.min() >= min(-1e6 * temperature / 16.0, least - temperature / 16.0) - rounding
                assert over[chosen % MOST_LOOKED_AT] >= least - temperature / 16.0 - rounding
