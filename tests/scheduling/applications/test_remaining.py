"""Demand graphs: what they learn, and samples of what a run still needs."""

import numpy as np
import pytest

from scheduling.applications.demand_graph import (
    MOST_RECORDS,
    Backend,
    DemandGraph,
    RunRecord,
    ServiceRate,
    Step,
)
from scheduling.applications.recording import Call, record_of
from scheduling.applications.remaining import MOST_PASSES, UNKNOWN, Position, build, remaining
from tests.oracles import applications as plain

LLM = Backend("llm", "llama")
RATE = ServiceRate(0.5, 0.001, 0.02)


def graph_of(records, *units):
    graph = DemandGraph("app", dict.fromkeys(units, LLM))
    for record in records:
        graph.add(record)
    return graph


def chain(*steps):
    return RunRecord(
        tuple(Step(unit, at - 1, taken, given, 0.0, many) for at, (unit, taken, given, many) in enumerate(steps))
    )


def reviewed(random, count):
    """Write, then review one to three times; the review's input follows what was written, its output is noise."""
    for _ in range(count):
        written = random.uniform(100, 1000)
        reviews = [("review", 1.5 * written + random.normal(0, 10), random.uniform(50, 60), 1)] * random.integers(1, 4)
        yield chain(("write", random.uniform(200, 400), written, 1), *reviews)


def at(graph, unit, *known):
    index = list(graph.units).index(unit)
    return Position(
        unit=np.array([index]),
        before=np.array([len(graph.units)]),
        known=np.array([known], float),
        known_before=np.zeros((1, 3)),
        visits=np.zeros(len(graph.units), np.int64),
    )


def test_samples_are_as_records_say_without_correlations():
    random = np.random.default_rng(1)
    graph = graph_of(reviewed(random, 200), "write", "review")
    rates = dict.fromkeys(graph.units, RATE)
    position = at(graph, "write", 300.0, 500.0, 1.0)
    samples = remaining(build(graph, rates, refined=False), position, 20_000, 7).service_s
    same = plain.remaining_s(graph, rates, "write", 300.0, 500.0, 3_000, random)
    assert samples.mean() == pytest.approx(same.mean(), rel=0.03)
    assert np.quantile(samples, (0.1, 0.5, 0.9)) == pytest.approx(np.quantile(same, (0.1, 0.5, 0.9)), rel=0.06)


def test_what_correlates_narrows_the_samples():
    random = np.random.default_rng(2)
    graph = graph_of(reviewed(random, 300), "write", "review")
    rates = {"write": ServiceRate(0, 0, 0), "review": ServiceRate(0, 1.0, 0)}
    errors = {}
    for refined in (True, False):
        arrays = build(graph, rates, refined=refined)
        means = [
            remaining(arrays, at(graph, "write", 300.0, written, 1.0), 2_000, 3).service_s.mean()
            for written in (150, 950)
        ]
        errors[refined] = [abs(mean - 2 * 1.5 * written) for mean, written in zip(means, (150, 950), strict=True)]
    assert max(errors[True]) < 250 < min(errors[False])


def test_with_few_matches_a_condition_is_dropped():
    """Seven records in a bucket are too few: all records are drawn from."""
    records = [chain(("a", 100, 100, 1), ("b", 100, 1, 1))] * 7 + [chain(("a", 900, 900, 1), ("b", 900, 1, 1))] * 20
    graph = graph_of(records, "a", "b")
    arrays = build(graph, {"a": ServiceRate(0, 0, 0), "b": ServiceRate(0, 1.0, 0)})
    few = remaining(arrays, at(graph, "a", 100.0, 100.0, 1.0), 4_000, 1).service_s
    many = remaining(arrays, at(graph, "a", 900.0, 900.0, 1.0), 4_000, 1).service_s
    assert set(few.tolist()) == {100.0, 900.0}
    assert set(many.tolist()) == {900.0}


@pytest.mark.parametrize("records", [1, 2, 10])
def test_a_loop_that_always_ran_three_times_ends_after_three(records):
    graph = graph_of([chain(*[("fix", 10, 10, 1)] * 3)] * records, "fix")
    arrays = build(graph, {"fix": ServiceRate(1.0, 0, 0)})
    assert set(remaining(arrays, at(graph, "fix", *[UNKNOWN] * 3), 200, 1).service_s.tolist()) == {3.0}


