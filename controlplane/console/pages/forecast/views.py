"""Forecast page: demand of each series as counted and expected, capacity, and the error of its forecasts."""

from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.charts.spec import Chart
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.forecast.charts import demand_and_forecast, unit_title
from controlplane.console.pages.forecast.selectors import (
    RANGES_H,
    USUAL_RANGE_H,
    OutlookFilter,
    OutlookResult,
    see,
    series_rows,
)
from controlplane.events.models import Event
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import selectors as planning
from controlplane.planning.models import Quantity
from controlplane.resources.filters import Filters, Select, last_hours, named
from controlplane.resources.names import region_names
from controlplane.tuning.selectors import tuned

USE_WARNING = 0.8
INTERACTIVE = "all-interactive"
CLASSES = [
    (demand.EVERY_CLASS, "Interactive and deferred"), (INTERACTIVE, "Interactive classes"),
    (demand.DEFERRED, "Deferred classes"),
]  # fmt: skip


def filters_of(request: HttpRequest, endpoints: list[tuple[str, str]], region_titles: dict[str, str]) -> Filters | None:
    """Return the series of the query string, by default the first; None without any deployment."""
    if not endpoints:
        return None
    model = Select("model", "Model", named(sorted({name for name, _ in endpoints})), endpoints[0][0])
    regions = [region for name, region in endpoints if name == model.read(request.GET)]
    return Filters(
        request.GET,
        model,
        Select("region", "Region", [(name, region_titles.get(name, name)) for name in regions], regions[0]),
        Select("quantity", "Tokens", [(demand.TOKENS, "Prompt and output"), *Quantity.choices], demand.TOKENS),
        Select("class", "SLO class", CLASSES, demand.EVERY_CLASS),
        Select("hours", "Time range", last_hours(*RANGES_H), str(USUAL_RANGE_H)),
    )


def asked_of(filters: Filters | None) -> OutlookFilter | None:
    if filters is None:
        return None
    slo_class = "" if filters["class"] == INTERACTIVE else filters["class"]
    return OutlookFilter(filters["model"], filters["region"], filters["quantity"], int(filters["hours"]), slo_class)


def chart_of(seen: OutlookResult) -> Chart:
    return demand_and_forecast(seen.outlook, "Nothing is known of this series yet.")


def first_forecast(asked: OutlookFilter, now: datetime) -> dict[str, Any]:
    """Describe why a series has no forecast yet, and the time to the first: a full window, then the next forecast."""
    minutes, first = planning.minutes_of(asked.model, asked.region, asked.slo_class, None)
    window_s, every_s = tuned().FORECAST_WINDOW_S, tuned().FORECAST_EVERY_S
    due = now
    if first is not None:
        due = demand.window_start(first, window_s) + timedelta(seconds=window_s) + demand.LAG
    if newest := planning.newest_forecast():
        due = max(due, newest.made_at + timedelta(seconds=every_s))
    first_in_s = max(0.0, (due - now).total_seconds())
    return {
        "minutes": minutes,
        "window_s": window_s,
        "every_s": every_s,
        "first_in_s": first_in_s,
    }


def is_stale(seen: OutlookResult | None, now: datetime) -> bool:
    """Return whether the series has a forecast that no newer one follows."""
    newest = seen.forecast if seen else None
    return newest is not None and now - newest.made_at > 2 * timedelta(seconds=tuned().FORECAST_EVERY_S)


def failure_of(seen: OutlookResult | None, now: datetime) -> Event | None:
    """Describe why forecasters failed on a series without a new forecast; None without a failure."""
    has_forecast = seen is not None and seen.forecast is not None
    if has_forecast and not is_stale(seen, now):
        return None
    return planning.forecast_failure(now)


def use_level(use: float | None) -> str:
    """Return the severity of a peak ahead that takes that share of the capacity."""
    if use is None or use <= USE_WARNING:
        return ""
    return "critical" if use > 1 else "warning"


@require_safe
@fleet_role(Role.VIEWER)
def forecast(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    endpoints = demand.endpoints()
    regions = dict(region_names())
    filters = filters_of(request, endpoints, regions)
    asked = asked_of(filters)
    seen = see(asked, now) if asked else None
    chart = chart_of(seen) if seen else None
    if chart and (answer := of_charts(request, [chart])) is not None:
        return answer
    rows = series_rows(asked.quantity, regions, now, asked.slo_class) if asked else []
    row = next((row for row in rows if asked and (row["model"], row["region"]) == (asked.model, asked.region)), None)
    context = {
        **live_context(feed.state(), ""),
        "filters": filters,
        "asked": asked,
        "unit": unit_title(asked.quantity) if asked else "",
        "seen": seen,
        "chart": chart,
        "region_title": regions.get(asked.region, asked.region) if asked else "",
        "rows": rows,
        "ahead_s": seen.forecast.window_s * len(seen.forecast.mean) if seen and seen.forecast else 0,
        "stale": is_stale(seen, now),
        "failure": failure_of(seen, now),
        "row": row,
        "use_level": use_level(row.get("use")) if row else "",
        "waiting": first_forecast(asked, now) if asked and seen and seen.forecast is None else None,
    }
    return render(request, "console/forecast/forecast.html", context)
