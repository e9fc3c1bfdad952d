"""A what-if as one self-contained HTML file: its table, and figures drawn by the embedded Plotly script."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

import plotly.graph_objects as go
import plotly.io
from django.utils import timezone

from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.models import LETTERS, WhatIf

COLOURS: Final = ("#111111", "#0b62d6", "#00704a", "#e07040", "#b1187c", "#6b5b10")
DASHES: Final = ("solid", "solid", "solid", "dash", "dot", "dashdot")
UNKNOWN: Final = "-"
STYLE: Final = """
body { font: 15px/1.5 Inter, system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #15181d; }
table { border-collapse: collapse; width: 100%; } th, td { border-bottom: 1px solid #d8dbe0; padding: .4rem .6rem;
text-align: right; } th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
.numbers :is(th, td):nth-child(3) { text-align: right; } small { color: #586070; }
"""
HEADS: Final = (
    "", "Future", "Changes against now", "SLO met", *(title for title, _ in selectors.SHOWN.values()), "Verdict",
)  # fmt: skip
Future = dict[str, Any]


def html(row: WhatIf) -> str:
    """Return the whole file, some 4 MB, mostly Plotly."""
    made, curves = selectors.comparison(row), selectors.curves(row)
    futures = [each for each in made["futures"] if each["seeds_done"]]
    cost = _against_cost(futures, "slo_met", 100, "Cost against SLO met", "SLO met, %")
    cost.add_hline(y=100 * made["target"], line={"dash": "dash", "color": "#b00020"}, annotation_text="SLO target")
    goodput = "Cost against goodput: output tokens of requests that kept their promise"
    figures = [
        cost,
        _against_cost(futures, "goodput_tokens_per_s", 1, goodput, "tokens/s"),
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
        _table(HEADS, map(_cells, made["futures"])),
        "<p><small>Means over seeds with 95% intervals; in brackets with the error of the simulation too.</small></p>",
        *drawn,
        _regret(made["regret"], {each["letter"]: each["name"] for each in futures}),
        _decides(selectors.decides(row)),
    ]
    title = f"<title>{escape(row.title)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], attributes: str = "") -> str:
    head = "".join(f"<th>{title}</th>" for title in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(future: Future) -> tuple[str, ...]:
    met, slo = UNKNOWN, future["slo_met"]
    if slo:
        met = (
            f"{100 * slo['mean']:.2f}% <small>{100 * slo['low']:.2f} to {100 * slo['high']:.2f}"
            f" ({100 * slo['wide_low']:.2f} to {100 * slo['wide_high']:.2f})</small>"
        )
    return (
        escape(future["letter"]),
        escape(future["name"]),
        escape("; ".join(future["changes"]) or "no change"),
        met,
        *(
            form.format(future[name]["mean"]) if future[name] else UNKNOWN
            for name, (_, form) in selectors.SHOWN.items()
        ),
        escape(future["verdict"]),
    )


def _style(letter: str) -> dict[str, Any]:
    at = LETTERS.index(letter)
    return {"color": COLOURS[at], "dash": DASHES[at]}


def _against_cost(futures: Sequence[Future], column: str, factor: float, title: str, unit: str) -> go.Figure:
    figure = go.Figure()
    for each in futures:
        gain, cost = each[column], each["cost_usd_per_h"]
        if gain is None or cost is None:
            continue
        figure.add_scatter(
            x=[cost["mean"]],
            y=[factor * gain["mean"]],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [factor * (gain["wide_high"] - gain["mean"])],
                "arrayminus": [factor * (gain["mean"] - gain["wide_low"])],
            },
            mode="markers+text",
            name=f"{each['letter']} {each['name']}",
            text=[each["letter"]],
            textposition="top right",
            marker={"color": _style(each["letter"])["color"], "size": 11},
        )
    figure.update_layout(title=title, xaxis_title="USD an hour", yaxis_title=unit, template="simple_white")
    return figure


def _ttft(futures: Sequence[Future], curves: dict[str, dict[str, Any]]) -> go.Figure:
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
    futures: Sequence[Future], curves: dict[str, dict[str, Any]], quantity: str, title: str, unit: str
) -> list[go.Figure]:
    """Return one figure per region: *quantity* of all its models."""
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
    """Return dollars above each seed's best future, smallest regret first."""
    if regret is None:
        return ""
    heads = ("", "Future", *map("Seed {}".format, regret["seeds"]), "Mean", "Worst")
    rows = [
        (
            each["letter"],
            escape(names[each["letter"]]),
            *map("${:,.2f}".format, (*each["usd"], each["mean"], each["worst"])),
        )
        for each in sorted(regret["rows"], key=lambda each: each["mean"])
    ]
    numbers = _table(heads, rows, ' class="numbers"')
    return (
        f"<h2>Regret</h2><p>Cost plus ${regret['usd_per_1000_missed']:g} per 1,000 missed requests, above the best future of"
        f" that seed. {escape(regret['sentence'])}</p>{numbers}"
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
