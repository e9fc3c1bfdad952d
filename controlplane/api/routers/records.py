"""`/api`: history: events, requests, usage."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import orjson
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Query, Router, Schema
from pydantic import AwareDatetime

from controlplane.accounts.models import Role, Tenant
from controlplane.accounts.selectors import tenants_with_role
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest, Caller
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.resources import add_list, schema_of
from controlplane.api.routers import system
from controlplane.api.schemas import ActionIn, Described, RowSchema
from controlplane.applications import versions
from controlplane.applications.models import Application, ApplicationRun, GraphVersion
from controlplane.applications.reporting import act_on_run
from controlplane.applications.selectors import UnitSummary, graph_of
from controlplane.applications.services import calls_of, give_title
from controlplane.batches.models import Batch
from controlplane.batches.services import speed_up, undo_speed_up
from controlplane.dispatch.queues.commands import ask_of_run
from controlplane.dispatch.queues.runs import RunAction, RunPrice, sentence
from controlplane.dispatch.wire import SUMMARY_KEY, NextToWarm
from controlplane.events.services import record
from controlplane.gateway import selectors
from controlplane.gateway.models import MinuteRow
from controlplane.resources.applications import (
    APPLICATIONS,
    PREWARMS,
    RUNS,
    VERSIONS,
    visible_applications,
    visible_runs,
    visible_versions,
)
from controlplane.resources.batches import BATCHES
from controlplane.resources.events import EVENTS
from controlplane.resources.requests import REQUESTS
from controlplane.resources.tables import csv_response
from scheduling.applications.demand_graph import DemandGraph

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])

USAGE_CSV_ROWS = 1_000_000
CALLS = 500
"""Of one run."""
USAGE_DEFAULT_RANGE = timedelta(hours=1)


class UsageRow(RowSchema):
    """One minute of arrivals for one model, region, caller region and SLO class.

    Tokens were served. `unserved` requests (refused, or expired, cancelled or failed before their first token) count
    predicted tokens. Demand is served plus unserved tokens, in the callers' `own_region`.
    """

    class Meta:
        model = MinuteRow
        fields = selectors.USAGE_COLUMNS


class UsageOut(Described):
    items: list[UsageRow]
    truncated: bool
    """More rows exist than `limit`: use a shorter range or CSV."""


class UsageQuery(Schema):
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    tenant: str = ""
    model: str = ""
    region: str = ""
    slo_class: str = ""
    format: Literal["json", "csv"] = "json"
    limit: int = Field(5_000, ge=1, le=20_000)


def check_tenant(caller: Caller, given: dict[str, Any]) -> None:
    _tenants(caller, given["tenant"])


add_list(
    router,
    EVENTS,
    schema_of(EVENTS, "EventOut"),
    """Events, newest first. `kind` is a whole kind or a family ending in a dot, such as `instance.`.

    The fleet's people see all; others see what happened to the API keys of their tenants.
    """,
)
BatchOut = schema_of(BATCHES, "BatchOut")
add_list(router, BATCHES, BatchOut, "Batches, newest first; `/v1/batches` is what SDKs ask.", check=check_tenant)


class SpeedUpIn(ActionIn):
    within_s: float | None = Field(None, gt=0, description="Seconds until its last line is to be done; null undoes it.")


@router.post("/batches/{public_id}/speed-up", response=BatchOut)
def speed_up_batch(request: ApiRequest, public_id: str, body: SpeedUpIn) -> Batch:
    """Release the lines of a batch above the marks of use, as fast as an earlier deadline needs, or undo that. 409 for one
    that does not run.
    """
    user = request.auth.require(Role.OPERATOR)
    batch = get_object_or_404(Batch.objects.select_related("tenant"), public_id=public_id)
    if body.within_s is None:
        undo_speed_up(batch, user, body.reason)
    else:
        speed_up(batch, body.within_s, user, body.reason)
    return batch


ApplicationOut = schema_of(APPLICATIONS, "ApplicationOut")
add_list(router, APPLICATIONS, ApplicationOut, "Applications, newest first.", check=check_tenant)
RunOut = schema_of(RUNS, "RunOut")
PrewarmOut = schema_of(PREWARMS, "PrewarmOut", "A backend that was prewarmed, or that a call of a run found cold.")
add_list(
    router,
    PREWARMS,
    PrewarmOut,
    "What was prewarmed and what became of it, newest first; rows are kept for a week.",
    check=check_tenant,
)


class NextToWarmOut(Described):
    at: float
    """Epoch seconds of the summary."""
    next: list[NextToWarm]
    """The first to start first."""


@router.get("/prewarms/next", response={200: NextToWarmOut, 503: ErrorBody})
def list_next_to_warm(request: ApiRequest) -> dict[str, Any]:
    """Return what prewarming starts next for runs in progress, when and why; people of tenants see their own. 503 while no
    gateway publishes it.
    """
    read = orjson.loads(system.read_published(SUMMARY_KEY))
    seen = set(request.auth.tenants().values_list("pk", flat=True))
    hidden = {} if request.auth.sees_fleet else {"region": ""}
    return {
        "at": read["ts"],
        "next": [row | hidden for row in system.summary_rows(read, "next_to_warm") if row["tenant_id"] in seen],
    }


RequestOut = schema_of(REQUESTS, "RequestOut", "One request of the ledger. Never a prompt, never a completion.")
add_list(router, RUNS, RunOut, "Runs of applications, newest first.", check=check_tenant)
add_list(
    router,
    REQUESTS,
    RequestOut,
    "Requests, newest first. A tenant's people and keys see their own, without where in the fleet these ran.",
    check=check_tenant,
)


VersionOut = schema_of(VERSIONS, "GraphVersionOut", "A demand graph as it was.")
add_list(router, VERSIONS, VersionOut, "Versions of demand graphs, newest first.", check=check_tenant)


def application_of(request: ApiRequest, pk: int, *, managed: bool = False) -> Application:
    """Return an application that the caller sees, or *managed*: is an operator of, in its tenant or over the fleet."""
    rows = visible_applications(request.auth).filter(pk=pk)
    if managed:
        rows = rows.filter(tenant__in=tenants_with_role(request.auth.person, Role.OPERATOR))
    application: Application | None = rows.first()
    if application is None:
        raise ApiError(404, "not_found", "Not found, or no access.")
    return application


def version_of(request: ApiRequest, application: Application, number: int) -> GraphVersion:
    version: GraphVersion | None = visible_versions(request.auth).filter(application=application, number=number).first()
    if version is None:
        raise ApiError(404, "not_found", f"No version {number} of this application is kept.", "version")
    return version


def graph_at(request: ApiRequest, application: Application, version: int | None) -> DemandGraph:
    """Return the graph of a version; the present one without."""
    if version is None:
        return graph_of(application)
    return versions.version_graph(version_of(request, application, version))


@router.get("/applications/{application_id}/graph")
def get_application_graph(request: ApiRequest, application_id: int, version: int | None = None) -> HttpResponseBase:
    """Return the demand graph of an application, or a version of it: its units, and records of up to 1,000 runs."""
    graph = graph_at(request, application_of(request, application_id), version)
    return HttpResponse(graph.to_json(), content_type="application/json")


class UnitChangeOut(Described):
    unit: str
    before: UnitSummary | None
    after: UnitSummary | None


class EdgeChangeOut(Described):
    before: str
    """Unit that leads to the other; empty for the start of a run."""
    after: str
    was: float
    now: float


class GraphComparisonOut(Described):
    units: list[UnitChangeOut]
    edges: list[EdgeChangeOut]
    """Branch probabilities that differ by at least 0.05."""
    records: tuple[int, int]
    service_s: tuple[float | None, float | None]
    """Mean service of a run, in seconds."""
    errors: tuple[float | None, float | None]
    """Of predictions of what left-out runs still needed, as shares of it; null with fewer than 16 runs."""


@router.get("/applications/{application_id}/compare", response=GraphComparisonOut)
def compare_application_graphs(
    request: ApiRequest, application_id: int, before: int | None = None, after: int | None = None
) -> dict[str, Any]:
    """Compare two versions of a demand graph; the present one where no number is given."""
    application = application_of(request, application_id)
    made = versions.compared(*(graph_at(request, application, number) for number in (before, after)))
    units = [{"unit": name, "before": was, "after": now} for name, was, now in made.units]
    edges = [{name: getattr(edge, name) for name in ("before", "after", "was", "now")} for edge in made.edges]
    return {"units": units, "edges": edges, "records": made.records, "service_s": made.service_s, "errors": made.errors}


@router.post("/applications/{application_id}/versions", response=VersionOut, auth=PEOPLE)
def keep_graph_version(request: ApiRequest, application_id: int, body: ActionIn) -> GraphVersion:
    """Keep the present demand graph as a version. Requires the role operator, in the tenant or over the fleet."""
    application = application_of(request, application_id, managed=True)
    person, graph = request.auth.person, graph_of(application)
    if not graph.records:
        raise ApiError(409, "conflict", "Nothing is recorded yet.")
    version = versions.keep_version(application, graph, body.reason, person, timezone.now())
    record("application.version_kept", application, actor=person, reason=body.reason, after={"version": version.number})
    return version


@router.post("/applications/{application_id}/versions/{int:number}/restore", response=ApplicationOut, auth=PEOPLE)
def restore_graph_version(request: ApiRequest, application_id: int, number: int, body: ActionIn) -> Application:
    """Make a version the present demand graph. What was learned since is kept as another version."""
    application = application_of(request, application_id, managed=True)
    version = version_of(request, application, number)
    versions.restore(application, version, request.auth.person, body.reason, timezone.now())
    return application_of(request, application_id)


class FreezeIn(ActionIn):
    frozen: bool


@router.post("/applications/{application_id}/freeze", response=ApplicationOut, auth=PEOPLE)
def freeze_application(request: ApiRequest, application_id: int, body: FreezeIn) -> Application:
    """Stop learning: runs are recorded, and the demand graph stays; or learn again, from these too."""
    application = application_of(request, application_id, managed=True)
    versions.freeze(application, body.frozen, request.auth.person, body.reason, timezone.now())
    return application_of(request, application_id)


class ReportOut(Described):
    """An execution of a unit that is no LLM, as its tenant reported it."""

    report: str
    unit: str
    kind: str
    backend: str
    began_at: AwareDatetime
    ended_at: AwareDatetime | None
    failed: bool


class RunDetailOut(Described):
    run: RunOut  # type: ignore[valid-type]
    calls: list[RequestOut]  # type: ignore[valid-type]
    """The first 500, in the order in which they came."""
    units: list[ReportOut]
    """Reported ones."""


@router.get("/runs/{run_id}", response=RunDetailOut)
def get_run(request: ApiRequest, run_id: int) -> dict[str, Any]:
    """Return one run with its calls and reported units."""
    run = run_seen(request, run_id)
    application = run.application
    calls = calls_of(application.tenant_id, application.name, run.run).select_related("tenant", "api_key")
    return {"run": run, "calls": calls.order_by("arrived_at")[:CALLS], "units": run.reports.all()[:CALLS]}


def run_seen(request: ApiRequest, run_id: int) -> ApplicationRun:
    run: ApplicationRun | None = visible_runs(request.auth).filter(pk=run_id).first()
    if run is None:
        raise ApiError(404, "not_found", "Not found, or no access.")
    return run


@router.get("/runs/{run_id}/price", response={200: RunPrice, 503: ErrorBody})
def get_run_price(request: ApiRequest, run_id: int) -> RunPrice:
    """Return where the open calls of a run are, and what moving it first or stopping it costs. Needs the role operator."""
    request.auth.require(Role.OPERATOR)
    run = run_seen(request, run_id)
    return ask_of_run(run.application.tenant_id, run.application.name, run.run)


class RunActedOut(Described):
    message: str
    price: RunPrice


@router.post("/runs/{run_id}/{action}", response={200: RunActedOut, 503: ErrorBody})
def act_on_application_run(request: ApiRequest, run_id: int, action: RunAction, body: ActionIn) -> dict[str, Any]:
    """Move a run first, stop it, or undo that within 30 s. 409 when not possible. Requires the role operator."""
    user, run = request.auth.require(Role.OPERATOR), run_seen(request, run_id)
    price = act_on_run(run, action, user, body.reason, timezone.now())
    return {"message": sentence(run.run, action, price), "price": price}


class NameIn(ActionIn):
    title: str = Field(max_length=80, description="Empty: its recognized name again.")


@router.post("/applications/{application_id}/name", response=ApplicationOut, auth=PEOPLE)
def name_application(request: ApiRequest, application_id: int, body: NameIn) -> Application:
    """Name an application that was recognized by system prompt; 409 for one that its marks name.

    Requires the role operator, in the tenant or over the fleet.
    """
    person, application = request.auth.person, application_of(request, application_id, managed=True)
    try:
        before = give_title(application, body.title)
    except ValueError as error:
        raise ApiError(409, "conflict", str(error), "title") from error
    record(
        "application.named",
        application,
        actor=person,
        reason=body.reason,
        before={"title": before},
        after={"title": application.title},
    )
    return application


class ImportIn(Schema):
    tenant: str
    graph: dict[str, Any]
    """As `GET /applications/{application_id}/graph` returns it."""
    activate: bool = True
    """False: it is only kept as a version, to compare and restore."""


class ImportOut(Schema):
    id: int
    records: int
    version: int
    """Under which it is kept."""


@router.post("/applications/import", response=ImportOut, auth=PEOPLE)
def import_application_graph(request: ApiRequest, body: ImportIn) -> dict[str, int]:
    """Import a demand graph, which is kept as a version. Its records replace those that were imported before; runs recorded
    here stay. Requires the role operator, in the tenant or over the fleet."""
    person = request.auth.person
    tenant = tenants_with_role(person, Role.OPERATOR).filter(name=body.tenant).first()
    if tenant is None:
        raise ApiError(403, "forbidden", "You do not manage the applications of such a tenant.", "tenant")
    try:
        graph = DemandGraph.from_json(json.dumps(body.graph).encode())
        application, version = versions.take_in(tenant, graph, person, timezone.now(), activate=body.activate)
    except ValueError as error:
        raise ApiError(422, "invalid", str(error), "graph") from error
    return {"id": application.pk, "records": len(graph.records), "version": version.number}


@router.get("/usage", response=UsageOut)
def get_usage(request: ApiRequest, query: Query[UsageQuery]) -> dict[str, Any] | HttpResponseBase:
    """Return requests and tokens by minute of arrival, model, region and SLO class; `since` is inclusive, `until` exclusive.

    Default range: the last hour. Fleet users get the fleet's series, or with `tenant` that tenant's; tenant users and keys
    get their own, counted from the request ledger, which is kept for `PILOTHOUSE_LEDGER_KEEP_DAYS` days. `format=csv`
    streams the whole range.
    """
    caller: Caller = request.auth
    until = query.until or timezone.now()
    since = query.since or until - USAGE_DEFAULT_RANGE
    if since >= until:
        raise ApiError(422, "invalid", "The range is empty: since is not before until.", "since")
    names = {"model": query.model, "region": query.region, "slo_class": query.slo_class}
    tenants = _tenants(caller, query.tenant)

    def rows(limit: int) -> Iterator[dict[str, Any]]:
        if tenants is None:
            return selectors.fleet_usage(since, until, limit, **names)
        return selectors.tenant_usage(tenants, since, until, limit, **names)

    if query.format == "csv":
        columns = selectors.USAGE_COLUMNS
        cells = ([row[column] for column in columns] for row in rows(USAGE_CSV_ROWS))
        return csv_response("usage", columns, cells, USAGE_CSV_ROWS)
    items = list(rows(query.limit + 1))
    return {"items": items[: query.limit], "truncated": len(items) > query.limit}


def _tenants(caller: Caller, name: str) -> QuerySet[Tenant] | None:
    """Return the tenant *name* if given, else all tenants visible to the caller; None means no limit."""
    if not name:
        return None if caller.sees_fleet else caller.tenants()
    tenants = caller.tenants().filter(name=name)
    if not tenants.exists():
        raise ApiError(403, "forbidden", "You do not see such a tenant.", "tenant")
    return tenants
