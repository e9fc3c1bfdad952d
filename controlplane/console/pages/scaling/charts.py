"""The chart of the scaling page: what strategies cost against how well they served."""

from collections.abc import Callable, Sequence
from typing import Any

from controlplane.console.charts.labels import labels_of
from controlplane.console.charts.spec import NUMBERS, SHARE, STYLES, Chart, Series
from controlplane.console.formats import count, percent
from controlplane.resources.tables import Columns, table

HOVER = "%{text}: %{x:,.1f} instance-hours, %{y:.2%} within SLO<extra></extra>"


def cost_against_service(
    rows: Sequence[dict[str, Any]], title_of: Callable[[str], str], used: set[str], caption: str
) -> Chart:
    """Return instance-hours against SLO attainment by strategy; those in use are marked. Left and high is good."""
    known = [row for row in rows if row.get("instance_hours") is not None and row.get("slo_met") is not None]
    lowest = min((row["slo_met"] for row in known), default=1.0)
    room = max(0.005, (1 - lowest) * 0.25)
    across, up = _padded([row["instance_hours"] for row in known]), [max(0.0, lowest - room), 1 + room]
    texts = [(row["strategy"], [title_of(row["strategy"])], row["instance_hours"], row["slo_met"]) for row in known]
    labels = labels_of(texts, across, up)

    def points(label: str, style: tuple[str, str], shape: str, members: list[dict[str, Any]]) -> Series:
        return Series(
            label,
            [row["slo_met"] for row in members],
            style,
            [row["instance_hours"] for row in members],
            shape=shape,
            size=11,
            more={
                "mode": "markers+text",
                "text": [title_of(row["strategy"]) for row in members],
                "textposition": [labels[row["strategy"]][1] for row in members],
                "textfont": {"color": "var(--text)", "size": 11},
                "hovertemplate": HOVER,
            },
        )

    groups = (
        points("in use", STYLES[0], "circle", [row for row in known if row["strategy"] in used]),
        points("simulated only", STYLES[1], "diamond", [row for row in known if row["strategy"] not in used]),
    )
    statement = "not compared yet"
    if known:
        best = min(known, key=lambda row: (-row["slo_met"], row["instance_hours"]))
        least = min(known, key=lambda row: row["instance_hours"])
        statement = (
            f"{title_of(best['strategy'])} met the SLO for {percent(best['slo_met'])} of the requests with "
            f"{count(best['instance_hours'])} instance-hours; {title_of(least['strategy'])} used the fewest, "
            f"{count(least['instance_hours'])}, and met it for {percent(least['slo_met'])}"
        )
    columns: Columns = {
        "Strategy": lambda row: title_of(row["strategy"]),
        "Instance-hours": "instance_hours",
        "SLO met (ratio)": "slo_met",
        "Cost (USD)": "usd",
    }
    return Chart(
        key="strategies",
        title="Cost against service",
        caption=caption,
        sentence=f"Strategies: {statement}.",
        across=NUMBERS.but(ticksuffix=" h", hoverformat=",.1f", range=across),
        up=SHARE.but(tickformat=".1%", range=up, rangemode="normal"),
        series=[group for group in groups if group.y],
        table=table(columns, sorted(known, key=lambda row: row["instance_hours"])),
        empty="" if known else "No comparison has been made yet.",
        size="medium",
        hover="closest",
    )


def _padded(values: Sequence[float]) -> list[float]:
    """Return a range with room at both ends for the names of the points."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max((high - low) * 0.22, high * 0.04, 0.5)
    return [max(0.0, low - room), high + room]
