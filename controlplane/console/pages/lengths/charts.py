"""Charts of output lengths: predicted against actual, calibration of the quantiles, error by length and over time."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import plotly.graph_objects as go
from django.utils import timezone

from controlplane.console.charts.spec import (
    LARGE_HEIGHT,
    STYLES,
    TIME_TICKS,
    Chart,
    Line,
    as_json,
    layout,
    level_lines,
    scatter,
)
from controlplane.console.formats import count, percent, percent_fine, quantity, signed
from controlplane.lengths.selectors import CACHE, PRIOR, SEMANTIC, SHADOW, Measures, Pair, Series

SOURCES_SHOWN = len(STYLES)
POINT_SHAPES = ("circle", "diamond", "square", "triangle-up")
TICKS = (1, 10, 100, 1_000, 10_000, 100_000)
PROMISED = ((0.5, "median"), (0.9, "0.9 quantile"))
NO_MEASURES = "No request with a predicted length ended in this range."
NO_SAMPLES = (
    "No request was kept as a sample in this range. Samples are taken of requests that end as their model likes."
)


def source_order(name: str) -> tuple[int, str]:
    """Caches first, then versions, then the prior; shadows last."""
    if name.startswith(SHADOW):
        return 4, name
    return {CACHE: 0, SEMANTIC: 1, PRIOR: 3}.get(name, 2), name


def _lines(names: Sequence[str], shaped: bool) -> dict[str, Line]:
    """A line of the legend for each of *names*; what has no style of its own any more shares the last one."""
    lines = {}
    for at, name in enumerate(sorted(names, key=source_order)):
        color, dash = STYLES[min(at, len(STYLES) - 1)]
        shape = POINT_SHAPES[min(at, len(POINT_SHAPES) - 1)] if shaped else ""
        lines[name] = Line(name, f"var(--{color})", "solid" if shaped else dash, shape)
    return lines


def _tick(tokens: int) -> str:
    return f"{tokens // 1_000}k" if tokens >= 1_000 else str(tokens)


def _logarithmic(low: float, high: float) -> dict[str, Any]:
    """An axis over powers of ten; its range is in logarithms, as plotly wants it."""
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": list(TICKS),
        "ticktext": [_tick(value) for value in TICKS],
        "tickformatstops": [],
        "hoverformat": ",d",
        "rangemode": "normal",
        "showgrid": True,
    }


def predicted_against_actual(pairs: Sequence[Pair], of: int) -> Chart:
    """One point a request on logarithmic axes; on the diagonal the prediction was right."""
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.predicted_by, []).append(pair)
    lines = _lines(list(by_source), shaped=True)
    values = [value for pair in pairs for value in (pair.predicted_tokens, pair.output_tokens)]
    low, high = max(0.8, min(values, default=1) * 0.7), max(10, *values, 0) * 1.4  # answers may have no token
    traces: list[Any] = [
        go.Scatter(
            x=[max(1, pair.output_tokens) for pair in by_source[name]],
            y=[max(1, pair.predicted_tokens) for pair in by_source[name]],
            mode="markers",
            name=name,
            marker={"color": line.color, "size": 6, "symbol": line.shape, "opacity": 0.55},
            customdata=[[pair.model, pair.tenant] for pair in by_source[name]],
            hovertemplate=(
                "predicted %{y:,d}, came %{x:,d} tokens<br>"
                f"%{{customdata[0]}}, %{{customdata[1]}}, {name}<extra></extra>"
            ),
        )
        for name, line in lines.items()
    ]
    right = Line("right", "var(--text)", "dash")
    diagonal = go.Scatter(
        x=[low, high], y=[low, high], mode="lines", name="right", hoverinfo="skip",
        line={"color": right.color, "dash": "dash", "width": 1.25},
    )  # fmt: skip
    if traces:
        traces.insert(0, diagonal)
    axis = _logarithmic(low, high)
    title = {"font": {"size": 11}, "standoff": 4}
    axes = {
        "xaxis": {**axis, "title": {"text": "tokens that came", **title}},
        "yaxis": {**axis, "title": {"text": "tokens predicted", **title}, "fixedrange": False},
    }
    sentence = "Predicted against actual: no samples in this range."
    if pairs:
        twice = sum(pair.predicted_tokens > 2 * pair.output_tokens for pair in pairs) / len(pairs)
        half = sum(2 * pair.predicted_tokens < pair.output_tokens for pair in pairs) / len(pairs)
        sentence = (
            f"Predicted against actual: of {count(len(pairs))} requests, {percent(1 - twice - half)} were predicted "
            f"within a factor of two, {percent(twice)} as more than twice as long, {percent(half)} as less than half."
        )
    shown = f"{count(len(pairs))} of {count(of)}" if of > len(pairs) else f"All {count(of)}"
    return Chart(
        key="pairs",
        title="Predicted against actual",
        caption=f"{shown} samples of this range; on the dashed line a prediction was right" if pairs else "",
        sentence=sentence,
        header=("At", "Came (tokens)", "Predicted (tokens)", "Prompt (tokens)", "Predicted by", "Model", "Tenant"),
        rows=[
            [
                timezone.localtime(pair.at),
                pair.output_tokens,
                pair.predicted_tokens,
                pair.prompt_tokens,
                pair.predicted_by,
                pair.model,
                pair.tenant,
            ]
            for pair in pairs
        ],
        figure=as_json(traces, layout(height=LARGE_HEIGHT, hovermode="closest", **axes)) if pairs else None,
        legend=(*lines.values(), right) if pairs else (),
        empty="" if pairs else NO_SAMPLES,
        size="large",
        time_format="%d %b %H:%M:%S",
    )


def calibration(found: dict[str, Measures]) -> Chart:
    """Share of requests at most as long as the predicted quantile, beside what the quantile promises."""
    names = [name for name in sorted(found, key=source_order) if found[name].requests][:SOURCES_SHOWN]
    legend = (
        Line("at most the predicted median", "var(--s1)", shape="circle"),
        Line("at most the predicted 0.9 quantile", "var(--s2)", shape="diamond"),
        Line("promised", "var(--crit)", "dash"),
    )
    traces = [
        go.Scatter(
            x=names,
            y=[getattr(found[name], field) for name in names],
            mode="markers",
            name=line.label,
            marker={"color": line.color, "size": 11, "symbol": line.shape},
            hovertemplate="%{y:.1%} " + line.label + "<extra></extra>",
        )
        for field, line in zip(("coverage_median", "coverage_upper"), legend[:2], strict=True)
    ]
    promised = level_lines([level for level, _ in PROMISED])
    axes = {
        "xaxis": {"type": "category", "tickangle": None, "automargin": True, "nticks": 0},
        "yaxis": {"tickformat": ".0%", "range": [0, 1.03], "tickvals": [0, 0.25, 0.5, 0.75, 0.9, 1], "nticks": 0},
    }
    sentence = "Calibration: nothing was predicted in this range."
    if names:
        most = max(names, key=lambda name: found[name].requests)
        sentence = (
            f"Calibration: of {count(found[most].requests)} requests predicted by {most}, "
            f"{percent_fine(found[most].coverage_median)} were at most as long as the median and "
            f"{percent_fine(found[most].coverage_upper)} at most as long as the 0.9 quantile."
        )
    return Chart(
        key="calibration",
        title="Calibration",
        caption="Share of requests whose real length was at most the predicted quantile",
        sentence=sentence,
        header=("Predicted by", "At most the median (ratio)", "At most the 0.9 quantile (ratio)", "Requests"),
        rows=[[name, found[name].coverage_median, found[name].coverage_upper, found[name].requests] for name in names],
        figure=as_json(traces, layout(height=LARGE_HEIGHT, shapes=promised, hovermode="closest", **axes))
        if names
        else None,
        legend=legend if names else (),
        empty="" if names else NO_MEASURES,
        size="large",
    )


def bucket_title(tokens: int) -> str:
    """The lengths of a bucket that begins at *tokens*: `64 to 127`."""
    last = max(1, 2 * tokens - 1)
    return f"{tokens}" if last <= tokens else f"{tokens:,} to {last:,}"


def error_by_length(found: dict[int, Measures]) -> Chart:
    """Absolute error and bias against the length that came, in tokens."""
    buckets = [tokens for tokens, measures in found.items() if measures.requests]
    names = [bucket_title(tokens) for tokens in buckets]
    errors = {tokens: max(0.5, found[tokens].mae or 0.0) for tokens in buckets}  # logarithms want more than nought
    line = Line("mean absolute error", "var(--s1)")
    legend = (
        line,
        Line("predicted too long on the whole", "var(--s2)", shape="circle"),
        Line("too short", "var(--s4)", shape="diamond"),
    )
    traces: list[Any] = [
        go.Scatter(
            x=names,
            y=list(errors.values()),
            mode="lines",
            name=line.label,
            line={"color": line.color, "dash": line.dash, "width": 2},
            hoverinfo="skip",
        )
    ]
    for point, long in zip(legend[1:], (True, False), strict=True):
        members = [tokens for tokens in buckets if ((found[tokens].bias or 0.0) >= 0) is long]
        traces.append(
            go.Scatter(
                x=[bucket_title(tokens) for tokens in members],
                y=[errors[tokens] for tokens in members],
                mode="markers",
                name=point.label,
                marker={"color": point.color, "size": 9, "symbol": point.shape},
                customdata=[[found[tokens].requests, found[tokens].bias] for tokens in members],
                hovertemplate=(
                    "%{x} tokens: error %{y:,.0f}, bias %{customdata[1]:+,.0f}<br>"
                    "of %{customdata[0]:,d} requests<extra></extra>"
                ),
            )
        )
    axes = {
        "xaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names,
            "tickvals": names,
            "ticktext": [_tick(tokens) for tokens in buckets],
            "title": {"text": "length that came, from (tokens)", "font": {"size": 11}, "standoff": 4},
        },
        "yaxis": _logarithmic(min(errors.values(), default=1.0) * 0.7, max(errors.values(), default=1.0) * 1.4),
    }
    sentence = "Error by length: nothing was predicted in this range."
    if buckets:
        worst = max(buckets, key=lambda tokens: found[tokens].mae or 0.0)
        sentence = (
            f"Error by length: the largest is {quantity(found[worst].mae)} tokens, for answers of "
            f"{bucket_title(worst)} tokens, with a bias of {signed(found[worst].bias)}."
        )
    return Chart(
        key="buckets",
        title="Error by length",
        caption="Mean absolute error in tokens by the length that came, on a logarithmic axis",
        sentence=sentence,
        header=(
            "Length (tokens)",
            "Requests",
            "MAE (tokens)",
            "Bias (tokens)",
            "Error of length (ratio)",
            "Within 25 (ratio)",
            "Within 50 (ratio)",
            "Within 100 (ratio)",
        ),
        rows=[
            [
                name,
                of.requests,
                of.mae,
                of.bias,
                of.relative_error,
                of.acc_25,
                of.acc_50,
                of.acc_100,
            ]
            for name, of in ((bucket_title(tokens), found[tokens]) for tokens in buckets)
        ],
        figure=as_json(traces, layout(hovermode="closest", **axes)) if buckets else None,
        legend=legend if buckets else (),
        empty="" if buckets else NO_MEASURES,
    )


def error_over_time(found: Series) -> Chart:
    """Mean absolute error of each predictor."""
    names = sorted(found.lines, key=source_order)
    busiest = sorted(names, key=lambda name: -sum(window.requests for window in found.lines[name]))[:SOURCES_SHOWN]
    lines = _lines(busiest, shaped=False)
    starts: list[datetime] = [timezone.localtime(start) for start in found.starts]
    values = {name: [window.mae for window in found.lines[name]] for name in lines}
    traces = [
        scatter(starts, values[name], line, 2).update(
            hovertemplate="%{y:,.0f} tokens", mode="lines+markers", marker={"color": line.color, "size": 4}
        )
        for name, line in lines.items()
    ]
    axes = {
        "xaxis": {"tickformatstops": TIME_TICKS, "hoverformat": "%d %b %H:%M"},
        "yaxis": {"tickformat": "~s"},
    }
    sentence = "Error over time: nothing was predicted in this range."
    if lines:
        newest = {name: next((value for value in reversed(values[name]) if value is not None), None) for name in lines}
        parts = [f"{name} {quantity(value)}" for name, value in newest.items()]
        sentence = f"Error over time: mean absolute error in tokens in the newest window of each, {', '.join(parts)}."
    step = f"{found.step_s // 60} min" if found.step_s < 3600 else "1 h"
    return Chart(
        key="trend",
        title="Error over time",
        caption=f"Mean absolute error in tokens, by what predicted, in windows of {step}",
        sentence=sentence,
        header=("Window from", *(f"{name} (tokens)" for name in lines)),
        rows=[[start, *row] for start, *row in zip(starts, *(values[name] for name in lines), strict=True)],
        figure=as_json(traces, layout(**axes)) if lines else None,
        legend=tuple(lines.values()),
        empty="" if lines else NO_MEASURES,
        time_format="%d %b %H:%M",
    )
