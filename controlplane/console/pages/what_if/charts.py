"""Charts of a what-if: cost against SLO met or goodput, time to first token, and what changes over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from controlplane.console.charts.labels import labels_of, place_of
from controlplane.console.charts.spec import NUMBERS, TIME, Chart, Levels, Series, axis_title
from controlplane.console.formats import usd
from controlplane.console.pages.what_if.compare import COLORS, DASHES
from controlplane.resources.tables import Table, table
from controlplane.simulation.whatif.models import LETTERS

Row = dict[str, Any]
QUANTITIES: Final = (("ready", "Instances"), ("waiting", "Waiting requests"))


@dataclass(frozen=True, slots=True)
class Gain:
    """Quantity that cost is drawn against: a column of the comparison, times *factor*."""

    column: str
    title: str
    heading: str
    unit: str
    factor: float
    form: str
    """Of a value in a sentence."""
    bars: str
    """Meaning of its intervals."""


GAINS: Final = {
    "slo": Gain(
        "slo_met", "SLO met", "SLO met (%)", "%", 100.0, "{:.2f}% met", "95% intervals with the twin error"
    ),
    "goodput": Gain(
        "goodput_tokens_per_s", "goodput", "Goodput (tok/s)", "tok/s", 1.0, "{:,.0f} tok/s", "95% intervals over seeds"
    ),
}  # fmt: skip
AGAINST: Final = (("slo", "SLO met"), ("goodput", "Goodput"))
NOTHING: Final = "Nothing is simulated yet. Points come as seeds are done."


def _style(at: int) -> tuple[str, str]:
    return COLORS[at].removeprefix("var(--").removesuffix(")"), DASHES[at]


def scatter(rows: Sequence[Row], target: float, against: str = "slo") -> Chart:
    """Return the chart of cost and gain by future, with intervals; a line joins those that none beats on both."""
    gain = GAINS[against]
    known = [row for row in rows if row[gain.column] and row["cost_usd_per_h"]]
    level = [gain.factor * target] if against == "slo" else []
    across, up = _ranges(known, gain, level)
    points = {row["letter"]: (row["cost_usd_per_h"]["mean"], _gained(row, gain)) for row in known}
    labels = future_labels(points, {row["letter"]: row["name"] for row in known}, across, up)
    series = [
        Series(
            f"{row['letter']} {row['name']}",
            [_gained(row, gain)],
            _style(row["at"]),
            [round(row["cost_usd_per_h"]["mean"], 3)],
            shape="circle",
            size=11,
            listed=False,
            more={
                "mode": "markers+text",
                "text": [labels[row["letter"]][0]],
                "textposition": labels[row["letter"]][1],
                "cliponaxis": False,
                "textfont": {"size": 11, "color": "var(--text)"},
                "marker": {"symbol": "circle-open" if row["partial"] else "circle", "line": {"width": 2}},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [round(_gained(row, gain, "wide_high") - _gained(row, gain), 3)],
                    "arrayminus": [round(_gained(row, gain) - _gained(row, gain, "wide_low"), 3)],
                    "color": COLORS[row["at"]],
                    "thickness": 1.5,
                    "width": 0,
                },
                "hovertemplate": f"{row['letter']} {row['name']}<br>{gain.form.format(_gained(row, gain))} at $%{{x:.2f}}/h"
                "<extra></extra>",
            },
        )
        for row in known
    ]
    front = _front(known, gain)
    line = Series(
        "Pareto front",
        [y for _, y in front],
        ("s1", "solid"),
        [x for x, _ in front],
        width=1.5,
        layer=-1,
        more={"line": {"shape": "hv"}, "hoverinfo": "skip"},
    )
    best = max(known, key=lambda row: _gained(row, gain), default=None)
    return Chart(
        key="what-if-cost",
        title=f"Cost against {gain.title}",
        caption=f"Up and left is better; bars are {gain.bars}",
        sentence=f"{len(known)} futures; {best['letter']} has the most, {gain.form.format(_gained(best, gain))}, at "
        f"{usd(best['cost_usd_per_h']['mean'])} an hour." if best else "",
        across=NUMBERS.but(
            tickprefix="$", showgrid=True, range=list(across),
            title=axis_title("cost, $/h"),
        ),
        up=NUMBERS.but(unit=gain.unit, range=list(up), rangemode="normal", **_ticks(against)),
        series=[*series, line],
        levels=Levels(f"SLO target, {100 * target:g}%", level) if level else None,
        empty="" if known else NOTHING,
        size="large",
        hover="closest",
        table=_table_of(rows, gain),
    )  # fmt: skip


def _gained(row: Row, gain: Gain, statistic: str = "mean") -> float:
    return round(gain.factor * float(row[gain.column][statistic]), 3)


def _ticks(against: str) -> dict[str, Any]:
    if against == "slo":
        return {"ticksuffix": "%"}
    return {"tickformat": "~s", "title": axis_title("goodput, tok/s")}


def _ranges(
    known: Sequence[Row], gain: Gain, level: Sequence[float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return ranges of the axes of cost and gain, with room for labels and intervals."""
    lows = [*(_gained(row, gain, "wide_low") for row in known), *level] or [0.0]
    highs = [_gained(row, gain, "wide_high") for row in known] or [1.0]
    top = 100.0 if level else max(highs)
    height = max(top - min(lows), 0.02 * top, 0.01)
    low = max(0.0, min(lows) - 0.15 * height)
    costs = [row["cost_usd_per_h"]["mean"] for row in known] or [0.0]
    room = max(0.15 * (max(costs) - min(costs)), 0.08 * max(costs), 0.01)
    return (min(costs) - room, max(costs) + room), (low, top + (0.06 if level else 0.15) * (top - low))


