"""`/api`: history: events, requests, usage."""

from typing import Any

from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Router
from pydantic import AwareDatetime

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import tenants_with_role
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest, Caller
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import ActionIn, Described
from controlplane.applications.reporting import act_on_run, acted_on_run
from controlplane.applications.selectors import graph_of
from controlplane.applications.services import APPLICATION, calls_of
from controlplane.dispatch.queues.operations import RunAction
from controlplane.fleet.inventory import services as inventory
from controlplane.resources.applications import (
    APPLICATIONS,
    RUNS,
    visible_applications,
    visible_runs,
)
from controlplane.resources.batches import BATCHES
from controlplane.resources.events import EVENTS
from controlplane.resources.requests import REQUESTS

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])

CALLS = 500
"""Of one run."""


def check_tenant(caller: Caller, given: dict[str, Any]) -> None:
    """Raise ApiError for a tenant that the caller does not see."""
    if given["tenant"] and not caller.tenants().filter(name=given["tenant"]).exists():
        raise ApiError(403, "forbidden", "You do not see such a tenant.", "tenant")


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
def limit_application_runs(request: ApiRequest, application_id: int, body: LimitsIn) -> Any:
    """Change what a run may take. Only what is given changes; null ends a limit. Requires the role operator, in the tenant
    or over the fleet."""
    person = request.auth.person
    rows = visible_applications(request.auth).filter(tenant__in=tenants_with_role(person, Role.OPERATOR))
    row = get_object_or_404(rows, pk=application_id)
    given = body.model_dump(exclude_unset=True, exclude={"reason"})
    inventory.change(APPLICATION, row, given, person, body.reason)
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
