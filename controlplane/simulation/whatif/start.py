"""Start of a what-if: its moment, scenario, running and waiting requests, and later arrivals."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial, reduce
from math import inf
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.simulation.whatif.arrivals import drawn, recent, recorded
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.past import EndpointDemand, as_arrays
from scheduling.applications.demand_graph import DemandGraph
from scheduling.fleet.state import FleetState
from scheduling.simulation.cluster.description import cluster_of
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import SOURCE, Stage, stage
from scheduling.simulation.staging.demand import demand_of, of_the_fleet
from scheduling.simulation.staging.fork import fork
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.edits import Edit, Factor, Shift, edited

MAX_REQUESTS: Final = 5_000_000
"""Maximum requests of one run, including bursts and the past that forecasters learn from."""


def _read(value: Any) -> FleetState:
    if isinstance(value, FleetState):
        return value
    try:
        return msgspec.convert(value, FleetState)
    except msgspec.ValidationError as error:
        raise ValueError(f"This fork was stored by another version, start again from the fleet: {error}") from error


StoredState = Annotated[FleetState, PlainValidator(_read), PlainSerializer(msgspec.to_builtins)]


class Start(BaseModel):
    """Start of a what-if, stored as JSON and read by the worker that simulates it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fleet", "ledger", "trace", "synthetic"]
    at: datetime
    """Time 0 of the simulation."""
    scenario: dict[str, Any]
    """Keys of a scenario file (docs/plan/simulation.md) for the present fleet."""
    state: StoredState | None = None
    """Requests that run and wait at `at`; None for none."""
    arrivals: dict[str, Any] = {"kind": "clients"}
    """Arrivals by `kind`: `clients` (the scenario's), `forecast`, `ledger` or `file`."""
    past: list[EndpointDemand] = []
    """Demand of the hour before."""
    remarks: list[str] = []
    """Limits of the start, for readers."""

    @property
    def asks(self) -> bool:
        """Return whether requests come from the scenario's own clients."""
        return bool(self.arrivals["kind"] == "clients")

    @property
    def is_quiet(self) -> bool:
        """Return whether there is nothing to draw requests from."""
        return bool(self.arrivals["kind"] == "forecast" and not self.arrivals["streams"])


def stage_start(
    start: Start, scenario: Scenario, seed: int, edits: Sequence[Edit] = (), horizon_s: float = inf
) -> Stage:
    """Prepare *scenario*, *start* after a future's changes, to run with *seed*.

    *edits* apply to its requests before *horizon_s*. Raises ScenarioError, TraceError, and ValueError for impossible
    arrivals or state.
    """
    workload = _workload(start, scenario, seed)
    if edits or (workload is not None and horizon_s < inf):
        if workload is None:
            workload, _ = demand_of(scenario, cluster_of(scenario), SOURCE.parent, seed)
        if horizon_s < inf:
            workload = workload.select(workload.arrival_s < horizon_s)
        factors = (edit.of_each(workload) for edit in edits if isinstance(edit, Factor))
        if (count := float(reduce(np.multiply, factors, np.ones(len(workload))).sum())) > MAX_REQUESTS:
            raise ValueError(f"These are some {count:,.0f} requests; {MAX_REQUESTS:,} are the most.")
        workload = edited(workload, edits, seed=seed, horizon_s=horizon_s)
    made = stage(scenario, SOURCE, seed, workload, partial(_graph_of, start.at))
    if start.arrivals["kind"] == "forecast" and all(isinstance(edit, Factor | Shift) for edit in edits):
        # Common to all seeds, so that capability is measured once for all of them.
        before = of_the_fleet(scenario, recent(start.arrivals))
        made = replace(made, recent=requests_of(scenario, made.cluster, before, seed) if len(before) else None)
    if start.past:
        made = replace(made, past=as_arrays(start.past, made.cluster.endpoints))
    if start.state is None:
        return made
    tenants = list(made.tenants)
    forked = fork(start.state, scenario, made.cluster, tenants, seed)
    for strategy in made.scaled.strategies.values() if made.scaled else ():
        strategy.memory.update(start.state.memory)
    return replace(made, state=forked, tenants=tenants)


@lru_cache(maxsize=64)
def _graph_of(at: datetime, tenant: str, application: str) -> DemandGraph | None:
    """Return what orders knew of an application *at* that time."""
    row = Application.objects.filter(tenant__name=tenant, name=application).first()
    return None if row is None else graph_of(row, at)


def _workload(start: Start, scenario: Scenario, seed: int) -> Workload | None:
    """Return the requests after *start*; None for the scenario's own clients."""
    match start.arrivals["kind"]:
        case "clients":
            return None
        case "file":
            return traces.workload_of(start.arrivals, scenario, seed)
        case "forecast":
            return drawn(start.arrivals, seed)
        case "ledger":
            return recorded(start.arrivals, start.at)
        case other:
            raise ValueError(f"There are no arrivals of the kind {other!r}.")
