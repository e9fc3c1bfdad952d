"""Forecast page: expected demand of each series, capacity, and the errors of forecasters."""

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.forecast.charts import coverage, demand_and_forecast, error_by_horizon, unit_title
from controlplane.console.pages.forecast.selectors import (
    RANGES_H,
    USUAL_RANGE_H,
    OutlookFilter,
    OutlookResult,
    leader_board,
    scores,
    see,
    series_of,
    series_rows,
)
from controlplane.events.models import Event
from controlplane.fleet.models import SloClass
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import selectors as planning
from controlplane.planning.models import Backtest, Quantity
from controlplane.resources.filters import Filters, Select, last_hours, named
from controlplane.resources.names import region_names
from controlplane.resources.tables import Columns, table, value
from controlplane.tuning.selectors import tuned
from forecasting.workload import FORECASTERS, rests

USE_WARNING = 0.8
INTERACTIVE = "all-interactive"
CLASSES = [
    (demand.EVERY_CLASS, "Interactive and deferred"), (INTERACTIVE, "Interactive classes"),
    (demand.DEFERRED, "Deferred classes"),
]  # fmt: skip
SERIES: Columns = {
    "Model": "model",
    "Region": "region",
    "Ready (instances)": "ready",
    "Demand, last 10 min (tok/s)": "demand",
    "Not served (tok/s)": "unserved",
    "Served elsewhere (tok/s)": "elsewhere",
    "Next window (tok/s)": "next",
    "Peak ahead (tok/s)": "peak",
    "Peak at (UTC)": "peak_at",
    "Capacity (tok/s)": "capacity",
    "Load (ratio)": "load",
    "Peak load (ratio)": "use",
    "Forecaster": "forecaster",
    "Made (UTC)": "made_at",
    "Note": "note",
}
SCORES = {
    "mean error (ratio)": "error",
    "max APE (ratio)": "max_ape",
    "pinball loss (ratio)": "pinball",
    "within 80% (ratio)": "coverage_80",
    "within 95% (ratio)": "coverage_95",
}
BACKTEST: Columns = {
    "Forecaster": "title",
    **{
        f"{quantity}: {heading}": partial(lambda at, name, row: value(row["scores"][at], name), at, name)
        for at, quantity in enumerate(("Prompt", "Output"))
        for heading, name in SCORES.items()
    },
    "Fit (s)": "fit_s",
}


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
        Select(
            "class",
            "SLO class",
            [*CLASSES, *named(SloClass.objects.values_list("name", flat=True))],
            demand.EVERY_CLASS,
        ),
        Select("hours", "Time range", last_hours(*RANGES_H), str(USUAL_RANGE_H)),
    )


def asked_of(filters: Filters | None) -> OutlookFilter | None:
    if filters is None:
        return None
    slo_class = "" if filters["class"] == INTERACTIVE else filters["class"]
    return OutlookFilter(filters["model"], filters["region"], filters["quantity"], int(filters["hours"]), slo_class)


def chosen_backtest(request: HttpRequest, backtests: list[Backtest]) -> tuple[Backtest | None, str]:
    """Return the backtest of the query string, by default the newest, and the series within it, "" for all."""
    if not backtests:
        return None, ""
    by_key = {str(row.pk): row for row in backtests}
    backtest = by_key.get(request.GET.get("backtest", ""), backtests[0])
    return backtest, Select("of", "Series", named(series_of(backtest))).read(request.GET)


def charts_of(
    asked: OutlookFilter | None, seen: OutlookResult | None, backtest: Backtest | None, series: str
) -> list[Chart]:
    charts = []
    if asked and seen:
        charts.append(demand_and_forecast(seen.outlook, "Nothing is known of this series yet."))
    if backtest and asked:
        quantity = Quantity.OUTPUT.value if asked.quantity == demand.TOKENS else asked.quantity  # judged one by one
        board = scores(backtest, quantity, series)
        what = f"{quantity} tokens of {series or 'all series'}"
        charts.append(error_by_horizon(board, backtest.window_s, what))
        charts.append(coverage(board, what))
    return charts


