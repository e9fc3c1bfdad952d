"""SVG preview of a figure, for the time before plotly.js has loaded and for browsers that do not run it.

The same numbers without axis details: lines, bands, points and the objective, without text.
"""

import math
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.console.charts.spec import DASHES

WIDTH, HEIGHT = 400.0, 180.0
Points = list[tuple[float, float]]


def preview(figure: dict[str, Any]) -> SafeString:
    traces = figure["data"]
    draw = DRAWN.get(traces[0]["type"], _lines) if traces else _lines
    body = draw(traces, figure["layout"])
    return format_html(
        '<svg class="preview" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>',
        int(WIDTH),
        int(HEIGHT),
        body,
    )


class _Scale:
    """Mapping from axis values to drawing coordinates. The horizontal axis may hold times, numbers or names (by order); both
    axes may be logarithmic, with a range in powers of ten, as in plotly.
    """

    def __init__(self, traces: list[dict[str, Any]], layout: dict[str, Any], levels: list[float]) -> None:
        self._names: dict[str, int] = {}
        self._logarithmic = layout.get("xaxis", {}).get("type") == "log"
        places = [self._place(value) for trace in traces for value in trace["x"]]
        room = 0.5 if self._names else 0.0  # names are centred in their slots
        self._left, right = min(places, default=0.0) - room, max(places, default=1.0) + room
        if across := layout.get("xaxis", {}).get("range"):
            self._left, right = across if self._logarithmic else map(self._place, across)
        self._across = (right - self._left) or 1.0
        fixed = layout.get("yaxis", {}).get("range")
        top = max([value for trace in traces for value in trace["y"] if value is not None] + levels, default=0) * 1.08
        low = min([value for trace in traces for value in trace["y"] if value is not None], default=0) * 1.08
        bounds: tuple[float, float] = fixed or (min(0.0, low), top or 1.0)
        self._bottom, self._top = bounds
        self._up: Callable[[float], float] = math.log10 if layout.get("yaxis", {}).get("type") == "log" else float

    def _place(self, value: Any) -> float:
        if not isinstance(value, str):
            return math.log10(value) if self._logarithmic else float(value)
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return float(self._names.setdefault(value, len(self._names)))

    def x(self, value: Any) -> float:
        return (self._place(value) - self._left) / self._across * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT * (1 - (self._up(value) - self._bottom) / (self._top - self._bottom))

    def points(self, trace: dict[str, Any]) -> Points:
        """Return the points of a trace, with corners added for step lines."""
        known = zip(trace["x"], trace["y"], strict=True)
        points = [(self.x(place), self.y(value)) for place, value in known if value is not None]
        if trace.get("line", {}).get("shape") != "hv":
            return points
        corners = [corner for (_, before), (x, y) in pairwise(points) for corner in ((x, before), (x, y))]
        return points[:1] + corners


def _text(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _lines(traces: list[dict[str, Any]], layout: dict[str, Any]) -> SafeString:
    levels = [shape["y0"] for shape in layout.get("shapes", ()) if shape.get("xref") == "paper"]
    scale = _Scale(traces, layout, levels)
    drawn = [(trace, scale.points(trace)) for trace in traces]
    bands = format_html_join(
        "",
        '<polygon points="{}" fill="{}"/>',
        (
            (_text([*before, *points[::-1]]), trace["fillcolor"])
            for (_, before), (trace, points) in pairwise(drawn)
            if trace.get("fill") == "tonexty"
        ),
    )
    lines = format_html_join(
        "",
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>',
        (
            (
                _text(points),
                trace["line"]["color"],
                trace["line"]["width"],
                DASHES.get(trace["line"].get("dash"), "none"),
            )
            for trace, points in drawn
            if trace.get("line", {}).get("width")
        ),
    )
    dots = format_html_join(
        "",
        '<ellipse cx="{}" cy="{}" rx="3" ry="4" fill="{}" fill-opacity="{}"/>',
        (
            (f"{x:.1f}", f"{y:.1f}", trace["marker"]["color"], trace["marker"].get("opacity", 1))
            for trace, points in drawn
            if "markers" in trace.get("mode", "")
            for x, y in points
        ),
    )
    objectives = format_html_join(
        "",
        '<line x1="0" x2="{}" y1="{}" y2="{}" stroke="var(--crit)" stroke-width="1.25" stroke-dasharray="8 4"/>',
        ((WIDTH, f"{scale.y(level):.1f}", f"{scale.y(level):.1f}") for level in levels),
    )
    return bands + lines + dots + objectives


def _bars(traces: list[dict[str, Any]], layout: dict[str, Any]) -> SafeString:
    """Draw stacked bars over time; each is as wide as its period."""
    tops = [sum(values) for values in zip(*(trace["y"] for trace in traces), strict=True)]
    scale = _Scale([traces[0] | {"y": tops}], layout, [])
    height_of = dict.fromkeys(traces[0]["x"], 0.0)
    boxes = []
    for trace in traces:
        for place, value in zip(trace["x"], trace["y"], strict=True):
            begin = datetime.fromisoformat(place)
            left = scale.x(place)
            width = scale.x((begin + timedelta(milliseconds=trace["xperiod"])).isoformat()) - left
            bottom, height_of[place] = height_of[place], height_of[place] + value
            top = scale.y(height_of[place])
            box = (left + width * 0.075, top, width * 0.85, scale.y(bottom) - top)
            if value:
                boxes.append((*(f"{number:.1f}" for number in box), trace["marker"]["color"]))
    return format_html_join("", '<rect x="{}" y="{}" width="{}" height="{}" fill="{}"/>', boxes)


def _heat(traces: list[dict[str, Any]], layout: dict[str, Any]) -> SafeString:
    """Draw a heat map; runs of nearly equal cells become one rectangle, which keeps the page small."""
    trace = traces[0]
    rows = trace["z"][::-1]  # plotly draws the first row at the bottom
    height = HEIGHT / max(1, len(rows))
    cells = []
    for at, values in enumerate(rows):
        width = WIDTH / max(1, len(values))
        began, shade = 0, None
        for column, value in enumerate([*values, None]):
            now = None if value is None else round(value * 10)
            if column == len(values) or now != shade:
                if shade is not None:
                    box = (began * width, at * height, (column - began) * width, height - 1)
                    cells.append((*(f"{value:.1f}" for value in box), shade / 10))
                began, shade = column, now
    return format_html_join(
        "", '<rect x="{}" y="{}" width="{}" height="{}" fill="var(--s1)" fill-opacity="{}"/>', cells
    )


DRAWN: dict[str, Callable[[list[dict[str, Any]], dict[str, Any]], SafeString]] = {"heatmap": _heat, "bar": _bars}
"""By type of a figure's first trace; all others are lines and points."""
