"""A chart over time within a row of a table: its lines and bands alone, drawn by the server."""

from datetime import datetime
from itertools import pairwise
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.console.charts.spec import DASHES

WIDTH, HEIGHT = 400, 100
Points = list[tuple[float, float]]


def sparkline(figure: dict[str, Any]) -> SafeString:
    """Draw the traces of *figure*, whose horizontal axis is time; all of them begin at zero."""
    traces = figure["data"]
    times = [_time(at) for trace in traces for at in trace["x"]]
    begin, end = min(times, default=0.0), max(times, default=1.0)
    top = max((y for trace in traces for y in trace["y"] if y is not None), default=0) * 1.08 or 1.0

    def points(trace: dict[str, Any]) -> Points:
        known = [(at, y) for at, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
        places = [(WIDTH * (_time(at) - begin) / ((end - begin) or 1.0), HEIGHT * (1 - y / top)) for at, y in known]
        if trace.get("line", {}).get("shape") != "hv":
            return places
        return places[:1] + [corner for (_, y), after in pairwise(places) for corner in ((after[0], y), after)]

    drawn = [(trace, points(trace)) for trace in traces]
    bands = (
        (_text([*before, *places[::-1]]), trace["fillcolor"])
        for (_, before), (trace, places) in pairwise(drawn)
        if trace.get("fill") == "tonexty"
    )
    lines = (
        (_text(places), line["color"], line["width"], DASHES.get(line.get("dash"), "none"))
        for trace, places in drawn
        if (line := trace.get("line", {})).get("width")
    )
    return format_html(
        '<svg class="sparkline" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}{}</svg>',
        WIDTH,
        HEIGHT,
        format_html_join("", '<polygon points="{}" fill="{}"/>', bands),
        format_html_join(
            "", '<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>', lines
        ),
    )


def _time(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _text(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
