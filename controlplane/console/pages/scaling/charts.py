"""The chart of the scaling page: what strategies cost against how well they served."""

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from controlplane.console.charts.labels import label_sides
from controlplane.console.charts.spec import MEDIUM_HEIGHT, Chart, Line, as_json, layout
from controlplane.console.formats import count, percent


def cost_against_service(
    rows: Sequence[dict[str, Any]], title_of: Callable[[str], str], used: set[str], caption: str
) -> Chart:
    """Instance-hours against SLO attainment, one point a strategy; those in use are marked. Left and high is good."""
    known = [row for row in rows if row.get("instance_hours") is not None and row.get("slo_met") is not None]
    groups = (
        (Line("in use", "var(--s1)", shape="circle"), [row for row in known if row["strategy"] in used]),
        (Line("simulated only", "var(--s2)", shape="diamond"), [row for row in known if row["strategy"] not in used]),
    )
    lowest = min((row["slo_met"] for row in known), default=1.0)
    room = max(0.005, (1 - lowest) * 0.25)
    across, up = _padded([row["instance_hours"] for row in known]), [max(0.0, lowest - room), 1 + room]
    sides = label_sides(
        [(row["strategy"], title_of(row["strategy"]), row["instance_hours"], row["slo_met"]) for row in known],
        across,
        up,
    )
    traces = [
        go.Scatter(
            x=[row["instance_hours"] for row in members],
            y=[row["slo_met"] for row in members],
            mode="markers+text",
            name=line.label,
            text=[title_of(row["strategy"]) for row in members],
            textposition=[sides[row["strategy"]] for row in members],
            textfont={"color": "var(--text)", "size": 11},
            marker={"color": line.color, "size": 11, "symbol": line.shape},
            hovertemplate="%{text}: %{x:,.1f} instance-hours, %{y:.2%} within SLO<extra></extra>",
        )
        for line, members in groups
        if members
    ]
    axes = {
        "xaxis": {
            "type": "linear",
            "ticksuffix": " h",
            "hoverformat": ",.1f",
            "range": across,
        },
        "yaxis": {"tickformat": ".1%", "range": up, "rangemode": "normal"},
    }
    sentence = "Strategies: not compared yet."
    if known:
        best = min(known, key=lambda row: (-row["slo_met"], row["instance_hours"]))
        least = min(known, key=lambda row: row["instance_hours"])
        sentence = (
            f"Strategies: {title_of(best['strategy'])} met the SLO for {percent(best['slo_met'])} of the requests with "
            f"{count(best['instance_hours'])} instance-hours; {title_of(least['strategy'])} used the fewest, "
            f"{count(least['instance_hours'])}, and met it for {percent(least['slo_met'])}."
        )
    return Chart(
        key="strategies",
        title="Cost against service",
        caption=caption,
        sentence=sentence,
        header=("Strategy", "Instance-hours", "SLO met (ratio)", "Cost (USD)"),
        rows=[
            [title_of(row["strategy"]), row["instance_hours"], row["slo_met"], row.get("usd")]
            for row in sorted(known, key=lambda row: row["instance_hours"])
        ],
        figure=as_json(traces, layout(height=MEDIUM_HEIGHT, hovermode="closest", **axes)) if known else None,
        legend=tuple(line for line, members in groups if members),
        empty="" if known else "No comparison has been made yet.",
        size="medium",
    )


def _padded(values: Sequence[float]) -> list[float]:
    """A range with room at both ends for the names of the points."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max((high - low) * 0.22, high * 0.04, 0.5)
    return [max(0.0, low - room), high + room]
