"""The charts of the overview: time to first token, demand by region, KV cache by instance."""

from collections.abc import Sequence

import plotly.graph_objects as go

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import (
    NO_SAMPLES,
    NO_TRAFFIC,
    STYLES,
    TALL_HEIGHT,
    Chart,
    Line,
    as_json,
    change,
    last,
    layout,
    local,
    scatter,
)
from controlplane.console.filters import DEMANDS, View
from controlplane.console.formats import count, milliseconds, percent, quantity
from controlplane.console.live import history, tiles
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.console.selectors.names import region_names


def time_to_first_token(samples: list[Sample], model: str) -> Chart:
    times = history.times(samples)
    p50, p95, p99 = (history.tile_series(samples, f"ttft_p{p}_ms", model) for p in (50, 95, 99))
    slo = last(history.tile_series(samples, "ttft_slo_ms", model))
    legend = [Line("p50", "var(--s3)", "dot"), Line("p95", "var(--s1)"), Line("p99", "var(--s2)", "dash")]
    traces = [
        scatter(times, values, line, width)
        for values, line, width in zip((p50, p95, p99), legend, (1.5, 2.25, 1.5), strict=True)
    ]
    now = last(p95)
    sentence = "Time to first token: no traffic in this range."
    if now is not None:
        against = f", {'above' if now > slo else 'within'} the SLO of {milliseconds(slo)}" if slo else ""
        sentence = f"Time to first token: p95 is {milliseconds(now)}{against}{change(p95)}."
    shapes = []
    if slo:
        legend.append(Line("SLO", "var(--crit)", "dash"))
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": slo,
                "y1": slo,
                "line": {"color": "var(--crit)", "width": 1.25, "dash": "8px,4px"},
            }
        )
    y_axis = {"ticksuffix": " ms", "tickformat": ",d", "hoverformat": ",.0f"}
    return Chart(
        key="ttft",
        title="Time to first token",
        caption="p50, p95 and p99 of the last minute",
        sentence=sentence,
        header=("Time", "p50 (ms)", "p95 (ms)", "p99 (ms)"),
        rows=[list(row) for row in zip(times, p50, p95, p99, strict=True)],
        figure=as_json(traces, layout(yaxis=y_axis, shapes=shapes)) if now is not None else None,
        legend=tuple(legend),
        empty="" if now is not None else (NO_TRAFFIC if samples else NO_SAMPLES),
    )


def demand(samples: list[Sample], model: str, kind: str, region_titles: dict[str, str]) -> Chart:
    field, title, unit, _ = DEMANDS[kind]
    times = history.times(samples)
    regions = history.demand_by_region(samples, field, model)
    names = sorted(regions, key=lambda name: -(last(regions[name]) or 0))
    if len(names) > REGIONS_SHOWN:
        others = [regions[name] for name in names[REGIONS_SHOWN:]]
        regions["other regions"] = [
            None if all(value is None for value in values) else sum(value or 0 for value in values)
            for values in zip(*others, strict=True)
        ]
        names = [*names[:REGIONS_SHOWN], "other regions"]
    names.sort(key=lambda name: (name == "other regions", name))
    legend = tuple(
        Line(region_titles.get(name, name), f"var(--{color})", dash)
        for name, (color, dash) in zip(names, STYLES, strict=False)
    )
    traces = [scatter(times, regions[name], line) for name, line in zip(names, legend, strict=True)]
    parts = [f"{line.label} {quantity(last(regions[name]))}" for name, line in zip(names, legend, strict=True)]
    sentence = f"{title}: {', '.join(parts)}." if parts else f"{title}: nothing in this range."
    return Chart(
        key="demand",
        title="Demand by region",
        caption=title,
        sentence=sentence,
        header=("Time", *(f"{line.label} ({unit})" for line in legend)),
        rows=[list(row) for row in zip(times, *(regions[name] for name in names), strict=True)],
        figure=as_json(traces, layout(yaxis={"tickformat": "~s", "hoverformat": ",.1f"})) if traces else None,
        legend=legend,
        empty="" if traces else (NO_TRAFFIC if samples else NO_SAMPLES),
    )


