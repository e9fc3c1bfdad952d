"""`/api/what-ifs`: futures asked of the simulator, compared, and made the plan. Viewers read, operators decide."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from django.db.models import Prefetch, QuerySet
from django.http import HttpResponse, StreamingHttpResponse
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
from controlplane.simulation.whatif import counterfactual, plan, selectors, services, twin_errors
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import Counterfactual, FutureSeed, TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.simulation.scenario import ScenarioError

router = Router(auth=VIEWERS, tags=["What-if"])


class FutureIn(Strict):
    name: str = Field("", max_length=80)
    preset: str = ""
    """Name of one of `/api/what-if-presets`, whose changes come before `changes`."""
    changes: list[dict[str, Any]] = []
    """Changes against now, each with its `kind`: docs/what-if.md has them."""


class WhatIfIn(Strict):
    title: str = Field("", max_length=160)
    begin: Begin = Begin()
    """What it starts from."""
    horizon_s: float = 3600.0
    warmup_s: float = 0.0
    """Of the horizon, from its begin: not counted."""
    seeds: int = 5
    edits: list[dict[str, Any]] = []
    """Changes of demand that all futures share."""
    futures: list[FutureIn] = []
    """Futures other than A, which is as now; at most five."""
    usd_per_1000_missed: float = 5.0
    slo_target: float = 0.99
    draft: bool = False
    """Only keep it; else workers run it at once."""


class WhatIfOut(RowSchema):
    class Meta:
        model = WhatIf
        fields = (
            "id", "title", "horizon_s", "warmup_s", "seeds", "created_at", "submitted_at", "started_at", "ended_at",
            "usd_per_1000_missed", "slo_target",
        )  # fmt: skip

    requested_by: str | None = Field(None, alias="requested_by.username", description="Null once the user is deleted.")
    state: WhatIfState


class WhatIfDetail(WhatIfOut):
    begin: dict[str, Any]
    """Kind, moment and remarks of its start."""
    edits: list[dict[str, Any]]
    futures: list[dict[str, Any]]
    """letter, name, changes, those in words, and every key that differs from now."""
    progress: dict[str, Any]
    """As the live topic `what-if:ID`: state, done, eta_s, and a row for each future."""
    plan: dict[str, Any]
    """What was made of the chosen future; empty for nothing."""

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


class FutureDecision(DecisionIn):
    future: str = Field("", max_length=1)
    """Letter of one; empty for all."""


class PlanIn(DecisionIn):
    future: str = Field(max_length=1)
    """Its letter."""
    confirmed: bool = False
    """That it becomes the plan though it misses its target in every seed."""


class ChoiceIn(Strict):
    future: str = Field(max_length=1)
    """Its letter."""
    usd_per_1000_missed: float | None = None


class FutureQuery(Schema):
    future: str


class Obstacles(Schema):
    obstacles: list[str]
    differs: list[str]


class CounterfactualOut(RowSchema):
    class Meta:
        model = Counterfactual
        fields = (
            "made_at", "from_at", "to_at", "bundle", "requests", "cost_usd", "missed", "ttft_p95_ms", "saved_usd",
            "fewer_missed",
        )  # fmt: skip


class Counterfactuals(Described):
    sentence: str
    """Which bundle would have been the cheapest, and by how much."""
    items: list[CounterfactualOut]


class TwinErrorOut(Described):
    model: str
    gpu: str
    """GPUs of an instance."""
    windows: int
    """Of which `within` is made."""
    requests: int
    to_at: datetime
    """End of the newest window."""
    last: dict[str, float]
    """Of that window: ttft_p50, ttft_p95, itl_p50, itl_p95 as simulated over measured, less one; slo_met in points of 1."""
    within: dict[str, float]
    """What the errors were within in nine of ten windows, whatever their sign."""


class SeedsIn(Strict):
    count: int


class ComparisonQuery(Schema):
    scope: str = selectors.ALL
    usd_per_1000_missed: float | None = None


class TraceOut(RowSchema):
    class Meta:
        model = TraceFile
        fields = ("id", "name", "format", "requests", "span_s", "uploaded_at")


@router.post("/what-ifs", response={202: WhatIfDetail})
def ask_what_if(request: ApiRequest, body: WhatIfIn) -> Status[WhatIf]:
    """Have workers simulate futures. 422 names the field that is wrong, such as `B.changes[0].region`."""
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
    """Cancel it, or one future; what is done stays. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return services.cancel(_row(number), user, body.reason, body.future)


