"""A recorded run in its replay: under the same policy its calls come when they came, on a faster fleet it ends earlier."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from scheduling.applications.demand_graph import RunRecord
from scheduling.fleet.profile import Profile
from scheduling.simulation.scenario.demand import PredictionsOf
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging.recorded_runs import no_graphs, recorded_runs
from scheduling.simulation.workload.columns import Coded, Workload, calls_of
from scheduling.simulation.workload.requests import make_requests
from tests.clocks import scenarios
from tests.clocks.both import CLOSE_S, live_fleet
from tests.clocks.test_equal_events import of

DRAWN = scenarios.drawn_record


def of_calls_alone(random, loops):
    """Draw a record without the units that are no LLM, of which a ledger has no rows."""
    steps = [step for step in DRAWN(random, loops).steps if step.unit != "test"]
    return RunRecord(tuple(type(step)(step.unit, at - 1, step.input_tokens, step.output_tokens, 0.0, step.parallelism)
                           for at, step in enumerate(steps)))  # fmt: skip


def recorded(scenario):
    """Serve *scenario* live; return its calls as a ledger has them, in the order of arrival, and their numbers."""
    live, _ = live_fleet(scenario)
    live.run()
    came = sorted(live.courses, key=lambda number: live.courses[number].submit.arrived_at)  # as inserted where equal
    courses = [live.courses[number] for number in came]
    asked = [each.submit for each in courses]
    arrival_s = np.array([each.arrived_at for each in asked])
    took_ms = [1000 * (each.finished_s - each.submit.arrived_at) for each in courses]
    names = [[getattr(each, name) for each in asked] for name in ("tenant", "application", "run", "unit", "run_due_s")]
    workload = Workload(
        arrival_s,
        np.array([each.prompt_tokens for each in asked], np.int32),
        np.array([each.output_tokens for each in courses], np.int32),
        *(Coded.of(values) for values in zip(*((each.model, each.region, "", each.tenant) for each in asked), strict=True)),
        calls=calls_of(*names, took_ms, ["done"] * len(asked)),
    )  # fmt: skip
    return workload, came


def replayed(scenario, workload, came, cluster=None):
    """Simulate the recorded calls; return when each came and ended, and when runs ended."""
    cluster = cluster or scenario.cluster
    tables = SimpleNamespace(
        predictions=PredictionsOf(), policies=SimpleNamespace(late_runs_last=False), models={}, applications=[]
    )
    run, runs = recorded_runs(tables, cluster, workload, no_graphs)
    names = "predicted_tokens", "model", "region", "priority", "tenant"
    columns = {name: getattr(scenario.requests, name)[came] for name in names}
    requests = make_requests(workload.arrival_s, workload.prompt_tokens, workload.output_tokens, run=run, **columns)
    if runs is not None:
        graphs = dict(scenario.graph_names)
        known = [each._replace(graph=graphs[each.name.partition(" of ")[0]]) for each in runs.applications]
        runs = replace(runs, applications=known)
    simulation = Simulation(cluster, requests, runs=runs)
    result = simulation.run()
    return simulation.requests.arrival_s, result.outcomes["e2e_s"], result.runs


@pytest.mark.parametrize("ordering", ["fcfs", "application", "ssjf", "hermes"])
def test_the_calls_of_a_replay_come_when_they_came(ordering, monkeypatch):
    if ordering == "hermes":
        monkeypatch.setattr(scenarios, "drawn_record", of_calls_alone)
    scenario = scenarios.draw(0, [of(ordering=ordering)] * 2, ["many runs"])
    workload, came = recorded(scenario)
    assert np.unique(workload.calls.run).size == scenarios.RUNS
    assert (np.diff(workload.arrival_s) == 0).any(), "some calls are made at once"
    arrival_s, e2e_s, runs = replayed(scenario, workload, came)
    np.testing.assert_allclose(arrival_s, workload.arrival_s, atol=CLOSE_S)
    np.testing.assert_allclose(e2e_s, workload.calls.took_s, atol=CLOSE_S)
    np.testing.assert_array_equal(np.argsort(arrival_s, kind="stable"), np.arange(len(workload)))
    assert np.isfinite(runs.ended_s).all()


def test_on_a_faster_fleet_runs_end_earlier():
    """So they would not where calls came at their recorded times."""
    scenario = scenarios.draw(0, [of()] * 2, ["many runs"])
    workload, came = recorded(scenario)
    faster = Profile(0.02, 0.02, 5e-4, 0.0, 0.02, 0.001, 5e-6)
    specs = [replace(spec, engine=replace(spec.engine, profile=faster)) for spec in scenario.cluster.instances]
    cluster = replace(scenario.cluster, instances=specs)
    ends_s = {}
    for name, each in (("closed", workload), ("open", replace(workload, calls=None))):
        arrival_s, e2e_s, _ = replayed(scenario, each, came, cluster)
        ends_s[name] = np.zeros(scenarios.RUNS)
        np.maximum.at(ends_s[name], workload.calls.run, arrival_s + e2e_s)
    began_s, was_s = np.full(scenarios.RUNS, np.inf), np.zeros(scenarios.RUNS)
    np.minimum.at(began_s, workload.calls.run, workload.arrival_s)
    np.maximum.at(was_s, workload.calls.run, workload.arrival_s + workload.calls.took_s)
    closed, opened = ((ends_s[name] - began_s).mean() / (was_s - began_s).mean() for name in ("closed", "open"))
    assert closed < 0.7
    assert opened > 0.85
