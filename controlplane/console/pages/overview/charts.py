"""The charts of the overview: time to first token, demand with its forecast and capacity, KV cache by instance."""

from collections.abc import Sequence
from urllib.parse import urlencode

from django.urls import reverse
from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.demand import EVERY_S, demand_and_capacity
from controlplane.console.charts.spec import (
    MILLISECONDS,
    NO_SAMPLES,
    NO_TRAFFIC,
    STYLES,
    TIME,
    Axis,
    Chart,
    Heat,
    Levels,
    Series,
    change,
    last,
)
from controlplane.console.formats import count, milliseconds, percent
from controlplane.console.live import history, tiles
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.resources.filters import Filters
from controlplane.resources.tables import Table

HEAT_ROWS = 12
HEAT_COLUMNS = 60
SLOWEST = {"hours": "1", "sort": "-ttft_ms", "first": "yes"}
KV_HEADER = ("Instance", "Now (ratio)", "Mean (ratio)", "Highest (ratio)")


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
        link=(f"{reverse('console:requests')}?{urlencode(SLOWEST | {'model': model})}", "Slowest request"),
        empty="" if now is not None else NO_TRAFFIC if samples else NO_SAMPLES,
    )


def kv_heat_map(samples: list[Sample], names: Sequence[str]) -> Chart:
    """KV cache use of instances over time; the HEAT_ROWS fullest, fullest above. The table has them all."""
    known = {
        name: reported
        for name, values in history.kv_by_instance(samples, names).items()
        if (reported := [value for value in values if value is not None])
    }
    fullest = sorted(known, key=lambda name: (-known[name][-1], name))
    thinned = samples[::-1][:: max(1, -(-len(samples) // HEAT_COLUMNS))][::-1]
    picked = history.kv_by_instance(thinned, fullest[:HEAT_ROWS][::-1])  # the first row is drawn at the bottom
    statement, caption = "no instance has reported in this range", "One row an instance, fullest above"
    if fullest:
        highest = max(value for values in known.values() for value in values)
        statement = (
            f"{fullest[0]} is the fullest of {count(len(fullest))} instances at {percent(known[fullest[0]][-1])}; "
            f"the highest in this range was {percent(highest)}"
        )
    if len(fullest) > HEAT_ROWS:
        caption = f"The {HEAT_ROWS} fullest of {count(len(fullest))} instances; the table has all"
    hover = "%{y}<br>%{x|%H:%M:%S}: %{z:.0%}<extra></extra>"
    return Chart(
        key="kv",
        title="KV cache by instance",
        caption=caption,
        sentence=f"KV cache: {statement}.",
        x=history.times(thinned),
        across=TIME.but(showgrid=False, showline=False, nticks=4),
        up=Axis({"showgrid": False, "fixedrange": True, "automargin": True, "tickfont": {"size": 10}, "dtick": 1}),
        series=[Heat([shortened(name) for name in picked], list(picked.values()), hover)],
        table=Table(KV_HEADER, [[n, known[n][-1], sum(known[n]) / len(known[n]), max(known[n])] for n in fullest]),
        hover="closest",
        empty="" if fullest else "No instance has reported its KV cache in this range." if samples else NO_SAMPLES,
    )


def shortened(name: str) -> str:
    """*name* with its middle left out if it is longer than 22 characters: instances differ at either end."""
    return name if len(name) <= 22 else f"{name[:10]}…{name[-11:]}"


def overview_charts(state: LiveState, filters: Filters) -> list[Chart]:
    model, minutes = filters["model"], filters["range"]

    def build() -> list[Chart]:
        samples = history.latest(state.history, int(minutes))
        names = [row["name"] for row in state.tables["instances"] if model in ("", row["model"])]
        return [
            time_to_first_token(samples, model),
            demand_and_capacity(model, timezone.now(), size=""),
            kv_heat_map(samples, names),
        ]

    made = int(timezone.now().timestamp()) // EVERY_S, history.newest_s(state.history)
    return once(("overview", model, minutes, *made), build)


def sparks(state: LiveState, filters: Filters) -> list[str]:
    """The line of each tile over the range, as points of an SVG polyline."""
    samples = history.latest(state.history, int(filters["range"]))
    return [tiles.spark(history.tile_series(samples, tile.field, filters["model"])) for tile in tiles.TILES]
