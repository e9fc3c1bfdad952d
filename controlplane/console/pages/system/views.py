"""System: the parts of the stack and its periodic jobs; whether Pilothouse itself is well."""

from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.filters import view_of
from controlplane.console.live.hub import hub
from controlplane.console.live.jobs import job_title, part_title, trouble
from controlplane.console.live.state import Source
from controlplane.console.live.views import live_context
from controlplane.exports import csv_response

# Shape, colour and word of each state.
JOB_MARKS = {
    "failing": ("failed", "Failing"),
    "late": ("saturated", "Late"),
    "never": ("provisioning", "Not run yet"),
    "ok": ("ready", "OK"),
}
PART_MARKS = {
    "down": ("failed", "Down"),
    "warning": ("saturated", "Warning"),
    "starting": ("loading", "Starting"),
    "standby": ("sleeping", "Standing by"),
    "off": ("stopped", "Off"),
    "ok": ("ready", "OK"),
}
CSV_COLUMNS = (
    ("name", "Job"),
    ("kind", "Run by"),
    ("state", "State"),
    ("period_s", "Period (s)"),
    ("last_success_at", "Last success (UTC)"),
    ("last_error", "Last error"),
    ("last_error_at", "Last error (UTC)"),
    ("failures_in_a_row", "Failures in a row"),
    ("failures_total", "Failures"),
    ("last_duration_s", "Last duration (s)"),
    ("due_at", "Next due (UTC)"),
)
RUN_BY = {"celery": "Celery", "gateway": "Gateway"}
WORST_FIRST = list(JOB_MARKS)


def job_row(job: dict[str, Any]) -> dict[str, Any]:
    mark, word = JOB_MARKS[job["state"]]
    bad = job["state"] in ("late", "failing")
    return {
        **job,
        "bad": bad,
        "mark": mark,
        "word": word,
        "title": job_title(job["name"]),
        "run_by": RUN_BY.get(job["kind"], job["kind"]),
        "duration_ms": None if job["last_duration_s"] is None else job["last_duration_s"] * 1000,
        "said": trouble(job) if bad else job["last_error"],
    }


def part_row(part: dict[str, Any]) -> dict[str, Any]:
    mark, word = PART_MARKS[part["state"]]
    return {**part, "mark": mark, "word": word, "title": part_title(part["name"])}


def csv_cell(job: dict[str, Any], field: str) -> Any:
    value = job[field]
    return datetime.fromtimestamp(value, UTC) if value is not None and field.endswith("_at") else value


@require_safe
@fleet_role(Role.VIEWER)
def system(request: HttpRequest) -> HttpResponse:
    if not may(request, Role.OPERATOR):  # what a viewer's attention list points to is told by events too
        return redirect(f"{reverse('console:events')}?q=monitor")
    state = hub.state()
    tables = state.system()
    jobs = sorted(tables["jobs"], key=lambda job: (WORST_FIRST.index(job["state"]), job["name"]))
    if request.GET.get("format") == "csv":
        rows = ([csv_cell(job, name) for name, _ in CSV_COLUMNS] for job in jobs)
        return csv_response("jobs", [title for _, title in CSV_COLUMNS], rows)
    bad = sum(job["state"] in ("late", "failing") for job in jobs)
    context = {
        **live_context(state, view_of(request, []), "system"),
        "jobs": [job_row(job) for job in jobs],
        "bad": bad,
        "parts": [part_row(part) for part in tables["parts"]],
        "supervised": any(part["restarts"] is not None and part["process_id"] for part in tables["parts"]),
        "own": state.source != Source.LIVE,
    }
    return render(request, "console/system/system.html", context)
