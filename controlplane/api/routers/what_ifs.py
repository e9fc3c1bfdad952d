"""`/api/what-ifs`: simulated futures, their comparison, and adoption as a plan. Viewers read, operators decide."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from django.db.models import Prefetch, QuerySet
from django.http import StreamingHttpResponse
from django.shortcuts import get_object_or_404
from ninja import Field, File, Form, Query, Router, Schema, Status
from ninja.files import UploadedFile
from ninja.pagination import paginate

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import DecisionIn, Described, Items, NewestFirst, Page, RowSchema, Strict
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.tables import csv_response
from controlplane.rows import narrowed
from controlplane.simulation.whatif import plan, selectors, services, twin_errors
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.simulation.scenario import ScenarioError

router = Router(auth=VIEWERS, tags=["What-if"])


class FutureIn(Strict):
    name: str = Field("", max_length=80)
    preset: str = ""
    """Name of one of `/api/what-if-presets`; its changes precede `changes`."""
    changes: list[dict[str, Any]] = []
    """Changes against now, each with its `kind`, see docs/what-if.md."""


class WhatIfIn(Strict):
    title: str = Field("", max_length=160)
    begin: Begin = Begin()
    """Starting point."""
    horizon_s: float = 3600.0
    warmup_s: float = 0.0
    """Start of the horizon that is not counted."""
    seeds: int = 5
    edits: list[dict[str, Any]] = []
    """Changes of demand shared by all futures."""
    futures: list[FutureIn] = []
    """Futures other than A (the present state); at most six."""
    usd_per_1000_missed: float = 5.0
    slo_target: float = 0.99
    draft: bool = False
    """Only save it; otherwise workers run it immediately."""


class WhatIfOut(RowSchema):
    class Meta:
        model = WhatIf
        fields = (
            "id", "title", "horizon_s", "warmup_s", "seeds", "created_at", "submitted_at", "started_at", "ended_at",
            "usd_per_1000_missed", "slo_target", "nightly",
        )  # fmt: skip

    requested_by: str | None = Field(None, alias="requested_by.username", description="Null once the user is deleted.")
    state: WhatIfState


class WhatIfDetail(WhatIfOut):
    begin: dict[str, Any]
    """Kind, time and remarks of the starting point."""
    edits: list[dict[str, Any]]
    futures: list[dict[str, Any]]
    """Letter, name, changes, changes in words, and every key that differs from now."""
    progress: dict[str, Any]
    """As in the live topic `what-if:ID`: state, done, eta_s, and a row for each future."""
    plan: dict[str, Any]
    """Plan made from the chosen future; empty for none."""

    @staticmethod
    def resolve_begin(row: WhatIf) -> dict[str, Any]:
        return {name: row.start.get(name) for name in ("kind", "at", "remarks")}

    @staticmethod
    def resolve_futures(row: WhatIf) -> list[dict[str, Any]]:
        return [
            {
                "letter": each.letter,
                "name": each.name,
                "changes": each.changes,
                "words": selectors.changes_in_words(row, each),
                "diff": selectors.full_diff(row, each),
            }
            for each in row.futures.all()
        ]

    @staticmethod
    def resolve_progress(row: WhatIf) -> dict[str, Any]:
        return selectors.progress(row.pk) or {}


class WhatIfQuery(Schema):
    state: WhatIfState | None = None
    since: datetime | None = None
    nightly: bool | None = None


class FutureDecision(DecisionIn):
    future: str = Field("", max_length=1)
    """Letter of one future; empty for all."""


class PlanIn(DecisionIn):
    future: str = Field(max_length=1)
    """Letter of the future."""
    confirmed: bool = False
    """Confirms a plan that misses its target in every seed."""


class ChoiceIn(Strict):
    future: str = Field(max_length=1)
    """Letter of the future."""
    usd_per_1000_missed: float | None = None


class FutureQuery(Schema):
    future: str


class Obstacles(Schema):
    obstacles: list[str]
    differs: list[str]


class TwinErrorOut(Described):
    model: str
    gpu: str
    """GPUs of an instance."""
    windows: int
    """Number of windows behind `within`."""
    requests: int
    to_at: datetime
    """End of the newest window."""
    last: dict[str, float]
    """Errors of that window: ttft_p50, ttft_p95, itl_p50, itl_p95 as simulated over measured, minus one; slo_met as a
    difference of shares.
    """
    within: dict[str, float]
    """Bound of the absolute errors in nine of ten windows."""


class SeedsIn(Strict):
    count: int


class ComparisonQuery(Schema):
    scope: str = selectors.ALL
    usd_per_1000_missed: float | None = None


class TraceOut(RowSchema):
    class Meta:
        model = TraceFile
        fields = ("id", "name", "format", "unit", "requests", "span_s", "uploaded_at")


@router.post("/what-ifs", response={202: WhatIfDetail})
def ask_what_if(request: ApiRequest, body: WhatIfIn) -> Status[WhatIf]:
    """Have workers simulate futures. 422 names the invalid field, such as `B.changes[0].region`."""
    user = request.auth.require(Role.OPERATOR)
    values = body.model_dump(exclude={"begin", "futures", "draft"})
    values["start"] = start_of(body.begin, body.horizon_s).model_dump(mode="json")
    futures = [services.future_of(each.name, each.preset, each.changes) for each in body.futures]
    made = services.save_draft(None, values, futures, user) if body.draft else services.ask(values, futures, user)
    return Status(202, made)


@router.get("/what-ifs", response=Page[WhatIfOut])
@paginate(NewestFirst)
def list_what_ifs(request: ApiRequest, query: Query[WhatIfQuery]) -> QuerySet[WhatIf]:
    return narrowed(selectors.what_ifs(), state=query.state, created_at__gte=query.since)


@router.get("/what-ifs/{int:number}", response=WhatIfDetail)
def get_what_if(request: ApiRequest, number: int) -> WhatIf:
    return _row(number)


@router.post("/what-ifs/{int:number}/run", response=WhatIfDetail)
def run_what_if(request: ApiRequest, number: int) -> WhatIf:
    """Run a draft."""
    user = request.auth.require(Role.OPERATOR)
    return services.submit(_row(number), user)


@router.post("/what-ifs/{int:number}/cancel", response=WhatIfDetail)
def cancel_what_if(request: ApiRequest, number: int, body: FutureDecision) -> WhatIf:
    """Cancel a what-if or one future; completed runs stay. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return services.cancel(_row(number), user, body.reason, body.future)


