"""Applications: their completion times, demand graphs, and runs."""

from datetime import datetime
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import tenants_with_role
from controlplane.applications.models import Application, ApplicationRun, RunOutcome
from controlplane.applications.selectors import (
    Prediction,
    graph_of,
    histograms,
    predictions,
    quality,
    rates_of,
    service_histogram,
    unit_summaries,
)
from controlplane.applications.services import calls_of, give_title
from controlplane.console.access.roles import signed_in
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import PageViewer, list_page, viewer_of
from controlplane.console.live.hub import hub
from controlplane.console.live.views import live_context
from controlplane.console.pages.applications import timeline
from controlplane.console.pages.applications.drawing import edges_of, layout
from controlplane.console.pages.applications.prewarming import prewarming_of, prewarming_of_run
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.applications import APPLICATIONS, visible_applications, visible_runs
from scheduling.applications.remaining import FEWEST_MATCHES, correlations

RUNS_SHOWN = 20
RANKED = 50
"""Running runs with a prediction on a page."""
SUMMED = 200
"""Applications that the tiles and the verdict of the list cover."""
CALLS_SHOWN = 500


def live_of(viewer: PageViewer) -> dict[str, Any]:
    """Return the context of a live page; the live connection is the fleet's, other pages are as they were loaded."""
    if not viewer.sees_fleet:
        return {"layout": "console/page.html"}
    return {**live_context(hub.state(), "applications"), "layout": "console/live_page.html"}


@require_safe
@signed_in
def applications(request: HttpRequest) -> HttpResponseBase:
    viewer, now = viewer_of(request), timezone.now()
    rows = list(visible_applications(viewer)[:SUMMED])
    running = ranked_runs(visible_runs(viewer), now)
    return list_page(
        request,
        APPLICATIONS,
        model=model_to_try(),
        several_tenants=viewer.tenants().count() > 1,
        **figures(rows, running),
    )


def figures(rows: list[Application], running: list["RunStanding"]) -> dict[str, Any]:
    """Return the numbers above the list, and the running runs in the order of their ranks."""
    done = [row.completions for row in rows]
    durations_s = [each for one in done for each in one.durations_s]
    judged, met = sum(one.judged for one in done), sum(one.met for one in done)
    return {
        "met_ratio": met / judged if judged else None,
        "met": met,
        "judged": judged,
        "with_deadline": sum(one.judged > 0 for one in done),
        "below": [row for row in rows if row.completions.below_target],
        "mean_s": sum(durations_s) / len(durations_s) if durations_s else None,
        "finished": len(durations_s),
        "abandoned": sum(one.abandoned for one in done),
        "running": running[:RANKED],
        "running_count": len(running),
        "late": sum(one.level == "late" for one in running),
        "at_risk": sum(one.level == "at_risk" for one in running),
        "fewest": FEWEST_MATCHES,
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


def application_of(request: HttpRequest, pk: int) -> Application:
    row: Application = get_object_or_404(visible_applications(viewer_of(request)), pk=pk)
    return row


@require_safe
@signed_in
def application(request: HttpRequest, pk: int) -> HttpResponse:
    row = application_of(request, pk)
    graph = graph_of(row)
    units = unit_summaries(graph)
    chosen = request.GET.get("unit", "")
    if chosen not in graph.units:
        chosen = max(units, key=lambda unit: unit.share).name if units else ""
    context = {
        **live_of(viewer_of(request)),
        "application": row,
        "done": row.completions,
        "graph": layout(graph, chosen) if graph.records else None,
        "edges": edges_of(graph),
        "units": units,
        "unit": next((unit for unit in units if unit.name == chosen), None),
        "histograms": histograms(graph, chosen) if graph.records and chosen else [],
        "service": service_histogram(graph),
        "correlations": correlations(graph) if graph.records else [],
        "quality": quality(graph),
        "records": len(graph.records),
        "fewest": FEWEST_MATCHES,
        "running": ranked_runs(row.runs.all(), timezone.now())[:RANKED],
        "runs": row.runs.filter(imported=False).exclude(ended_at=None)[:RUNS_SHOWN],
        "managed": tenants_with_role(request.user, Role.OPERATOR).filter(pk=row.tenant_id).exists(),
        **prewarming_of(row, timezone.now()),
        "sees_places": viewer_of(request).sees_fleet,
    }
    return render(request, "console/applications/application.html", context)


def managed_applications(request: HttpRequest) -> QuerySet[Application]:
    return Application.objects.filter(tenant__in=tenants_with_role(request.user, Role.OPERATOR))


@action(None, managed_applications, page="console:applications", unchanged="{row} was not named")
def name_application(form: ActionForm, row: Application) -> str:
    """Name an application that was recognized; without `title` it has its recognized name again."""
    try:
        before = give_title(row, form.fields.get("title", ""))
    except ValueError as error:
        raise ActionError(str(error)) from error
    record(
        "application.named", row, actor=form.user, reason=form.reason, before={"title": before},
        after={"title": row.title},
    )  # fmt: skip
    return f"The application is called {row}."


@require_safe
@signed_in
def export(request: HttpRequest, pk: int) -> HttpResponse:
    """The demand graph as JSON."""
    row = application_of(request, pk)
    response = HttpResponse(graph_of(row).to_json(), content_type="application/json")
    response["Content-Disposition"] = f'attachment; filename="{row.name}-{timezone.now():%Y%m%d}.json"'
    return response


@require_safe
@signed_in
def run(request: HttpRequest, pk: int) -> HttpResponse:
    viewer, now = viewer_of(request), timezone.now()
    row: ApplicationRun = get_object_or_404(visible_runs(viewer), pk=pk)
    rows = calls_of(row.application.tenant_id, row.application.name, row.run).order_by("arrived_at")
    spans = timeline.spans_of(list(rows[:CALLS_SHOWN]), list(row.reports.all()[:CALLS_SHOWN]), row.began_at, now)
    path = [span for span in spans if span.critical]
    duration_s = max([row.duration_s, *(span.ended_s for span in spans)])
    graph = graph_of(row.application)
    running = row.state == "running"
    standing = RunStanding(row, next(iter(predictions(graph, [row])), None), now) if running else None
    expected = timeline.expectations(spans, graph.units, rates_of(graph))
    waited_s = sum(span.parts.get("queue", 0.0) for span in path)
    level, sentence = timeline.verdict(row, waited_s, standing.slack_s if standing else None)
    context = {
        **live_of(viewer),
        "run": row,
        "running": running,
        "abandoned": row.outcome == RunOutcome.ABANDONED,
        "spans": [(span, timeline.pieces(span, duration_s)) for span in spans],
        "duration_s": duration_s,
        "deadline_x": round(timeline.AXIS * min(1.0, row.deadline_s / max(duration_s, 1e-3)), 1)
        if row.deadline_s
        else None,
        "went": timeline.where_time_went(path, duration_s) if spans else [],
        "losses": timeline.losses(path),
        "expected": expected,
        "rank_line": timeline.rank_line(expected, duration_s),
        "top_rank_s": max((one.rank_s for one in expected), default=0.0),
        "level": level,
        "sentence": sentence,
        "standing": standing,
        "records": len(graph.records),
        "fewest": FEWEST_MATCHES,
        "more_calls": max(0, row.calls - CALLS_SHOWN),
        **prewarming_of_run(row, duration_s, now),
        "sees_places": viewer.sees_fleet,
    }
    return render(request, "console/applications/run.html", context)
