"""Demand graphs of applications, and what their runs are expected to need."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
import numpy as np

from controlplane.applications.models import LEARNED, Application, ApplicationRun
from controlplane.applications.services import backends, done_calls
from controlplane.applications.spans import rates_of
from controlplane.rows import narrowed
from scheduling.applications.demand_graph import (
    MOST_RECORDS,
    DemandGraph,
    RunRecord,
    ServiceRate,
    Step,
    demand,
    step_service_s,
)
from scheduling.applications.gittins import buckets, gittins_ranks
from scheduling.applications.recording import record_of
from scheduling.applications.remaining import (
    Position,
    build,
    rate_rows,
    remaining,
    start_of,
)
from scheduling.applications.standings import KnownGraph

SAMPLES = 400
"""Walks of the graph for one run."""


def graph_of(application: Application, before: datetime | None = None) -> DemandGraph:
    """Return the graph of the latest records, oldest first; of runs that had ended *before*, if given."""
    ended = narrowed(application.runs.filter(LEARNED), ended_at__lt=before)
    latest = ended.values_list("steps", flat=True)[:MOST_RECORDS]
    records = [RunRecord(msgspec.convert(steps, tuple[Step, ...])) for steps in reversed(latest)]
    return DemandGraph(application.name, backends(application), records)


def known_graph(application: Application) -> KnownGraph | None:
    """Return what orders by application know of *application*; None without records."""
    graph = graph_of(application)
    return KnownGraph.of(graph, rates_of(graph.units)) if graph.records else None


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to need still, in seconds of service."""

    run: ApplicationRun
    last_unit: str
    """Of its last ended call; empty before the first one."""
    attained_s: float
    mean_s: float
    low_s: float
    high_s: float
    """Of the middle 80 % of all samples."""
    rank: float
    path_s: float
    """Expected along its longest chain of steps, in which parallel requests count once."""
    worst_s: float
    """The longest such path of all samples."""

    def slack_s(self, now: datetime) -> float | None:
        """Return what is left to the deadline after the expected path; None without a deadline."""
        if self.run.deadline_s is None:
            return None
        return self.run.deadline_s - (now - self.run.began_at).total_seconds() - self.path_s

    def worst_slack_s(self, now: datetime) -> float | None:
        """Return the same for the longest path."""
        slack_s = self.slack_s(now)
        return None if slack_s is None else slack_s + self.path_s - self.worst_s


def predictions(graph: DemandGraph, runs: Sequence[ApplicationRun]) -> list[Prediction]:
    """Return predictions of *runs* of one application, the lowest Gittins rank first; none without records.

    Service is that of the region that a run comes from.
    """
    if not graph.records or not runs:
        return []
    rates_in = {region: rates_of(graph.units, region) for region in {run.region for run in runs}}
    arrays, random = build(graph, rates_of(graph.units)), np.random.default_rng(0)
    attained, samples, paths, last_units = np.zeros(len(runs)), [], [], []
    for number, run in enumerate(runs):
        rates = rates_in[run.region]
        last, visits, attained[number] = _so_far(graph, rates, run)
        position = start_of(graph, random) if last is None else _after(graph, last, visits)
        there = arrays._replace(rate=rate_rows(graph, rates))
        drawn, path_s = remaining(there, position, SAMPLES, number + 1)
        if last is not None:  # the step there has been served
            drawn = drawn - step_service_s(last, graph.units[last.unit], rates[last.unit])
        samples.append(np.maximum(drawn, 0.0))
        paths.append(path_s)
        last_units.append("" if last is None else last.unit)
    whole = np.stack([buckets(drawn + had) for drawn, had in zip(samples, attained, strict=True)])
    rank, refresh = np.empty(len(runs)), np.empty(len(runs))
    gittins_ranks(whole, attained, np.ones(len(runs)), rank, refresh)
    ranked = [
        Prediction(
            run,
            unit,
            *map(float, (had, drawn.mean(), *np.quantile(drawn, (0.1, 0.9)), each, path_s.mean(), path_s.max())),
        )
        for run, had, drawn, each, path_s, unit in zip(runs, attained, samples, rank, paths, last_units, strict=True)
    ]
    return sorted(ranked, key=lambda one: one.rank)


def _so_far(
    graph: DemandGraph, rates: dict[str, ServiceRate], run: ApplicationRun
) -> tuple[Step | None, np.ndarray, float]:
    """Return the last step of a run that was served, how often each unit ran before it, and the service so far."""
    visits, attained_s, last = np.zeros(len(graph.units), np.int64), 0.0, None
    index = {name: number for number, name in enumerate(graph.units)}
    calls = done_calls(run)[0]
    for step in record_of(calls).steps if calls else ():
        if step.unit not in index:
            continue  # a unit that no run before had
        if last is not None:
            visits[index[last.unit]] += 1
        attained_s += step_service_s(step, graph.units[step.unit], rates[step.unit])
        last = step
    return last, visits, attained_s


def _after(graph: DemandGraph, step: Step, visits: np.ndarray) -> Position:
    """Return the position of a run whose *step* was served just now."""
    index = {name: number for number, name in enumerate(graph.units)}
    return Position(
        unit=np.array([index[step.unit]], np.int64),
        before=np.array([len(index)], np.int64),
        known=np.array([demand(step, graph.units[step.unit])]),
        known_before=np.zeros((1, 3)),
        visits=visits,
    )


@dataclass(frozen=True)
class UnitSummary:
    name: str
    backend: str
    kind: str
    runs: float
    """Executions by run."""
    input_tokens: float
    output_tokens: float
    parallelism: float
    duration_s: float
    """0 of an LLM."""
    share: float
    """Of the service of all runs."""


def unit_summaries(graph: DemandGraph) -> list[UnitSummary]:
    """Return what each unit takes, by the records."""
    rates, steps = rates_of(graph.units), [step for record in graph.records for step in record.steps]
    total_s = sum(step_service_s(step, graph.units[step.unit], rates[step.unit]) for step in steps) or 1.0
    rows = []
    for name, backend in graph.units.items():
        mine = [step for step in steps if step.unit == name]
        count = max(1, len(mine))
        service_s = sum(step_service_s(step, backend, rates[name]) for step in mine)
        rows.append(
            UnitSummary(
                name,
                backend.name,
                backend.kind,
                len(mine) / max(1, len(graph.records)),
                sum(step.input_tokens for step in mine) / count,
                sum(step.output_tokens for step in mine) / count,
                sum(step.parallelism for step in mine) / count,
                sum(step.duration_s for step in mine) / count,
                service_s / total_s,
            )
        )
    return rows
