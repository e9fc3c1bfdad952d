"""A what-if as one HTML file that needs nothing else: the table, and figures that Plotly's own script in it draws."""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import plotly.graph_objects as go
import plotly.io
from django.utils import timezone

from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.models import WhatIf

COLOURS: Final = ("#111111", "#0b62d6", "#00704a", "#e07040", "#b1187c", "#6b5b10")
DASHES: Final = ("solid", "solid", "solid", "dash", "dot", "dashdot")
UNKNOWN: Final = "-"
STYLE: Final = """
body { font: 15px/1.5 Inter, system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #15181d; }
table { border-collapse: collapse; width: 100%; } th, td { border-bottom: 1px solid #d8dbe0; padding: .4rem .6rem;
text-align: right; } th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
.numbers :is(th, td):nth-child(3) { text-align: right; } small { color: #586070; }
"""


def html(row: WhatIf) -> str:
    """The whole file, some 4 MB, most of which is Plotly."""
    made, curves = selectors.comparison(row), selectors.curves(row)
    futures = [each for each in made["futures"] if each["seeds_done"]]
    figures = [
        _cost(futures, made["target"]),
        _goodput(futures),
        _ttft(futures, curves),
        *_over_time(futures, curves, "ready", "Instances ready", "instances"),
        *_over_time(futures, curves, "waiting", "Waiting requests", "requests"),
    ]
    drawn = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0, default_height="420px")
        for number, figure in enumerate(figures)
    ]
    shared = "; ".join(selectors.edits_in_words(row))
    parts = [
        f"<h1>{escape(row.title)}</h1>",
        f"<p>{row.horizon_s / 3600:g} h from {escape(str(row.start.get('at', '')))}, {row.seeds} seeds with the same"
        f" requests in each future. State: {row.state}. Written {timezone.now():%F %H:%M} UTC.</p>",
        f"<p>In all futures: {escape(shared)}.</p>" if shared else "",
        _table(made["futures"]),
        "<p><small>Means over seeds with 95% intervals; in brackets with the error of the simulation too.</small></p>",
        *drawn,
        _regret(made["regret"], {each["letter"]: each["name"] for each in futures}),
        _decides(selectors.decides(row)),
    ]
    title = f"<title>{escape(row.title)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(futures: Sequence[dict[str, Any]]) -> str:
    titles = (
        "",
        "Future",
        "Changes against now",
        "SLO met",
        "TTFT p95",
        "Goodput",
        "Cost an hour",
        "Instance-hours",
        "Queue peak",
        "Verdict",
    )
    rows = []
    for each in futures:
        slo = each["slo_met"]
        met = UNKNOWN
        if slo:
            met = (
                f"{100 * slo['mean']:.2f}% <small>{100 * slo['low']:.2f} to {100 * slo['high']:.2f}"
                f" ({100 * slo['wide_low']:.2f} to {100 * slo['wide_high']:.2f})</small>"
            )
        cells = (
            escape(each["letter"]),
            escape(each["name"]),
            escape("; ".join(each["changes"]) or "no change"),
            met,
            _mean(each, "ttft_p95_ms", "{:,.0f} ms"),
            _mean(each, "goodput_tokens_per_s", "{:,.0f} tok/s"),
            _mean(each, "cost_usd_per_h", "${:,.2f}"),
            _mean(each, "instance_hours", "{:,.1f}"),
            _mean(each, "queue_peak", "{:,.0f}"),
            escape(each["verdict"]),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _mean(future: dict[str, Any], name: str, form: str) -> str:
    value = future[name]
    return UNKNOWN if value is None else form.format(value["mean"])


def _style(letter: str) -> dict[str, Any]:
    at = "ABCDEF".index(letter)
    return {"color": COLOURS[at], "dash": DASHES[at]}


def _cost(futures: Sequence[dict[str, Any]], target: float) -> go.Figure:
    figure = go.Figure()
    for each in futures:
        slo, cost = each["slo_met"], each["cost_usd_per_h"]
        if slo is None:
            continue
        low, high = 100 * (slo["mean"] - slo["wide_low"]), 100 * (slo["wide_high"] - slo["mean"])
        error = {"type": "data", "symmetric": False, "array": [high], "arrayminus": [low]}
        figure.add_scatter(
            x=[cost["mean"]],
            y=[100 * slo["mean"]],
            error_y=error,
            mode="markers+text",
            name=f"{each['letter']} {each['name']}",
            text=[each["letter"]],
            textposition="top right",
            marker={"color": _style(each["letter"])["color"], "size": 11},
        )
    figure.add_hline(y=100 * target, line={"dash": "dash", "color": "#b00020"}, annotation_text="SLO target")
    figure.update_layout(
        title="Cost against SLO met", xaxis_title="USD an hour", yaxis_title="SLO met, %", template="simple_white"
    )
    return figure


def _goodput(futures: Sequence[dict[str, Any]]) -> go.Figure:
    figure = go.Figure()
    for each in futures:
        good, cost = each["goodput_tokens_per_s"], each["cost_usd_per_h"]
        if good is None or cost is None:
            continue
        ends = {"array": [good["wide_high"] - good["mean"]], "arrayminus": [good["mean"] - good["wide_low"]]}
        figure.add_scatter(
            x=[cost["mean"]],
            y=[good["mean"]],
            error_y={"type": "data", "symmetric": False, **ends},
            mode="markers+text",
            name=f"{each['letter']} {each['name']}",
            text=[each["letter"]],
            textposition="top right",
            marker={"color": _style(each["letter"])["color"], "size": 11},
        )
    title = "Cost against goodput: output tokens of requests that kept their promise"
    figure.update_layout(title=title, xaxis_title="USD an hour", yaxis_title="tokens/s", template="simple_white")
    return figure


def _ttft(futures: Sequence[dict[str, Any]], curves: dict[str, dict[str, Any]]) -> go.Figure:
    figure = go.Figure()
    for each in futures:
        points = curves.get(each["letter"], {}).get("ttft", [])
        x, y = zip(*points, strict=True) if points else ((), ())
        figure.add_scatter(
            x=x, y=[100 * share for share in y], name=f"{each['letter']} {each['name']}", line=_style(each["letter"])
        )
    figure.update_xaxes(type="log", title="TTFT, ms")
    figure.update_layout(title="TTFT, share of requests within", yaxis_title="%", template="simple_white")
    return figure


def _over_time(
    futures: Sequence[dict[str, Any]], curves: dict[str, dict[str, Any]], quantity: str, title: str, unit: str
) -> list[go.Figure]:
    """One figure a region: *quantity* of all its models."""
    regions = dict.fromkeys(key.rpartition(" ")[2] for of in curves.values() for key in of["series"][quantity])
    figures = []
    for region in regions:
        figure = go.Figure()
        for each in futures:
            series = curves[each["letter"]]["series"]
            own = [values for key, values in series[quantity].items() if key.rpartition(" ")[2] == region]
            total = [sum(values) for values in zip(*own, strict=True)]
            hours = [t_s / 3600 for t_s in series["t_s"]]
            line = _style(each["letter"]) | {"shape": "hv"}
            figure.add_scatter(x=hours, y=total, name=f"{each['letter']} {each['name']}", line=line)
        said = f"{title} in {region_title(region)}"
        figure.update_layout(title=said, xaxis_title="hours", yaxis_title=unit, template="simple_white")
        figures.append(figure)
    return figures


def _regret(regret: dict[str, Any] | None, names: dict[str, str]) -> str:
    """Dollars above the best future of each seed, the least regretted first."""
    if regret is None:
        return ""
    head = "".join(
        f"<th>{title}</th>" for title in ("", "Future", *map("Seed {}".format, regret["seeds"]), "Mean", "Worst")
    )
    rows = []
    for each in sorted(regret["rows"], key=lambda each: each["mean"]):
        cells = "".join(f"<td>${value:,.2f}</td>" for value in (*each["usd"], each["mean"], each["worst"]))
        rows.append(f"<tr><td>{each['letter']}</td><td>{escape(names[each['letter']])}</td>{cells}</tr>")
    return (
        f"<h2>Regret</h2><p>Cost plus ${regret['usd_per_1000_missed']:g} per 1,000 missed requests, above the best future of"
        f' that seed. {escape(regret["sentence"])}</p><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _decides(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    items = "".join(
        f"<li>{each['at_s'] / 60:.0f} min, A and {escape(each['letter'])}: {escape(each['sentence'])}"
        f" <small>{escape(each['effect'])}</small></li>"
        for each in rows
    )
    return f"<h2>What decides</h2><ul>{items}</ul>"
