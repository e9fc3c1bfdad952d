"""`/api/what-ifs`: simulated futures, their comparison, and adoption as a plan. Viewers read, operators decide."""

from enum import StrEnum
from typing import Annotated, Any

from django.shortcuts import get_object_or_404
from ninja import Field, File, Form, Query, Router, Schema, Status
from ninja.files import UploadedFile
from pydantic import FiniteFloat

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import DecisionIn, Items, RowSchema, Strict
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.resource import Column
from controlplane.resources.what_ifs import WHAT_IFS
from controlplane.simulation.whatif import plan, selectors, services
from controlplane.simulation.whatif.models import TraceFile, WhatIf
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin, start_of

router = Router(auth=VIEWERS, tags=["What-if"])


class FutureIn(Strict):
    name: str = Field("", max_length=80)
    preset: str = ""
    """Name of a policy bundle or a baseline (docs/plan/what-if.md); its changes precede `changes`."""
    changes: list[dict[str, Any]] = []
    """Changes against now, each with its `kind`, see docs/plan/what-if.md."""


class WhatIfIn(Strict):
    title: str = Field("", max_length=160)
    begin: Begin = Begin()
    """Starting point."""
    horizon_s: FiniteFloat = 3600.0
    warmup_s: FiniteFloat = 0.0
    """Start of the horizon that is not counted."""
    seeds: int = 5
    edits: list[dict[str, Any]] = []
    """Changes of demand shared by all futures."""
    futures: list[FutureIn] = []
    """Futures other than A (the present state); at most six."""


def _futures(row: WhatIf) -> list[dict[str, Any]]:
    return [
        {
            "letter": each.letter,
            "name": each.name,
            "changes": each.changes,
            "words": selectors.changes_in_words(row, each),
            "warnings": plan.warnings(row, each) if row.start.get("kind") == "fleet" else [],
        }
        for each in row.futures.all()
    ]


WhatIfOut = schema_of(WHAT_IFS, "WhatIfOut")
WhatIfDetail = schema_of(
    WHAT_IFS,
    "WhatIfDetail",
    "",
    Column(
        "begin",
        source=lambda row: {name: row.start.get(name) for name in ("kind", "at", "remarks")},
        type=dict[str, Any],
        about="Kind, time and remarks of the starting point.",
    ),
    Column("edits", type=list[dict[str, Any]], about="Changes that all futures share."),
    Column(
        "futures",
        source=_futures,
        type=list[dict[str, Any]],
        about="Letter, name, changes, changes in words, and warnings against it as the plan.",
    ),
    Column(
        "progress",
        source=lambda row: selectors.progress(row.pk) or {},
        type=dict[str, Any],
        about="As in the live topic `what-if:ID`: state, done, eta_s, and a row for each future.",
    ),
    Column("plan", type=dict[str, Any], about="Plan made from the chosen future; empty for none."),
)


class Target(StrEnum):
    """State to bring a what-if to."""

    QUEUED = "queued"
    """Run what was cancelled or failed."""
    CANCELLED = "cancelled"


class WhatIfChange(Strict):
    state: Target | None = None
    seeds: int | None = None
    """Seeds of every future, more than there are: they run and narrow the intervals."""
    reason: str = Field("", max_length=255)


class PlanIn(DecisionIn):
    future: str = Field(max_length=1)
    """Letter of the future."""
    anyway: bool = False
    """Also if it breaks its promises in most of its seeds."""


class ComparisonQuery(Schema):
    slo_class: str = ""
    """Whose requests are compared; by default the class that does worst against its own target as things are now."""


class TraceOut(RowSchema):
    class Meta:
        model = TraceFile
        fields = ("id", "name", "format", "unit", "requests", "span_s", "uploaded_at")


@router.post("/what-ifs", response={202: WhatIfDetail})
def ask_what_if(request: ApiRequest, body: WhatIfIn) -> Status[WhatIf]:
    """Have workers simulate futures. 422 names the invalid field, such as `B.changes[0].region`."""
    user = request.auth.require(Role.OPERATOR)
    values = body.model_dump(exclude={"begin", "futures"})
    values["start"] = start_of(body.begin, body.horizon_s).model_dump(mode="json")
    futures = [services.future_of(each.name, each.preset, each.changes) for each in body.futures]
    return Status(202, services.ask(values, futures, user))


add_list(router, WHAT_IFS, WhatIfOut, "What-ifs, newest first, replays of the ledger among them.")


@router.get("/what-ifs/{int:number}", response=WhatIfDetail)
def get_what_if(request: ApiRequest, number: int) -> WhatIf:
    return _row(number)


@router.patch("/what-ifs/{int:number}", response=WhatIfDetail)
def change_what_if(request: ApiRequest, number: int, body: WhatIfChange) -> WhatIf:
    """Cancel or resume it, or add seeds. 409 when it has no such state to leave."""
    user = request.auth.require(Role.OPERATOR)
    row = _row(number)
    match body.state:
        case Target.CANCELLED:
            row = services.cancel(row, user, body.reason)
        case Target.QUEUED:
            row = services.resume(row, user)
    if body.seeds is not None:
        row = services.add_seeds(row, body.seeds - row.seeds, user)
    return row


@router.delete("/what-ifs/{int:number}", response={204: None})
def delete_what_if(request: ApiRequest, number: int) -> Status[None]:
    """Delete it with its runs. 409 while it runs, or when a plan was made from it."""
    user = request.auth.require(Role.OPERATOR)
    services.delete(_row(number), user)
    return Status(204, None)


@router.get("/what-ifs/{int:number}/comparison", response=dict[str, Any])
def compare_futures(request: ApiRequest, number: int, query: Query[ComparisonQuery]) -> dict[str, Any]:
    """Compare the futures with 95% intervals. A verdict is on the promises of all classes.

    `curves`, by letter: ttft_p95_ms by SLO class at `until_s`, and ready instances by `MODEL REGION` at `t_s`.
    """
    row = _row(number)
    return {**selectors.comparison(row, query.slo_class), "curves": selectors.curves(row)}


@router.post("/what-ifs/{int:number}/plan", response=WhatIfDetail)
def make_what_if_plan(request: ApiRequest, number: int, body: PlanIn) -> WhatIf:
    """Make a future the plan: its policies and bounds apply, its instances are proposed as plans to approve.

    The `warnings` of a future in the detail say what speaks against it. 409 if it breaks its promises in most of its
    seeds, unless `anyway`.
    """
    user = request.auth.require(Role.OPERATOR)
    return plan.make_plan(_row(number), body.future, user, body.reason, anyway=body.anyway)


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
