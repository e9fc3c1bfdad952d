"""Applications: their completion times, demand graphs, and runs."""

from collections import Counter
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.db.models import F, Max, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import tenants_with_role
from controlplane.applications.completion import AXIS_TICKS, DAY_H, on_axis
from controlplane.applications.models import Application, ApplicationRun, RunOutcome
from controlplane.applications.selectors import Prediction, demand_by, graph_of, predictions, unit_summaries
from controlplane.applications.services import APPLICATION, MAX_GRAPH_BYTES, calls_of, read_graph, warnings_of
from controlplane.applications.services import import_graph as import_as_application
from controlplane.applications.spans import expectations, rates_of, spans_of
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, action, back
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.live.feed import feed
from controlplane.console.pages.applications import timeline
from controlplane.console.pages.applications.drawing import edges_of, layout
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.events import since
from controlplane.fleet.inventory import services as inventory
from controlplane.planning.parts import PARTS, PolicyPart
from controlplane.resources.applications import APPLICATIONS, RANGE, orders_of, visible_applications, visible_runs
from controlplane.resources.filters import Filters
from controlplane.resources.names import place_titles
from scheduling.applications.remaining import FEWEST_MATCHES
from scheduling.policy import RUN_DEMANDS

RUNS_SHOWN = 20
RANKED = 50
"""Running runs with a prediction on a page."""
CALLS_SHOWN = 500
ORDERING: PolicyPart = next(part for part in PARTS if part.name == "ordering_policy")


@require_safe
@signed_in
def applications(request: HttpRequest) -> HttpResponseBase:
    viewer, now = viewer_of(request), timezone.now()
    filters, narrowed = APPLICATIONS.listed(viewer, request.GET)
    latest: Any = narrowed
    rows: list[Any] = sorted(
        latest.order_by(F("last_run_at").desc(nulls_last=True))[: APPLICATIONS.whole], key=worst_first
    )
    for row in rows:
        row.orders = [ORDERING.choice(order) for order in orders_of(row)]
    region = filters["region"]
    runs = visible_runs(viewer).filter(application__in=[row.pk for row in rows])
    ended = runs.filter(imported=False).exclude(ended_at=None).order_by().values_list("application")
    newest = dict(ended.annotate(Max("pk")))
    for row in rows:
        row.newest_run = newest.get(row.pk)
    running = ranked_runs(runs.filter(region=region) if region else runs, now)
    return list_page(
        request,
        APPLICATIONS,
        show=lambda _: rows,
        model=model_to_try(),
        in_range=dict(RANGE.options)[filters["hours"]].lower(),
        several_tenants=viewer.tenants().count() > 1,
        warnings=warnings_of(viewer.tenants().values_list("pk", flat=True)),
        importers=tenants_with_role(request.user, Role.OPERATOR).order_by("name"),
        axis=AXIS_TICKS,
        prewarmed=feed.state().tables["prewarmed"] if viewer.sees_fleet else (),
        **figures(rows, running),
    )


def worst_first(row: Application) -> tuple[float, int, str]:
    """Return the key of the list: what misses most deadlines first, then what runs most, then by name."""
    done = row.completions
    return (done.in_time if done.in_time is not None else 2.0, -done.ended, str(row))


def figures(rows: list[Application], running: list["RunStanding"]) -> dict[str, Any]:
    """Return the numbers above the list, and the running runs in the order of their ranks."""
    done = [row.completions for row in rows]
    durations_s = [each for one in done for each in one.durations_s]
    needed_s = sum(one.needed_s for one in done)
    judged, met = sum(one.judged for one in done), sum(one.met for one in done)
    return {
        "met_ratio": met / judged if judged else None,
        "met": met,
        "judged": judged,
        "with_deadline": sum(one.judged > 0 for one in done),
        "below": [row for row in rows if row.completions.below_target],
        "mean_s": sum(durations_s) / len(durations_s) if durations_s else None,
        "finished": len(durations_s),
        "error": sum(one.error_s for one in done) / needed_s if needed_s else None,
        "abandoned": sum(one.abandoned for one in done),
        "running": running[:RANKED],
        "running_count": len(running),
        "late": sum(one.level == "late" for one in running),
        "at_risk": sum(one.level == "at_risk" for one in running),
    }


