"""When prewarming starts (Hermes equation 3), for which backends, where it brings adapters, and what is counted."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.prewarming import (
    LikelyCall,
    Warmable,
    due,
    likely_calls_of,
    start_in_s,
)
from scheduling.applications.standings import KnownGraph, RunCall, Standings

ends_of_units = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40)


@given(ends=ends_of_units, probability=st.floats(0.05, 1.0), warm_s=st.floats(0.0, 30.0), k=st.floats(0.01, 1.0))
def test_it_is_the_first_start_that_is_effective_enough(ends, probability, warm_s, k):
    ends_s = np.sort(ends)
    start_s = start_in_s(ends_s, probability, warm_s, k)
    if probability < k:
        assert start_s is None
        return
    candidates = [0.0, *(end - warm_s for end in ends_s if end >= warm_s)]
    enough = [at for at in candidates if probability * np.mean(ends_s <= at + warm_s + 1e-9) >= k - 1e-9]
    assert start_s == pytest.approx(min(enough, default=0.0), abs=1e-9)


@given(ends=ends_of_units, warm_s=st.floats(0.0, 30.0))
def test_a_smaller_k_prewarms_more_calls_and_each_of_them_sooner(ends, warm_s):
    starts = [[start_in_s(np.sort(ends), p, warm_s, k) for p in np.linspace(0.1, 1.0, 10)] for k in (0.2, 0.5, 0.8)]
    made = [sum(start is not None for start in each) for each in starts]
    assert made == sorted(made, reverse=True)
    for smaller, larger in itertools.pairwise(starts):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True) if b is not None)


RATE = ServiceRate(0.5, 0.01, 0.1)
UNITS = {"plan": Backend("llm", "m"), "write": Backend("llm", "m"), "test": Backend("container", "python")}


def standings():
    """After a plan text is written in three runs of four, once a container has run for 2 or 6 s; then nothing follows."""
    longer = [
        RunRecord((
            Step("plan", output_tokens=20), Step("test", 0, duration_s=lasts_s), Step("write", 1, output_tokens=50),
            Step("test", 2, duration_s=2),
        ))
        for lasts_s in (2.0, 2.0, 6.0)
    ]  # fmt: skip
    shorter = RunRecord((Step("plan", output_tokens=10), Step("test", 0, duration_s=2)))
    graph = DemandGraph("a", UNITS, [*longer, shorter] * 3)
    rates = {name: RATE if unit.kind == "llm" else ServiceRate() for name, unit in UNITS.items()}
    return Standings({"a": KnownGraph.of(graph, rates)})


def call(request, unit, adapter=5, weight=1.0, run="r"):
    return RunCall(request, "a", run, unit, 100, 20, RATE, weight=weight, adapter=adapter, endpoint=0)


def report(number, run="r"):
    """The container of a run, as its tenant reports it."""
    return RunCall(-number, "a", run, "test", 0, 0, ServiceRate())


def adapters(before, unit, backend):
    if backend.kind == "llm" and before.adapter >= 0:
        yield Warmable("adapter", before.adapter, before.endpoint), 0.1


def containers(before, unit, backend):
    if backend.kind == "container":
        yield Warmable("container", backend.name), 0.5


def starts_of(known, produced=lambda request: 0, k=0.5, now_s=0.0, needs=adapters):
    (run,) = known.runs.values()
    return likely_calls_of(run, known.graphs[run.application], produced, needs, k, now_s)


def test_the_next_call_of_a_run_is_expected_by_its_graph():
    known = standings()
    known.arrive(call(1, "plan"), 0.0)
    # 3 of 4 continue, and 2 of 3 have to come later: 1.5 s of prefill, 20 tokens, 2 s of another unit
    (likely,) = starts_of(known)
    assert likely == LikelyCall(Warmable("adapter", 5, 0), pytest.approx(1.5 + 2.0 + 2.0 - 0.1), 0, "write", 1, 0.75)
    assert starts_of(known, lambda request: 15)[0].start_in_s == pytest.approx(0.5 + 2.0 - 0.1)
    assert starts_of(known, k=0.8) == []
    known.end(1, 20, 3.0)
    assert starts_of(known, now_s=4.0)[0].start_in_s == pytest.approx(1.0 - 0.1)
    (late,) = starts_of(known, now_s=6.0)  # only the longest are left
    assert late.start_in_s == pytest.approx(3.0 - 0.1)
    assert starts_of(known, now_s=20.0) == []
    known.arrive(call(2, "write"), 6.0)
    assert starts_of(known, now_s=6.0) == []  # a container follows, and nothing else


def test_a_container_is_expected_once_the_unit_before_it_ends_and_the_call_after_it_by_its_duration():
    known = standings()
    known.arrive(call(1, "plan"), 0.0)
    # Every plan leads to a container; half have 20 tokens or more.
    assert starts_of(known, needs=containers) == [
        LikelyCall(Warmable("container", "python"), pytest.approx(1.5 + 2.0 - 0.5), 0, "test")
    ]
    known.end(1, 20, 3.0)
    assert starts_of(known, needs=containers, now_s=3.5) == [], (
        "what follows at once is not to come after half a second"
    )
    known.arrive(report(1), 3.5)
    assert starts_of(known, needs=containers, now_s=3.5) == [], "the run's second container comes after more text"
    assert starts_of(known, now_s=4.0) == [], "three of seven containers lead to text"
    (late,) = starts_of(known, k=0.7, now_s=6.5)  # this one takes longer than those that end a run
    assert late.start_in_s == pytest.approx(3.0 - 0.1)
    assert starts_of(known, k=0.6, now_s=6.5)[0].start_in_s == 0.0, "most that lead to text are shorter"
    known.end(-1, 6.0, 9.5)
    known.arrive(call(2, "write"), 9.5)
    (after,) = starts_of(known, needs=containers, now_s=9.5)
    assert after.start_in_s == pytest.approx(1.5 + 5.0 - 0.5)


def test_of_a_unit_several_backends_are_needed_and_due_by_kind():
    known = standings()
    known.arrive(call(1, "plan"), 0.0)
    likely = starts_of(known, needs=lambda *call: [*adapters(*call), *containers(*call)])
    assert {one.target.kind for one in likely} == {"adapter", "container"}
    assert due(likely, "adapter") == []
    soon = [one._replace(start_in_s=0.5 * one.start_in_s - 1.0) for one in likely]
    assert [one.target.kind for one in due(soon, "container", "adapter")] == ["container"]


def test_a_weightier_tenant_has_less_likely_calls_prewarmed():
    known = standings()
    known.arrive(call(1, "plan", weight=2.0), 0.0)
    assert len(starts_of(known, k=1.0)) == 1


def test_a_call_longer_than_any_recorded_may_end_now():
    known = standings()
    known.arrive(call(1, "plan"), 0.0)
    assert starts_of(known, lambda request: 60)[0].start_in_s == pytest.approx(2.0 - 0.1)


def test_a_step_ends_with_the_call_that_has_produced_least():
    known = standings()
    for request in (1, 2):
        known.arrive(call(request, "plan"), 0.0)
    (likely,) = starts_of(known, {1: 19, 2: 5}.__getitem__)
    assert likely.start_in_s == pytest.approx(1.5 + 2.0 - 0.1)


@pytest.mark.parametrize("unit", ["unknown", "plan"])
def test_what_is_not_known_is_not_expected(unit):
    known = standings()
    known.arrive(call(1, unit, adapter=-1 if unit == "plan" else 5), 0.0)
    assert starts_of(known) == []
