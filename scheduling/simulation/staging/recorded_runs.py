"""Recorded application runs as closed loops: a call comes once those that it followed have ended, after the recorded gap."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import MOST_STEPS, Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.recording import NO_UNIT, TOGETHER_S
from scheduling.applications.standings import KnownGraph, Reading
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.applications import Served, graphs_wanted, known_graph
from scheduling.simulation.workload.columns import Calls, Workload
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome

Graphs = Callable[[str, str], DemandGraph | None]
"""Returns what is known of an application, by tenant and name."""


def followed(arrival_s: Sequence[float], ended_s: Sequence[float]) -> list[list[int]]:
    """Return by call, in order of arrival, those that it waited for: the earlier ones that had ended when it came, without
    those that one of these had waited for.
    """
    running: list[tuple[float, int]] = []
    before: list[tuple[float, int]] = []
    made = []
    for at, moment_s in enumerate(arrival_s):
        while running and running[0][0] <= moment_s:
            before.append(heappop(running))
        last = max((each for _, each in before), default=0)
        before = [each for each in before if each[1] == last or each[0] > arrival_s[last]]
        made.append([each for _, each in before])
        heappush(running, (max(moment_s, ended_s[at] - TOGETHER_S), at))
    return made


def recorded_runs(
    scenario: Scenario, cluster: Cluster, workload: Workload, graphs: Graphs
) -> tuple[NDArray[np.int32], RunsToCome | None]:
    """Return the run of each request of *workload*, -1 for none, and these runs.

    A run of more than `MOST_STEPS` calls counts as several.
    """
    run, calls = np.full(len(workload), -1, np.int32), workload.calls
    rows = np.zeros(0, np.int64) if calls is None else np.flatnonzero(calls.run >= 0)
    if calls is None or not rows.size:
        return run, None
    rows = rows[np.argsort(calls.run[rows], kind="stable")]
    applications: dict[tuple[int, int], int] = {}
    units: list[dict[str, Backend]] = []
    runs = []
    for whole in np.split(rows, np.flatnonzero(np.diff(calls.run[rows])) + 1):
        for own in np.split(whole, range(MOST_STEPS, whole.size, MOST_STEPS)):
            key = int(workload.tenant.codes[own[0]]), int(calls.application.codes[own[0]])
            number = applications.setdefault(key, len(applications))
            if number == len(units):
                units.append({})
            run[own] = len(runs)
            runs.append(_run(workload, calls, own, number, units[number]))
    to_come = []
    for (tenant, application), own_units in zip(applications, units, strict=True):
        name, owner = calls.application.names[application], workload.tenant.names[tenant]
        graph = graphs(owner, name) if graphs_wanted(scenario, cluster) else None
        alike = sum(each == application for _, each in applications) > 1
        title = f"{name} of {owner}" if alike else name
        to_come.append(ApplicationToCome(title, own_units, _known(scenario, cluster, graph)))
    predictions = scenario.predictions
    reading = Reading(predictions.buckets, predictions.worst, scenario.policies.late_runs_last)
    return run, RunsToCome(to_come, runs, predictions.runs == "exact", reading)


def _run(
    workload: Workload, calls: Calls, rows: NDArray[np.int64], application: int, units: dict[str, Backend]
) -> RunToCome:
    """Return the run with the calls *rows*, in order of arrival; adds its units to *units*."""
    arrival_s, prompts, outputs = (
        each[rows].tolist() for each in (workload.arrival_s, workload.prompt_tokens, workload.output_tokens)
    )
    took_s = calls.took_s[rows]
    ended_s = (arrival_s + np.where(np.isnan(took_s), np.inf, took_s)).tolist()
    after, steps = followed(arrival_s, ended_s), []
    for at, row in enumerate(rows.tolist()):
        unit = calls.unit.names[calls.unit.codes[row]] or NO_UNIT
        units.setdefault(unit, Backend("llm", workload.model.names[workload.model.codes[row]]))
        parent = max(after[at], key=ended_s.__getitem__, default=-1)
        steps.append(Step(unit, parent, float(prompts[at]), float(outputs[at])))
    gap_s = [
        max(0.0, moment_s - max((ended_s[each] for each in before), default=arrival_s[0]))
        for moment_s, before in zip(arrival_s, after, strict=True)
    ]
    failed = frozenset(np.flatnonzero(calls.failed[rows]).tolist())
    due_in_s = float(calls.due_in_s[rows[0]])
    return RunToCome(application, arrival_s[0], due_in_s, RunRecord(tuple(steps)), 0, after, gap_s, failed)


def _known(scenario: Scenario, cluster: Cluster, graph: DemandGraph | None) -> KnownGraph | None:
    """Return *graph* with the rates of the cluster's models, as far as these are to be known."""
    predictions = scenario.predictions
    if graph is None or not graph.records or predictions.runs in ("exact", "none"):
        return None
    longest = dict(zip(cluster.models, cluster.longest_tokens(), strict=True))
    served = [
        Served(key[0], longest[key[0]], ServiceRate.of(cluster.reference_profile(key))) for key in cluster.endpoints
    ]
    return known_graph(graph.application, graph.units, graph.records, served, predictions.runs)


def no_graphs(tenant: str, application: str) -> DemandGraph | None:
    """Know nothing of any application."""
