"""Follow the runs of applications in the ledger, and learn from those that ended."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from django.db import transaction
from django.db.models import Count, Exists, Max, Min, OuterRef, Q, QuerySet, Sum
from django.utils import timezone

from controlplane.accounts.models import Tenant, User
from controlplane.applications.models import (
    LEARNED,
    Application,
    ApplicationRun,
    FollowedLedger,
    RunOutcome,
    UnitBackend,
    UnitReport,
)
from controlplane.applications.spans import expectations, rates_of, service_of, spans_of
from controlplane.dispatch.runs import MAX_UNIT_S
from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet.inventory.kinds import Kind
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.applications.demand_graph import (
    MOST_RECORDS,
    Backend,
    DemandGraph,
)
from scheduling.applications.recording import IDLE_S, NO_UNIT, SESSION_IDLE_S, SESSION_UNITS, Call, record_of

UNIT_BACKEND: Final = Kind("unit_backends", UnitBackend, secret=frozenset({"secret"}))
APPLICATION: Final = Kind(
    "applications",
    Application,
    key=("tenant", "name"),
    only=("run_deadline_s", "run_max_tokens", "run_max_usd"),
    deletable=False,
)
IDLE: Final = timedelta(seconds=IDLE_S)
SESSION_IDLE: Final = timedelta(seconds=SESSION_IDLE_S)
READ_AGAIN: Final = 2_000
"""Ledger rows read twice: gateways may commit in another order than keys were given."""
MAX_GRAPH_BYTES: Final = 4 * 2**20
"""Of a graph that is imported: 1,000 runs of 40 steps."""
MAX_CALLS: Final = 4_096
"""Calls of a run that its record is made of."""
KEPT_DAYS: Final = 30
MAX_APPLICATIONS: Final = 100
"""Applications of a tenant. Further names are left out: they look like ids of runs."""
TOO_MANY: Final = "application.too_many"
SETTLED: Final = timedelta(seconds=5)
"""A run that was closed ends so much later: its last calls may not be in the ledger yet."""


def follow_runs(now: datetime) -> int:
    """Update the runs that have new calls, and end those that are idle. Returns how many ended."""
    mark, _ = FollowedLedger.objects.get_or_create(pk=1)
    newest = LedgerRow.objects.aggregate(newest=Max("pk"))["newest"] or 0
    rows = (
        LedgerRow.objects.filter(pk__gt=mark.ledger_pk - READ_AGAIN, pk__lte=newest)
        .exclude(application="")
        .exclude(run="")
    )
    known: dict[tuple[int, str], Application | None] = {}
    for tenant_id, name, run in rows.order_by().values_list("tenant_id", "application", "run").distinct():
        if (tenant_id, name) not in known:
            known[tenant_id, name] = application_of(tenant_id, name)
        if (application := known[tenant_id, name]) is not None:
            _follow(application, run, mark.ledger_pk - READ_AGAIN)
    FollowedLedger.objects.filter(pk=1).update(ledger_pk=newest)
    running = UnitReport.objects.filter(
        run=OuterRef("pk"), ended_at=None, began_at__gte=now - timedelta(seconds=MAX_UNIT_S)
    )
    session = LedgerRow.objects.filter(
        tenant=OuterRef("application__tenant"),
        application=OuterRef("application__name"),
        run=OuterRef("run"),
        unit__in=SESSION_UNITS,
    )
    idle = Q(last_call_at__lt=now - SESSION_IDLE) | (Q(last_call_at__lt=now - IDLE) & ~Exists(session))
    over = Q(closed_at__lt=now - SETTLED) | (idle & ~Exists(running))
    ending = ApplicationRun.objects.filter(over, ended_at=None).select_related("application")
    return sum(1 for run in list(ending) if end_run(run))


def application_of(tenant_id: int, name: str) -> Application | None:
    """Return the application *name* of a tenant, made if missing; None where the tenant has `MAX_APPLICATIONS` others.

    A warning says so once in `KEPT_DAYS`: a client that sends a new name with each call would make rows without end.
    """
    known = Application.objects.filter(tenant_id=tenant_id, name=name).first()
    if known is not None:
        return known
    if Application.objects.filter(tenant_id=tenant_id).count() < MAX_APPLICATIONS:
        return Application.objects.get_or_create(tenant_id=tenant_id, name=name)[0]
    if not warnings_of([tenant_id]).exists():
        record(
            TOO_MANY,
            Tenant.objects.get(pk=tenant_id),
            actor="follow-runs",
            after={"application": name, "known": MAX_APPLICATIONS},
            reason="Names of applications look like ids; put them in the run header, X-Run. New ones are left out.",
            severity=Severity.WARNING,
        )
    return None


def warnings_of(tenant_ids: Iterable[int]) -> QuerySet[Event]:
    """Return the late warnings of tenants that their names of applications are too many."""
    since, ids = timezone.now() - timedelta(days=KEPT_DAYS), list(map(str, tenant_ids))
    return Event.objects.filter(kind=TOO_MANY, subject_type="tenant", subject_id__in=ids, at__gte=since)


def calls_of(tenant_id: int, application: str, run: str) -> QuerySet[LedgerRow]:
    """Return the calls of a run.

    They are found before they are sorted, by the condition of the index `ledger_application_run`: else SQLite reads all rows
    of the tenant.
    """
    rows = LedgerRow.objects.order_by().filter(tenant_id=tenant_id)
    return LedgerRow.objects.filter(pk__in=rows.filter(application=application, run=run).exclude(run="").values("pk"))


def _follow(application: Application, run: str, seen_pk: int) -> None:
    """Bring the row of a run up to its calls, of which those from *seen_pk* on may be new. A run with a call after it was
    taken as ended runs again."""
    calls = calls_of(application.tenant_id, application.name, run)
    sums: dict[str, Any] = calls.aggregate(
        began_at=Min("arrived_at"),
        calls=Count("pk"),
        failed_calls=Count("pk", filter=~Q(outcome=Outcome.DONE)),
        prompt_tokens=Sum("prompt_tokens"),
        output_tokens=Sum("output_tokens"),
    )
    new = calls.filter(pk__gt=seen_pk).only("arrived_at", "e2e_ms")
    last_call_at = max(call.ended_at or call.arrived_at for call in new)
    first = calls.order_by("arrived_at")
    said_s = first.values_list("run_due_s", flat=True).exclude(run_due_s=None).first()
    due_s = min((each for each in (said_s, application.run_deadline_s) if each is not None), default=None)
    own, served = first.values_list("own_region", "region").first() or ("", "")
    known, new_run = ApplicationRun.objects.get_or_create(  # its tenant may report it at this moment
        application=application,
        run=run,
        defaults={"last_call_at": last_call_at, "deadline_s": due_s, "region": own or served, **sums},
    )
    if not new_run and known.calls != sums["calls"]:
        sums["began_at"] = min(known.began_at, sums["began_at"])
        closed_at = known.closed_at
        stopped = known.outcome == RunOutcome.STOPPED
        if closed_at is not None and not stopped and new.filter(arrived_at__gt=closed_at).exists():
            closed_at = None
        ApplicationRun.objects.filter(pk=known.pk).update(
            last_call_at=max(known.last_call_at, last_call_at),
            deadline_s=due_s if known.deadline_s is None else known.deadline_s,
            region=own or served,
            closed_at=closed_at,
            outcome=known.outcome if closed_at else "",
            ended_at=None,
            steps=[],
            **sums,
        )


def done_calls(run: ApplicationRun) -> tuple[list[Call], dict[str, dict[str, str]]]:
    """Return what a run has done, in the order of its beginning, and the backends of its units. What failed is left out."""
    application = run.application
    rows = calls_of(application.tenant_id, application.name, run.run)
    calls, units = [], {}
    read = ("unit", "arrived_at", "model", "e2e_ms", "prompt_tokens", "output_tokens", "predicted_output_tokens")
    for row in rows.filter(outcome=Outcome.DONE).only(*read).order_by("arrived_at")[:MAX_CALLS]:
        unit, began_s = row.unit or NO_UNIT, row.arrived_at.timestamp()
        units[unit] = {"kind": "llm", "name": row.model}
        ended_s = began_s + (row.e2e_ms or 0.0) / 1000
        predicted = row.predicted_output_tokens
        calls.append(Call(unit, began_s, ended_s, row.prompt_tokens, row.output_tokens, predicted_tokens=predicted))
    for report in run.reports.filter(failed=False).exclude(ended_at=None):
        units[report.unit] = {"kind": report.kind, "name": report.backend}
        began_s = report.began_at.timestamp()
        duration_s = report.duration_s
        calls.append(Call(report.unit, began_s, began_s + duration_s, duration_s=duration_s))
    return sorted(calls, key=lambda call: call.began_s), units


def _is_abandoned(run: ApplicationRun) -> bool:
    """Whether a run that was not closed stopped early: it was opened, a unit did not end, or the last call failed."""
    if run.opened or run.reports.filter(ended_at=None).exists():
        return True
    last = calls_of(run.application.tenant_id, run.application.name, run.run).order_by("-arrived_at", "-pk").first()
    return last is not None and last.outcome != Outcome.DONE


def end_run(run: ApplicationRun) -> bool:
    """End *run* and keep its record; false if it was ended already. A run that was abandoned teaches nothing, nor does one
    whose calls all failed."""
    application = run.application
    calls, seen = done_calls(run)
    outcome = run.outcome or (RunOutcome.ABANDONED if _is_abandoned(run) else RunOutcome.ENDED)
    teaches = calls and outcome in (RunOutcome.ENDED, RunOutcome.DONE)
    judged = judged_predictions(run, known_backends(application.units | seen)) if teaches else {}
    with transaction.atomic():
        known = Application.objects.select_for_update().get(pk=application.pk)  # another run may have added units since
        if known.units != known.units | seen:
            Application.objects.filter(pk=application.pk).update(units=known.units | seen)
        ended = ApplicationRun.objects.filter(pk=run.pk, ended_at=None, calls=run.calls)
        return bool(
            ended.update(
                ended_at=run.closed_at or run.last_call_at,
                outcome=outcome,
                steps=msgspec.to_builtins(record_of(calls).steps) if teaches else [],
                **judged,
            )
        )


def judged_predictions(run: ApplicationRun, units: dict[str, Backend]) -> dict[str, float]:
    """Return the columns of a complete *run* that compare what it was predicted to need, at each call placed by rank, with
    what came.
    """
    application = run.application
    calls = calls_of(application.tenant_id, application.name, run.run).order_by("arrived_at")[:MAX_CALLS]
    spans = spans_of(list(calls), list(run.reports.all()), run.began_at, run.last_call_at)
    rates = rates_of(units, run.region)
    made = expectations(spans, units, rates)
    return {
        "service_s": service_of(spans, units, rates),
        "expected_calls": len(made),
        "needed_s": sum(each.actual_s for each in made),
        "error_s": sum(abs(each.error_s) for each in made),
    }


def prune_runs(now: datetime) -> int:
    """Delete runs that no graph needs: ended `KEPT_DAYS` ago, and not among an application's latest records. With its last
    run goes an application."""
    deleted = 0
    for application in Application.objects.all():
        needed = application.runs.filter(LEARNED).values_list("pk", flat=True)[:MOST_RECORDS]
        old = application.runs.filter(ended_at__lt=now - timedelta(days=KEPT_DAYS)).exclude(pk__in=list(needed))
        deleted += old.delete()[0]
    without_limits = dict.fromkeys(APPLICATION.fields)
    bare = Application.objects.filter(runs=None, created_at__lt=now - timedelta(days=KEPT_DAYS), **without_limits)
    return deleted + bare.delete()[0]


def read_graph(text: bytes) -> DemandGraph:
    """Return the graph in a file. Raise ValueError that says what is wrong and where."""
    if len(text) > MAX_GRAPH_BYTES:
        raise ValueError(f"the graph has {len(text):,} bytes; {MAX_GRAPH_BYTES:,} are the most")
    graph = DemandGraph.from_json(text)
    if not graph.units:
        raise ValueError("units: the graph has none")
    return graph


def import_graph(tenant: Tenant, graph: DemandGraph, actor: User | str, now: datetime) -> Application:
    """Make *graph* the application of its name: its records replace those that were imported before, and its units add to
    those known. Runs that were recorded here stay.

    Raises ValueError for a name that cannot be stored, and for an application too many.
    """
    if not 1 <= len(graph.application) <= 80 or "\0" in graph.application:
        raise ValueError("application: a name has 1 to 80 characters, none of them NUL")
    with transaction.atomic():
        if (application := application_of(tenant.pk, graph.application)) is None:
            raise ValueError(f"application: {MAX_APPLICATIONS} are known, and no more are kept")
        application.units |= {name: msgspec.to_builtins(backend) for name, backend in graph.units.items()}
        application.save(update_fields=["units"])
        application.runs.filter(imported=True).delete()
        ApplicationRun.objects.bulk_create(
            ApplicationRun(
                application=application,
                run=f"imported-{number}",
                began_at=now,
                last_call_at=now,
                ended_at=now,
                calls=sum(step.parallelism for step in each.steps),
                imported=True,
                steps=msgspec.to_builtins(each.steps),
            )
            for number, each in enumerate(graph.records)
        )
        record("application.imported", application, actor=actor, inputs={"records": len(graph.records)})
    return application


def backends(application: Application) -> dict[str, Backend]:
    return known_backends(application.units)


def known_backends(units: dict[str, Any]) -> dict[str, Backend]:
    return {name: msgspec.convert(value, Backend) for name, value in units.items()}
