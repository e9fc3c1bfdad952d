"""Allotments of queues to models against their plain twin, and that what they are said to cost is what their orders do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import broken_rules
from scheduling.queueing.reordering.search.allotting import Allotment, best_allotment, improve, list_model
from scheduling.queueing.reordering.search.listing import LOOKED_AT, allocate_listing
from scheduling.queueing.reordering.search.sequences import terms_of
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


@given(*drawings, st.sampled_from([0.0, 1e4]))
def test_the_costs_of_models_are_kept_whatever_was_tried(seed, queues, groups, load, hot):
    _, terms, random = drawn(seed, queues, groups, load)
    allotment, listing = allotted(terms, random), allocate_listing(terms)

    def costs():
        return [list_model(terms, listing, allotment, model, 0, np.inf)[1] for model in range(4)]

    allotment.cost[:] = costs()
    before = allotment.cost.sum()
    improve(terms, listing, allotment, np.array([seed], np.uint64), 60, hot)
    assert allotment.cost.tolist() == pytest.approx(costs())
    if hot == 0.0:
        assert allotment.cost.sum() <= before * (1 + 1e-12)


def test_more_trials_find_better_allotments():
    problem, terms, _ = drawn(3, 12, 240, 1.0)
    listing, worth = allocate_listing(terms), []
    for trials in (1, 1000):
        order = best_allotment(terms, listing, lambda tried, most=trials: tried / most, 0)
        assert broken_rules(problem, order) == []
        score = evaluate(problem, order, KAPPA_S)
        rows = [[problem.loaded[queue], *problem.model[row]] for queue, row in enumerate(order.queues())]
        assert score.swaps == sum(row[1] != row[0] for row in rows if len(row) > 1)  # none but the first
        worth.append(score.objective)
    assert worth[1] < 0.8 * worth[0]


@given(small_problems(most_groups=12, most_queues=4, whole=False), st.integers(0, 3))
def test_an_allotment_names_each_group_once_and_only_where_it_can_be_served(problem, seed):
    terms = terms_of(problem, KAPPA_S, problem.free_s, problem.loaded)
    order = best_allotment(terms, allocate_listing(terms), lambda tried: tried / 100, seed)
    wrong = [text for text in broken_rules(problem, order) if not text.endswith("is not in it")]
    assert wrong == []
