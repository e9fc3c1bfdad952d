"""Follow the runs of applications in the ledger, and learn from those that ended."""

from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from django.db import transaction
from django.db.models import Count, Max, Min, Q, QuerySet, Sum

from controlplane.accounts.models import Tenant
from controlplane.applications.models import Application, ApplicationRun, FollowedLedger
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.applications.demand_graph import MOST_RECORDS, Backend, DemandGraph
from scheduling.applications.recording import NO_UNIT, Call, record_of

IDLE: Final = timedelta(seconds=120)
"""A run has ended when no call of it ended for so long."""
LOOKED_AGAIN: Final = 2_000
"""Ledger rows read twice: gateways may commit in another order than keys were given."""
MOST_CALLS: Final = 4_096
"""Calls of a run that its record is made of."""
KEPT_DAYS: Final = 30


def follow_runs(now: datetime) -> int:
    """Update the runs that have new calls, and end those that are idle. Returns how many ended."""
    mark, _ = FollowedLedger.objects.get_or_create(pk=1)
    newest = LedgerRow.objects.aggregate(newest=Max("pk"))["newest"] or 0
    rows = (
        LedgerRow.objects.filter(pk__gt=mark.ledger_pk - LOOKED_AGAIN, pk__lte=newest)
        .exclude(application="")
        .exclude(run="")
    )
    for tenant_id, application, run in rows.order_by().values_list("tenant_id", "application", "run").distinct():
        _follow(tenant_id, application, run)
    FollowedLedger.objects.filter(pk=1).update(ledger_pk=newest)
    idle = ApplicationRun.objects.filter(ended_at=None, last_call_at__lt=now - IDLE).select_related("application")
    return sum(1 for run in list(idle) if end_run(run))


def calls_of(tenant_id: int, application: str, run: str) -> QuerySet[LedgerRow]:
    return LedgerRow.objects.filter(tenant_id=tenant_id, application=application, run=run)


def _follow(tenant_id: int, name: str, run: str) -> None:
    """Bring the row of a run up to its calls. A run with a call after it was taken as ended runs again."""
    calls = calls_of(tenant_id, name, run)
    sums: dict[str, Any] = calls.aggregate(
        began_at=Min("arrived_at"),
        calls=Count("pk"),
        failed_calls=Count("pk", filter=~Q(outcome=Outcome.DONE)),
        prompt_tokens=Sum("prompt_tokens"),
        output_tokens=Sum("output_tokens"),
    )
    last_call_at = max(call.ended_at or call.arrived_at for call in calls.only("arrived_at", "e2e_ms"))
    application, _ = Application.objects.get_or_create(tenant_id=tenant_id, name=name)
    known = ApplicationRun.objects.filter(application=application, run=run).first()
    if known is None:
        ApplicationRun.objects.create(application=application, run=run, last_call_at=last_call_at, **sums)
    elif known.calls != sums["calls"]:
        ApplicationRun.objects.filter(pk=known.pk).update(last_call_at=last_call_at, ended_at=None, steps=[], **sums)


def end_run(run: ApplicationRun) -> bool:
    """End *run* and keep its record; false if it was ended already. A run whose calls all failed has none."""
    application = run.application
    rows = calls_of(application.tenant_id, application.name, run.run)
    done = rows.filter(outcome=Outcome.DONE).order_by("arrived_at")[:MOST_CALLS]
    calls, units = [], dict(application.units)
    for row in done:
        unit, began_s = row.unit or NO_UNIT, row.arrived_at.timestamp()
        units[unit] = {"kind": "llm", "name": row.model}
        ended_s = began_s + (row.e2e_ms or 0.0) / 1000
        calls.append(Call(unit, began_s, ended_s, row.prompt_tokens, row.output_tokens))
    steps = msgspec.to_builtins(record_of(calls).steps) if calls else []
    with transaction.atomic():
        if units != application.units:
            Application.objects.filter(pk=application.pk).update(units=units)
        ended = ApplicationRun.objects.filter(pk=run.pk, ended_at=None, calls=run.calls)
        return bool(ended.update(ended_at=run.last_call_at, steps=steps))


def prune_runs(now: datetime) -> int:
    """Delete runs that no graph needs: ended `KEPT_DAYS` ago, and not among an application's latest records."""
    deleted = 0
    for application in Application.objects.all():
        needed = application.runs.exclude(steps=[]).values_list("pk", flat=True)[:MOST_RECORDS]
        old = application.runs.filter(ended_at__lt=now - timedelta(days=KEPT_DAYS)).exclude(pk__in=list(needed))
        deleted += old.delete()[0]
    return deleted


def import_graph(tenant: Tenant, graph: DemandGraph, now: datetime) -> Application:
    """Make *graph* the application of its name: its records replace those that were imported before, and its units add to
    those known. Runs that were recorded here stay."""
    with transaction.atomic():
        application, _ = Application.objects.get_or_create(tenant=tenant, name=graph.application)
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
                calls=sum(step.parallelism for step in record.steps),
                imported=True,
                steps=msgspec.to_builtins(record.steps),
            )
            for number, record in enumerate(graph.records)
        )
    return application


def backends(application: Application) -> dict[str, Backend]:
    return {name: msgspec.convert(value, Backend) for name, value in application.units.items()}
