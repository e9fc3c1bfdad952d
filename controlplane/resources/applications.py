"""Applications of tenants and their runs."""

from typing import Any

from django.db.models import Avg, Case, Count, Max, OuterRef, Q, QuerySet, Subquery, When
from django.utils import timezone

from controlplane.applications.completion import DAY
from controlplane.applications.models import (
    Application,
    ApplicationRun,
    GraphVersion,
    PrewarmRow,
    UnitBackend,
    learned,
)
from controlplane.resources.filters import Search
from controlplane.resources.requests import tenant_control
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range, search_in


def visible_applications(viewer: Viewer) -> QuerySet[Any]:
    """Return the applications that *viewer* may see, with their runs and prewarming of the last day in numbers."""
    since = timezone.now() - DAY
    warmed = PrewarmRow.objects.filter(
        tenant=OuterRef("tenant"), application=OuterRef("name"), began_at__gte=since, fate__in=("hit", "late", "miss")
    )
    hits = warmed.order_by().values("application").values(share=Avg(Case(When(fate="hit", then=1.0), default=0.0)))
    ended = Q(runs__ended_at__gte=since, runs__imported=False)
    return (
        Application.objects.filter(tenant__in=viewer.tenants())
        .select_related("tenant")
        .annotate(
            running=Count("runs", Q(runs__ended_at=None)),
            ended=Count("runs", ended),
            records=Count("runs", learned("runs__", "")),
            last_run_at=Max("runs__began_at"),
            prewarm_hits=Subquery(hits),
        )
    )


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
        Column("name", "Application", draw="console/applications/cells/name.html"),
        Column("title", "Title", about="Name given to an application that was recognized."),
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("running", "Running", draw="count", type=int),
        Column(
            "ended", "Ended, 24 h", label="Ended", draw="count", type=int, about="Runs that ended in the last 24 hours."
        ),
        Column(
            "in_time",
            "Deadlines met (share)",
            "completions.in_time",
            draw="console/applications/cells/in_time.html",
            kind="num",
            type=float | None,
            about="Share of runs with a deadline that ended by it, over 24 hours; null without any.",
        ),
        Column("judged", "Runs with a deadline", "completions.judged", draw="count", type=int),
        Column(
            "deadline_s",
            "Deadline (s)",
            "completions.deadline_s",
            draw="clock",
            type=float | None,
            about="Of the latest run with one.",
        ),
        Column(
            "completion",
            label="p50 to p95",
            source="pk",
            draw="console/applications/cells/completion.html",
            rest=False,
            axis="console/applications/axis.html",
            tip="From half a second to an hour, on a logarithmic axis; the dashed line is the deadline",
        ),
        Column(
            "abandoned",
            "Abandoned, 24 h",
            "completions.abandoned",
            label="Abandoned",
            draw="count",
            type=int,
            about="Opened and not closed, or the last call did not succeed.",
        ),
        Column(
            "tokens",
            "Tokens a run",
            "completions.tokens",
            draw="quantity",
            type=float | None,
            about="Mean of prompt and output tokens over 24 hours.",
        ),
        Column(
            "completion_p50_s",
            "Completion p50 (s)",
            label="p50",
            source="completions.p50_s",
            draw="clock",
            type=float | None,
            about="From the first call of a run to the end of its last one, over 24 hours.",
        ),
        Column(
            "completion_p95_s",
            "Completion p95 (s)",
            "completions.p95_s",
            label="p95",
            draw="clock",
            type=float | None,
        ),
        Column(
            "prewarm_hits",
            "Prewarm hits (share)",
            label="Prewarm hits",
            draw="percent",
            type=float | None,
            about="Share of calls that found their backend warm, of those that needed one, over 24 hours.",
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
        *("name", "tenant", "in_time", "completion", "completion_p50_s", "completion_p95_s", "deadline_s"),
        *("running", "ended", "abandoned", "tokens", "prewarm_hits", "last_run_at"),
    ),
    template="console/applications/applications.html",
    live="applications",
    caption="Newest first; over 24 hours",
    refresh_s=10,
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
        Column("duration_s", "Duration (s)", draw="clock", type=float),
        Column("state", "State", type=str, about="running, ended, done, failed, cancelled, abandoned or stopped."),
        Column("deadline_s", "Deadline (s)", draw="clock", about="After it began."),
        Column("late_s", "Late (s)", type=float | None, about="Negative: before its deadline; null without one."),
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

PREWARMS = Resource(
    name="prewarms",
    noun="prewarmed backend",
    model=PrewarmRow,
    rows=lambda viewer: PrewarmRow.objects.filter(tenant__in=viewer.tenants()).select_related("tenant"),
    columns=(
        Column("id"),
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("application", "Application"),
        Column("run", "Run", draw="id"),
        Column("kind", "Kind"),
        Column("backend", "Backend"),
        Column("place", "Place", fleet=True, type=str | None),
        Column("why", "Why", draw="reason"),
        Column("began_at", "Began (UTC)", draw="moment"),
        Column("warm_at", "Warm (UTC)", draw="moment"),
        Column("settled_at", "Settled (UTC)", draw="moment"),
        Column("fate", "Found"),
    ),
    filters=(
        Filter("tenant", "tenant__name"),
        *(Filter(name) for name in ("application", "run", "kind", "backend", "fate")),
        *in_range("began_at", "Began", 24, 168),
    ),
    page=("backend", "kind"),
)

UNIT_BACKENDS = Resource(
    name="unit-backends",
    noun="unit backend",
    model=UnitBackend,
    rows=lambda viewer: UnitBackend.objects.all(),
    columns=tuple(
        Column(name)
        for name in (
            *("name", "kind", "image", "command", "container_port", "capacity"),
            *("keep_alive_s", "start_limit_s", "reused", "active"),
        )
    ),
    filters=(Filter("kind"),),
)


def visible_versions(viewer: Viewer) -> QuerySet[Any]:
    rows = GraphVersion.objects.filter(application__tenant__in=viewer.tenants())
    return rows.select_related("application__tenant").defer("graph")


VERSIONS = Resource(
    name="graph-versions",
    noun="graph version",
    model=GraphVersion,
    rows=visible_versions,
    columns=(
        Column("id"),
        Column("application", "Application", "application.name", type=str),
        Column("tenant", "Tenant", "application.tenant.name", type=str),
        Column("number", "Version"),
        Column("made_at", "Kept (UTC)", draw="moment"),
        Column("made_by", "By"),
        Column("why", "Why"),
        Column("records", "Runs", draw="count"),
        Column("error", "Error (share)", type=float | None, about="Of predictions of what left-out runs still needed."),
        Column("size_bytes", "Size (bytes)", draw="count"),
    ),
    filters=(
        Filter("application", "application__name"),
        Filter("application_id", type=int),
        Filter("tenant", "application__tenant__name"),
    ),
    page=("application", "number"),
)