class RunStanding:
    """A running run, with a prediction if its application has enough records."""

    def __init__(self, run: ApplicationRun, prediction: Prediction | None, now: datetime) -> None:
        self.run, self.prediction = run, prediction
        self.slack_s = prediction.slack_s(now) if prediction else None
        self.worst_slack_s = prediction.worst_slack_s(now) if prediction else None
        left_s = None if run.deadline_s is None else run.deadline_s - (now - run.began_at).total_seconds()
        self.left_s = left_s
        late = self.slack_s if self.slack_s is not None else left_s
        self.level = ""
        if late is not None and late < 0:
            self.level = "late"
        elif self.worst_slack_s is not None and self.worst_slack_s < 0:
            self.level = "at_risk"

    @property
    def rank(self) -> float:
        return self.prediction.rank if self.prediction else float("inf")

    @property
    def last_unit(self) -> str:
        return self.prediction.last_unit if self.prediction else ""

    @property
    def places(self) -> dict[str, float]:
        """Return the places of its work left and its deadline on the axis of completion times."""
        known = self.prediction
        seconds = {"deadline": self.left_s} if self.left_s is not None else {}
        if known is not None:
            seconds |= {"low": known.low_s, "high": known.high_s, "mean": known.mean_s}
        return {name: on_axis(max(0.0, value_s)) for name, value_s in seconds.items()}


def ranked_runs(rows: QuerySet[ApplicationRun], now: datetime) -> list[RunStanding]:
    """Return the running runs among *rows*, the lowest rank first and those without one last.

    The `RANKED` that began last are predicted.
    """
    runs = list(rows.filter(ended_at=None, closed_at=None).select_related("application__tenant")[: 10 * RANKED])
    known: dict[int, Prediction] = {}
    by_application: dict[int, list[ApplicationRun]] = {}
    for run in runs[:RANKED]:
        by_application.setdefault(run.application_id, []).append(run)
    for several in by_application.values():
        known |= {one.run.pk: one for one in predictions(graph_of(several[0].application), several)}
    standings = [RunStanding(run, known.get(run.pk), now) for run in runs]
    return sorted(standings, key=lambda one: (one.rank, one.run.began_at))


def application_of(request: HttpRequest, pk: int, hours: int = DAY_H) -> Application:
    row: Application = get_object_or_404(visible_applications(viewer_of(request), hours), pk=pk)
    return row


@require_safe
@signed_in
def application(request: HttpRequest, pk: int) -> HttpResponse:
    filters = Filters(request.GET, RANGE)
    row = application_of(request, pk, int(filters["hours"]))
    graph = graph_of(row)
    units = unit_summaries(graph)
    running = ranked_runs(row.runs.all(), timezone.now())[:RANKED]
    context = {
        "application": row,
        "done": row.completions,
        "graph": layout(graph, units, Counter(one.last_unit for one in running)) if graph.records else None,
        "edges": edges_of(graph),
        "units": units,
        "records": len(graph.records),
        "fewest": FEWEST_MATCHES,
        "models": [unit.backend for unit in units if unit.kind == "llm"],
        "running": running,
        "predicted_by": RUN_DEMANDS[demand_by(graph)],
        "drawn_after": since.newest(),
        "axis": AXIS_TICKS,
        "runs": row.runs.filter(imported=False).exclude(ended_at=None)[:RUNS_SHOWN],
        "managed": tenants_with_role(request.user, Role.OPERATOR).filter(pk=row.tenant_id).exists(),
        "filters": filters,
        "in_range": dict(RANGE.options)[filters["hours"]].lower(),
    }
    return render(request, "console/applications/application.html", context)


