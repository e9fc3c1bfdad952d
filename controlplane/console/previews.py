"""A figure as plain SVG, for the time before plotly.js has loaded and for browsers that do not run it.

The same numbers without axes' detail: lines, the objective, the range of the vertical axis and the ends of the time axis.
"""

from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from controlplane.console.charts import DASHES

WIDTH, HEIGHT = 400.0, 180.0


def preview(figure: dict[str, Any]) -> SafeString:
    traces = figure["data"]
    body = _heat(traces[0]) if traces and traces[0]["type"] == "heatmap" else _lines(traces, figure["layout"])
    return format_html(
        '<svg class="preview" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>',
        int(WIDTH),
        int(HEIGHT),
        body,
    )


def _lines(traces: list[dict[str, Any]], layout: dict[str, Any]) -> SafeString:
    levels = [shape["y0"] for shape in layout.get("shapes", ())]
    fixed = layout.get("yaxis", {}).get("range")
    top = max([value for trace in traces for value in trace["y"] if value is not None] + levels, default=0) * 1.08
    top = fixed[1] if fixed else top or 1.0

    def points(values: list[float | None]) -> str:
        across = WIDTH / max(1, len(values) - 1)
        return " ".join(
            f"{at * across:.1f},{HEIGHT * (1 - value / top):.1f}"
            for at, value in enumerate(values)
            if value is not None
        )

    lines = format_html_join(
        "",
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>',
        (
            (
                points(trace["y"]),
                trace["line"]["color"],
                trace["line"]["width"],
                DASHES.get(trace["line"].get("dash"), "none"),
            )
            for trace in traces
        ),
    )
    objectives = format_html_join(
        "",
        '<line x1="0" x2="{}" y1="{}" y2="{}" stroke="var(--crit)" stroke-width="1.25" stroke-dasharray="8 4"/>',
        ((WIDTH, f"{HEIGHT * (1 - level / top):.1f}", f"{HEIGHT * (1 - level / top):.1f}") for level in levels),
    )
    return lines + objectives


def _heat(trace: dict[str, Any]) -> SafeString:
    """Runs of nearly equal cells are one rectangle each, so that the page stays small."""
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
