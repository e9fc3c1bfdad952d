"""`/api/what-ifs`: simulated futures, their comparison, and adoption as a plan. Viewers read, operators decide."""

from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from django.db.models import QuerySet
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
from controlplane.simulation.whatif.models import TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.simulation.scenario import ScenarioError

router = Router(auth=VIEWERS, tags=["What-if"])


class FutureIn(Strict):
    name: str = Field("", max_length=80)
    preset: str = ""
    """Name of one of `/api/what-if-presets`; its changes precede `changes`."""
    changes: list[dict[str, Any]] = []
    """Changes against now, each with its `kind`, see docs/plan/what-if.md."""


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
    slo_target: float = 0.99
    scenario: dict[str, Any] | None = None
    """Scenario file (docs/plan/simulation.md) in JSON, simulated by itself with its own seed; traces and other files are not
    read. Leave out all else."""
    draft: bool = False
    """Only save it; otherwise workers run it immediately."""


class WhatIfOut(RowSchema):
    class Meta:
        model = WhatIf
        fields = (
            "id", "title", "horizon_s", "warmup_s", "seeds", "created_at", "submitted_at", "started_at", "ended_at",
            "slo_target", "nightly",
        )  # fmt: skip

    requested_by: str | None = Field(None, alias="requested_by.username", description="Null once the user is deleted.")
    state: WhatIfState


class WhatIfDetail(WhatIfOut):
    begin: dict[str, Any]
    """Kind, time and remarks of the starting point."""
    edits: list[dict[str, Any]]
    futures: list[dict[str, Any]]
    """Letter, name, changes, changes in words, every key that differs from now, and warnings against it as the plan."""
    progress: dict[str, Any]
    """As in the live topic `what-if:ID`: state, done, eta_s, and a row for each future."""
    plan: dict[str, Any]
    """Plan made from the chosen future; empty for none."""
    result: dict[str, Any] | None
    """Of a scenario, when done: measures, hours, counters, moves and plans (the first 5,000 of each)."""

    @staticmethod
    def resolve_result(row: WhatIf) -> dict[str, Any] | None:
        if row.start.get("kind") != "scenario":
            return None
        result: dict[str, Any] | None = row.futures.all()[0].runs.all()[0].result.get("simulated")
        return result

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
                "warnings": plan.warnings(row, each) if row.start.get("kind") == "fleet" else [],
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


class Target(StrEnum):
    """State to bring a what-if or one of its futures to."""

    QUEUED = "queued"
    """Run a draft, or what was cancelled or failed."""
    CANCELLED = "cancelled"


class WhatIfChange(Strict):
    state: Target | None = None
    future: str = Field("", max_length=1)
    """Letter of the future whose state changes; empty for all."""
    seeds: int | None = None
    """Seeds of every future, more than there are: they run and narrow the intervals."""
    chosen: str = Field("", max_length=1)
    """Letter of the selected future."""
    reason: str = Field("", max_length=255)


class PlanIn(DecisionIn):
    future: str = Field(max_length=1)
    """Letter of the future."""


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


class ComparisonQuery(Schema):
    scope: str = selectors.ALL


class TraceOut(RowSchema):
    class Meta:
        model = TraceFile
        fields = ("id", "name", "format", "unit", "requests", "span_s", "uploaded_at")


@router.post("/what-ifs", response={202: WhatIfDetail})
def ask_what_if(request: ApiRequest, body: WhatIfIn) -> Status[WhatIf]:
    """Have workers simulate futures. 422 names the invalid field, such as `B.changes[0].region`."""
    user = request.auth.require(Role.OPERATOR)
    if body.scenario is not None:
        try:
            return Status(202, services.simulate_scenario(body.scenario, user))
        except ScenarioError as error:
            what = f"{error.key}: {error.what}".removeprefix(": ")
            raise ApiError(422, "invalid", what, error.key or "scenario") from error
    values = body.model_dump(exclude={"begin", "futures", "draft", "scenario"})
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


@router.patch("/what-ifs/{int:number}", response=WhatIfDetail)
def change_what_if(request: ApiRequest, number: int, body: WhatIfChange) -> WhatIf:
    """Run, cancel or resume it or one future, add seeds, or choose a future. 409 when it has no such state to leave."""
    user = request.auth.require(Role.OPERATOR)
    row = _row(number)
    match body.state:
        case Target.CANCELLED:
            row = services.cancel(row, user, body.reason, body.future)
        case Target.QUEUED if row.state == WhatIfState.DRAFT:
            row = services.submit(row, user)
        case Target.QUEUED:
            row = services.resume(row, user, body.future)
    if body.seeds is not None:
        row = services.add_seeds(row, body.seeds - row.seeds, user)
    return services.choose(row, body.chosen) if body.chosen else row


@router.delete("/what-ifs/{int:number}", response={204: None})
def delete_what_if(request: ApiRequest, number: int) -> Status[None]:
    """Delete it with its runs. 409 while it runs, or when a plan was made from it."""
    user = request.auth.require(Role.OPERATOR)
    services.delete(_row(number), user)
    return Status(204, None)


@router.get("/what-ifs/{int:number}/comparison", response=dict[str, Any])
def compare_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """Compare the futures with 95% intervals, and the first decision of each that differs from those of A.

    `scope`: all, interactive, or either with `, edited`: only the time of shared edits. `curves`, by letter: ttft_p95_ms by
    SLO class at `until_s`, and ready instances by `MODEL REGION` at `t_s`.
    """
    row = _row(number)
    return {**selectors.comparison(row, query.scope), "curves": selectors.curves(row)}


@router.get("/what-ifs/{int:number}/futures.csv", response={200: None})
def export_what_if_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> StreamingHttpResponse:
    """Export the comparison as CSV."""
    rows = selectors.futures(_row(number), query.scope)
    return csv_response(f"what-if-{number}", selectors.FUTURES_HEADER, rows)


@router.post("/what-ifs/{int:number}/plan", response=WhatIfDetail)
def make_what_if_plan(request: ApiRequest, number: int, body: PlanIn) -> WhatIf:
    """Make a future the plan: its policies and bounds apply, its instances are proposed as plans to approve.

    The `warnings` of a future in the detail say what speaks against it.
    """
    user = request.auth.require(Role.OPERATOR)
    return plan.make_plan(_row(number), body.future, user, body.reason)


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
    """Upload a trace for what-ifs to start from (formats: docs/plan/simulation.md). `unit` (ms or s) is that of times in
    Mooncake's format, where they may be either. 409 says what is wrong with it."""
    user = request.auth.require(Role.OPERATOR)
    if file is None:
        raise ActionError("file is missing: the trace.")
    return Status(201, traces.upload(file.name or "trace", trace_format, file.read(), user, unit))


def _row(number: int) -> WhatIf:
    return get_object_or_404(WhatIf.objects.select_related("requested_by"), pk=number)