@action(
    None,
    lambda request: Application.objects.filter(tenant__in=tenants_with_role(request.user, Role.OPERATOR)),
    page=lambda row: reverse("console:application", args=[row.pk]),
)
def limit_runs(form: ActionForm, row: Application) -> str:
    """Change what a run of an application may take."""
    values = {name: form.fields.get(name, "").strip() or None for name in APPLICATION.fields}
    form.check(row, fields=values)
    inventory.change(APPLICATION, row, values, form.user, form.reason)
    return f"The limits of {row}'s runs are changed; calls follow them within seconds."


@require_POST
@signed_in
def import_graph(request: HttpRequest) -> HttpResponse:
    """Import the graph in a file."""
    tenants = tenants_with_role(request.user, Role.OPERATOR)
    tenant = get_object_or_404(tenants, name=request.POST.get("tenant", "").replace("\0", " "))
    file = request.FILES.get("file")
    try:
        graph = read_graph(file.read(MAX_GRAPH_BYTES + 1) if file is not None else b"")
        graph.application = request.POST.get("application") or graph.application
        row = import_as_application(tenant, graph, user_of(request), timezone.now())
    except ValueError as error:
        messages.error(request, f"Nothing was imported: {error}.")
        return back(request, "console:applications")
    messages.success(request, f"{len(graph.records):,} records of {row} are imported.")
    return redirect("console:application", row.pk)


@require_safe
@signed_in
def export(request: HttpRequest, pk: int) -> HttpResponse:
    """The demand graph as JSON."""
    row = application_of(request, pk)
    response = HttpResponse(graph_of(row).to_json(), content_type="application/json")
    name = f"{row.name}-{timezone.now():%Y%m%d}"
    response["Content-Disposition"] = f'attachment; filename="{name}.json"'
    return response


@require_safe
@signed_in
def run(request: HttpRequest, pk: int) -> HttpResponse:
    viewer, now = viewer_of(request), timezone.now()
    row: ApplicationRun = get_object_or_404(visible_runs(viewer), pk=pk)
    rows = calls_of(row.application.tenant_id, row.application.name, row.run).order_by("arrived_at")
    spans = spans_of(list(rows[:CALLS_SHOWN]), list(row.reports.all()[:CALLS_SHOWN]), row.began_at, now)
    path, titles = [span for span in spans if span.critical], place_titles()
    duration_s = max([row.duration_s, *(span.ended_s for span in spans)])
    graph = graph_of(row.application)
    running = row.state == "running"
    standing = RunStanding(row, next(iter(predictions(graph, [row])), None), now) if running else None
    expected = expectations(spans, graph.units, rates_of(graph.units, row.region))
    waited_s = sum(span.parts.get("queue", 0.0) for span in path)
    level, sentence = timeline.verdict(row, waited_s, standing.slack_s if standing else None)
    context = {
        "run": row,
        "graph": layout(graph, unit_summaries(graph), Counter()) if graph.records else None,
        "running": running,
        "abandoned": row.outcome == RunOutcome.ABANDONED,
        "spans": [(span, timeline.pieces(span, duration_s), span.where(titles)) for span in spans],
        "duration_s": duration_s,
        "deadline_x": round(timeline.AXIS * min(1.0, row.deadline_s / max(duration_s, 1e-3)), 1)
        if row.deadline_s
        else None,
        "ticks": timeline.ticks(duration_s),
        "went": timeline.where_time_went(path, duration_s) if spans else [],
        "losses": timeline.losses(path),
        "expected": expected,
        "level": level,
        "sentence": sentence,
        "standing": standing,
        "more_calls": max(0, row.calls - CALLS_SHOWN),
        "may_act": running and may(request, Role.OPERATOR),
    }
    return render(request, "console/applications/run.html", context)
