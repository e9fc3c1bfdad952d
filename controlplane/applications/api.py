"""`/v1/runs`: tenants open and close runs, and report units that are no LLM. Django serves it: no request waits for it."""

import json
import uuid
from typing import Any, Final, NoReturn

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from django.utils import timezone

from controlplane.accounts.models import ApiKey
from controlplane.applications import reporting
from controlplane.applications.models import ApplicationRun, RunOutcome, UnitReport
from controlplane.gateway.admission.marks import TEXT
from controlplane.gateway.errors import ApiError, invalid
from controlplane.gateway.key_endpoints import endpoint

PATH: Final = "/v1/runs"
MAX_BODY_BYTES: Final = 16 * 1024
MAX_SECONDS: Final = 86_400.0 * 30
KINDS: Final = ("container", "dnn", "tool")
CLOSED_AS: Final = (RunOutcome.DONE, RunOutcome.FAILED, RunOutcome.CANCELLED)


def body_of(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object that was sent. Raises ApiError 400."""
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise invalid("The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return body


def name_of(value: object, param: str) -> str:
    """Return a name. Raises ApiError 400 if *value* cannot be one."""
    if not isinstance(value, str) or not TEXT.fullmatch(value):
        code = "missing_required_parameter" if value is None else "invalid_value"
        raise invalid(f"`{param}` must be 1 to 80 letters, digits or . _ : / -", param, code)
    return value


def seconds_of(body: dict[str, Any], param: str) -> float | None:
    """Return a number of seconds, None without one. Raises ApiError 400."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise invalid(f"`{param}` must be a number of seconds from 0 to {MAX_SECONDS:,.0f}.", param)
    return float(value)


def one_of(body: dict[str, Any], param: str, choices: tuple[str, ...], default: str) -> str:
    value = body.get(param, default)
    if value not in choices:
        raise invalid(f"`{param}` must be {', '.join(choices[:-1])} or {choices[-1]}.", param)
    return str(value)


def missing(run: str) -> NoReturn:
    raise ApiError(404, f"No run {run!r} of this application.", code="not_found", param="run")


def run_of(key: ApiKey, application: object, run: str) -> ApplicationRun:
    """Return the run of the key's tenant. Raises ApiError 404."""
    rows = ApplicationRun.objects.filter(application__tenant=key.tenant, imported=False).select_related("application")
    name = name_of(application, "application")
    return rows.filter(application__name=name, run=run).first() or missing(run)


def open_run(request: HttpRequest, key: ApiKey) -> HttpResponseBase:
    body = body_of(request)
    application = name_of(body.get("application"), "application")
    run = name_of(body.get("run", f"run-{uuid.uuid4().hex}"), "run")
    deadline_s = seconds_of(body, "deadline_s")
    if deadline_s == 0:
        raise invalid("`deadline_s` must be above 0.", "deadline_s")
    return JsonResponse(run_dict(reporting.open_run(key.tenant, application, run, deadline_s, timezone.now())))


def show_run(request: HttpRequest, key: ApiKey, run: str) -> HttpResponseBase:
    return JsonResponse(run_dict(run_of(key, request.GET.get("application"), run)))


def close_run(request: HttpRequest, key: ApiKey, run: str) -> HttpResponseBase:
    body = body_of(request)
    outcome = one_of(body, "outcome", CLOSED_AS, RunOutcome.DONE)
    row = run_of(key, body.get("application"), run)
    return JsonResponse(run_dict(reporting.close_run(row, RunOutcome(outcome), timezone.now())))


def report_unit(request: HttpRequest, key: ApiKey, run: str) -> HttpResponseBase:
    body = body_of(request)
    application = name_of(body.get("application"), "application")
    execution = reporting.Execution(
        report=name_of(body.get("id"), "id"),
        unit=name_of(body.get("unit"), "unit"),
        kind=one_of(body, "kind", KINDS, "tool"),
        backend=name_of(body.get("backend", body.get("unit")), "backend"),
        state=one_of(body, "state", reporting.STATES, reporting.DONE),
        duration_s=seconds_of(body, "duration_s"),
    )
    row = reporting.report_unit(key.tenant, application, name_of(run, "run"), execution, timezone.now())
    return JsonResponse(unit_dict(row))


def run_dict(run: ApplicationRun) -> dict[str, Any]:
    return {
        "object": "run",
        "application": run.application.name,
        "run": run.run,
        "state": run.state,
        "began_at": run.began_at.timestamp(),
        "closed_at": run.closed_at.timestamp() if run.closed_at else None,
        "deadline_s": run.deadline_s,
        "calls": run.calls,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "units": [unit_dict(row) for row in run.reports.all()[: reporting.MAX_REPORTS]],
    }


def unit_dict(row: UnitReport) -> dict[str, Any]:
    return {
        "object": "run.unit",
        "id": row.report,
        "unit": row.unit,
        "kind": row.kind,
        "backend": row.backend,
        "state": "running" if row.ended_at is None else "failed" if row.failed else "done",
        "began_at": row.began_at.timestamp(),
        "duration_s": row.duration_s if row.ended_at else None,
    }


urlpatterns = [
    path("v1/runs", endpoint(POST=open_run)),
    path("v1/runs/<path:run>/units", endpoint(POST=report_unit)),
    path("v1/runs/<path:run>/close", endpoint(POST=close_run)),
    path("v1/runs/<path:run>", endpoint(GET=show_run)),
]
