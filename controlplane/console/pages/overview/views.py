"""The overview: is everybody served within SLO now, and if not, where to look."""

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.live import tiles
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import attention_list, event_list
from controlplane.console.live.state import SOURCE_TEXT, Source
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.overview.charts import overview_charts, sparks
from controlplane.console.pages.overview.first_steps import first_steps
from controlplane.console.selectors.instances import instance_rows, worst_first
from controlplane.fleet.selectors import instances
from controlplane.planning.capacity import endpoint_loads, total
from controlplane.planning.sizing.selectors import newest_loss
from controlplane.resources.filters import CHART_RANGE, Filters, model_select
from controlplane.resources.instances import INSTANCES, SUMMARY
from controlplane.resources.names import model_names

INSTANCES_SHOWN = 12
MODELS_SHOWN = 4


def filters_of(request: HttpRequest) -> Filters:
    return Filters(request.GET, model_select(model_names()), CHART_RANGE)


@require_safe
@fleet_role(Role.VIEWER)
def overview(request: HttpRequest) -> HttpResponseBase:
    state = feed.state()
    filters = filters_of(request)
    model = filters["model"]
    charts = overview_charts(state, filters)
    if (answer := of_charts(request, charts, sparks=sparks(state, filters))) is not None:
        return answer
    rows = worst_first(instance_rows(state, instances(model=model)))
    if request.GET.get("format") == "csv":
        return INSTANCES.csv(rows)
    context = {
        **live_context(state, f"overview:{model},instances,events"),
        "filters": filters,
        "tiles": [
            {**reading, "spark": spark}
            for reading, spark in zip(
                tiles.readings(tiles.TILES, state.tile(model), f"tile/{model}"), sparks(state, filters), strict=True
            )
        ],
        "charts": charts,
        "model_rows": state.model_rows(MODELS_SHOWN),
        "attention": attention_list(state.alerts, model),
        "columns": INSTANCES.named(*SUMMARY),
        "rows": [row for row in rows if row["status"] != "stopped"][:INSTANCES_SHOWN],
        "rows_total": len(rows),
        "sums": total(each for each in endpoint_loads(timezone.now()).values() if model in ("", each.model)),
        "events": event_list(),
        "losses": newest_loss(),
        "steps": first_steps(request),
        "disconnected": SOURCE_TEXT.get(state.source, "") if state.source != Source.LIVE else "",
    }
    return render(request, "console/overview/overview.html", context)
