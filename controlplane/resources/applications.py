"""Applications of tenants and their runs."""

from datetime import timedelta
from typing import Any

from django.db.models import Count, Max, Q, QuerySet
from django.utils import timezone

from controlplane.applications.models import Application, ApplicationRun
from controlplane.resources.filters import Search
from controlplane.resources.requests import tenant_control
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range, search_in

DAY = timedelta(days=1)


def visible_applications(viewer: Viewer) -> QuerySet[Any]:
    ended = Q(runs__ended_at__gte=timezone.now() - DAY, runs__imported=False)
    return (
        Application.objects.filter(tenant__in=viewer.tenants())
        .select_related("tenant")
        .annotate(
            running=Count("runs", Q(runs__ended_at=None)),
            ended=Count("runs", ended),
            records=Count("runs", ~Q(runs__steps=[])),
            last_run_at=Max("runs__began_at"),
        )
    )


def durations_s(application: Application) -> list[float]:
    """Return the durations of runs that ended in the last day, ascending."""
    runs = application.runs.filter(ended_at__gte=timezone.now() - DAY, imported=False)
    return sorted(run.duration_s for run in runs.only("began_at", "ended_at", "last_call_at"))


def quantile(values: list[float], share: float) -> float | None:
    """The value of nearest rank; None for none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def visible_runs(viewer: Viewer) -> QuerySet[Any]:
    rows = ApplicationRun.objects.filter(application__tenant__in=viewer.tenants(), imported=False)
    return rows.select_related("application__tenant")


APPLICATIONS = Resource(
    name="applications",
    noun="application",
    model=Application,
    rows=visible_applications,
    columns=(
        Column("id"),
        Column("name", "Application", href="console:application", own_page=True),
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("running", "Running", draw="count", type=int),
        Column("ended", "Ended, 24 h", draw="count", type=int, about="Runs that ended in the last 24 hours."),
        Column(
            "completion_p50_s",
            "Completion p50 (s)",
            lambda row: quantile(durations_s(row), 0.5),
            draw="duration",
            type=float | None,
            about="From the first call of a run to the end of its last one, over 24 hours.",
        ),
        Column(
            "completion_p95_s",
            "Completion p95 (s)",
            lambda row: quantile(durations_s(row), 0.95),
            draw="duration",
            type=float | None,
        ),
        Column("units", "Units", lambda row: len(row.units), draw="count", type=int),
        Column("records", "Records", draw="count", type=int, about="Runs that its demand graph is learned from."),
        Column("last_run_at", "Last run (UTC)", draw="moment", type=Any),
    ),
    filters=(
        search_in("name", control=Search("q", "Search by name")),
        Filter("tenant", "tenant__name", control=tenant_control, fleet=True),
    ),
    page=(
        *("name", "tenant", "running", "ended", "completion_p50_s", "completion_p95_s"),
        *("units", "records", "last_run_at"),
    ),
    template="console/applications/applications.html",
    empty="Send X-Application and X-Run with each request.",
)

RUNS = Resource(
    name="runs",
    noun="run",
    model=ApplicationRun,
    rows=visible_runs,
    columns=(
        Column("id"),
        Column("run", "Run", draw="id"),
        Column("application", "Application", "application.name", type=str),
        Column("tenant", "Tenant", "application.tenant.name", type=str),
        Column("began_at", "Began (UTC)", draw="moment"),
        Column("ended_at", "Ended (UTC)", draw="moment"),
        Column("duration_s", "Duration (s)", draw="duration", type=float),
        Column("calls", "Calls", draw="count"),
        Column("failed_calls", "Failed calls", draw="count"),
        Column("prompt_tokens", "Prompt tokens", draw="count"),
        Column("output_tokens", "Output tokens", draw="count"),
    ),
    filters=(
        Filter("application", "application__name"),
        Filter("tenant", "application__tenant__name"),
        *in_range("began_at", "Began", 24, 168),
    ),
    page=("run", "application"),
)
