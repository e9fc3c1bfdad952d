"""Recorded runs as closed loops: a call follows those that had ended when it came, and no others."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, Step
from scheduling.applications.recording import TOGETHER_S
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.scenario.demand import PredictionsOf
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging.recorded_runs import followed, no_graphs, recorded_runs
from scheduling.simulation.workload.columns import Coded, Workload, calls_of
from scheduling.simulation.workload.requests import make_requests
from tests.clocks.scenarios import Draft

TIMES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=14)
"""When a call came and how long it took, in quarters of a second."""
TABLES = SimpleNamespace(
    predictions=PredictionsOf(), policies=SimpleNamespace(late_runs_last=False), models={}, applications=[]
)


def ancestors(after):
    known = []
    for before in after:
        known.append(set(before).union(*(known[each] for each in before)))
    return known


@given(TIMES)
def test_a_call_waits_for_those_that_had_ended(times):
    arrival_s, took_s = np.array(sorted(times)).T / 4
    ended_s = arrival_s + took_s
    counts = np.maximum(arrival_s, ended_s - TOGETHER_S)
    after = followed(arrival_s.tolist(), ended_s.tolist())
    for at, known in enumerate(ancestors(after)):
        assert known == {each for each in range(at) if counts[each] <= arrival_s[at]}
        for one in after[at]:
            assert not any(one in ancestors(after)[other] for other in after[at]), "nothing is waited for twice"


@settings(max_examples=25, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=4), st.floats(0.3, 3.0))
def test_no_call_comes_before_those_that_it_follows_and_all_come_once(runs, speed):
    rows = sorted((at, took, f"r{run}") for run, times in enumerate(runs) for at, took in times)
    count, none = len(rows), [""] * len(rows)
    names = [["t"] * count, ["a"] * count, [run for *_, run in rows], none, [None] * count]
    calls = calls_of(*names, [250.0 * took for _, took, _ in rows], ["done"] * count)
    arrival_s, tokens = np.array([at for at, *_ in rows]) / 4, np.full(count, 5, np.int32)
    coded = [Coded.of([name] * count) for name in ("m", "east", "", "t")]
    workload = Workload(arrival_s, tokens, tokens, *coded, calls=calls)
    draft = Draft(np.random.default_rng(1), [{}])
    profile = draft.specs[0].engine.profile
    engine = replace(draft.specs[0].engine, profile=replace(profile, decode_a_s=profile.decode_a_s / speed))
    cluster = Cluster([InstanceSpec("m", "east", engine)])
    run, to_come = recorded_runs(TABLES, cluster, workload, no_graphs)
    simulation = Simulation(cluster, make_requests(arrival_s, tokens, tokens, run=run), runs=to_come)
    result = simulation.run()
    came_s = simulation.requests.arrival_s
    ended_s = came_s + result.outcomes["e2e_s"]
    assert np.isfinite(ended_s).all()
    assert result.counters["arrived"] == count
    for number, one in enumerate(to_come.runs):
        own = np.flatnonzero(run == number)
        for at, before in enumerate(one.after):
            waited_s = max((ended_s[own[each]] for each in before), default=one.began_s)
            np.testing.assert_allclose(came_s[own[at]], waited_s + one.gap_s[at], atol=1e-6)


def test_orders_know_the_graph_of_an_application_by_the_rates_of_the_fleet():
    units = {"plan": Backend("llm", "m"), "gone": Backend("llm", "elsewhere"), "test": Backend("container", "python")}
    record = RunRecord((Step("plan", -1, 9000, 20), Step("gone", 0, 9000, 20), Step("test", 1, duration_s=3.0)))
    tokens = np.full(1, 5, np.int32)
    coded = [Coded.of([name]) for name in ("m", "east", "", "t")]
    calls = calls_of(["t"], ["a"], ["r"], ["plan"], [None], [1.0], ["done"])
    workload = Workload(np.zeros(1), tokens, tokens, *coded, calls=calls)
    engine = Draft(np.random.default_rng(1), [{}]).specs[0].engine
    for ordering, known in (("fcfs", False), ("hermes", True)):
        policies = {("m", "east"): EndpointPolicy(ordering=ordering)}
        cluster = Cluster([InstanceSpec("m", "east", engine)], policies=policies)
        graphs = {("t", "a"): DemandGraph("a", units, [record])}
        _, runs = recorded_runs(TABLES, cluster, workload, lambda *key, of=graphs: of.get(key))
        (one,) = runs.applications
        assert (one.graph is not None) == known
    rates = dict(zip(units, one.graph.arrays.rate.tolist(), strict=True))
    assert rates["plan"][1] == engine.profile.prefill_b_s_per_token
    assert rates["gone"] == rates["test"] == [0.0, 0.0, 1.0]
