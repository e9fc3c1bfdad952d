"""Tables of a scenario for runs of applications."""

from typing import Annotated, Any, Final, Self

import msgspec
from pydantic import Field, FiniteFloat, field_validator, model_validator

from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.suite import SUITE
from scheduling.simulation.scenario.demand import LengthsTrace
from scheduling.simulation.scenario.parts import AtLeast0, Positive, ScenarioTable, Size, one_of

MIXED: Final = "mix"
"""Stands for all applications of the suite, by their shares."""


class ApplicationOf(ScenarioTable):
    """Runs of an application: one of the suite, the suite's mix, or one with a demand graph."""

    suite: str | None = None
    graph: str | dict[str, Any] | None = None
    """A demand graph in JSON, whose records run again: a file, relative to the scenario's folder, or the object itself."""
    name: str | None = None
    """Default: that of the suite or the graph."""
    model: str
    """Serves the LLM units,"""
    models: dict[str, str] = {}
    """but for those units of a graph for which another model is given."""
    slo_class: str
    tenant: str = "applications"
    tenants: Size = 1
    """Tenants that send the runs, one after the other; with several, they are `TENANT 1`, `TENANT 2` and so on."""
    regions: dict[str, AtLeast0] = {}
    """Shares; default: equal for all of the scenario's regions."""
    runs: Size | None = None
    runs_per_h: Positive | None = None
    from_h: AtLeast0 = 0.0
    window_h: Positive | None = None
    """In which runs begin; default: `demand.duration_h`, or else `until_h`."""
    cv: Annotated[FiniteFloat, Field(gt=0, le=20)] = 1.0
    """Coefficient of variation of the gaps between two runs."""
    arrivals: LengthsTrace | None = None
    """A trace: so many of its arrivals in a row, from a random one on, are when runs begin, stretched to the window."""
    prompts: Size | None = None
    """Versions of the suite's system prompts, drawn by run: calls of one share it. None: calls share nothing."""
    deadline_s: Positive | None = None
    """Of every run, after it began."""
    deadline_factor: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Deadlines as multiples of the time that a run takes alone, drawn for each run; None for no deadlines."""

    @field_validator("suite")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return None if value is None else one_of(value, (*SUITE, MIXED))

    @field_validator("graph")
    @classmethod
    def _graph(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if isinstance(value, dict):
            demand_graph(msgspec.json.encode(value))
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.suite is None) == (self.graph is None):
            raise ValueError("give suite or graph, and not both")
        if (self.runs is None) == (self.runs_per_h is None):
            raise ValueError("give runs or runs_per_h, and not both")
        if None not in (self.deadline_s, self.deadline_factor):
            raise ValueError("give deadline_s or deadline_factor, and not both")
        if self.suite == MIXED and self.name is not None:
            raise ValueError("the mix has the names of the suite: give no name")
        if self.suite is not None and self.models:
            raise ValueError("models are those of the units of a graph: give graph")
        if isinstance(self.graph, dict):
            units = demand_graph(msgspec.json.encode(self.graph)).units
            if wrong := [name for name in self.models if name not in units or units[name].kind != "llm"]:
                raise ValueError(f"models.{wrong[0]}: the graph has no LLM unit of that name")
        if self.suite is None and self.prompts is not None:
            raise ValueError("prompts are those of the suite; a demand graph does not say how long its prompts are")
        return self


class BackendsOf(ScenarioTable):
    """Containers or DNN models of units of applications."""

    start_s: AtLeast0
    """Time of a cold start,"""
    starts_s: dict[str, AtLeast0] = {}
    """and of backends by name where it differs."""
    capacity: Size = 16
    """Warm ones at once."""
    keep_alive_s: AtLeast0 = 60.0
    """After which an idle one leaves."""


def demand_graph(text: bytes) -> DemandGraph:
    """Return the demand graph in *text*. Raise ValueError if it is none, or nothing is recorded."""
    try:
        graph = DemandGraph.from_json(text)
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"is not a demand graph: {error}") from error
    if not graph.records:
        raise ValueError("has no records of runs")
    if not any(graph.units[step.unit].kind == "llm" for record in graph.records for step in record.steps):
        raise ValueError("has no LLM unit in its records")
    return graph
