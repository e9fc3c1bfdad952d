"""The console's charts: plotly figures built in Python, each with a table of the same numbers and a sentence that says it.

Colours are names of CSS variables (`var(--s1)`), which `charts.js` resolves, so that one figure serves both themes. The
meaning of a style is fixed: s1 solid is the main series, the objective is dashed in the critical colour; line style differs
as well as colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import plotly.graph_objects as go

from controlplane.console import history
from controlplane.console.formats import NONE, count, milliseconds, percent, quantity
from controlplane.console.history import Sample, Series

HEIGHT, TALL_HEIGHT = 196, 220  # with a legend above, and without
HEAT_ROWS = 12
HEAT_COLUMNS = 60
REGIONS_SHOWN = 5
DASHES = {"dot": "1 4", "dash": "7 4", "dashdot": "7 3 1 3", "longdash": "11 4"}  # of SVG lines
STYLES = (("s1", "solid"), ("s2", "dash"), ("s3", "dot"), ("s4", "dashdot"), ("s5", "longdash"), ("s6", "solid"))
DEMANDS = {
    "output": ("output_tokens_per_s", "Output tokens per second", "tok/s", "Output tok/s"),
    "prompt": ("prompt_tokens_per_s", "Prompt tokens per second", "tok/s", "Prompt tok/s"),
    "requests": ("requests_per_s", "Requests per second", "/s", "Requests/s"),
}
NO_SAMPLES = "No samples yet. The gateway keeps one every 5 s; the first appear shortly after it starts."
NO_TRAFFIC = "No traffic in this range."


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of the legend above a chart: a stroke of *dash* in the colour *color*, or a point of *shape*."""

    label: str
    color: str
    dash: str = "solid"
    shape: str = ""  # circle or diamond

    @property
    def stroke(self) -> str:
        """For the legend's SVG."""
        return DASHES.get(self.dash, "none")


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart in all its forms. *figure* is None when there is nothing to draw, and *empty* says why."""

    key: str
    title: str
    caption: str
    sentence: str
    header: tuple[str, ...]  # of the table, with units
    rows: list[list[Any]]
    figure: dict[str, Any] | None
    legend: tuple[Line, ...] = ()
    empty: str = ""
    size: str = ""  # "large" for the chart that a page is about, or "medium"
    time_format: str = "%H:%M:%S"  # of the table's first column

    @property
    def script_id(self) -> str:
        return f"figure-{self.key}"

    @property
    def csv_header(self) -> tuple[str, ...]:
        """In files times are UTC; on pages they are in the zone of the pages."""
        times = bool(self.rows) and isinstance(self.rows[0][0], datetime)
        return (f"{self.header[0]} (UTC)", *self.header[1:]) if times else self.header

    @property
    def shown_rows(self) -> list[list[str]]:
        """The rows as the page's table shows them, newest first where they are times."""
        rows = self.rows[::-1] if self.rows and isinstance(self.rows[0][0], datetime) else self.rows
        return [[_shown(value, self.time_format) for value in row] for row in rows]

    def payload(self) -> dict[str, Any]:
        """What a page is sent to redraw it."""
        return {"figure": self.figure, "sentence": self.sentence, "empty": self.empty}


def _shown(value: Any, time_format: str) -> str:
    match value:
        case None:
            return NONE
        case datetime():
            return value.strftime(time_format)
        case float():
            return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def layout(**changes: Any) -> go.Layout:
    base = go.Layout(
        template=go.layout.Template(),
        height=HEIGHT,
        margin={"l": 8, "r": 8, "t": 6, "b": 4},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "var(--font)", "size": 11, "color": "var(--text-muted)"},
        showlegend=False,
        hovermode="x unified",
        hoverlabel={
            "bgcolor": "var(--overlay)",
            "bordercolor": "var(--border)",
            "font": {"color": "var(--text)", "size": 12},
        },
        dragmode="zoom",
        xaxis={
            "type": "date",
            "gridcolor": "var(--grid)",
            "linecolor": "var(--border)",
            "showline": True,
            "zeroline": False,
            "nticks": 5,
            "tickangle": 0,
            "tickformatstops": [
                {"dtickrange": [None, 59_999], "value": "%H:%M:%S"},
                {"dtickrange": [60_000, None], "value": "%H:%M"},
            ],
            "hoverformat": "%H:%M:%S",
            "automargin": True,
        },
        yaxis={
            "gridcolor": "var(--grid)",
            "zeroline": False,
            "rangemode": "tozero",
            "nticks": 5,
            "automargin": True,
            "fixedrange": True,
        },
        uirevision="kept",
    )
    return base.update(changes)