def _table_of(rows: Sequence[Row], gain: Gain) -> Any:
    def statistic(name: str) -> Any:
        return lambda row: row[gain.column] and gain.factor * row[gain.column][name]

    return table(
        {
            "Future": lambda row: f"{row['letter']} {row['name']}",
            gain.heading: statistic("mean"),
            f"low ({gain.unit})": statistic("wide_low"),
            f"high ({gain.unit})": statistic("wide_high"),
            "Cost ($/h)": lambda row: row["cost_usd_per_h"] and row["cost_usd_per_h"]["mean"],
        },
        rows,
    )


def _front(rows: Sequence[Row], gain: Gain) -> list[tuple[float, float]]:
    """Return the futures that none beats on both cost and gain, by cost."""
    best, front = -1.0, []
    for row in sorted(rows, key=lambda row: (row["cost_usd_per_h"]["mean"], -_gained(row, gain))):
        if _gained(row, gain) > best:
            best = _gained(row, gain)
            front.append((round(row["cost_usd_per_h"]["mean"], 3), best))
    return front


def ttft(rows: Sequence[Row], curves: Mapping[str, Row], slo_ms: float | None, scope: str) -> Chart:
    """Return the chart of the share of requests with their first token within a time, a line a future."""
    series = []
    for row in rows:
        points = [(ms, share) for ms, share in curves.get(row["letter"], {}).get("ttft", ())]
        if points:
            more = {"hovertemplate": f"%{{y:.1%}} within %{{x:.0f}} ms<br>{row['letter']} {row['name']}<extra></extra>"}
            label = f"{row['letter']} {row['name']}"
            series.append(
                Series(label, [y for _, y in points], _style(row["at"]), [x for x, _ in points], width=1.75, more=more)
            )
    shapes = [] if slo_ms is None else [slo_ms]
    return Chart(
        key="what-if-ttft",
        title="TTFT, share of requests within",
        caption=("Interactive requests" if scope.startswith("interactive") else "All classes")
        + ", all seeds"
        + (f"; the tightest target is {slo_ms:,.0f} ms" if shapes else ""),
        sentence=f"Time to first token of {len(series)} futures, as shares of all requests.",
        across=NUMBERS.but(
            type="log", showgrid=True, ticksuffix=" ms",
            tickvals=[10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000],
            ticktext=["10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s", "30 s", "100 s"],
        ),
        up=NUMBERS.but(unit="ratio", tickformat=".0%", range=[0, 1.02], rangemode="normal"),
        series=series,
        empty="" if series else NOTHING,
        size="large",
        hover="closest",
        table=_points_of(series),
    )  # fmt: skip


def _points_of(series: Sequence[Series]) -> Any:
    rows = [[one.label, x, y] for one in series for x, y in zip(one.x or (), one.y, strict=True)]
    return Table(("Future", "TTFT (ms)", "Share of requests (ratio)"), rows)


