"""What runs still need by recorded runs: a distribution that is never ranked below its table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.predictor import (
    TABLE,
    DemandPredictor,
    Forest,
    Opening,
    Shown,
    find_leaves,
    grow,
)
from scheduling.applications.remaining import Remaining

UNITS = {name: Backend("llm", "m") for name in ("plan", "work")} | {"tool": Backend("tool", "t")}
RATES = dict.fromkeys(UNITS, ServiceRate(0.0, 0.0, 1.0))
RATE = np.array([[0.0, 0.0, 1.0]] * 3)


def graph_of(records):
    return DemandGraph("a", UNITS, records)


def told_by_the_prompt(random, runs=60):
    """Work is as long as the plan's prompt, which the table does not see; a tool comes between."""
    for _ in range(runs):
        prompt = float(random.integers(10, 1_000))
        plan = Step("plan", -1, prompt, 10.0)
        yield RunRecord((plan, Step("tool", 0, duration_s=float(random.uniform(0, 5))), Step("work", 1, 50.0, prompt)))


def of_noise(random, runs=60):
    for _ in range(runs):
        yield RunRecord((Step("plan", -1, 20.0, 5.0), Step("work", 0, 50.0, float(random.integers(1, 500)))))


def test_an_opinion_has_the_weight_that_it_has_earned():
    learned = DemandPredictor(graph_of([*told_by_the_prompt(np.random.default_rng(1))]), RATES)
    assert learned.weights[1] > 0.5
    assert learned.worth["mixture"] < 0.9 * learned.worth["table"]
    for size, seed in ((1, 1), (60, 2)):
        assert DemandPredictor(graph_of([*of_noise(np.random.default_rng(seed), size)]), RATES).weights == TABLE


def test_what_a_run_has_shown_counts_past_a_tool_and_the_table_is_of_unit_and_visit():
    predictor = DemandPredictor(graph_of([*told_by_the_prompt(np.random.default_rng(1))]), RATES)
    left_s = {}
    for prompt in (50.0, 900.0):
        shown = Shown()
        shown.add("plan", (prompt, 10.0, 1.0))
        shown.add("tool", (0.0, 2.0, 1.0))
        assert shown.last == ("plan", (prompt, 10.0, 1.0)), "a tool's is not that of an LLM"
        for learned in (True, False):
            opening = Opening("work", 50.0, 0.0, 1.0)
            drawn = predictor.draw(shown, opening, RATE, 200, None, learned)
            left_s[prompt, learned] = drawn.service_s.mean()
    assert left_s[50.0, True] < 250 < 650 < left_s[900.0, True]
    assert left_s[50.0, False] == left_s[900.0, False]


steps = st.tuples(
    st.sampled_from(["plan", "work", "tool"]),
    st.integers(1, 900),
    st.integers(0, 900),
    st.integers(1, 4),
    st.integers(-1, 30),
)


def record_of(drawn):
    made = []
    for at, (unit, taken, given_, many, above) in enumerate(drawn):
        parent = min(above, at - 1)
        if unit == "tool":
            made.append(Step(unit, parent, duration_s=given_ / 100, parallelism=many))
        else:
            made.append(
                Step(unit, parent, taken, given_, 0.0, many, longest=1.5 * given_, predicted_tokens=given_ // 2)
            )
    return RunRecord(tuple(made))


@settings(max_examples=25, deadline=None)
@given(
    runs=st.lists(st.lists(steps, min_size=1, max_size=6), min_size=1, max_size=20),
    shown=st.lists(steps, max_size=60),
    opening=steps,
)
def test_whatever_is_recorded_and_shown_a_distribution_comes_out(runs, shown, opening):
    """Nothing is negative, quantiles ascend, the weights are a mixture, and no training run is ranked below the table."""
    graph = graph_of([record_of(each) for each in runs])
    predictor = DemandPredictor(graph, RATES)
    assert sum(predictor.weights) == pytest.approx(1.0)
    assert min(predictor.weights) >= 0.0
    assert predictor.worth["mixture"] <= predictor.worth["table"] * (1 + 1e-9)
    so_far = Shown()
    for unit, taken, given_, many, _ in shown:
        so_far.add(unit, (0.0 if unit == "tool" else float(taken), float(given_), float(many)))
    unit, taken, given_, many, _ = opening
    walks = Remaining(np.full(50, 3.0), np.full(50, 2.0))
    drawn = predictor.draw(so_far, Opening(unit, taken, given_, many), RATE, 200, walks)
    seen = {step.unit for record in graph.records for step in record.steps}
    assert (drawn is None) == (unit not in seen), "of what no record has, the caller falls back to what is predicted"
    if drawn is not None:
        for samples in drawn:
            assert samples.size == 200
            assert (samples >= 0.0).all()
            assert (np.diff(np.quantile(samples, [0.1, 0.5, 0.9])) >= 0).all()
        table = DemandPredictor(graph, RATES, learned=False)
        opened = Opening(unit, taken, given_, many)
        same = [each.draw(so_far, opened, RATE, 200, walks, False).service_s for each in (predictor, table)]
        assert (same[0] == same[1]).all()
        assert (table.draw(so_far, opened, RATE, 200, None, ended=True).service_s <= same[0]).all(), (
            "less once it ended"
        )
        again = predictor.draw(so_far, Opening(unit, taken, given_, many), RATE, 200, walks)
        assert (again.service_s == drawn.service_s).all(), "both clocks draw the same"


def test_a_tree_puts_each_moment_into_one_leaf_of_its_unit_and_finds_it_there():
    random = np.random.default_rng(3)
    features, target = random.normal(size=(300, 4)), random.normal(size=300)
    roots = np.array([0, 120, 120, 300])
    rows, feature, child, begin, end = np.arange(300), *np.zeros((4, 700), np.int64)
    threshold = np.zeros(700)
    nodes = grow(features, target, rows, roots, 5, np.array([7], np.uint64), feature, threshold, child, begin, end)
    leaves = [at for at in range(nodes) if feature[at] < 0]
    assert sorted(row for at in leaves for row in rows[begin[at] : end[at]]) == list(range(300))
    forest = Forest(np.array([0, nodes]), feature, threshold, child, begin, end, rows)
    found = np.empty(1, np.int64)
    for row in range(300):
        find_leaves(forest, 0 if row < 120 else 2, features[row], found)
        assert row in rows[begin[found[0]] : end[found[0]]]
