"""The charts of the overview: time to first token, and demand with its forecast and capacity."""

from dataclasses import replace

from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import (
    MILLISECONDS,
    NO_SAMPLES,
    NO_TRAFFIC,
    STYLES,
    Chart,
    Levels,
    Series,
    change,
    last,
)
from controlplane.console.formats import milliseconds
from controlplane.console.live import history, tiles
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.console.pages.models.selectors import EVERY_S, demand_and_capacity
from controlplane.planning.forecasts.demand import TOKENS
from controlplane.resources.filters import Filters


def time_to_first_token(samples: list[Sample], model: str) -> Chart:
    p50, p95, p99 = (history.tile_series(samples, f"ttft_p{p}_ms", model) for p in (50, 95, 99))
    slo, now = last(history.tile_series(samples, "ttft_slo_ms", model)), last(p95)
    statement = "no traffic in this range"
    if now is not None:
        against = f", {'above' if now > slo else 'within'} the SLO of {milliseconds(slo)}" if slo else ""
        statement = f"p95 is {milliseconds(now)}{against}{change(p95)}"
    return Chart(
        key="ttft",
        title="Time to first token",
        caption="p50, p95 and p99 of the last minute, of the SLO class that does worst against its promise",
        sentence=f"Time to first token: {statement}.",
        x=history.times(samples),
        up=MILLISECONDS,
        series=[
            Series("p50", p50, STYLES[2], width=1.5),
            Series("p95", p95, width=2.25),
            Series("p99", p99, STYLES[3], width=1.5),  # by colour too unlike the line of the SLO,
        ],
        levels=Levels("SLO", [slo]) if slo else None,
        empty="" if now is not None else NO_TRAFFIC if samples else NO_SAMPLES,
    )


def overview_charts(state: LiveState, filters: Filters) -> list[Chart]:
    model, minutes = filters["model"], filters["range"]

    def build() -> list[Chart]:
        demand = demand_and_capacity(model, TOKENS, timezone.now())
        return [
            time_to_first_token(history.latest(state.history, int(minutes)), model),
            replace(demand, key="demand", title="Demand, forecast and capacity", size=""),
        ]

    made = int(timezone.now().timestamp()) // EVERY_S, history.newest_s(state.history)
    return once(("overview", model, minutes, *made), build)


def sparks(state: LiveState, filters: Filters) -> list[str]:
    """The line of each tile over the range, as points of an SVG polyline."""
    samples = history.latest(state.history, int(filters["range"]))
    return [tiles.spark(history.tile_series(samples, tile.field, filters["model"])) for tile in tiles.TILES]
