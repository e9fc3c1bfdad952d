"""Chart specification: data, axes with units and levels; derives the figure, legend, table and CSV file.

Pages declare a `Chart`. Figures are plotly's JSON with CSS variables (`var(--s1)`) for colours, which `charts.js` resolves,
so that one figure serves both themes. Styles have fixed meanings: s1 solid is the main series, a level is dashed in the
critical colour; series differ in line style as well as colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from django.http import StreamingHttpResponse

from controlplane.console.formats import NONE
from controlplane.resources.tables import Table

HEIGHT, TALL_HEIGHT = 196, 220  # px, with and without a legend above
HEIGHTS = {"large": 320, "medium": 248, "calendar": 420}
DASHES = {"dot": "2 3", "dash": "7 4", "dashdot": "7 3 1 3", "longdash": "11 4"}  # SVG dash patterns
STYLES = (("s1", "solid"), ("s2", "dash"), ("s3", "dot"), ("s4", "dashdot"), ("s5", "longdash"), ("s6", "solid"))
SHADES = [[0.0, "var(--sunken)"], [1.0, "var(--s1)"]]  # in either theme, full is prominent and empty is not
NO_SAMPLES = "No samples yet. The gateway keeps one every 5 s; the first appear shortly after it starts."
NO_TRAFFIC = "No traffic in this range."

Values = Sequence[float | None]
Settings = Mapping[str, Any]  # as in plotly


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis. *heading* is that of the table's first column, *unit* that of the other columns."""

    settings: Settings = field(default_factory=dict)
    unit: str = ""
    heading: str = ""
    time_format: str = "%H:%M:%S"  # of the table's first column
    scale: float = 1.0  # from values to drawn values

    def but(self, *, unit: str | None = None, heading: str | None = None, **settings: Any) -> "Axis":
        """Return this axis with other settings."""
        return replace(
            self,
            settings={**self.settings, **settings},
            unit=self.unit if unit is None else unit,
            heading=self.heading if heading is None else heading,
        )


TIME = Axis(heading="Time")
DAYS = Axis(
    {
        "tickformatstops": [
            {"dtickrange": [None, 43_199_999], "value": "%H:%M"},
            {"dtickrange": [43_200_000, None], "value": "%a %d %b"},
        ],
        "hoverformat": "%d %b %H:%M",
    },
    heading="Window from",
    time_format="%d %b %H:%M",
)
NUMBERS = Axis({"type": "linear"})
PLAIN = Axis()
AMOUNT = Axis({"tickformat": "~s"})
COUNT = Axis({"tickformat": ",d"})
SHARE = Axis({"tickformat": ".0%"}, "ratio")
MILLISECONDS = Axis({"ticksuffix": "s", "tickformat": "~s", "hoverformat": ".3~s"}, "ms", scale=1e-3)
"""Drawn in seconds, so that ticks read 500ms and 8s."""


@dataclass(frozen=True, slots=True)
class Series:
    """Line, or points if *size* is set: on the line, or alone with *shape*.

    The legend entry and the table heading derive from *label*.
    """

    label: str
    y: Values
    style: tuple[str, str] = STYLES[0]  # colour and dash
    x: Sequence[Any] | None = None  # default: the chart's
    width: float = 1.75  # px; 0: edge of a filled area
    shape: str = ""  # circle or square
    size: int = 0  # of points, px
    heading: str = ""  # of the table's column
    listed: bool = True  # in the legend
    layer: int = 0  # the lowest is drawn first
    more: Settings = field(default_factory=dict)

    @property
    def color(self) -> str:
        return f"var(--{self.style[0]})"

    @property
    def dash(self) -> str:
        return "solid" if self.shape else self.style[1]

    @property
    def stroke(self) -> str:
        """Return the stroke for the legend's SVG."""
        return DASHES.get(self.dash, "none")

    def trace(self, x: Sequence[Any]) -> dict[str, Any]:
        x = x if self.x is None else self.x
        drawn: dict[str, Any] = {
            "type": "scatter",
            "name": self.label,
            "x": [local(place) if isinstance(place, datetime) else place for place in x],
            "y": list(self.y),
            "mode": "markers" if self.shape else "lines+markers" if self.size else "lines",
        }
        if not self.shape:
            drawn["line"] = {"color": self.color, "dash": self.dash, "width": self.width}
        if self.size:
            drawn["marker"] = {"color": self.color, "size": self.size} | ({"symbol": self.shape} if self.shape else {})
        return merged(drawn, self.more)