def kv_heat_map(samples: list[Sample], names: Sequence[str]) -> Chart:
    """KV cache use of instances over time; the HEAT_ROWS fullest, fullest above. The table has them all."""
    series = {
        name: values
        for name, values in history.kv_by_instance(samples, names).items()
        if any(value is not None for value in values)
    }
    fullest = sorted(series, key=lambda name: (-(last(series[name]) or 0), name))
    shown = fullest[:HEAT_ROWS]
    thinned = samples[::-1][:: max(1, -(-len(samples) // HEAT_COLUMNS))][::-1]
    picked = history.kv_by_instance(thinned, shown[::-1])  # the first row is drawn at the bottom
    figure = None
    if shown:
        heat = go.Heatmap(
            x=[local(moment) for moment in history.times(thinned)],
            y=[shortened(name) for name in picked],
            z=[[None if value is None else round(value, 3) for value in values] for values in picked.values()],
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            ygap=1,
            hovertemplate="%{y}<br>%{x|%H:%M:%S}: %{z:.0%}<extra></extra>",
            colorbar={
                "thickness": 8,
                "outlinewidth": 0,
                "tickvals": [0, 0.5, 1],
                "ticktext": ["0%", "50%", "100%"],
                "tickfont": {"size": 10},
                "xpad": 6,
                "ypad": 7,
            },
        )
        grid = {"showgrid": False, "fixedrange": True, "automargin": True, "tickfont": {"size": 10}, "dtick": 1}
        x_axis = {"showgrid": False, "showline": False, "nticks": 4}
        figure = as_json([heat], layout(height=TALL_HEIGHT, xaxis=x_axis, yaxis=grid, hovermode="closest"))
    rows = [
        [name, last(values), sum(known) / len(known), max(known)]
        for name, values in ((name, series[name]) for name in fullest)
        if (known := [value for value in values if value is not None])
    ]
    sentence = "KV cache: no instance has reported in this range."
    if rows:
        sentence = (
            f"KV cache: {rows[0][0]} is the fullest of {count(len(rows))} instances at {percent(rows[0][1])}; "
            f"the highest in this range was {percent(max(row[3] for row in rows))}."
        )
    caption = "One row an instance, fullest above"
    if len(fullest) > HEAT_ROWS:
        caption = f"The {HEAT_ROWS} fullest of {count(len(fullest))} instances; the table has all"
    return Chart(
        key="kv",
        title="KV cache by instance",
        caption=caption,
        sentence=sentence,
        header=("Instance", "Now (ratio)", "Mean (ratio)", "Highest (ratio)"),
        rows=rows,
        figure=figure,
        empty="" if shown else ("No instance has reported its KV cache in this range." if samples else NO_SAMPLES),
    )


def shortened(name: str, length: int = 22) -> str:
    """*name* with its middle left out if it is longer than *length*: both ends tell instances apart."""
    if len(name) <= length:
        return name
    head = (length - 1) // 2
    return f"{name[:head]}…{name[-(length - 1 - head) :]}"


HEAT_ROWS = 12


HEAT_COLUMNS = 60


REGIONS_SHOWN = 5


def overview_charts(state: LiveState, view: View) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, view.range_s)
        table = state.tables["instances"]
        pairs = zip(table["name"], table["model"], strict=True)
        names = [name for name, model in pairs if not view.model or model == view.model]
        return [
            time_to_first_token(samples, view.model),
            demand(samples, view.model, view.demand, dict(region_names())),
            kv_heat_map(samples, names),
        ]

    return once(("overview", view.model, view.range_min, view.demand, history.newest_s(state.history)), build)


def sparks(state: LiveState, view: View) -> list[str]:
    """The line of each tile over the range, as points of an SVG polyline."""
    samples = history.latest(state.history, view.range_s)
    return [tiles.spark(history.tile_series(samples, tile.field, view.model)) for tile in tiles.TILES]
