"""Plots of kept results in the documentation, as SVG: `python -m tests.docs.plots` draws them again from `docs/results`.

Each is a row of panels with a line or a bar for each strategy.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np

from controlplane.experiments.experiment import Result, Row
from controlplane.experiments.hermes import QUANTILES
from controlplane.experiments.sageserve_mixed import BIN_S, PARTS
from tests.docs.evidence import KEPT

SAMPLE_S = {name: part["sample_s"] for name, part in PARTS.items()}
COLOURS: Final = ("#6e7781", "#0969da", "#bf8700", "#1a7f37", "#8250df", "#bc4c00", "#0a7ea4", "#953800")
LOAD_COLOUR: Final = "#cf222e"
WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 120, 34, 46, 30
DAY_S, HOUR_S = 86_400.0, 3_600.0


class Panel(NamedTuple):
    """Named values of each strategy, in the order of the legend: courses by step, or bars by their labels."""

    name: str
    values: list[list[float]]
    labels: Sequence[str] = ()
    """Of the bars; none for courses."""
    unit: str = ""
    """Of the values, after the largest one."""
    step_s: float = 0.0
    """Of courses; 0 for that of the part's samples."""
    span_s: float = 0.0
    """Of the axis of courses; 0 for the hours of a day."""


class Plot(NamedTuple):
    kept: str
    part: str
    title: str
    panels: Callable[[Result, list[Row]], Iterator[Panel]]
    names: Sequence[str] = ()
    """Of the strategies that are drawn; none for all."""
    load: bool = False
    """Whether the last course of each panel is the load instead of a strategy."""
    strategies: Callable[[list[Row]], list[Row]] = list
    """Returns a row for each strategy from the rows of the part."""


def by_system(rows: list[Row]) -> list[Row]:
    """Return a row for each system, with its rows by intensity."""
    systems = dict.fromkeys(row["system"] for row in rows)
    return [
        {"strategy": system, "by": {row["intensity"]: row for row in rows if row["system"] == system}}
        for system in systems
    ]


