"""`/api/simulations`: scenarios simulated by workers, each a what-if of one future. Viewers read, operators decide."""

from datetime import datetime
from typing import Any

from django.db.models import Prefetch, QuerySet
from django.shortcuts import get_object_or_404
from ninja import Field, Query, Router, Status
from ninja.pagination import paginate

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.routers.what_ifs import WhatIfQuery
from controlplane.api.schemas import DecisionIn, NewestFirst, Page, RowSchema, Strict
from controlplane.rows import narrowed
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState
from scheduling.simulation.scenario import ScenarioError

router = Router(auth=VIEWERS, tags=["Simulation"])
RUNS = WhatIf.objects.filter(start__kind="scenario").select_related("requested_by")
SHOWN = FutureSeed.objects.only("future", "seed", "progress", "error")


class SimulationIn(Strict):
    scenario: dict[str, Any]
    """As a scenario file (docs/simulation.md), in JSON; traces and other files are not read."""
    reason: str = Field("", max_length=255)


class SimulationOut(RowSchema):
    class Meta:
        model = WhatIf
        fields = ("id", "title", "started_at", "ended_at")

    requested_at: datetime = Field(alias="submitted_at")
    requested_by: str | None = Field(None, alias="requested_by.username", description="Null once the user is deleted.")
    state: WhatIfState
    seed: int
    progress: float
    """Share of the whole run that is done."""
    error: str
    """Why it failed."""

    @staticmethod
    def resolve_seed(row: WhatIf) -> int:
        return _run(row).seed

    @staticmethod
    def resolve_progress(row: WhatIf) -> float:
        return _run(row).progress

    @staticmethod
    def resolve_error(row: WhatIf) -> str:
        return _run(row).error


class SimulationDetail(SimulationOut):
    scenario: dict[str, Any] = Field(alias="start.scenario")
    result: dict[str, Any] | None
    """Measures, hours, counters, moves and plans (the first 5,000 of each), once it is done."""

    @staticmethod
    def resolve_result(row: WhatIf) -> dict[str, Any] | None:
        result: dict[str, Any] | None = _run(row).result.get("simulated")
        return result


@router.post("/simulations", response={202: SimulationOut})
def run_simulation(request: ApiRequest, body: SimulationIn) -> Status[WhatIf]:
    """Have a worker simulate a scenario. 422 names the key that is wrong, 409 when too many wait."""
    user = request.auth.require(Role.OPERATOR)
    try:
        return Status(202, services.simulate_scenario(body.scenario, user, body.reason))
    except ScenarioError as error:
        raise ApiError(
            422, "invalid", f"{error.key}: {error.what}".removeprefix(": "), error.key or "scenario"
        ) from error


@router.get("/simulations", response=Page[SimulationOut])
@paginate(NewestFirst)
def list_simulations(request: ApiRequest, query: Query[WhatIfQuery]) -> QuerySet[WhatIf]:
    rows = RUNS.defer("start").prefetch_related(Prefetch("futures__runs", SHOWN))
    return narrowed(rows, state=query.state, submitted_at__gte=query.since)


@router.get("/simulations/{int:number}", response=SimulationDetail)
def get_simulation(request: ApiRequest, number: int) -> WhatIf:
    return get_object_or_404(RUNS, pk=number)


@router.post("/simulations/{int:number}/cancel", response=SimulationOut)
def cancel_simulation(request: ApiRequest, number: int, body: DecisionIn) -> WhatIf:
    """Cancel one that waits or runs. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return services.cancel(get_object_or_404(RUNS, pk=number), user, body.reason)


def _run(row: WhatIf) -> FutureSeed:
    """The only one."""
    return row.futures.all()[0].runs.all()[0]
