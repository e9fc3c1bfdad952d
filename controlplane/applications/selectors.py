"""Demand graphs of applications, and what their runs are expected to need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from controlplane.applications.models import LEARNED, Application, ApplicationRun
from controlplane.applications.services import backends, done_calls
from controlplane.applications.spans import rates_of
from controlplane.rows import narrowed
from controlplane.tuning.selectors import tuned
from scheduling.applications.demand_graph import MOST_RECORDS, DemandGraph, RunRecord, Step, step_service_s
from scheduling.applications.standings import USUAL_READING, KnownGraph, PastCall, Run, Standings, most_learned

RUN_DEMAND: Final = "RUN_DEMAND"
"""Setting of that knob, which is declared with the policy."""


def graph_of(application: Application, before: datetime | None = None) -> DemandGraph:
    """Return the graph of the latest records, oldest first; of runs that had ended *before*, if given."""
    ended = narrowed(application.runs.filter(LEARNED), ended_at__lt=before)
    latest = ended.values_list("steps", flat=True)[:MOST_RECORDS]
    records = [RunRecord(msgspec.convert(steps, tuple[Step, ...])) for steps in reversed(latest)]
    return DemandGraph(application.name, backends(application), records)


def demand_by(graph: DemandGraph) -> str:
    """Return by what the models that its LLM units ask predict runs: the knob `run_demand`."""
    return most_learned(getattr(tuned(unit.name), RUN_DEMAND) for unit in graph.units.values() if unit.kind == "llm")


def known_graph(application: Application) -> KnownGraph | None:
    """Return what orders by application know of *application*; None without records."""
    graph = graph_of(application)
    return KnownGraph.of(graph, rates_of(graph.units), by=demand_by(graph)) if graph.records else None


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
    """Return predictions of *runs* of one application by what orders them, the lowest Gittins rank first; none without
    records. A dispatcher knows of open calls too.

    Service is that of the region that a run comes from.
    """
    if not graph.records or not runs:
        return []
    by, ranked = demand_by(graph), []
    known = KnownGraph.of(graph, rates_of(graph.units), by=by)
    rates_in = {region: rates_of(graph.units, region) for region in {run.region for run in runs}}
    for row in runs:
        began_s, rates = row.began_at.timestamp(), rates_in[row.region]
        past = [
            PastCall(
                call.unit,
                call.began_s,
                call.ended_s,
                round(call.input_tokens),
                call.duration_s or call.output_tokens,
                rates[call.unit],
            )
            for call in done_calls(row)[0]
            if call.unit in graph.units  # else no run before had it
        ]
        run = Standings({}).resume("", row.run, past) or Run(0, "", row.run, began_s, math.inf, 1.0, None, began_s)
        run.draw(known, began_s, by=by)
        assert run.whole_s is not None
        assert run.path_s is not None
        standing, (low, _, high), path_s = run.standing(began_s, USUAL_READING), run.whole_s, run.path_s
        low_s, high_s = (max(0.0, float(each) - standing.attained_s) for each in (high[0], low[-1]))
        needs_s = standing.mean_s, low_s, high_s, standing.rank_s, float(path_s.mean()), standing.worst_s
        ranked.append(Prediction(row, run.last, standing.attained_s, *needs_s))
    return sorted(ranked, key=lambda one: one.rank)


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