def first_forecast(asked: OutlookFilter, now: datetime) -> dict[str, Any]:
    """Describe why a series has no forecast yet, and the time to the first: a full window, then the next forecast."""
    days = tuned().FORECAST_HISTORY_DAYS
    since = now - timedelta(days=days) if asked.one_class else None  # a class without demand since then has no forecast
    minutes, first = planning.minutes_of(asked.model, asked.region, asked.slo_class, since)
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
        "history_days": days,
    }


def left_out(board: list[dict[str, Any]]) -> list[str]:
    """Describe why forecasters that are not on *board* are unavailable."""
    tried = {row["forecaster"] for row in board}
    return [reason for name in FORECASTERS if name not in tried and (reason := rests(name))]


def is_stale(seen: OutlookResult, one_class: bool, now: datetime) -> bool:
    """Return whether forecasts have stopped. Those of one class may: its demand has ended, or others come first."""
    newest = planning.newest_forecast() if one_class else seen.forecast
    return newest is not None and now - newest.made_at > 2 * timedelta(seconds=tuned().FORECAST_EVERY_S)


def failure_of(seen: OutlookResult | None, now: datetime) -> Event | None:
    """Describe why forecasters failed on a series without a new forecast; None without a failure."""
    newest = seen.forecast if seen else None
    if newest is not None and now - newest.made_at <= 2 * timedelta(seconds=tuned().FORECAST_EVERY_S):
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
    backtests = planning.backtests()
    backtest, series = chosen_backtest(request, backtests)
    charts = {chart.key: chart for chart in charts_of(asked, seen, backtest, series)}
    rows = series_rows(asked.quantity, regions, now, asked.slo_class) if asked else []
    row = next((row for row in rows if asked and (row["model"], row["region"]) == (asked.model, asked.region)), None)
    board = leader_board(backtest, series) if backtest else []
    if request.GET.get("format") == "csv":
        return _csv(request.GET.get("table", ""), charts, rows, board)
    context = {
        **live_context(feed.state(), ""),
        "filters": filters,
        "asked": asked,
        "unit": unit_title(asked.quantity) if asked else "",
        "seen": seen,
        "charts": charts,
        "region_title": regions.get(asked.region, asked.region) if asked else "",
        "rows": rows,
        "backtests": backtests,
        "backtest": backtest,
        "backtest_series": series_of(backtest) if backtest else [],
        "series": series,
        "board": board,
        "left_out": left_out(board),
        "in_use": seen.forecast.forecaster if seen and seen.forecast else "",
        "ahead_s": seen.forecast.window_s * len(seen.forecast.mean) if seen and seen.forecast else 0,
        "stale": asked is not None and seen is not None and is_stale(seen, asked.one_class, now),
        "failure": failure_of(seen, now),
        "row": row,
        "use_level": use_level(row.get("use")) if row else "",
        "generated": planning.generated_past(now),
        "waiting": first_forecast(asked, now) if asked and seen and seen.forecast is None else None,
    }
    return render(request, "console/forecast/forecast.html", context)


def _csv(
    name: str, charts: dict[str, Chart], rows: list[dict[str, Any]], board: list[dict[str, Any]]
) -> HttpResponseBase:
    if name in charts:
        return charts[name].csv(name)
    if name == "backtest":
        return table(BACKTEST, board).csv("backtest")
    return table(SERIES, rows).csv("series")


@require_GET
@fleet_role(Role.VIEWER)
def charts(request: HttpRequest) -> HttpResponse:
    """Show `GET /console/api/forecast-charts?charts=forecast,horizon&model=…`: the figures of the page, redrawn."""
    now = timezone.now()
    asked = asked_of(filters_of(request, demand.endpoints(), {}))
    backtest, series = chosen_backtest(request, planning.backtests())
    key = ("forecast", asked, backtest.pk if backtest else 0, series, int(now.timestamp()) // 30)
    drawn = once(key, lambda: charts_of(asked, see(asked, now) if asked else None, backtest, series))
    return redrawn(request, drawn)
