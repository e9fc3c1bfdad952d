"""`/api`: scenarios simulated by a worker. Viewers read, operators decide."""

from datetime import datetime
from typing import Any

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from ninja import Field, Query, Router, Schema, Status
from ninja.pagination import paginate

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import DecisionIn, NewestFirst, Page, RowSchema, Strict
from controlplane.rows import narrowed
from controlplane.simulation import requested
from controlplane.simulation.models import SimulationRun, SimulationState
from scheduling.simulation.scenario import ScenarioError

router = Router(auth=VIEWERS, tags=["Simulation"])


class SimulationIn(Strict):
    scenario: dict[str, Any]
    """As a scenario file (docs/simulation.md), in JSON; traces and other files are not read."""
    reason: str = Field("", max_length=255)


class SimulationOut(RowSchema):
    class Meta:
        model = SimulationRun
        fields = ("id", "requested_at", "title", "seed", "progress", "started_at", "ended_at", "error")

    requested_by: str | None = Field(None, alias="requested_by.username", description="Null once the user is deleted.")
    state: SimulationState


class SimulationDetail(SimulationOut):
    scenario: dict[str, Any]
    result: dict[str, Any] | None
    """Measures, hours, counters, moves and plans (the first 5,000 of each), once it is done."""


class SimulationQuery(Schema):
    state: SimulationState | None = None
    since: datetime | None = None


@router.post("/simulations", response={202: SimulationOut})
def run_simulation(request: ApiRequest, body: SimulationIn) -> Status[SimulationRun]:
    """Have a worker simulate a scenario. 422 names the key that is wrong, 409 when too many wait."""
    user = request.auth.require(Role.OPERATOR)
    try:
        return Status(202, requested.request_simulation(body.scenario, user, body.reason))
    except ScenarioError as error:
        raise ApiError(
            422, "invalid", f"{error.key}: {error.what}".removeprefix(": "), error.key or "scenario"
        ) from error


@router.get("/simulations", response=Page[SimulationOut])
@paginate(NewestFirst)
def list_simulations(request: ApiRequest, query: Query[SimulationQuery]) -> QuerySet[SimulationRun]:
    rows = SimulationRun.objects.select_related("requested_by").defer("scenario", "result")
    return narrowed(rows, state=query.state, requested_at__gte=query.since)


@router.get("/simulations/{int:number}", response=SimulationDetail)
def get_simulation(request: ApiRequest, number: int) -> SimulationRun:
    return get_object_or_404(SimulationRun, pk=number)


@router.post("/simulations/{int:number}/cancel", response=SimulationOut)
def cancel_simulation(request: ApiRequest, number: int, body: DecisionIn) -> SimulationRun:
    """Cancel one that waits or runs. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return requested.cancel(get_object_or_404(SimulationRun, pk=number), user, body.reason)