@router.post("/what-ifs/{int:number}/resume", response=WhatIfDetail)
def resume_what_if(request: ApiRequest, number: int, body: FutureDecision) -> WhatIf:
    """Run what was cancelled, failed or interrupted. 409 when nothing is missing."""
    user = request.auth.require(Role.OPERATOR)
    return services.resume(_row(number), user, body.future)


@router.post("/what-ifs/{int:number}/seeds", response=WhatIfDetail)
def add_what_if_seeds(request: ApiRequest, number: int, body: SeedsIn) -> WhatIf:
    """Run more seeds of every future: its intervals become narrower."""
    user = request.auth.require(Role.OPERATOR)
    return services.add_seeds(_row(number), body.count, user)


@router.post("/what-ifs/{int:number}/choose", response=WhatIfDetail)
def choose_future(request: ApiRequest, number: int, body: ChoiceIn) -> WhatIf:
    """Note which future is looked at, and what a thousand missed requests cost, for everybody who opens it."""
    request.auth.require(Role.OPERATOR)
    return services.choose(_row(number), body.future, body.usd_per_1000_missed)


@router.post("/what-ifs/{int:number}/delete", response={204: None})
def delete_what_if(request: ApiRequest, number: int) -> Status[None]:
    """Delete it with its runs. 409 while it runs, or when a plan was made of it."""
    user = request.auth.require(Role.OPERATOR)
    services.delete(_row(number), user)
    return Status(204, None)


@router.get("/what-ifs/{int:number}/comparison", response=dict[str, Any])
def compare_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """The futures side by side with 95% intervals, regret, and the decisions that first differ from those of A.

    `scope`: all, interactive, or either with `, edited`: the time of shared edits alone.
    """
    row = _row(number)
    return {**selectors.comparison(row, query.scope, query.usd_per_1000_missed), "decides": selectors.decides(row)}