@router.post("/what-ifs/{int:number}/resume", response=WhatIfDetail)
def resume_what_if(request: ApiRequest, number: int, body: FutureDecision) -> WhatIf:
    """Run what was cancelled, failed or interrupted. 409 when nothing is missing."""
    user = request.auth.require(Role.OPERATOR)
    return services.resume(_row(number), user, body.future)


@router.post("/what-ifs/{int:number}/seeds", response=WhatIfDetail)
def add_what_if_seeds(request: ApiRequest, number: int, body: SeedsIn) -> WhatIf:
    """Run more seeds of every future, which narrows the intervals."""
    user = request.auth.require(Role.OPERATOR)
    return services.add_seeds(_row(number), body.count, user)


@router.post("/what-ifs/{int:number}/choose", response=WhatIfDetail)
def choose_future(request: ApiRequest, number: int, body: ChoiceIn) -> WhatIf:
    """Set the selected future and the cost of a thousand missed requests, for all users of this what-if."""
    request.auth.require(Role.OPERATOR)
    return services.choose(_row(number), body.future, body.usd_per_1000_missed)


@router.post("/what-ifs/{int:number}/delete", response={204: None})
def delete_what_if(request: ApiRequest, number: int) -> Status[None]:
    """Delete it with its runs. 409 while it runs, or when a plan was made from it."""
    user = request.auth.require(Role.OPERATOR)
    services.delete(_row(number), user)
    return Status(204, None)


@router.get("/what-ifs/{int:number}/comparison", response=dict[str, Any])
def compare_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """Compare the futures with 95% intervals, regret, and the decisions that first differ from those of A.

    `scope`: all, interactive, or either with `, edited`: only the time of shared edits.
    """
    row = _row(number)
    return {**selectors.comparison(row, query.scope, query.usd_per_1000_missed), "decides": selectors.decides(row)}


