"""Allotments of queues to models against their plain twin, and that what they are said to cost is what their orders do."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import Order, broken_rules
from scheduling.queueing.reordering.search.allotting import (
    allocate_allotment,
    begin_random,
    best_allotment,
    best_of,
    list_by,
    tune,
    tuned,
)
from scheduling.queueing.reordering.search.apportioning import (
    allocate_apportionment,
    apportion,
    models_of,
    price_shifts,
    usable_queues,
)
from scheduling.queueing.reordering.search.listing import LOOKED_AT, allocate_listing
from scheduling.queueing.reordering.search.model_listing import Allotment, list_model
from scheduling.queueing.reordering.search.parts import served_most
from scheduling.queueing.reordering.search.relisting import group_costs, relisted, shifted
from scheduling.queueing.reordering.search.sequences import terms_of
from scheduling.queueing.reordering.searching import rows_of
from tests.oracles import reordering as plain
from tests.scheduling.queueing.reordering.problems import small_problems, synthetic

KAPPA_S = 300.0
UNSERVED = 5000.0


def allotted(terms, random):
    models, queues = terms.first.size - 1, terms.kind.size
    return Allotment(
        model=random.integers(0, models, queues),
        near=random.uniform(5.0, 200.0, models),
        give_up=random.uniform(-1.0, 7.0, models),
        cost=np.empty(models),
        unserved=np.array([UNSERVED]),
        queues=np.empty(queues, np.int64),
    )


def drawn(seed, queues, groups, load):
    problem = synthetic(queues, groups, load, seed)
    return problem, terms_of(problem, KAPPA_S, problem.free_s, problem.loaded), np.random.default_rng(seed)


drawings = (st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 150), st.sampled_from([0.7, 1.0, 1.6]))


@given(*drawings)
def test_groups_of_a_model_are_listed_as_the_index_says(seed, queues, groups, load):
    _, terms, random = drawn(seed, queues, groups, load)
    allotment, listing = allotted(terms, random), allocate_listing(terms)
    for model in range(4):
        count, cost = list_model(terms, listing, allotment, model, 0, np.inf)
        chosen, same = plain.listed_by_model(
            terms,
            allotment.model.tolist(),
            model,
            allotment.near[model],
            allotment.give_up[model],
            UNSERVED,
            LOOKED_AT,
        )
        assert list(zip(listing.chosen[:count].tolist(), listing.queue[:count].tolist(), strict=True)) == chosen
        assert cost == pytest.approx(same)


@given(*drawings)
def test_tuning_keeps_only_what_is_cheaper(seed, queues, groups, load):
    _, terms, random = drawn(seed, queues, groups, load)
    allotment, listing = allotted(terms, random), allocate_listing(terms)

    def costs():
        return [list_model(terms, listing, allotment, model, 0, np.inf)[1] for model in range(4)]

    allotment.cost[:] = before = costs()
    tune(terms, listing, allotment, np.array([seed], np.uint64), 60)
    assert allotment.cost.tolist() == pytest.approx(costs())
    assert all(allotment.cost <= before)


def apportioned_cost(terms, listing, allotment, apportionment, counts):
    """What a plain twin says that numbers of queues (M, T) cost: `preferred` queues of each model, listed on their own."""
    cost = []
    for model, row in enumerate(counts):
        served_by = [-1] * terms.kind.size
        for kind, many in enumerate(row):
            first = apportionment.first[kind]
            for queue in apportionment.preferred[model, first : first + many].tolist():
                served_by[queue] = model
        near, give_up = allotment.near[model], allotment.give_up[model]
        unserved = allotment.unserved[0]
        cost.append(plain.listed_by_model(terms, served_by, model, near, give_up, unserved, LOOKED_AT)[1])
    return cost


@given(*drawings, st.sampled_from([0.0, 1e6]))
def test_an_apportionment_costs_what_its_models_do_and_the_best_is_kept(seed, queues, groups, load, hot):
    _, terms, random = drawn(seed, queues, groups, load)
    listing, (allotment, mean_s) = allocate_listing(terms), allocate_allotment(terms)
    list_by(allotment, 0.1, mean_s)
    begins = random.integers(-1, 4, queues)
    apportionment = allocate_apportionment(terms, begins)
    of_type = apportionment.shares.sum(axis=0).tolist()
    first = sum(apportioned_cost(terms, listing, allotment, apportionment, apportionment.shares.tolist()))
    for _ in range(3):
        apportion(terms, listing, allotment, apportionment, np.array([seed], np.uint64), 40, hot)
    for counts, cost in (
        (apportionment.shares, apportionment.cost[:-1].sum()),
        (apportionment.best, apportionment.cost[-1]),
    ):
        assert counts.sum(axis=0).tolist() == of_type
        assert np.all((counts >= 0) & (counts <= apportionment.usable))
        assert sum(apportioned_cost(terms, listing, allotment, apportionment, counts.tolist())) == pytest.approx(cost)
    assert apportionment.cost[-1] <= first * (1 + 1e-9)
    model, usable = models_of(terms, apportionment), usable_queues(terms)
    for queue in range(queues):
        assert usable[model[queue], queue] or not usable[:, queue].any()
    for number, kind in itertools.product(range(4), range(2)):
        mine = (model == number) & (terms.kind == kind) & usable[number]
        assert mine.sum() == apportionment.best[number, kind]
        kept = mine & (apportionment.begins == number)
        had = (apportionment.begins == number) & (terms.kind == kind) & usable[number]
        assert kept.sum() == min(had.sum(), mine.sum())  # no queue changes its model for nothing


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_apportionments_is_found(seed):
    """Of all ways to share six fast queues and six slow ones, where a step of one queue alone often leads uphill."""
    problem = synthetic(12, 120, 1.0, seed, models=3, a10=0.5)
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)
    listing, (allotment, mean_s) = allocate_listing(terms), allocate_allotment(terms)
    list_by(allotment, 0.1, mean_s)
    apportionment = allocate_apportionment(terms, terms.loaded)
    shares = [row for row in itertools.product(range(7), repeat=3) if sum(row) == 6]
    known = {}

    def cost(model, many):
        if (model, many) not in known:
            counts = [many if number == model else (0, 0) for number in range(3)]
            known[model, many] = apportioned_cost(terms, listing, allotment, apportionment, counts)[model]
        return known[model, many]

    usable = [tuple(row) for row in apportionment.usable.tolist()]
    least = min(
        sum(cost(model, (fast[model], slow[model])) for model in range(3))
        for fast, slow in itertools.product(shares, shares)
        if all(fast[model] <= usable[model][0] and slow[model] <= usable[model][1] for model in range(3))
    )
    random = np.array([seed + 1], np.uint64)
    for hot in (0.01, 0.005, 0.0):
        apportion(terms, listing, allotment, apportionment, random, 2_000, hot * least)
    assert apportionment.cost[-1] == pytest.approx(least)


@given(*drawings)
def test_a_shift_is_priced_as_both_models_are_listed(seed, queues, groups, load):
    _, terms, _ = drawn(seed, queues, groups, load)
    listing, (allotment, mean_s) = allocate_listing(terms), allocate_allotment(terms)
    list_by(allotment, 0.2, mean_s)
    apportionment, price = allocate_apportionment(terms, terms.loaded), np.zeros((4, 4, 2))
    before = price_shifts(terms, listing, allotment, apportionment, price)
    counts, usable = apportionment.shares, apportionment.usable
    assert before == pytest.approx(sum(apportioned_cost(terms, listing, allotment, apportionment, counts.tolist())))
    for (giver, taker), kind in itertools.product(itertools.permutations(range(4), 2), range(2)):
        if not counts[giver, kind] or counts[taker, kind] == usable[taker, kind]:
            assert price[giver, taker, kind] == np.inf
            continue
        after = counts.copy()
        after[giver, kind] -= 1
        after[taker, kind] += 1
        cost = sum(apportioned_cost(terms, listing, allotment, apportionment, after.tolist()))
        assert price[giver, taker, kind] == pytest.approx(cost - before, abs=1e-6 * (before + 1.0))


def test_more_listings_find_better_allotments():
    problem, terms, _ = drawn(3, 12, 240, 1.0)
    listing, worth = allocate_listing(terms), []
    for listings in (1, 1000):
        order = best_allotment(terms, listing, lambda listed, most=listings: listed / most, 0)
        assert broken_rules(problem, order) == []
        score = evaluate(problem, order, KAPPA_S)
        rows = [[problem.loaded[queue], *problem.model[row]] for queue, row in enumerate(order.queues())]
        assert score.swaps == sum(row[1] != row[0] for row in rows if len(row) > 1)  # none but the first
        worth.append(score.objective)
    assert worth[1] < 0.8 * worth[0]


@given(small_problems(most_groups=12, most_queues=4, whole=False), st.integers(0, 3))
def test_an_allotment_names_each_group_once_and_only_where_it_can_be_served(problem, seed):
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)
    order = best_allotment(terms, allocate_listing(terms), lambda listed: listed / 100, seed)
    wrong = [text for text in broken_rules(problem, order) if not text.endswith("is not in it")]
    assert wrong == []


@given(st.integers(0, 10_000), st.integers(2, 10), st.integers(20, 120))
def test_models_that_cost_less_in_a_new_list_are_listed_anew_and_no_other(seed, queues, groups):
    """From an order that is good for two models and bad for the other two."""
    problem, terms, random = drawn(seed, queues, groups, 1.0)
    listing = allocate_listing(terms)
    good = best_allotment(terms, listing, lambda listed: listed / 300, seed).queues()
    spoilt = [row if queue % 2 else random.permutation(row).tolist() for queue, row in enumerate(good)]
    order = Order.of(spoilt)
    state, cost = rows_of(terms, order)
    assert group_costs(terms, state).sum() == pytest.approx(cost)
    before = served_most(terms, order)
    allotment, listed = shifted(terms, listing, before)
    tries = [
        tuned(terms, listing, allotment, lambda listed: listed / 300, listed, begin_random(seed + k)) for k in range(2)
    ]
    least = np.minimum(tries[0].cost, tries[1].cost)
    best = best_of(tries)
    assert np.array_equal(best.cost, least)
    for model in range(4):
        assert list_model(terms, listing, best, model, 0, np.inf)[1] == pytest.approx(least[model])
    anew = relisted(terms, listing, order, state, best)
    assert [text for text in broken_rules(problem, anew) if not text.endswith("is not in it")] == []
    rows, after = anew.queues(), served_most(terms, anew)
    if np.array_equal(before, after):  # no queue went to another model
        assert sorted(anew.groups.tolist()) == sorted(order.groups.tolist())
        new_state, _ = rows_of(terms, anew)
        costs = [np.bincount(terms.model, group_costs(terms, rows), minlength=4) for rows in (state, new_state)]
        assert np.all(costs[1] <= costs[0] * (1 + 1e-9))
        for queue in range(queues):
            if costs[1][before[queue]] == costs[0][before[queue]]:
                assert rows[queue] == spoilt[queue]
