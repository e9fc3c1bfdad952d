"""Applications of tenants and their runs."""

from datetime import timedelta
from typing import Annotated, Any

from django.db.models import Count, Max, Prefetch, Q, QuerySet, Value
from django.utils import timezone
from pydantic import Field

from controlplane.applications.completion import DAY_H
from controlplane.applications.models import Application, ApplicationRun
from controlplane.fleet.models import Deployment
from controlplane.resources.filters import Search, Select, last_hours
from controlplane.resources.requests import region_control, tenant_control
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range, search_in

RANGE = Select("hours", "Range", last_hours(1, DAY_H, 168), str(DAY_H))
"""Hours that the figures of pages cover."""


def visible_applications(viewer: Viewer, hours: int = DAY_H) -> QuerySet[Any]:
    """Return the applications that *viewer* may see, with their records in numbers and the runs of their figures."""
    rows: QuerySet[Any] = Application.objects.filter(tenant__in=viewer.tenants()).select_related("tenant")
    rows = rows.annotate(records=Count("runs", ~Q(runs__steps=[])), last_run_at=Max("runs__began_at"))
    return within_hours(rows, hours)


def within_hours(rows: QuerySet[Any], hours: int) -> QuerySet[Any]:
    """Fetch with *rows* the runs that run, or ended in the last *hours*."""
    since = Q(ended_at=None) | Q(ended_at__gte=timezone.now() - timedelta(hours=hours))
    runs = ApplicationRun.objects.filter(since, imported=False).defer("steps").order_by("ended_at")
    return rows.prefetch_related(None).prefetch_related(Prefetch("runs", runs, to_attr="lately"))


def orders_of(application: Application) -> list[str]:
    """Return the orders in which the models that its units ask serve; none without a deployment of one."""
    names = {unit.get("name") for unit in application.units.values() if unit.get("kind") == "llm"}
    used = Deployment.objects.filter(model__name__in=names, active=True).values_list("ordering_policy", flat=True)
    return sorted(set(used))


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
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("running", "Running", draw="count", type=int),
        Column("ended", "Ended", "completions.ended", draw="count", type=int, about="Runs that ended in the range."),
        Column(
            "in_time",
            "Deadlines met (share)",
            "completions.in_time",
            draw="console/applications/cells/in_time.html",
            kind="num",
            type=float | None,
            about="Share of runs with a deadline that ended by it; null without any.",
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
            "Abandoned",
            "completions.abandoned",
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
            about="Mean of prompt and output tokens.",
        ),
        *(
            Column(
                f"tokens_{end}",
                f"Tokens a run, {end}",
                f"completions.tokens_{end}",
                type=float | None,
                about=f"The {end} end of the middle 80% of runs.",
            )
            for end in ("low", "high")
        ),
        Column(
            "demand_error",
            "Demand error (share)",
            "completions.error",
            draw="percent",
            type=float | None,
            about="Mean error of the remaining service that was predicted at calls placed by rank, as a share of what came; "
            "null where none was.",
        ),
        Column(
            "order",
            "Order",
            lambda row: ", ".join(orders_of(row)),
            draw="console/applications/cells/order.html",
            type=str,
            about="In which the models that its units ask serve what waits.",
        ),
        Column(
            "completion_p50_s",
            "Completion p50 (s)",
            label="p50",
            source="completions.p50_s",
            draw="clock",
            type=float | None,
            about="From the first call of a run to the end of its last one.",
        ),
        Column(
            "completion_p95_s",
            "Completion p95 (s)",
            "completions.p95_s",
            label="p95",
            draw="clock",
            type=float | None,
        ),
        Column("units", "Units", lambda row: len(row.units), draw="count", type=int),
        Column("records", "Records", draw="count", type=int, about="Runs that its demand graph is learned from."),
        *(Column(name) for name in ("run_deadline_s", "run_max_tokens", "run_max_usd")),
        Column("last_run_at", "Last run (UTC)", draw="moment", type=Any),
    ),
    filters=(
        search_in("name", control=Search("q", "Search by name")),
        Filter("tenant", "tenant__name", control=tenant_control, fleet=True),
        Filter(
            "region",
            lambda rows, name: rows.annotate(asked_region=Value(name)),
            control=region_control,
            about="Figures of runs whose first call came from this region.",
        ),
        Filter(
            "hours",
            lambda rows, hours: within_hours(rows, int(hours)),
            Annotated[int, Field(ge=1, le=24 * 366)],
            control=RANGE,
            about="Figures of so many hours; 24 by default.",
        ),
    ),
    page=(
        *("name", "in_time", "completion", "completion_p50_s", "completion_p95_s", "deadline_s"),
        *("ended", "tokens", "order"),
    ),
    template="console/applications/applications.html",
    caption="",
    whole=200,
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
        Column("region", "Region"),
        Column("service_s", "Service (s)", about="Of all calls and units, by the profiles of their models."),
        Column("expected_calls", "Predictions", draw="count"),
        Column("needed_s", "Needed after predictions (s)"),
        Column("error_s", "Error of predictions (s)"),
    ),
    filters=(
        Filter("application", "application__name"),
        Filter("region"),
        Filter("tenant", "application__tenant__name"),
        *in_range("began_at", "Began", 24, 168),
    ),
    page=("run", "application"),
)
