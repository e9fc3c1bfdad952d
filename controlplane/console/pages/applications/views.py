"""Applications: their completion times, demand graphs, and runs."""

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.applications.models import Application, ApplicationRun
from controlplane.applications.selectors import graph_of, predictions, quality, unit_summaries
from controlplane.applications.services import calls_of
from controlplane.console.access.roles import signed_in
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.pages.applications.drawing import edges_of, layout, waterfall
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.resources.applications import (
    APPLICATIONS,
    durations_s,
    quantile,
    visible_applications,
    visible_runs,
)
from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.recording import NO_UNIT
from scheduling.applications.remaining import FEWEST_MATCHES, correlations

RUNS_SHOWN = 20
RANKED = 50
"""Running runs with a prediction on a page."""


@require_safe
@signed_in
def applications(request: HttpRequest) -> HttpResponseBase:
    return list_page(request, APPLICATIONS, model=model_to_try())


def application_of(request: HttpRequest, pk: int) -> Application:
    row: Application = get_object_or_404(visible_applications(viewer_of(request)), pk=pk)
    return row


@require_safe
@signed_in
def application(request: HttpRequest, pk: int) -> HttpResponse:
    row = application_of(request, pk)
    graph, durations = graph_of(row), durations_s(row)
    running = list(row.runs.filter(ended_at=None).select_related("application")[:RANKED])
    context = {
        "application": row,
        "graph": layout(graph) if graph.records else None,
        "edges": edges_of(graph),
        "units": unit_summaries(graph),
        "correlations": correlations(graph) if graph.records else [],
        "quality": quality(graph),
        "records": len(graph.records),
        "fewest": FEWEST_MATCHES,
        "running": running,
        "predictions": predictions(graph, running),
        "runs": row.runs.filter(imported=False).exclude(ended_at=None)[:RUNS_SHOWN],
        "ended": len(durations),
        "p50_s": quantile(durations, 0.5),
        "p95_s": quantile(durations, 0.95),
    }
    return render(request, "console/applications/application.html", context)


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
    row: ApplicationRun = get_object_or_404(visible_runs(viewer_of(request)), pk=pk)
    calls = list(calls_of(row.application.tenant_id, row.application.name, row.run).order_by("arrived_at")[:500])
    graph: DemandGraph = graph_of(row.application)
    context = {
        "run": row,
        "calls": waterfall(calls, row.began_at, row.duration_s),
        "no_unit": NO_UNIT,
        "predictions": predictions(graph, [row]) if row.ended_at is None else [],
        "records": len(graph.records),
        "fewest": FEWEST_MATCHES,
    }
    return render(request, "console/applications/run.html", context)
