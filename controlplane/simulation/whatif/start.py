"""Where a what-if begins: the moment, the scenario, what runs and waits then, and how requests come after it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from controlplane.simulation.whatif.arrivals import drawn, recent, recorded
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.past import EndpointDemand, as_arrays
from controlplane.simulation.whatif.state import StoredState, with_state
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import SOURCE, Stage, stage
from scheduling.simulation.staging.demand import demand_of, of_the_fleet
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.edits import Edit, Factor, Shift, edited


class Start(BaseModel):
    """Kept as JSON in a row, and read again by whichever worker simulates from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fleet", "ledger", "trace", "synthetic", "scenario"]
    """`scenario`: one that is simulated by itself, exactly as it stands."""
    at: datetime
    """The moment that is time 0 of the simulation."""
    scenario: dict[str, Any]
    """Keys of a scenario file (docs/simulation.md), as things are now."""
    state: StoredState | None = None
    """Requests that run and wait at `at`; None: none."""
    arrivals: dict[str, Any] = {"kind": "clients"}
    """How requests come: `clients` (those of the scenario), `forecast`, `ledger` or `file`, by its `kind`."""
    past: list[EndpointDemand] = []
    """Demand of the hour before."""
    remarks: list[str] = []
    """Limits of the start that a reader should know."""

    @property
    def asks(self) -> bool:
        """Whether the requests are those of the scenario's own clients."""
        return bool(self.arrivals["kind"] == "clients")

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing that requests could be drawn from."""
        return bool(self.arrivals["kind"] == "forecast" and not self.arrivals["streams"])


def stage_start(
    start: Start, scenario: Scenario, seed: int, edits: Sequence[Edit] = (), horizon_s: float = inf
) -> Stage:
    """Make *scenario*, that of *start* after a future's changes, ready to run with *seed*.

    *edits* are those of its requests, of which the ones before *horizon_s* come. Raises ScenarioError, TraceError, and
    ValueError for arrivals or a state that cannot be had.
    """
    workload = _workload(start, scenario, seed)
    if edits or (workload is not None and horizon_s < inf):
        if workload is None:
            workload, _ = demand_of(scenario, SOURCE.parent, seed)
        if horizon_s < inf:
            workload = workload.select(workload.arrival_s < horizon_s)
        workload = edited(workload, edits, seed=seed, horizon_s=horizon_s)
    made = stage(scenario, SOURCE, seed, workload)
    if start.arrivals["kind"] == "forecast" and all(isinstance(edit, Factor | Shift) for edit in edits):
        # Of all seeds the same, so that what an instance serves is measured once for all of them.
        before = of_the_fleet(scenario, recent(start.arrivals))
        made = replace(made, recent=requests_of(scenario, made.cluster, before, seed) if len(before) else None)
    if start.past:
        made = replace(made, past=as_arrays(start.past, made.cluster.endpoints))
    if start.state is None:
        return made
    return with_state(start.state, scenario, made, seed, recorded=start.arrivals["kind"] == "ledger")


def _workload(start: Start, scenario: Scenario, seed: int) -> Workload | None:
    """The requests after *start*; None where they are those of the scenario's own clients."""
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