def test_loops_of_few_records_end_as_these_did():
    """Three runs of 10 to 12 passes: one at its ninth goes on for two or three, one past all of them ends soon."""
    graph = graph_of([chain(*[("fix", 10, 10, 1)] * passes) for passes in (10, 11, 12)], "fix")
    arrays = build(graph, {"fix": ServiceRate(1.0, 0, 0)})

    def left(visits):
        position = at(graph, "fix", *[UNKNOWN] * 3)._replace(visits=np.array([visits]))
        return remaining(arrays, position, 2_000, 1).service_s.mean()

    assert left(0) == pytest.approx(11.0, abs=0.5)
    assert left(8) == pytest.approx(3.0, abs=0.5)
    assert left(14) < 2.5


def test_a_parallelism_of_which_a_part_has_come_is_drawn_from_records_of_as_many():
    graph = graph_of([chain(("map", 1, 1, many)) for many in [1, 2, 4] * 10], "map")
    arrays = build(graph, {"map": ServiceRate(1.0, 0, 0)})
    for known, drawn in ((UNKNOWN, {1.0, 2.0, 4.0}), (-2.0, {2.0, 4.0}), (-3.0, {4.0}), (-5.0, {5.0}), (1.0, {1.0})):
        samples = remaining(arrays, at(graph, "map", 1.0, UNKNOWN, known), 200, 1).service_s
        assert set(samples.tolist()) == drawn, known


def test_a_loop_that_does_not_end_is_bounded():
    steps = [Step("fix", at - 1, 1.0, 1.0) for at in range(2_000)]
    graph = graph_of([RunRecord(tuple(steps))], "fix")
    samples = remaining(
        build(graph, {"fix": ServiceRate(1.0, 0, 0)}), at(graph, "fix", *[UNKNOWN] * 3), 50, 1
    ).service_s
    assert samples.max() <= MOST_PASSES + 1


def test_parallel_requests_and_branches_count_in_service():
    record = RunRecord((Step("split", -1, 10, 10), Step("map", 0, 10, 10, 0.0, 4), Step("check", 0, 10, 10)))
    graph = graph_of([record] * 8, "split", "map", "check")
    rates = dict.fromkeys(graph.units, ServiceRate(1.0, 0, 0))
    samples = remaining(build(graph, rates), at(graph, "split", *[UNKNOWN] * 3), 10, 1)
    assert samples.service_s.tolist() == [6.0] * 10
    assert graph.service_s(record, rates) == 6.0
    assert samples.path_s.tolist() == [2.0] * 10, "the longest chain, on which parallel requests count once"
    assert graph.path_s(record, rates) == 2.0
    assert remaining(build(graph, rates), at(graph, "split", 10, 10, 1), 9, 1).path_s.tolist() == [1.0] * 9, (
        "it has ended"
    )
    assert graph.next_units("split") == {("check", "map"): 1.0}
    assert graph.branch_probabilities()["split", "map"] == 1.0


def test_a_tool_between_two_llm_units_keeps_their_correlation():
    random, units = np.random.default_rng(5), {"write": LLM, "test": Backend("tool", "t"), "mend": LLM}
    graph = DemandGraph("app", units)
    for written in random.uniform(100, 1_000, 300):
        test = Step("test", 0, duration_s=random.uniform(1, 9))
        graph.add(RunRecord((Step("write", -1, 50, written), test, Step("mend", 1, written, written))))
    arrays = build(graph, dict.fromkeys(units, ServiceRate(0.0, 0.0, 1.0)))
    for written in (150.0, 950.0):
        known = np.array([[0.0, 5.0, 1.0]]), np.array([[50.0, written, 1.0]])
        tested = Position(np.array([1]), np.array([0]), *known, np.array([1, 0, 0]))
        for position, before in ((tested, 5.0), (at(graph, "write", 50.0, written, 1.0), written)):
            left_s = remaining(arrays, position, 400, 1).service_s - before
            assert left_s.mean() == pytest.approx(written, abs=120), "mended as long as what was written"


