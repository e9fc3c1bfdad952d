"""Allotments of queues to models: their costs are those of their models, the best is found and kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.allotting import (
    GIVE_UP,
    NEAR,
    allocate_allotment,
    apportion,
    best_allotment,
    models_of,
    usable_queues,
)
from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.listing import IN_TIME, LATE, allocate_listing, mean_service_s
from scheduling.queueing.reordering.problem import broken_rules
from scheduling.queueing.reordering.rows import terms_of
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic

KAPPA_S = 300.0
SPAN_S = 5000.0

drawings = (st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 150), st.sampled_from([0.7, 1.0, 1.6]))


def drawn(seed, queues, groups, load, **kinds):
    problem = synthetic(queues, groups, load, seed, **kinds)
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded, SPAN_S)
    listing, models = allocate_listing(terms), terms.first.size - 1
    listing.weights[:models] = np.log(NEAR * mean_service_s(terms))
    listing.weights[models : 2 * models] = GIVE_UP / np.sqrt(NEAR)
    return problem, terms, listing


def model_cost(terms, listing, allotment, model, counts):
    """Cost of *model* by the oracle when its first *counts* (T,) preferred queues of each type serve it, and it alone."""
    queues = [
        queue
        for kind, many in enumerate(counts)
        for queue in allotment.preferred[model, allotment.first[kind] : allotment.first[kind] + many].tolist()
    ]
    groups, first = terms.movable[terms.first[model] : terms.first[model + 1]], np.zeros_like(terms.first)
    first[model + 1 :] = groups.size
    only = terms._replace(
        movable=groups, first=first, kind=terms.kind[queues], free=terms.free[queues], loaded=terms.loaded[queues]
    )
    models = terms.first.size - 1
    near_s, give_up = np.exp(listing.weights[:models]), listing.weights[models + model]
    unserved = listing.unserved[0]
    return plain.listed(only, near_s, 1.0, give_up, IN_TIME, LATE, unserved)[1]


@given(*drawings, st.sampled_from([0.0, 1e6]))
def test_an_allotment_costs_what_its_models_do_and_the_cheapest_is_kept(seed, queues, groups, load, hot):
    _, terms, listing = drawn(seed, queues, groups, load)
    usable = usable_queues(terms)
    allotment = allocate_allotment(terms, usable)
    of_type = allotment.shares.sum(axis=0).tolist()

    def cost(counts):
        return sum(model_cost(terms, listing, allotment, model, row) for model, row in enumerate(counts.tolist()))

    first = cost(allotment.shares)
    for _ in range(3):
        apportion(terms, listing, allotment, np.array([seed], np.uint64), 40, hot)
    kept = ((allotment.shares, allotment.cost[:-1].sum()), (allotment.best, allotment.cost[-1]))
    for counts, said in kept:
        assert counts.sum(axis=0).tolist() == of_type
        assert np.all((counts >= 0) & (counts <= allotment.usable))
        assert cost(counts) == pytest.approx(said)
    assert allotment.cost[-1] <= first * (1 + 1e-9)
    model = models_of(terms, allotment, usable)
    for number, kind in itertools.product(range(4), range(2)):
        mine = (model == number) & (terms.kind == kind) & usable[number]
        assert mine.sum() == allotment.best[number, kind]
    assert all(usable[model[queue], queue] or not usable[:, queue].any() for queue in range(queues))


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_of_all_allotments_is_found(seed):
    """Over all allotments of six fast and six slow queues; moving a single queue is often worse."""
    _, terms, listing = drawn(seed, 12, 120, 1.0, models=3, a10=0.5)
    allotment = allocate_allotment(terms, usable_queues(terms))
    shares = [row for row in itertools.product(range(7), repeat=3) if sum(row) == 6]
    usable = allotment.usable.tolist()
    costs = [
        {
            counts: model_cost(terms, listing, allotment, model, counts)
            for counts in itertools.product(range(usable[model][0] + 1), range(usable[model][1] + 1))
        }
        for model in range(3)
    ]
    least = min(
        sum(costs[model][fast[model], slow[model]] for model in range(3))
        for fast, slow in itertools.product(shares, shares)
        if all((fast[model], slow[model]) in costs[model] for model in range(3))
    )
    random = np.array([seed + 1], np.uint64)
    for hot in (0.01, 0.005, 0.0):
        apportion(terms, listing, allotment, random, 2_000, hot * least)
    assert allotment.cost[-1] == pytest.approx(least)


@given(small_problems(most_groups=12, most_queues=4), st.integers(0, 2**31))
def test_the_best_allotment_serves_each_queue_one_model(problem, seed):
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded, SPAN_S)
    order = best_allotment(terms, np.array([seed], np.uint64), lambda listed: listed / 50)
    # A model may be left without a queue: its groups are placed by the search afterwards.
    assert [rule for rule in broken_rules(problem, order) if "is not in it" not in rule] == []
    assert all(len(set(problem.model[row].tolist())) <= 1 for row in order.queues())


def test_more_listings_find_better_allotments():
    problem, terms, _ = drawn(3, 12, 240, 1.0)
    objectives = []
    for listings in (1, 1000):
        order = best_allotment(terms, np.array([1], np.uint64), lambda listed, most=listings: listed / most)
        assert broken_rules(problem, order) == []
        objectives.append(evaluate(problem, order, KAPPA_S).objective)
    assert objectives[1] < 0.8 * objectives[0]
