"""The overview: is everybody served within SLO now, and if not, where to look."""

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.filters import DEMANDS, RANGES_MIN, view_of
from controlplane.console.live import attention, jobs, tiles
from controlplane.console.live.hub import hub
from controlplane.console.live.state import SOURCE_TEXT, LiveState, Source
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.instances.charts import instance_charts
from controlplane.console.pages.instances.views import instances_csv
from controlplane.console.pages.overview.charts import overview_charts, sparks
from controlplane.console.selectors.attention import plans_waiting, rollouts_failed
from controlplane.console.selectors.events import latest_events
from controlplane.console.selectors.instances import instance_rows, worst_first
from controlplane.console.selectors.names import model_names
from controlplane.fleet.selectors import instances

INSTANCES_SHOWN = 12
EVENTS_SHOWN = 5
MODELS_SHOWN = 4


def without_numbers(state: LiveState, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The attention list while the gateway has said nothing: what the inventory knows is wrong."""
    tables = {"instances": _columns(rows), "endpoints": {}, "tiles": {}, "lengths": {}, **jobs.own_tables()}
    return attention.find(tables, attention.Known(plans=plans_waiting(), rollouts=rollouts_failed()))


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = ("name", "model", "region", "status", "failures")
    return {name: [row[name] for row in rows] for name in names}


@require_safe
@fleet_role(Role.VIEWER)
def overview(request: HttpRequest) -> HttpResponseBase:
    state = hub.state()
    models = model_names()
    view = view_of(request, models)
    charts = overview_charts(state, view)
    rows = instance_rows(state, model=view.model)
    if request.GET.get("format") == "csv":
        chart = next((chart for chart in charts if chart.key == view.table), None)
        if chart is None:
            return instances_csv(worst_first(rows))
        return chart.csv(chart.key)
    context = {
        **live_context(state, view, "overview,instances,events"),
        "models": models,
        "ranges": RANGES_MIN,
        "demand_choices": [(kind, label) for kind, (_, _, _, label) in DEMANDS.items()],
        "tiles": [
            {**shown, "spark": spark}
            for shown, spark in zip(tiles.shown(state.tile(view.model)), sparks(state, view), strict=True)
        ],
        "charts": charts,
        "model_rows": state.model_rows(MODELS_SHOWN),
        "attention": attention.of_model(state.attention if state.known else without_numbers(state, rows), view.model),
        "rows": worst_first([row for row in rows if row["status"] != "stopped"])[:INSTANCES_SHOWN],
        "rows_total": len(rows),
        "events": latest_events(EVENTS_SHOWN, view.model),
        "events_shown": EVENTS_SHOWN,
        "disconnected": SOURCE_TEXT.get(state.source, "") if state.source != Source.LIVE else "",
    }
    return render(request, "console/overview/overview.html", context)


@require_GET
@fleet_role(Role.VIEWER)
def charts(request: HttpRequest) -> HttpResponse:
    """`GET /console/api/charts?charts=ttft,kv&…`: figures of the overview, or with `instance=NAME` of one instance."""
    state = hub.state()
    view = view_of(request, model_names())
    if name := request.GET.get("instance"):
        return redrawn(request, instance_charts(state, view, get_object_or_404(instances(), name=name)))
    return redrawn(request, overview_charts(state, view), sparks=sparks(state, view))
