"""`/api`: history: events, requests, usage."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Query, Router, Schema
from pydantic import AwareDatetime

from controlplane.accounts.models import Role, Tenant
from controlplane.accounts.selectors import tenants_with_role
from controlplane.api import conditions
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest, Caller
from controlplane.api.conditions import IfMatch
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import ActionIn, Described, RowSchema
from controlplane.applications.reporting import act_on_run, acted_on_run
from controlplane.applications.selectors import graph_of
from controlplane.applications.services import APPLICATION, calls_of, import_graph
from controlplane.dispatch.queues.operations import RunAction
from controlplane.fleet.inventory import services as inventory
from controlplane.gateway import selectors
from controlplane.gateway.models import MinuteRow
from controlplane.resources.applications import (
    APPLICATIONS,
    RUNS,
    visible_applications,
    visible_runs,
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


ApplicationOut = schema_of(APPLICATIONS, "ApplicationOut")
add_list(router, APPLICATIONS, ApplicationOut, "Applications, newest first.", check=check_tenant)


class LimitsIn(APPLICATION.change):  # type: ignore[name-defined, misc]
    reason: str = Field("", max_length=255, description="Kept with the event.")


@router.patch("/applications/{int:application_id}", response=ApplicationOut, auth=PEOPLE)
def limit_application_runs(request: ApiRequest, application_id: int, body: LimitsIn, if_match: str = IfMatch) -> Any:
    """Change what a run may take. Only what is given changes; null ends a limit. Requires the role operator, in the tenant
    or over the fleet."""
    person = request.auth.person
    rows = visible_applications(request.auth).filter(tenant__in=tenants_with_role(person, Role.OPERATOR))
    row = get_object_or_404(rows, pk=application_id)
    given = body.model_dump(exclude_unset=True, exclude={"reason"})
    inventory.change(APPLICATION, row, given, person, body.reason, read_at=conditions.event_of(if_match))
    return rows.get(pk=row.pk)


RunOut = schema_of(RUNS, "RunOut")
RequestOut = schema_of(REQUESTS, "RequestOut", "One request of the ledger. Never a prompt, never a completion.")
add_list(router, RUNS, RunOut, "Runs of applications, newest first.", check=check_tenant)
add_list(
    router,
    REQUESTS,
    RequestOut,
    "Requests, newest first. A tenant's people and keys see their own, without where in the fleet these ran.",
    check=check_tenant,
)


@router.get("/applications/{application_id}/graph")
def get_application_graph(request: ApiRequest, application_id: int) -> HttpResponseBase:
    """Return the demand graph of an application: its units, and records of up to 1,000 runs."""
    graph = graph_of(get_object_or_404(visible_applications(request.auth), pk=application_id))
    return HttpResponse(graph.to_json(), content_type="application/json")


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
    """The first 500, in the order of arrival."""
    units: list[ReportOut]
    """Reported ones."""


@router.get("/runs/{run_id}", response=RunDetailOut)
def get_run(request: ApiRequest, run_id: int) -> dict[str, Any]:
    """Return one run with its calls and reported units."""
    run = get_object_or_404(visible_runs(request.auth), pk=run_id)
    application = run.application
    calls = calls_of(application.tenant_id, application.name, run.run).select_related("tenant", "api_key")
    shown = calls.order_by("arrived_at")[:CALLS]
    return {"run": run, "calls": shown, "units": run.reports.all()[:CALLS]}


class RunActedOut(Described):
    message: str
    open_calls: int
    """Those that it had."""


@router.post("/runs/{run_id}/{action}", response={200: RunActedOut, 503: ErrorBody})
def act_on_application_run(request: ApiRequest, run_id: int, action: RunAction, body: ActionIn) -> dict[str, Any]:
    """Move a run first, or stop it. 409 when not possible. Requires the role operator."""
    user, run = request.auth.require(Role.OPERATOR), get_object_or_404(visible_runs(request.auth), pk=run_id)
    calls = act_on_run(run, action, user, body.reason, timezone.now())
    return {"message": acted_on_run(run.run, action, calls), "open_calls": calls}


class ImportIn(Schema):
    tenant: str
    graph: dict[str, Any]
    """As `GET /applications/{application_id}/graph` returns it."""


class ImportOut(Schema):
    id: int
    records: int


@router.post("/applications/import", response=ImportOut, auth=PEOPLE)
def import_application_graph(request: ApiRequest, body: ImportIn) -> dict[str, int]:
    """Import a demand graph. Its records replace those that were imported before; runs recorded here stay. Requires the role
    operator, in the tenant or over the fleet."""
    person = request.auth.person
    tenant = tenants_with_role(person, Role.OPERATOR).filter(name=body.tenant).first()
    if tenant is None:
        raise ApiError(403, "forbidden", "You do not manage the applications of such a tenant.", "tenant")
    try:
        graph = DemandGraph.from_json(json.dumps(body.graph).encode())
        application = import_graph(tenant, graph, person, timezone.now())
    except ValueError as error:
        raise ApiError(422, "invalid", str(error), "graph") from error
    return {"id": application.pk, "records": len(graph.records)}


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