def completion_times(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield the mean and the 95th percentile of completion times by intensity, means over seeds."""
    for title, name in (("mean", "mean_s"), ("95th percentile", "p95_s")):
        bars = [[sum(of[name]) / len(of[name]) for of in row["by"].values()] for row in rows]
        yield Panel(title, bars, labels=list(rows[0]["by"]), unit=" s")


def distribution(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield the share of runs that have completed after a time, at the highest intensity, of the first seed."""
    of = [[*row["by"].values()][-1]["quantiles_s"][0] for row in rows]
    span_s = max(each[-1] for each in of)
    moments_s = np.linspace(0.0, span_s, 101)
    courses = [np.interp(moments_s, [0.0, *each], [0.0, *QUANTILES], right=100.0).tolist() for each in of]
    yield Panel("runs completed", courses, unit="%", step_s=span_s / 100, span_s=span_s)


def by_application(rows: Any) -> list[Row]:
    return [row | {"strategy": name} for name, row in rows.items()]


def services(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield the share of runs that need no more than so many seconds of service, of less than a minute and in all."""
    for span_s in (60.0, 900.0):
        moments_s = np.linspace(0.0, span_s, 101)
        courses = [np.interp(moments_s, row["quantiles_s"], QUANTILES, left=0.0).tolist() for row in rows]
        yield Panel(f"runs of up to {span_s:.0f} s", courses, unit="%", step_s=span_s / 100, span_s=span_s)


def by_setting(rows: list[Row]) -> list[Row]:
    """Return a row for each system, with its rows by setting."""
    systems = dict.fromkeys(row["system"] for row in rows)
    return [
        {"strategy": system, "by": {row["setting"]: row for row in rows if row["system"] == system}}
        for system in systems
    ]


def hits(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield the share of calls whose system prompt is cached when they come, and when they begin."""
    for title, name in (("cached when the call comes", "came_hits"), ("cached when it begins", "hits")):
        bars = [[100 * each[name] for each in row["by"].values()] for row in rows]
        yield Panel(title, bars, labels=list(rows[0]["by"]), unit=" %")


def by_knob(rows: list[Row]) -> list[Row]:
    """Return a row for each kind of backend that is no adapter, with its rows by system."""
    kinds = [name for name in dict.fromkeys(row["setting"] for row in rows) if name != "adapters"]
    return [{"strategy": kind, "by": {row["system"]: row for row in rows if row["setting"] == kind}} for kind in kinds]


def waiting_and_idle(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield what a run waits for cold backends less than without prewarming, and for how long warm ones are idle more."""
    ks = [name for name in rows[0]["by"] if name.startswith("K = ")]
    for title, name, sign in (("waited less a run", "waited_s", -1), ("idle longer a run", "idle_s", 1)):
        bars = [[max(0.0, sign * (row["by"][k][name] - row["by"]["LRU"][name])) for k in ks] for row in rows]
        yield Panel(title, bars, labels=[k.removeprefix("K = ") for k in ks], unit=" s")


def deadlines_met(_: Result, rows: list[Row]) -> Iterator[Panel]:
    """Yield the share of runs that met their deadline, of all and by the factor of their deadline."""
    names = ("met", "met_1.2", "met_1.5", "met_2")
    of = [next(iter(row["by"].values())) for row in rows]
    bars = [[100 * sum(each[name]) / len(each[name]) for name in names] for each in of]
    yield Panel("deadlines met", bars, labels=("all", "1.2x", "1.5x", "2x"), unit=" %")


def by_model(series: str) -> Callable[[Result, list[Row]], Iterator[Panel]]:
    """Return panels with a course for each model."""

    def panels(result: Result, rows: list[Row]) -> Iterator[Panel]:
        for model in result["models"]:
            yield Panel(model, [row["series"][series][model] for row in rows])

    return panels


def by_region(series: str, step_s: float = 0.0, unit: str = "") -> Callable[[Result, list[Row]], Iterator[Panel]]:
    """Return panels with a course of the busiest model for each region."""

    def panels(_: Result, rows: list[Row]) -> Iterator[Panel]:
        for region in rows[0]["series"][series]:
            yield Panel(region, [row["series"][series][region] for row in rows], unit=unit, step_s=step_s)

    return panels


def latencies_by_region(_: Result, rows: list[Row]) -> Iterator[Panel]:
    for latency in ("ttft", "e2e"):
        for statistic in ("p50", "p95"):
            values = [row["series"][f"{latency}_by_region_s"] for row in rows]
            bars = [[of[region][statistic] for region in of] for of in values]
            yield Panel(f"{latency.upper()} {statistic}", bars, labels=list(values[0]), unit=" s")


def added_hours(_: Result, rows: list[Row]) -> Iterator[Panel]:
    for model in list(rows[0]["series"]["added_hours"])[:2]:
        of = [row["series"]["added_hours"][model] for row in rows]
        yield Panel(model, [list(each.values()) for each in of], labels=list(of[0]), unit=" h")


def latencies_by_bin(_: Result, rows: list[Row]) -> Iterator[Panel]:
    for latency in ("ttft", "e2e"):
        courses = [row["series"][f"{latency}_p95_course_s"] for row in rows]
        span_s = len(courses[0]) * BIN_S
        yield Panel(
            f"{latency.upper()} p95", courses, unit=" s", step_s=BIN_S, span_s=span_s if span_s > 2 * DAY_S else 0.0
        )


def burst_memory(result: Result, rows: list[Row]) -> Iterator[Panel]:
    region = "us-east"
    load = result["load"][region]
    most_use = max(max(row["series"]["kv_use_course"][region]) for row in rows)
    most_load = max(load)
    drawn_load = [value / most_load * most_use for value in load]
    yield Panel(region, [*(row["series"]["kv_use_course"][region] for row in rows), drawn_load])


LONG_TERM: Final = ("LT-I", "LT-U", "LT-UA", "Pilothouse (ours)")
PLOTS: Final = {
    "pools-memory": Plot(
        "sageserve-mixed-pools", "pools", "Use of KV memory in us-west (figure 6)", by_model("kv_use_course")
    ),
    "pools-instances": Plot(
        "sageserve-mixed-pools", "pools", "Ready instances in us-west (figure 5)", by_model("ready_course")
    ),
    "plans-hours": Plot(
        "sageserve-mixed-plans",
        "plans",
        "Llama-2: instance-hours in each hour, by region (figure 12)",
        by_region("hours_course", HOUR_S, " h"),
    ),
    "plans-latency": Plot(
        "sageserve-mixed-plans", "plans", "Llama-2: interactive latencies by region (figure 13)", latencies_by_region
    ),
    "plans-memory": Plot(
        "sageserve-mixed-plans", "plans", "Llama-2: use of KV memory by region (figure 14)", by_region("kv_use_course")
    ),
    "plans-added": Plot(
        "sageserve-mixed-plans",
        "plans",
        "Hours until added instances serve, by where they came from (figure 15)",
        added_hours,
    ),
    "bursts-memory": Plot(
        "sageserve-mixed-bursts",
        "bursts",
        "Llama-2 in us-east: use of KV memory with two bursts (figure 16)",
        burst_memory,
        LONG_TERM,
        load=True,
    ),
    "plans-bins": Plot(
        "sageserve-mixed-plans", "plans", "Llama-2: p95 by three hours of the day (figure 17)", latencies_by_bin
    ),
    "week-bins": Plot(
        "sageserve-mixed-week", "week", "Llama-2: p95 by three hours of the week (figure 17)", latencies_by_bin
    ),
    "hermes-7b": Plot(
        "hermes-7b",
        "rows",
        "300 runs on Llama-2-7B: completion times by intensity (figure 9a)",
        completion_times,
        strategies=by_system,
    ),
    "hermes-70b": Plot(
        "hermes-70b",
        "rows",
        "3,000 runs on two instances of Llama-3-70B: completion times by intensity (figure 10a)",
        completion_times,
        strategies=by_system,
    ),
    "hermes-70b-distribution": Plot(
        "hermes-70b",
        "rows",
        "3,000 runs on two instances of Llama-3-70B in 10 minutes: completed after seconds (figure 10b)",
        distribution,
        strategies=by_system,
    ),
    "hermes-demand": Plot(
        "hermes-demand",
        "service",
        "Service of whole runs on Llama-2-7B: runs that need less (figure 7)",
        services,
        ("KBQAV", "EV", "CG", "PE", "DM", "MRS"),
        strategies=by_application,
    ),
    "hermes-prewarming-kv": Plot(
        "hermes-prewarming-kv",
        "rows",
        "Calls whose system prompt is in the prefix cache, by memory for keys and values (figure 13a)",
        hits,
        strategies=by_setting,
    ),
    "hermes-prewarming-k": Plot(
        "hermes-prewarming-k",
        "rows",
        "Prewarming by the knob K, against LRU (figure 14)",
        waiting_and_idle,
        strategies=by_knob,
    ),
    "hermes-deadlines": Plot(
        "hermes-deadlines",
        "rows",
        "300 runs on Llama-2-7B in 15 minutes: deadlines met (figure 11)",
        deadlines_met,
        ("vLLM", "VTC", "EDF", "Hermes", "Hermes-DDL", "EDF, late last"),
        strategies=by_system,
    ),
}
"""By name of the file."""


def draw(name: str) -> str:
    """Return the plot *name* as SVG."""
    plot = PLOTS[name]
    result = json.loads((KEPT / f"{plot.kept}.json").read_text())["result"]
    strategies = plot.strategies(result[plot.part])
    rows: list[Row] = [row for row in strategies if not plot.names or row["strategy"] in plot.names]
    all_names = [row["strategy"] for row in (strategies if len(strategies) <= len(COLOURS) else rows)]
    panels = list(plot.panels(result, rows))
    colours = [COLOURS[all_names.index(row["strategy"])] for row in rows]
    legend = [row["strategy"] for row in rows]
    if plot.load:
        colours, legend = [*colours, LOAD_COLOUR], [*legend, "requests a second, to scale"]
    wide = WIDTH if len(panels) > 1 else 4 * WIDTH
    whole = max(LEFT + len(panels) * (wide + GAP), LEFT + 200 * len(legend))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {TOP + HEIGHT + 40}" font-family="sans-serif"'
        f' font-size="11" role="img"><title>{escape(plot.title)}</title>',
        f'<rect width="{whole}" height="{TOP + HEIGHT + 40}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" font-size="13" fill="#1f2328">{escape(plot.title)}</text>',
    ]
    for at, (text, colour) in enumerate(zip(legend, colours, strict=True)):
        x = LEFT + 200 * at
        lines.append(
            f'<line x1="{x}" y1="{TOP + HEIGHT + 30}" x2="{x + 18}" y2="{TOP + HEIGHT + 30}" stroke="{colour}"'
            f' stroke-width="2"/><text x="{x + 24}" y="{TOP + HEIGHT + 34}" fill="#1f2328">{escape(text)}</text>'
        )
    for at, panel in enumerate(panels):
        lines += _panel(
            LEFT + at * (wide + GAP),
            wide,
            panel,
            panel.step_s or SAMPLE_S.get(plot.part, 0.0),
            colours,
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(x: int, wide: int, panel: Panel, step_s: float, colours: Sequence[str]) -> list[str]:
    most = max(max(values) for values in panel.values) or 1.0
    top = (
        f"{most:.{0 if most >= 10 else 1}f}{panel.unit}"
        if panel.unit
        else f"{100 * most:.2g}%"
        if most <= 1
        else f"{most:g}"
    )
    lines = [
        f'<text x="{x}" y="{TOP - 10}" fill="#1f2328">{escape(panel.name)}</text>',
        f'<rect x="{x}" y="{TOP}" width="{wide}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>',
        f'<text x="{x - 4}" y="{TOP + 9}" text-anchor="end" fill="#59636e">{top}</text>',
        f'<text x="{x - 4}" y="{TOP + HEIGHT}" text-anchor="end" fill="#59636e">0</text>',
    ]
    if panel.labels:
        return lines + _bars(x, wide, panel, most, colours)
    span_s = panel.span_s or DAY_S
    days = round(span_s / DAY_S)
    marks = (
        [(DAY_S * day, f"{day} d") for day in range(1, days)]
        if days > 1
        else [(span_s * at / 4, f"{span_s * at / 4:,.0f} s" if panel.span_s else f"{6 * at}:00") for at in (1, 2, 3)]
    )
    for moment_s, label in marks:
        at = x + wide * moment_s / span_s
        lines.append(
            f'<text x="{at:g}" y="{TOP + HEIGHT + 13}" text-anchor="middle" fill="#59636e">{label}</text>'
            f'<line x1="{at:g}" y1="{TOP}" x2="{at:g}" y2="{TOP + HEIGHT}" stroke="#eaeef2"/>'
        )
    for number, course in enumerate(panel.values):
        points = " ".join(
            f"{x + wide * step * step_s / span_s:.1f},{TOP + HEIGHT * (1 - value / most):.1f}"
            for step, value in enumerate(course)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colours[number]}" stroke-width="1.5"/>')
    return lines


def _bars(x: int, wide: int, panel: Panel, most: float, colours: Sequence[str]) -> list[str]:
    lines, group = [], wide / len(panel.labels)
    each = 0.8 * group / len(panel.values)
    for at, label in enumerate(panel.labels):
        left = x + group * (at + 0.1)
        for number, values in enumerate(panel.values):
            tall = HEIGHT * values[at] / most
            lines.append(
                f'<rect x="{left + number * each:.1f}" y="{TOP + HEIGHT - tall:.1f}" width="{0.9 * each:.1f}"'
                f' height="{tall:.1f}" fill="{colours[number]}"/>'
            )
        lines.append(
            f'<text x="{x + group * (at + 0.5):.1f}" y="{TOP + HEIGHT + 13}" text-anchor="middle" fill="#59636e">'
            f"{escape(label)}</text>"
        )
    return lines


def kept_plots() -> list[str]:
    """Return the names of the plots whose results are kept."""
    return [name for name, plot in PLOTS.items() if (KEPT / f"{plot.kept}.json").exists()]


def main() -> None:
    for name in kept_plots():
        (KEPT / f"{name}.svg").write_text(draw(name))


if __name__ == "__main__":
    sys.exit(main())
