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

from controlplane.console.formats import NONE
from controlplane.console.live.history import Series

HEIGHT, TALL_HEIGHT = 196, 220  # with a legend above, and without
LARGE_HEIGHT, MEDIUM_HEIGHT = 320, 248
TIME_TICKS = [
    {"dtickrange": [None, 43_199_999], "value": "%H:%M"},
    {"dtickrange": [43_200_000, None], "value": "%a %d %b"},
]
DASHES = {"dot": "1 4", "dash": "7 4", "dashdot": "7 3 1 3", "longdash": "11 4"}  # of SVG lines
STYLES = (("s1", "solid"), ("s2", "dash"), ("s3", "dot"), ("s4", "dashdot"), ("s5", "longdash"), ("s6", "solid"))
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
    figure = go.Figure(data=traces, layout=figure_layout).to_plotly_json()
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