@dataclass(frozen=True, slots=True)
class Heat:
    """Heat map of shares over time, first row at the bottom."""

    names: Sequence[str]
    z: Sequence[Values]  # 0 to 1
    hover: str
    listed: bool = False
    layer: int = 0

    def trace(self, x: Sequence[Any]) -> dict[str, Any]:
        ticks = {"tickvals": [0, 0.5, 1], "ticktext": ["0%", "50%", "100%"], "tickfont": {"size": 10}}
        return {
            "type": "heatmap",
            "x": [local(moment) for moment in x],
            "y": list(self.names),
            "z": [[None if value is None else round(value, 3) for value in values] for values in self.z],
            "zmin": 0,
            "zmax": 1,
            "colorscale": SHADES,
            "ygap": 1,
            "hovertemplate": self.hover,
            "colorbar": {"thickness": 8, "outlinewidth": 0, **ticks, "xpad": 6, "ypad": 7},
        }


@dataclass(frozen=True, slots=True)
class Levels:
    """Dashed horizontal lines: an SLO, or the promised value."""

    label: str
    values: Sequence[float]
    color = "var(--crit)"
    dash = "dash"
    shape = ""
    stroke = DASHES["dash"]

    def lines(self, scale: float = 1.0) -> list[dict[str, Any]]:
        line = {"color": self.color, "width": 1.25, "dash": "8px,4px"}
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line}
        return [{**across, "y0": level * scale, "y1": level * scale} for level in self.values]