@router.get("/what-ifs/{int:number}/curves", response=dict[str, Any])
def get_what_if_curves(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """By letter: TTFT as (ms, share of requests), and instances and queues over time by `MODEL REGION`."""
    return selectors.curves(_row(number), query.scope)


@router.get("/what-ifs/{int:number}/runs.csv", response={200: None})
def export_what_if_runs(request: ApiRequest, number: int) -> StreamingHttpResponse:
    """Every run and scope as CSV."""
    return csv_response(f"what-if-{number}-runs", selectors.RUNS_HEADER, selectors.runs(_row(number)))


@router.get("/what-ifs/{int:number}/futures.csv", response={200: None})
def export_what_if_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> StreamingHttpResponse:
    """The comparison as CSV."""
    rows = selectors.futures(_row(number), query.scope)
    return csv_response(f"what-if-{number}", selectors.FUTURES_HEADER, rows)


@router.get("/what-ifs/{int:number}/report.html", response={200: None})
def export_what_if_report(request: ApiRequest, number: int) -> HttpResponse:
    """The comparison as one HTML file with its figures, which needs nothing else."""
    # Here, since it brings Plotly, of which a web process has no need.
    from controlplane.simulation.whatif import report

    disposition = f'attachment; filename="pilothouse-what-if-{number}.html"'
    return HttpResponse(report.html(_row(number)), headers={"Content-Disposition": disposition})


@router.get("/what-ifs/{int:number}/obstacles", response=Obstacles)
def check_what_if_plan(request: ApiRequest, number: int, query: Query[FutureQuery]) -> dict[str, Any]:
    """What stands against making a future the plan, and what else differs now from when the what-if began."""
    row = _row(number)
    future = get_object_or_404(row.futures, letter=query.future)
    return {"obstacles": plan.obstacles(row, future), "differs": plan.changed_since(row)}


@router.post("/what-ifs/{int:number}/plan", response=WhatIfDetail)
def make_what_if_plan(request: ApiRequest, number: int, body: PlanIn) -> WhatIf:
    """Make a future the plan: its policies and bounds change, its instances are proposed as plans to approve.

    409 if what it rests on has changed since, or if it misses its target in every seed and that is not confirmed, in words.
    """
    user = request.auth.require(Role.OPERATOR)
    return plan.make_plan(_row(number), body.future, user, body.reason, confirmed=body.confirmed)


@router.post("/what-ifs/{int:number}/undo", response=WhatIfDetail)
def undo_what_if_plan(request: ApiRequest, number: int, body: DecisionIn) -> WhatIf:
    """Give back what making it the plan changed. 409 if it is not the plan."""
    user = request.auth.require(Role.OPERATOR)
    return plan.undo(_row(number), user, body.reason)


@router.get("/what-ifs/{int:number}/followed", response=dict[str, Any] | None)
def follow_what_if_plan(request: ApiRequest, number: int) -> dict[str, Any] | None:
    """What was predicted of the plan, and what happens; null if it is not the plan."""
    return plan.followed(_row(number))


@router.get("/counterfactuals", response=Counterfactuals)
def list_counterfactuals(request: ApiRequest) -> dict[str, Any]:
    """The newest replay of the ledger under every bundle, the cheapest first; an empty sentence before the first."""
    newest = counterfactual.newest()
    return {"sentence": newest.sentence, "items": newest.rows} if newest else {"sentence": "", "items": []}


@router.get("/twin-errors", response=Items[TwinErrorOut])
def list_twin_errors(request: ApiRequest) -> dict[str, Any]:
    """Errors of the simulator by performance profile; none before the first window is judged."""
    bands = twin_errors.twin_errors().items()
    return {"items": [{"model": model, "gpu": gpu, **asdict(band)} for (model, gpu), band in bands]}


@router.get("/what-if-presets", response=Items[dict[str, Any]])
def list_what_if_presets(request: ApiRequest) -> dict[str, Any]:
    """Futures ready to take: each paper's system, its baselines, and ours."""
    return {
        "items": [
            {"name": each.name, "title": each.title, "about": each.about, "changes": each.changes}
            for each in PRESETS.values()
        ]
    }


@router.get("/what-if-traces", response=Items[TraceOut])
def list_traces(request: ApiRequest) -> dict[str, Any]:
    """Traces that were uploaded."""
    return {"items": TraceFile.objects.defer("content")}


@router.post("/what-if-traces", response={201: TraceOut})
def upload_trace(
    request: ApiRequest,
    file: Annotated[UploadedFile | None, File()] = None,
    trace_format: Annotated[str, Form(alias="format")] = "",
) -> Status[TraceFile]:
    """Keep a trace for what-ifs to start from; formats are those of docs/simulation.md. 409 says what is wrong with it."""
    user = request.auth.require(Role.OPERATOR)
    if file is None:
        raise ActionError("file is missing: the trace.")
    return Status(201, traces.upload(file.name or "trace", trace_format, file.read(), user))


def _row(number: int) -> WhatIf:
    return get_object_or_404(WhatIf.objects.select_related("requested_by"), pk=number)


# Scenarios simulated by workers, each a what-if of one future


simulations = Router(auth=VIEWERS, tags=["Simulation"])
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


@simulations.post("/simulations", response={202: SimulationOut})
def run_simulation(request: ApiRequest, body: SimulationIn) -> Status[WhatIf]:
    """Have a worker simulate a scenario. 422 names the key that is wrong, 409 when too many wait."""
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
    """Cancel one that waits or runs. 409 when it has ended."""
    user = request.auth.require(Role.OPERATOR)
    return services.cancel(get_object_or_404(RUNS, pk=number), user, body.reason)


def _run(row: WhatIf) -> FutureSeed:
    """The only one."""
    return row.futures.all()[0].runs.all()[0]
