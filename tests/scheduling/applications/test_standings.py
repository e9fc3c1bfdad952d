"""Standings of runs: what is known of a run after each of its calls."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import (
    GATHERS_S,
    IDLE_S,
    LATE_S,
    KnownGraph,
    PastCall,
    Reading,
    RunCall,
    Standings,
)
from scheduling.queueing.ordering import HERMES, SRPT, Standing, run_key

RATE = ServiceRate(0.0, 0.0, 1.0)
UNITS = {name: Backend("llm", "m") for name in ("plan", "work", "check")}
ALWAYS = DemandGraph(
    "a", UNITS, [RunRecord((Step("plan", -1, 1, 2), Step("work", 0, 1, 5, parallelism=3), Step("check", 1, 1, 4)))] * 20
)
"""2 s, then three times 5 s at once, then 4 s: 21 s in all."""


def standings(graph=ALWAYS, **reading):
    return Standings({"a": KnownGraph.of(graph, dict.fromkeys(UNITS, RATE))} if graph else {}, Reading(**reading))


def call(request, unit, predicted=9, run="r", **more):
    return RunCall(request, "a", run, unit, 1, predicted, RATE, **more)


def test_of_a_run_that_is_always_the_same_all_is_known_after_each_step():
    runs = standings()
    seen = []

    def come(*requests, unit, now_s=0.0):
        seen.extend(runs.refreshed(runs.arrive(call(request, unit), now_s), now_s) for request in requests)

    def end(*requests, output):
        for request in requests:
            runs.end(request, output, 1.0)

    come(0, unit="plan", now_s=3.0)
    end(0, output=2)
    come(1, 2, 3, unit="work")
    end(1, 2, 3, output=5)
    come(4, unit="check")
    assert {each.began_s for each in seen} == {3.0}
    assert [each.attained_s for each in seen] == [0.0, 2.0, 2.0, 2.0, 17.0]
    assert [each.rank_s for each in seen] == pytest.approx([21.0, 19.0, 19.0, 19.0, 4.0]), "two are still to come"
    assert [each.mean_s for each in seen] == pytest.approx([21.0, 19.0, 19.0, 19.0, 4.0])
    assert [each.worst_s for each in seen] == pytest.approx([11.0, 9.0, 9.0, 9.0, 4.0]), "parallel calls count once"


def test_a_step_that_has_gathered_its_calls_has_as_many_as_came():
    runs = standings()
    run = runs.arrive(call(0, "work"), 3.0)
    assert runs.refreshed(run, 3.0).mean_s == pytest.approx(19.0)
    assert not runs.is_stale(run, 3.0 + 0.9 * GATHERS_S, lambda _: 0)
    assert runs.is_stale(run, 3.0 + GATHERS_S, lambda _: 0)
    assert runs.refreshed(run, 3.0 + GATHERS_S).mean_s == pytest.approx(9.0)
    for request in (1, 2, 3):
        runs.arrive(call(request, "work"), 4.0)
    assert runs.refreshed(run, 4.0).mean_s == pytest.approx(24.0), "more than ever were: none is to come"
    assert not runs.is_stale(run, 4.0 + GATHERS_S, lambda _: 0)


def test_service_is_that_of_the_endpoint_that_calls_go_to():
    """A slow one takes twice as long for all units of its model, called or not; another backend takes its own time."""
    units = {"plan": Backend("llm", "m"), "work": Backend("llm", "m"), "run": Backend("container", "c")}
    record = RunRecord((Step("plan", -1, 0, 2), Step("work", 0, 0, 5), Step("run", 1, duration_s=4)))
    runs = Standings({"a": KnownGraph.of(DemandGraph("a", units, [record]), dict.fromkeys(units, RATE))})
    slow = ServiceRate(0.0, 0.0, 2.0)
    run = runs.arrive(call(0, "plan")._replace(rate=slow), 0.0)
    standing = runs.refreshed(run, 0.0)
    assert (standing.mean_s, standing.worst_s) == (2 * 2 + 2 * 5 + 4, 2 * 2 + 2 * 5 + 4)
    runs.end(0, 2, 4.0)
    standing = runs.refreshed(runs.arrive(call(1, "work")._replace(rate=slow), 4.0), 4.0)
    assert (standing.attained_s, standing.mean_s) == (4.0, 14.0)


def test_service_is_attained_while_a_call_runs_and_a_rank_is_refreshed_past_a_bucket():
    records = [RunRecord((Step("plan", -1, 1, length),)) for length in (1, 100) for _ in range(10)]
    runs = standings(DemandGraph("a", UNITS, records))
    run = runs.arrive(call(0, "plan"), 0.0)
    produced = {0: 0}
    first = runs.refreshed(run, 0.0, produced.__getitem__)
    assert first.rank_s == pytest.approx(2.0, rel=0.3)  # a second of service ends half of such runs
    assert not runs.is_stale(run, 0.0, produced.__getitem__)
    produced[0] = 2
    assert runs.is_stale(run, 0.0, produced.__getitem__)
    later = runs.refreshed(run, 0.0, produced.__getitem__)
    assert (later.attained_s, later.rank_s) == (2.0, pytest.approx(98.0))
    assert later.worst_s == 98.0


def test_a_run_without_a_graph_or_with_an_unknown_unit_needs_what_its_open_calls_are_predicted_to_need():
    for graph, unit in ((None, "plan"), (ALWAYS, "other")):
        runs = standings(graph)
        run = runs.arrive(call(0, unit, predicted=7), 0.0)
        assert runs.refreshed(run, 1.0)[2:5] == (7.0, 7.0, 7.0)
        runs.arrive(call(1, unit, predicted=3), 0.0)
        runs.end(0, 8, 1.0)
        assert runs.refreshed(run, 1.0) == Standing(0.0, math.inf, 3.0, 3.0, 3.0, 8.0)


def test_a_call_that_fails_teaches_nothing_and_an_oracle_knows_the_whole():
    runs = standings()
    run = runs.arrive(call(0, "plan", total_s=50.0, weight=2.0, due_in_s=60.0), 1.0)
    assert runs.refreshed(run, 1.0) == Standing(1.0, 61.0, 25.0, 25.0, 50.0, 0.0)
    runs.end(0, None, 2.0)
    assert (run.steps, run.attained_s()) == ([], 0.0)
    runs.end(0, None, 2.0)  # of a call that is no longer open
    assert runs.arrive(call(5, "plan"), 3.0) is run
    assert runs.arrive(call(5, "plan"), 4.0) is run, "it waits again"
    assert len(run.calls) == 1


def test_a_run_that_cannot_be_in_time_is_last_once_its_shortest_path_does_not_fit():
    records = [RunRecord((Step("plan", -1, 1, length),)) for length in (10, 30) for _ in range(10)]
    runs = standings(DemandGraph("a", UNITS, records), late_last=True)
    run, produced = runs.arrive(call(0, "plan", due_in_s=50.0), 0.0), {0: 0}
    first = runs.refreshed(run, 0.0, produced.__getitem__)
    assert (first.due_s, first.worst_s) == (50.0, 30.0)
    assert not runs.is_stale(run, 40.0, produced.__getitem__)
    assert runs.is_stale(run, 40.5, produced.__getitem__)
    assert runs.refreshed(run, 40.5, produced.__getitem__).due_s == 50.0 + LATE_S
    assert not runs.is_stale(run, 90.0, produced.__getitem__), "it is late once"
    produced[0] = 9  # it runs, and what it has had is no longer before it
    later = runs.refreshed(run, 40.5, produced.__getitem__)
    assert (later.due_s, later.worst_s) == (50.0, 21.0)
    run.first = True
    assert runs.refreshed(run, 90.0, produced.__getitem__).due_s < 0.0, "an operator has moved it first"
    runs.reading, run.first = Reading(worst=0.2), False
    last = runs.refreshed(run, 90.0, produced.__getitem__)
    assert (last.due_s, last.worst_s) == (50.0, 1.0), "of a fifth of the walks"
    assert not runs.is_stale(run, 99.0, produced.__getitem__)


def test_idle_runs_are_forgotten():
    runs = standings()
    runs.arrive(call(0, "plan"), 0.0)
    runs.forget(10 * IDLE_S)
    assert runs.any_open, "a call is open"
    runs.end(0, 2, 10.0)
    runs.forget(9.0 + IDLE_S)
    assert runs.runs
    runs.forget(11.0 + IDLE_S)
    assert not runs.runs
    assert not runs.by_number
    assert not runs.any_open


loops = st.lists(st.tuples(st.sampled_from(list(UNITS)), st.integers(1, 3), st.booleans()), min_size=1, max_size=12)


@given(loops)
def test_whatever_a_run_does_its_standing_is_finite_and_its_service_adds_up(steps):
    runs, request, total = standings(), 0, 0.0
    for unit, count, fails in steps:
        opened = range(request, request + count)
        for each in opened:
            standing = runs.refreshed(runs.arrive(call(each, unit), float(request)), float(request))
            assert all(0.0 <= number < math.inf for number in standing[2:])
            assert standing.attained_s == pytest.approx(total)
        for each in opened:
            runs.end(each, None if fails else 4, float(request))
            total += 0.0 if fails else 4.0
        request += count


@given(loops)
def test_a_run_that_is_resumed_from_its_calls_stands_where_it_stood(steps):
    followed, resumed, past, request, now_s = standings(), standings(), [], 0, 5.0
    for unit, count, fails in steps:
        opened = range(request, request + count)
        for each in opened:
            followed.arrive(call(each, unit, due_in_s=60.0, weight=2.0), now_s)
        for each in opened:
            followed.end(each, None if fails else 4, now_s + 1.0)
            past.append(PastCall(unit, now_s, now_s + 1.0, 1, None if fails else 4, RATE))
        request, now_s = request + count, now_s + 1.0
    assert resumed.resume("a", "r", past[::-1]) is not None
    assert resumed.resume("a", "r", past) is None or not any(one.output_tokens for one in past)
    runs = [each.arrive(call(999, "plan", due_in_s=60.0, weight=2.0), now_s) for each in (followed, resumed)]
    assert [runs[1].attained_s(), runs[1].steps, runs[1].last, runs[1].shown] == [
        runs[0].attained_s(), runs[0].steps, runs[0].last, runs[0].shown
    ]  # fmt: skip
    runs[1].draws = runs[0].draws  # walks are numbered
    assert resumed.refreshed(runs[1], now_s) == followed.refreshed(runs[0], now_s)


def test_a_run_with_open_calls_is_resumed_and_one_that_ended_a_step_since_is_not():
    runs = standings()
    run = runs.arrive(call(1, "check", due_in_s=60.0, weight=2.0), 50.0)
    past = [PastCall("plan", 10.0, 12.0, 1, 2, RATE), PastCall("work", 12.0, 17.0, 1, 5, RATE)]
    resumed = runs.resume("a", "r", past)
    assert runs.refreshed(resumed, 50.0).attained_s == 7.0
    assert (resumed.number, resumed.began_s, resumed.due_s, resumed.weight) == (run.number, 10.0, 70.0, 2.0)
    runs.end(1, 4, 55.0)
    assert resumed.attained_s() == 11.0
    assert runs.resume("a", "r", past) is None
    assert runs.runs["a", "r"] is resumed


services = st.floats(0.01, 1e3)


@given(st.sampled_from([SRPT, HERMES]), services, services, st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 100))
def test_a_run_is_overtaken_only_by_those_that_begin_within_its_stretch(
    ordering, one_s, other_s, began_s, later_s, stretch
):
    keys = [
        run_key(ordering, began, math.inf, 0, service_s, service_s, service_s, stretch)
        for began, service_s in ((began_s, one_s), (began_s + later_s, other_s))
    ]
    if keys[1] < keys[0]:
        assert later_s < stretch * one_s