@dataclass(frozen=True)
class Chart:
    """Chart in all its forms. *empty* explains why nothing is drawn; the table has the rows even then."""

    key: str
    title: str
    caption: str
    sentence: str
    series: Sequence[Series | Heat]
    x: Sequence[Any] = ()
    across: Axis = TIME
    up: Axis = PLAIN
    levels: Levels | None = None
    now: datetime | None = None  # boundary of past and future
    table: Table | None = None  # where its columns are not the series
    empty: str = ""
    size: str = ""  # "large" for the main chart of a page, or "medium"
    hover: str = "x unified"
    shapes: Sequence[Settings] = ()  # further shapes, as in plotly
    layout: Settings = field(default_factory=dict)  # further settings of it
    opens: str = ""  # the dialog that dragging over the time axis opens
    link: tuple[str, str] = ("", "")  # address and label of what is behind it

    @property
    def script_id(self) -> str:
        return f"figure-{self.key}"

    @property
    def legend(self) -> tuple[Series | Levels, ...]:
        """Return the legend entries in order of declaration."""
        if self.empty:
            return ()
        listed = tuple(series for series in self.series if isinstance(series, Series) and series.listed)
        return (*listed, self.levels) if self.levels else listed

    @property
    def _columns(self) -> list[Series]:
        return [series for series in self.series if isinstance(series, Series)]

    @property
    def header(self) -> tuple[str, ...]:
        """Return the table header with units."""
        if self.table:
            return self.table.header
        return (self.across.heading, *(one.heading or f"{one.label} ({self.up.unit})" for one in self._columns))

    @cached_property
    def rows(self) -> list[list[Any]]:
        if self.table:
            return [list(row) for row in self.table.rows]
        return [list(row) for row in zip(self.x, *(series.y for series in self._columns), strict=True)]

    def csv(self, name: str) -> StreamingHttpResponse:
        """Return the rows as a CSV file. Times are UTC in files, in the pages' zone on pages."""
        header = (f"{self.header[0]} (UTC)", *self.header[1:]) if self._of_times else self.header
        return Table(header, self.rows).csv(name)

    @property
    def _of_times(self) -> bool:
        return bool(self.rows) and isinstance(self.rows[0][0], datetime)

    @property
    def shown_rows(self) -> list[list[str]]:
        """Return the rows as shown in the page's table, newest first if they are times."""
        rows = self.rows[::-1] if self._of_times else self.rows
        return [[_shown(value, self.across.time_format) for value in row] for row in rows]

    @cached_property
    def figure(self) -> dict[str, Any] | None:
        """Return plotly's JSON, or None if there is nothing to draw."""
        if self.empty:
            return None
        traces = [series.trace(self.x) for series in sorted(self.series, key=lambda series: series.layer)]
        if self.up.scale != 1.0:
            traces = [trace | {"y": [self._drawn(value) for value in trace["y"]]} for trace in traces]
        return {"data": traces, "layout": self._layout()}

    def _drawn(self, value: float | None) -> float | None:
        return None if value is None else round(value * self.up.scale, 6)

    def _layout(self) -> dict[str, Any]:
        height = HEIGHTS.get(self.size) or (HEIGHT if self.legend else TALL_HEIGHT)
        changes: dict[str, Any] = {
            "height": height,
            "hovermode": self.hover,
            "xaxis": self.across.settings,
            "yaxis": self.up.settings,
        }
        shapes = [*self.shapes, *(self.levels.lines(self.up.scale) if self.levels else ())]
        if self.now:
            line = {"color": "var(--border-strong)", "width": 1}
            at = local(self.now)
            shapes.append({"type": "line", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line})
        return merged(merged(LAYOUT, changes | ({"shapes": shapes} if shapes else {})), self.layout)

    def payload(self) -> dict[str, Any]:
        """Return the message that redraws the chart."""
        return {"figure": self.figure, "sentence": self.sentence, "empty": self.empty}


LAYOUT: dict[str, Any] = {
    "margin": {"l": 8, "r": 8, "t": 6, "b": 4},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "var(--font)", "size": 11, "color": "var(--text-muted)"},
    "showlegend": False,
    "hoverlabel": {
        "bgcolor": "var(--overlay)",
        "bordercolor": "var(--border)",
        "font": {"color": "var(--text)", "size": 12},
    },
    "dragmode": "zoom",
    "barmode": "stack",
    "bargap": 0.15,
    "xaxis": {
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
    "yaxis": {
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "rangemode": "tozero",
        "nticks": 5,
        "automargin": True,
        "fixedrange": True,
    },
    "uirevision": "kept",
}


def merged(base: Settings, changes: Settings) -> dict[str, Any]:
    """Return *base* deeply merged with *changes*; None removes a setting."""
    settings = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping):
            settings[name] = merged(settings[name], value)
        elif value is None:
            settings.pop(name, None)
        else:
            settings[name] = value
    return settings


def local(moment: datetime) -> str:
    """Return the local time without a zone: plotly shows dates verbatim."""
    return moment.replace(tzinfo=None).isoformat(sep=" ")


def _shown(value: Any, time_format: str) -> str:
    match value:
        case None:
            return NONE
        case datetime():
            return value.strftime(time_format)
        case float():
            return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 11}, "standoff": 4}


def last(values: Values) -> float | None:
    """Return the newest known value."""
    return next((value for value in reversed(values) if value is not None), None)


def change(values: Values) -> str:
    """Return `, up 8% over the range`, or an empty text for small or unknown changes."""
    known = [value for value in values if value is not None]
    if len(known) < 6:
        return ""
    third = max(1, len(known) // 3)
    before, after = sum(known[:third]) / third, sum(known[-third:]) / third
    if not before or abs(after / before - 1) < 0.03:
        return ""
    return f", {'up' if after > before else 'down'} {abs(after / before - 1) * 100:.0f}% over the range"
