"""What tenants report of runs: that one was opened or closed, and that a unit that is no LLM began or ended.

A report is a row at once. The process that owns the queues hears of it too, and ranks the run by it.
"""

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Literal

from django.db import transaction

from controlplane.accounts.models import Tenant, User
from controlplane.applications.models import ApplicationRun, RunOutcome, UnitReport
from controlplane.applications.services import IDLE, MAX_APPLICATIONS, application_of
from controlplane.dispatch.port import RunReport, Send
from controlplane.dispatch.queues.commands import ask_of_run
from controlplane.dispatch.queues.operations import RunAction
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.errors import ApiError, invalid

RUNNING, DONE, FAILED = STATES = ("running", "done", "failed")
"""Of a unit that is reported."""
MAX_REPORTS: Final = 4_096
"""Units reported of one run."""
MAX_RUNNING: Final = 10_000
"""Runs of one tenant in progress that it opened or reported units of."""
MAX_HELD: Final = 10_000
REPORTS: Final[deque[RunReport]] = deque(maxlen=MAX_HELD)
"""Reports that this process has taken and not handed over yet; they are rows already."""


def deliver_reports(send: Send) -> None:
    """Hand the reports over, in their order."""
    while REPORTS:
        send(REPORTS.popleft())


def _run(tenant: Tenant, name: str, run: str, now: datetime) -> ApplicationRun:
    """Return a run, locked; a new one begins now. Raises ApiError 429 if the tenant has too many in progress."""
    if (application := application_of(tenant.pk, name)) is None:
        message = (
            f"{MAX_APPLICATIONS} applications are known, and no more are kept. Put ids in `run`, not `application`."
        )
        raise ApiError(429, message, code="too_many_applications", param="application")
    rows = ApplicationRun.objects.select_for_update().select_related("application")
    known = rows.filter(application=application, run=run).first()
    if known is not None:
        return known
    if ApplicationRun.objects.filter(application__tenant=tenant, ended_at=None).count() >= MAX_RUNNING:
        message = f"{MAX_RUNNING:,} runs are in progress: close some first."
        raise ApiError(429, message, code="too_many_runs", retry_after_s=IDLE.total_seconds())
    return rows.get_or_create(application=application, run=run, defaults={"began_at": now, "last_call_at": now})[0]


def _report(report: RunReport) -> None:
    transaction.on_commit(partial(REPORTS.append, report))


@transaction.atomic
def open_run(tenant: Tenant, name: str, run: str, deadline_s: float | None, now: datetime) -> ApplicationRun:
    """Open a run, which its tenant will close. Idempotent: of a known run only a missing deadline is filled in.

    Raises ApiError 409 if it was closed, 429 if the tenant has too many in progress.
    """
    row = _run(tenant, name, run, now)
    if row.closed_at is not None:
        raise ApiError(409, f"The run {run!r} was closed.", code="run_closed", param="run")
    row.opened = True
    if row.deadline_s is None and deadline_s is not None:
        row.deadline_s = deadline_s
        due_s = deadline_s - (now - row.began_at).total_seconds()
        _report(RunReport("opened", tenant.pk, name, run, due_s=due_s))
    row.save(update_fields=["opened", "deadline_s"])
    return row


@transaction.atomic
def close_run(run: ApplicationRun, outcome: RunOutcome, now: datetime) -> ApplicationRun:
    """Close a run as its tenant says that it ended; one that was closed stays as it is."""
    row = ApplicationRun.objects.select_for_update().select_related("application").get(pk=run.pk)
    if row.closed_at is None:
        row.closed_at, row.outcome, row.ended_at = now, outcome, None
        row.save(update_fields=["closed_at", "outcome", "ended_at"])
        _report(RunReport("closed", row.application.tenant_id, row.application.name, row.run))
    return row


def act_on_run(run: ApplicationRun, action: RunAction, actor: User, reason: str, now: datetime) -> int:
    """Move a run first, or stop it; return how many open calls it had.

    Raises ActionError for a run that has ended and when the gateway objects, GatewaySilent (an ActionError) when none
    answers; then nothing is recorded.
    """
    if run.state != "running":
        raise ActionError(f"Run {run.run} has ended")
    calls = ask_of_run(run.application.tenant_id, run.application.name, run.run, action)
    if action == RunAction.STOP:
        ApplicationRun.objects.filter(pk=run.pk).update(closed_at=now, outcome=RunOutcome.STOPPED)
    kind = {RunAction.FIRST: "run.moved_first", RunAction.STOP: "run.stopped"}[action]
    record(kind, run.application, actor=actor, reason=reason, inputs={"run": run.run, "open_calls": calls})
    return calls


def acted_on_run(run: str, action: RunAction, calls: int) -> str:
    """Return what was done as a sentence."""
    if action == RunAction.FIRST:
        return f"Run {run} goes first: its calls overtake waiting requests of others."
    return f"Run {run} is stopped: {calls:,} open call{'s' * (calls != 1)} ended, and later ones are refused."


@dataclass(frozen=True)
class Execution:
    """What a tenant says of one execution of a unit that is no LLM."""

    report: str
    """Name of the execution: what is said twice counts once."""
    unit: str
    kind: str
    backend: str
    state: str
    duration_s: float | None = None


@transaction.atomic
def report_unit(tenant: Tenant, name: str, run: str, execution: Execution, now: datetime) -> UnitReport:
    """Take in an execution of a unit: it runs, or has ended. One that had ended stays as it is.

    Raises ApiError 400 if the duration of an execution is unknown whose start was not reported, 409 if the run was closed,
    429 for too many.
    """
    owner = _run(tenant, name, run, now)
    row = owner.reports.filter(report=execution.report).first()
    if row is not None and (row.ended_at is not None or execution.state == RUNNING):
        return row
    if owner.closed_at is not None:
        raise ApiError(409, f"The run {run!r} was closed.", code="run_closed", param="run")
    if row is None and owner.reports.count() >= MAX_REPORTS:
        raise ApiError(429, f"A run has at most {MAX_REPORTS:,} reported units.", code="too_many_units")
    duration_s = execution.duration_s
    if row is None:
        if execution.state != RUNNING and duration_s is None:
            raise invalid("`duration_s` is needed: the start of this unit was not reported.", "duration_s")
        began_at = now if execution.state == RUNNING else now - timedelta(seconds=duration_s or 0.0)
        row = UnitReport(
            run=owner,
            report=execution.report,
            unit=execution.unit,
            kind=execution.kind,
            backend=execution.backend,
            began_at=began_at,
        )
    if execution.state != RUNNING:
        row.ended_at = now if duration_s is None else row.began_at + timedelta(seconds=duration_s)
        row.failed = execution.state == FAILED
    row.save()
    owner.began_at, owner.last_call_at = min(owner.began_at, row.began_at), max(owner.last_call_at, now)
    owner.ended_at, owner.outcome, owner.steps = None, "", []
    owner.save(update_fields=["began_at", "last_call_at", "ended_at", "outcome", "steps"])
    took_s = None if row.ended_at is None or row.failed else row.duration_s
    what: Literal["began", "ended"] = "began" if row.ended_at is None else "ended"
    _report(RunReport(what, tenant.pk, name, run, row.pk, row.unit, took_s, backend=row.backend))
    return row
