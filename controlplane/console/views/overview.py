"""The overview: is everybody served within SLO now, and if not, where to look."""

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console import attention, dashboards, selectors, system, tiles
from controlplane.console.access import fleet_role
from controlplane.console.charts import DEMANDS
from controlplane.console.filters import RANGES_MIN, view_of
from controlplane.console.hub import hub
from controlplane.console.state import SOURCE_TEXT, LiveState, Source
from controlplane.console.views.instances import instances_csv
from controlplane.console.views.live import live_context
from controlplane.exports import csv_response

INSTANCES_SHOWN = 12
EVENTS_SHOWN = 5
MODELS_SHOWN = 4


def without_numbers(state: LiveState, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The attention list while the gateway has said nothing: what the inventory knows is wrong."""
    tables = {"instances": _columns(rows), "endpoints": {}, "tiles": {}, "lengths": {}, **system.own_tables()}
    return attention.find(
        tables, attention.Known(plans=selectors.plans_waiting(), rollouts=selectors.rollouts_failed())
    )


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = ("name", "model", "region", "status", "failures")
    return {name: [row[name] for row in rows] for name in names}


@require_safe
@fleet_role(Role.VIEWER)
def overview(request: HttpRequest) -> HttpResponseBase:
    state = hub.state()
    models = selectors.model_names()
    view = view_of(request, models)
    charts = dashboards.overview(state, view)
    rows = selectors.instance_rows(state, model=view.model)
    if request.GET.get("format") == "csv":
        chart = next((chart for chart in charts if chart.key == view.table), None)
        if chart is None:
            return instances_csv(selectors.worst_first(rows))
        return csv_response(chart.key, chart.csv_header, chart.rows)
    context = {
        **live_context(state, view, "overview,instances,events"),
        "models": models,
        "ranges": RANGES_MIN,
        "demand_choices": [(kind, label) for kind, (_, _, _, label) in DEMANDS.items()],
        "tiles": [
            {**shown, "spark": spark}
            for shown, spark in zip(tiles.shown(state.tile(view.model)), dashboards.sparks(state, view), strict=True)
        ],
        "charts": charts,
        "model_rows": state.model_rows(MODELS_SHOWN),
        "attention": attention.of_model(state.attention if state.known else without_numbers(state, rows), view.model),
        "rows": selectors.worst_first([row for row in rows if row["status"] != "stopped"])[:INSTANCES_SHOWN],
        "rows_total": len(rows),
        "events": selectors.latest_events(EVENTS_SHOWN, view.model),
        "events_shown": EVENTS_SHOWN,
        "disconnected": SOURCE_TEXT.get(state.source, "") if state.source != Source.LIVE else "",
    }
    return render(request, "console/overview.html", context)