def over_time(
    rows: Sequence[Row],
    curves: Mapping[str, Row],
    quantity: str,
    region: str,
    at: datetime,
    *,
    edited_s: tuple[float, float] | None,
    actual: Mapping[str, Sequence[tuple[datetime, int]]],
) -> list[Chart]:
    """Return a small chart a future, with A as a thin line; *actual* has the measured steps, by the plan's letter."""
    base = curves.get(LETTERS[0])
    charts = []
    titles = dict(QUANTITIES)
    lines = {letter: _line(own["series"], quantity, region) for letter, own in curves.items()}
    drawn = [value for _, values in lines.values() for value in values]
    most = max([*drawn, *(count for steps in actual.values() for _, count in steps)], default=0.0)
    for row in rows:
        if row["letter"] not in lines:
            continue
        t_s, values = lines[row["letter"]]
        series = [Series(row["name"], values, _style(row["at"]), _moments(at, t_s), width=2.0, more=STEPS)]
        if base is not None and row["at"]:
            base_s, base_values = lines[LETTERS[0]]
            series.append(
                Series(
                    "A, as now",
                    base_values,
                    ("text-faint", "solid"),
                    _moments(at, base_s),
                    width=1.0,
                    layer=-1,
                    more=STEPS,
                )
            )
        if steps := actual.get(row["letter"]):
            moments, counts = zip(*steps, strict=True)
            series.append(Series("measured", counts, ("s4", "dot"), moments, width=2.0, layer=1, more=STEPS))
        if edited_s is not None:
            series.append(_ground(at, edited_s, 1.1 * most))
        more: dict[str, Any] = {"range": [0, max(1.0, 1.1 * most)], "rangemode": "normal"}
        charts.append(
            Chart(
                key=f"what-if-over-{row['letter']}",
                title=f"{row['letter']} {row['name']}",
                caption="",
                sentence=f"{titles[quantity]} of {row['name']}: at most {max(values, default=0.0):.1f}.",
                across=TIME,
                up=NUMBERS.but(unit="", **more),
                series=series,
                table=_table_over(series, titles[quantity]),
            )
        )
    return charts


STEPS: Final = {"line": {"shape": "hv"}}


def _ground(at: datetime, edited_s: tuple[float, float], most: float) -> Series:
    """Return the ground of the time in which demand is edited."""
    filled = {"fill": "tozeroy", "fillcolor": "var(--warn-soft)", "hoverinfo": "skip"}
    return Series(
        "edited demand",
        [most, most],
        ("s2", "solid"),
        _moments(at, edited_s),
        width=0.0,
        listed=False,
        layer=-2,
        more=filled,
    )


def _line(series: Row, quantity: str, region: str) -> tuple[list[float], list[float]]:
    """Return times, and sums over the endpoints of *region* or of all."""
    own = [values for key, values in series[quantity].items() if region in ("", key.rpartition(" ")[2])]
    return series["t_s"], [round(sum(each), 2) for each in zip(*own, strict=True)]


def _moments(at: datetime, t_s: Sequence[float]) -> list[datetime]:
    return [at + timedelta(seconds=each) for each in t_s]


def _table_over(series: Sequence[Series], title: str) -> Any:
    first = series[0]
    return Table(("Time", title), [list(pair) for pair in zip(first.x or (), first.y, strict=True)])


GROUND_PX: Final = (330.0, 230.0)
"""Plot area of about a third of the page; a larger one has more room between labels."""
SAME_PX: Final = 11.0
"""Points whose centres are nearer than this are drawn as one."""
SIDES: Final = ("middle right", "middle left", "top center", "bottom center")
"""Sides of a point that its interval leaves free come first."""


def future_labels(
    points: Mapping[str, tuple[float, float]],
    names: Mapping[str, str],
    across: tuple[float, float],
    up: tuple[float, float],
) -> dict[str, tuple[str, str]]:
    """Return a text and a side for each of *points* (by letter): letter and name where there is room, else the letter.

    Points at one place share the label of the first; the others have an empty text.
    """
    groups: list[list[str]] = []
    placed = {letter: place_of(point, across, up, GROUND_PX) for letter, point in points.items()}
    for letter, place in placed.items():
        near = (
            group for group in groups if all(abs(a - b) < SAME_PX for a, b in zip(placed[group[0]], place, strict=True))
        )
        group = next(near, None)
        if group is None:
            groups.append([letter])
        else:
            group.append(letter)
    texts = [
        (group[0], [f"{group[0]} {names[group[0]]}"] * (len(group) == 1) + [", ".join(group)], *points[group[0]])
        for group in groups
    ]
    return dict.fromkeys(points, ("", SIDES[0])) | labels_of(texts, across, up, sides=SIDES, grounds_px=[GROUND_PX])