def test_a_parallel_step_ends_with_its_longest_request_and_needs_the_sum():
    """Of two requests at once the longer has 1.5 times the mean; of more it ends later still, of one with the mean."""
    records = [RunRecord((Step("map", -1, 1, 100, parallelism=2, longest=150), Step("end", 0, 1, 10)))] * 9
    graph = graph_of(records, "map", "end")
    arrays = build(graph, dict.fromkeys(graph.units, ServiceRate(0.0, 0.0, 1.0)))
    for count, ends in ((1, 100.0), (2, 150.0), (16, 100 * 1.5**2)):
        drawn = remaining(arrays, at(graph, "map", 1.0, UNKNOWN, count), 5, 1)
        assert drawn.path_s.tolist() == pytest.approx([ends + 10.0] * 5), count
        assert drawn.service_s.tolist() == [count * 100.0 + 10.0] * 5
    assert graph.path_s(records[0], dict.fromkeys(graph.units, ServiceRate(0.0, 0.0, 1.0))) == 160.0


def test_other_backends_take_the_time_that_they_took():
    graph = DemandGraph("app", {"run": Backend("container", "python:3.12")})
    graph.add(RunRecord((Step("run", duration_s=12.0),)))
    samples = remaining(build(graph, {"run": ServiceRate()}), at(graph, "run", *[UNKNOWN] * 3), 5, 1).service_s
    assert samples.tolist() == [12.0] * 5


def test_a_unit_without_records_needs_nothing_more():
    graph = graph_of([chain(("a", 1, 1, 1))], "a", "new")
    arrays = build(graph, dict.fromkeys(graph.units, ServiceRate(1.0, 0, 0)))
    assert remaining(arrays, at(graph, "new", 1.0, 1.0, 1.0), 3, 1).service_s.tolist() == [1.0] * 3


def test_the_oldest_records_go_first_and_json_keeps_the_graph():
    graph = graph_of([chain(("a", number, 1, 1)) for number in range(MOST_RECORDS + 5)], "a")
    assert graph.records[0].steps[0].input_tokens == 5
    again = DemandGraph.from_json(graph.to_json())
    assert again == graph
    assert len(again.records) == MOST_RECORDS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[]", "version: must be 1"),
        (b'{"version": 2}', "version: must be 1"),
        (b'{"version": 1, "application": "a", "units": {"u": {"kind": "gpu", "name": "x"}}}', r"\$\.units"),
        (b'{"version": 1, "application": "a", "units": {}, "records": [{"steps": []}]}', "1 to"),
        (
            b'{"version": 1, "application": "a", "units": {}, "records": [{"steps": [{"unit": "b"}]}]}',
            "'b' is no unit of a",
        ),
        (
            b'{"version": 1, "application": "a", "units": {}, "records": [{"steps": [{"unit": "b", "parent": 0}]}]}',
            "parent must be from -1 to -1",
        ),
        (b"{", "truncated"),
    ],
)
def test_a_wrong_graph_is_refused_with_what_and_where(text, says):
    with pytest.raises(ValueError, match=says):
        DemandGraph.from_json(text)


def test_nothing_recorded_is_an_error():
    with pytest.raises(ValueError, match="app has no records"):
        build(graph_of([], "a"), {"a": RATE})


def test_calls_become_steps_with_causes_parallelism_and_branches():
    calls = [
        Call("plan", 0.0, 1.0, 100, 10),
        Call("map", 1.01, 3.0, 200, 20),
        Call("map", 1.02, 4.0, 400, 40),
        Call("image", 1.02, 2.0, 50, 5),
        Call("join", 4.02, 5.0, 60, 6),
    ]
    assert record_of(reversed(calls)).steps == (
        Step("plan", -1, 100, 10),
        Step("map", 0, 300, 30, 0.0, 2, longest=40),
        Step("image", 0, 50, 5),
        Step("join", 1, 60, 6),
    )
    with pytest.raises(ValueError, match="1 to"):
        record_of([])


def test_successive_calls_are_separate_steps():
    record = record_of([Call("fix", at, at + 0.9, 10, 10) for at in range(3)])
    assert [step.parent for step in record.steps] == [-1, 0, 1]
