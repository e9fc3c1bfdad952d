"""Charts of a what-if: cost against SLO met, and time to first token of a class over time."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.console.charts.spec import NUMBERS, TIME, Chart, Levels, Series, axis_title
from controlplane.console.formats import goal, percent_fine, usd
from controlplane.console.pages.what_if.compare import COLORS, DASHES
from controlplane.resources.tables import Table

Row = dict[str, Any]
NOTHING: Final = "Nothing is simulated yet. Results appear as repetitions are done."
HEADER: Final = ("Future", "SLO met (%)", "low (%)", "high (%)", "Cost ($/h)")


def cost(rows: Sequence[Row], slo_class: str, target: float | None) -> Chart:
    """Return the chart of cost and SLO met by future, with intervals."""
    series, lines = [], []
    for row in rows:
        if not (row["slo_met"] and row["cost_usd_per_h"]):
            continue
        mean, low, high = (round(100 * row["slo_met"][name], 3) for name in ("mean", "low", "high"))
        name, at_usd = f"{row['letter']} {row['name']}", round(row["cost_usd_per_h"]["mean"], 3)
        bars = {
            "type": "data",
            "symmetric": False,
            "thickness": 1.5,
            "width": 0,
            "color": f"var(--{COLORS[row['at']]})",
        }
        more = {
            "marker": {"symbol": "circle" if row["whole"] else "circle-open", "line": {"width": 2}},
            "error_y": bars | {"array": [high - mean], "arrayminus": [mean - low]},
            "hovertemplate": f"{name}<br>{mean:.2f}% met at $%{{x:.2f}}/h<extra></extra>",
        }
        style = COLORS[row["at"]], DASHES[row["at"]]
        series.append(Series(name, [mean], style, [at_usd], shape="circle", size=11, more=more))
        lines.append([name, mean, low, high, at_usd])
    best = max(lines, key=lambda line: line[1], default=None)
    return Chart(
        key="what-if-cost",
        title=f"Cost against SLO met of {slo_class}",
        caption="Up and left is better; bars are 95% intervals with the simulator error",
        sentence=f"{best[0]} meets the SLO most: {percent_fine(best[1] / 100)} at {usd(best[4])} an hour."
        if best
        else "",
        across=NUMBERS.but(tickprefix="$", showgrid=True, title=axis_title("cost, $/h")),
        up=NUMBERS.but(unit="%", ticksuffix="%", rangemode="normal"),
        series=series,
        levels=Levels(f"promised, {goal(target)}", [100 * target]) if target else None,
        empty="" if series else NOTHING,
        size="large",
        hover="closest",
        table=Table(HEADER, lines),
    )


def latency(rows: Sequence[Row], curves: Mapping[str, Row], slo_class: str, at: datetime) -> Chart:
    """Return the chart of the time to first token of *slo_class* over time from *at*, a line a future."""
    series = []
    for row in rows:
        own = curves.get(row["letter"], {})
        if values := own.get("ttft_p95_ms", {}).get(slo_class):
            moments = [at + timedelta(seconds=each) for each in own["until_s"]]
            series.append(
                Series(f"{row['letter']} {row['name']}", values, (COLORS[row["at"]], DASHES[row["at"]]), moments)
            )
    lines = [[one.label, x, y] for one in series for x, y in zip(one.x or (), one.y, strict=True)]
    return Chart(
        key="what-if-latency",
        title=f"TTFT p95 of {slo_class} over time",
        caption="By time of arrival, mean over repetitions",
        sentence=f"Time to first token of {len(series)} futures over the simulated time.",
        across=TIME,
        up=NUMBERS.but(unit="ms", ticksuffix=" ms"),
        series=series,
        empty="" if series else NOTHING,
        size="large",
        table=Table(("Future", "Time", "TTFT p95 (ms)"), lines),
    )