def scatter(times: Sequence[datetime], values: Series, line: Line, width: float = 1.75, **more: Any) -> go.Scatter:
    return go.Scatter(
        x=[local(moment) for moment in times],
        y=values,
        mode="lines",
        name=line.label,
        line={"color": line.color, "dash": line.dash, "width": width},
        connectgaps=False,
        **more,
    )


def local(moment: datetime) -> str:
    """Plotly shows dates as they are written: the time of the page's zone, without the zone."""
    return moment.replace(tzinfo=None).isoformat(sep=" ")


def level_lines(levels: Sequence[float]) -> list[dict[str, Any]]:
    """Broken lines across the chart at *levels*: what was promised, against what came."""
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": level,
            "y1": level,
            "line": {"color": "var(--crit)", "width": 1.25, "dash": "8px,4px"},
        }
        for level in levels
    ]


def as_json(traces: list[Any], figure_layout: go.Layout) -> dict[str, Any]:
    figure: dict[str, Any] = go.Figure(data=traces, layout=figure_layout).to_plotly_json()
    figure["layout"].pop("template", None)
    return figure


def last(values: Series) -> float | None:
    """The newest known value."""
    return next((value for value in reversed(values) if value is not None), None)


def change(values: Series) -> str:
    """`, up 8 % over the range`, or nothing when little changed or is known."""
    known = [value for value in values if value is not None]
    if len(known) < 6:
        return ""
    third = max(1, len(known) // 3)
    before, after = sum(known[:third]) / third, sum(known[-third:]) / third
    if not before or abs(after / before - 1) < 0.03:
        return ""
    return f", {'up' if after > before else 'down'} {abs(after / before - 1) * 100:.0f} % over the range"


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
    rows: list[list[Any]] = [
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


def instance_load(samples: list[Sample], name: str, max_num_seqs: int) -> Chart:
    times = history.times(samples)
    running, waiting = history.load_of_instance(samples, name)
    legend = (Line("running", "var(--s1)"), Line("waiting inside vLLM", "var(--s2)", "dash"))
    traces = [
        scatter(times, running, legend[0], 2, fill="tozeroy", fillcolor="var(--s1-soft)"),
        scatter(times, waiting, legend[1]),
    ]
    now = last(running)
    sentence = "Load: nothing was reported in this range."
    if now is not None:
        of = f"{count(now)} of {count(max_num_seqs)} requests running"
        sentence = f"Load: {of}, {count(last(waiting))} waiting{change(running)}."
    return Chart(
        key="load",
        title="Running and waiting",
        caption=f"Requests inside the instance; it runs {count(max_num_seqs)} at most",
        sentence=sentence,
        header=("Time", "Running (requests)", "Waiting (requests)"),
        rows=[list(row) for row in zip(times, running, waiting, strict=True)],
        figure=as_json(traces, layout(yaxis={"tickformat": ",d"})) if now is not None else None,
        legend=legend,
        empty="" if now is not None else ("Nothing was reported in this range." if samples else NO_SAMPLES),
    )


def instance_kv(samples: list[Sample], name: str) -> Chart:
    times = history.times(samples)
    values = history.kv_by_instance(samples, [name])[name]
    line = Line("KV cache", "var(--s1)")
    now = last(values)
    sentence = "KV cache: nothing was reported in this range."
    if now is not None:
        sentence = f"KV cache: {percent(now)} in use{change(values)}."
    y_axis = {"tickformat": ".0%", "range": [0, 1.02], "hoverformat": ".1%"}
    return Chart(
        key="kv",
        title="KV cache",
        caption="Share of the KV cache in use",
        sentence=sentence,
        header=("Time", "KV cache (ratio)"),
        rows=[list(row) for row in zip(times, values, strict=True)],
        figure=as_json(
            [scatter(times, values, line, 2, fill="tozeroy", fillcolor="var(--s1-soft)")],
            layout(height=TALL_HEIGHT, yaxis=y_axis),
        )
        if now is not None
        else None,
        empty="" if now is not None else ("Nothing was reported in this range." if samples else NO_SAMPLES),
    )