@router.get("/what-ifs/{int:number}/curves", response=dict[str, Any])
def get_what_if_curves(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """Return by letter: TTFT as (ms, share of requests), and instances and queues over time by `MODEL REGION`."""
    return selectors.curves(_row(number), query.scope)


@router.get("/what-ifs/{int:number}/runs.csv", response={200: None})
def export_what_if_runs(request: ApiRequest, number: int) -> StreamingHttpResponse:
    """Export every run and scope as CSV."""
    return csv_response(f"what-if-{number}-runs", selectors.RUNS_HEADER, selectors.runs(_row(number)))


@router.get("/what-ifs/{int:number}/futures.csv", response={200: None})
def export_what_if_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> StreamingHttpResponse:
    """Export the comparison as CSV."""
    rows = selectors.futures(_row(number), query.scope)
    return csv_response(f"what-if-{number}", selectors.FUTURES_HEADER, rows)


@router.get("/what-ifs/{int:number}/obstacles", response=Obstacles)
def check_what_if_plan(request: ApiRequest, number: int, query: Query[FutureQuery]) -> dict[str, Any]:
    """Check a future before it becomes the plan: obstacles, and changes since the what-if started."""
    row = _row(number)
    future = get_object_or_404(row.futures, letter=query.future)
    return {"obstacles": plan.obstacles(row, future), "differs": plan.changed_since(row)}


@router.post("/what-ifs/{int:number}/plan", response=WhatIfDetail)
def make_what_if_plan(request: ApiRequest, number: int, body: PlanIn) -> WhatIf:
    """Make a future the plan: its policies and bounds apply, its instances are proposed as plans to approve.

    409 if the current state has changed since, or if it misses its target in every seed and that is not confirmed; the error
    says why.
    """
    user = request.auth.require(Role.OPERATOR)
    return plan.make_plan(_row(number), body.future, user, body.reason, confirmed=body.confirmed)


@router.post("/what-ifs/{int:number}/undo", response=WhatIfDetail)
def undo_what_if_plan(request: ApiRequest, number: int, body: DecisionIn) -> WhatIf:
    """Undo the changes that making it the plan caused. 409 if it is not the plan."""
    user = request.auth.require(Role.OPERATOR)
    return plan.undo(_row(number), user, body.reason)


@router.get("/what-ifs/{int:number}/followed", response=dict[str, Any] | None)
def follow_what_if_plan(request: ApiRequest, number: int) -> dict[str, Any] | None:
    """Return the plan's predictions and measurements; null if it is not the plan."""
    return plan.followed(_row(number))


@router.get("/twin-errors", response=Items[TwinErrorOut])
def list_twin_errors(request: ApiRequest) -> dict[str, Any]:
    """Return errors of the simulator by performance profile; empty before the first window is judged."""
    bands = twin_errors.twin_errors().items()
    return {"items": [{"model": model, "gpu": gpu, **asdict(band)} for (model, gpu), band in bands]}


@router.get("/what-if-presets", response=Items[dict[str, Any]])
def list_what_if_presets(request: ApiRequest) -> dict[str, Any]:
    """List predefined futures: each paper's system, its baselines, and ours."""
    return {
        "items": [
            {"name": each.name, "title": each.title, "about": each.about, "changes": each.changes}
            for each in PRESETS.values()
        ]
    }


@router.get("/what-if-traces", response=Items[TraceOut])
def list_traces(request: ApiRequest) -> dict[str, Any]:
    """List uploaded traces."""
    return {"items": TraceFile.objects.defer("content")}


@router.post("/what-if-traces", response={201: TraceOut})
def upload_trace(
    request: ApiRequest,
    file: Annotated[UploadedFile | None, File()] = None,
    trace_format: Annotated[str, Form(alias="format")] = "",
    unit: Annotated[str, Form()] = "",
) -> Status[TraceFile]:
    """Upload a trace that what-ifs can start from; for formats see docs/simulation.md. `unit` (ms or s) is that of times in
    Mooncake's format, where they may be either. 409 says what is wrong with it."""
    user = request.auth.require(Role.OPERATOR)
    if file is None:
        raise ActionError("file is missing: the trace.")
    return Status(201, traces.upload(file.name or "trace", trace_format, file.read(), user, unit))


def _row(number: int) -> WhatIf:
    return get_object_or_404(WhatIf.objects.select_related("requested_by"), pk=number)


# Scenarios simulated by workers, each a what-if of one future


simulations = Router(auth=VIEWERS, tags=["Simulation"])
RUNS = WhatIf.objects.filter(start__kind="scenario").select_related("requested_by")
SHOWN = FutureSeed.objects.only("future", "seed", "progress", "error")


class SimulationIn(Strict):
    scenario: dict[str, Any]
    """Scenario file (docs/simulation.md) in JSON; traces and other files are not read."""
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
    """Completed share of the run."""
    error: str
    """Reason of the failure."""

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
    """Measures, hours, counters, moves and plans (the first 5,000 of each), when done."""

    @staticmethod
    def resolve_result(row: WhatIf) -> dict[str, Any] | None:
        result: dict[str, Any] | None = _run(row).result.get("simulated")
        return result


@simulations.post("/simulations", response={202: SimulationOut})
def run_simulation(request: ApiRequest, body: SimulationIn) -> Status[WhatIf]:
    """Have a worker simulate a scenario. 422 names the invalid key, 409 when too many are queued."""
    user = request.auth.require(Role.OPERATOR)
    try:
        return Status(202, services.simulate_scenario(body.scenario, user, body.reason))
    except ScenarioError as error:
        raise ApiError(
            422, "invalid", f"{error.key}: {error.what}".removeprefix(": "), error.key or "scenario"
        ) from error


@simulations.get("/simulations", response=Page[SimulationOut])
@paginate(NewestFirst)
def list_simulations(request: ApiRequest, query: Query[WhatIfQuery]) -> QuerySet[WhatIf]:
    rows = RUNS.defer("start").prefetch_related(Prefetch("futures__runs", SHOWN))
    return narrowed(rows, state=query.state, submitted_at__gte=query.since)


@simulations.get("/simulations/{int:number}", response=SimulationDetail)
def get_simulation(request: ApiRequest, number: int) -> WhatIf:
    return get_object_or_404(RUNS, pk=number)


@simulations.post("/simulations/{int:number}/cancel", response=SimulationOut)
def cancel_simulation(request: ApiRequest, number: int, body: DecisionIn) -> WhatIf:
    """Cancel a queued or running simulation. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return services.cancel(get_object_or_404(RUNS, pk=number), user, body.reason)


def _run(row: WhatIf) -> FutureSeed:
    """Return the only run."""
    return row.futures.all()[0].runs.all()[0]
