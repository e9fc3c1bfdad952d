"""Charts of a what-if: cost against SLO met, and time to first token of a class over time."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.console.charts.spec import NUMBERS, TIME, Chart, Levels, Series, axis_title
from controlplane.console.formats import usd
from controlplane.console.pages.what_if.compare import COLORS, DASHES
from controlplane.resources.tables import Table, table

Row = dict[str, Any]
NOTHING: Final = "Nothing is simulated yet. Results appear as seeds are done."


def _style(at: int) -> tuple[str, str]:
    return COLORS[at].removeprefix("var(--").removesuffix(")"), DASHES[at]


def cost(rows: Sequence[Row], target: float) -> Chart:
    """Return the chart of cost and SLO met by future, with intervals."""
    known = [row for row in rows if row["slo_met"] and row["cost_usd_per_h"]]
    series = []
    for row in known:
        met = {name: round(100 * row["slo_met"][name], 3) for name in ("mean", "low", "high")}
        bars = {"type": "data", "symmetric": False, "color": COLORS[row["at"]], "thickness": 1.5, "width": 0}
        bars |= {"array": [met["high"] - met["mean"]], "arrayminus": [met["mean"] - met["low"]]}
        symbol = {"symbol": "circle-open" if row["partial"] else "circle", "line": {"width": 2}}
        name = f"{row['letter']} {row['name']}"
        hover = f"{name}<br>{met['mean']:.2f}% met at $%{{x:.2f}}/h<extra></extra>"
        series.append(
            Series(
                name,
                [met["mean"]],
                _style(row["at"]),
                [round(row["cost_usd_per_h"]["mean"], 3)],
                shape="circle",
                size=11,
                more={"marker": symbol, "error_y": bars, "hovertemplate": hover},
            )
        )
    best = max(known, key=lambda row: row["slo_met"]["mean"], default=None)
    sentence = ""
    if best is not None:
        at = usd(best["cost_usd_per_h"]["mean"])
        sentence = f"{best['letter']} meets the SLO most: {100 * best['slo_met']['mean']:.2f}% at {at} an hour."
    return Chart(
        key="what-if-cost",
        title="Cost against SLO met",
        caption="Up and left is better; bars are 95% intervals with the twin error",
        sentence=sentence,
        across=NUMBERS.but(tickprefix="$", showgrid=True, title=axis_title("cost, $/h")),
        up=NUMBERS.but(unit="%", ticksuffix="%", rangemode="normal"),
        series=series,
        levels=Levels(f"SLO target, {100 * target:g}%", [100 * target]),
        empty="" if known else NOTHING,
        size="large",
        hover="closest",
        table=table(
            {
                "Future": lambda row: f"{row['letter']} {row['name']}",
                "SLO met (%)": lambda row: 100 * row["slo_met"]["mean"],
                "low (%)": lambda row: 100 * row["slo_met"]["low"],
                "high (%)": lambda row: 100 * row["slo_met"]["high"],
                "Cost ($/h)": lambda row: row["cost_usd_per_h"]["mean"],
            },
            known,
        ),
    )


def latency(rows: Sequence[Row], curves: Mapping[str, Row], slo_class: str, at: datetime) -> Chart:
    """Return the chart of the time to first token of *slo_class* over time from *at*, a line a future."""
    series = []
    for row in rows:
        own = curves.get(row["letter"], {})
        if values := own.get("ttft_p95_ms", {}).get(slo_class):
            moments = [at + timedelta(seconds=each) for each in own["until_s"]]
            series.append(Series(f"{row['letter']} {row['name']}", values, _style(row["at"]), moments))
    lines = [[one.label, x, y] for one in series for x, y in zip(one.x or (), one.y, strict=True)]
    return Chart(
        key="what-if-latency",
        title=f"TTFT p95 of {slo_class} over time" if slo_class else "TTFT p95 over time",
        caption="By time of arrival, mean over seeds",
        sentence=f"Time to first token of {len(series)} futures over the simulated time.",
        across=TIME,
        up=NUMBERS.but(unit="ms", ticksuffix=" ms"),
        series=series,
        empty="" if series else NOTHING,
        size="large",
        table=Table(("Future", "Time", "TTFT p95 (ms)"), lines),
    )
