"""Charts of output lengths: predicted against actual, calibration of the quantiles, error by length and over time."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from django.utils import timezone

from controlplane.console.charts.spec import (
    AMOUNT,
    DAYS,
    NAMES,
    POINT_SHAPES,
    SHARE,
    STYLES,
    Axis,
    Chart,
    Levels,
    Series,
    axis_title,
    diagonal,
    last,
    styles,
)
from controlplane.console.formats import count, percent, percent_fine, quantity, signed
from controlplane.lengths import selectors
from controlplane.lengths.models import LengthSample, Measures
from controlplane.lengths.selectors import CACHE, EMBEDDING, LEXICAL, PRIOR, SHADOW
from controlplane.resources.tables import Columns, table

TICKS = (1, 10, 100, 1_000, 10_000, 100_000)
NO_MEASURES = "No request with a predicted length ended in this range."
NO_SAMPLES = "No request was kept as a sample in this range. Samples are taken of requests that end by themselves."
PAIRS: Columns = {
    "At": lambda pair: timezone.localtime(pair.at),
    "Came (tokens)": "output_tokens",
    "Predicted (tokens)": "predicted_tokens",
    "Prompt (tokens)": "prompt_tokens",
    "Predicted by": "predicted_by",
    "Model": "model",
    "Tenant": lambda pair: pair.tenant.name,
}
CALIBRATION: Columns = {
    "Predicted by": lambda row: row[0],
    "At most the median (ratio)": lambda row: row[1].coverage_median,
    "At most the 0.9 quantile (ratio)": lambda row: row[1].coverage_upper,
    "Requests": lambda row: row[1].requests,
}
BUCKETS: Columns = {
    "Length (tokens)": lambda row: bucket_title(row[0]),
    "Requests": lambda row: row[1].requests,
    "MAE (tokens)": lambda row: row[1].mae,
    "Bias (tokens)": lambda row: row[1].bias,
    "Error of length (ratio)": lambda row: row[1].relative_error,
    "Within 25 (ratio)": lambda row: row[1].acc_25,
    "Within 50 (ratio)": lambda row: row[1].acc_50,
    "Within 100 (ratio)": lambda row: row[1].acc_100,
}


def source_order(name: str) -> tuple[int, str]:
    """Caches first, then versions, then the prior; shadows last."""
    if name.startswith(SHADOW):
        return 4, name
    return {CACHE: 0, LEXICAL: 1, EMBEDDING: 2, PRIOR: 4}.get(name, 3), name


def _tick(tokens: int) -> str:
    return f"{tokens // 1_000}k" if tokens >= 1_000 else str(tokens)


def _logarithmic(low: float, high: float) -> Axis:
    """An axis over powers of ten; its range is in logarithms, as plotly wants it."""
    return Axis(
        {
            "type": "log",
            "range": [math.log10(low), math.log10(high)],
            "tickvals": list(TICKS),
            "ticktext": [_tick(value) for value in TICKS],
            "hoverformat": ",d",
            "rangemode": "normal",
            "showgrid": True,
        }
    )


def predicted_against_actual(pairs: Sequence[LengthSample], of: int) -> Chart:
    """Return a point for each request on logarithmic axes; on the diagonal, predictions are exact."""
    by_source: dict[str, list[LengthSample]] = defaultdict(list)
    for pair in pairs:
        by_source[pair.predicted_by].append(pair)
    values = [value for pair in pairs for value in (pair.predicted_tokens, pair.output_tokens)]
    low, high = max(0.8, min(values, default=1) * 0.7), max(10, *values, 0) * 1.4  # answers may have no token
    series = [
        Series(
            name,
            [max(1, pair.predicted_tokens) for pair in by_source[name]],
            (color, "solid"),
            [max(1, pair.output_tokens) for pair in by_source[name]],
            shape=POINT_SHAPES[min(at, len(POINT_SHAPES) - 1)],
            size=6,
            more={
                "marker": {"opacity": 0.55},
                "customdata": [[pair.model, pair.tenant.name] for pair in by_source[name]],
                "hovertemplate": (
                    "predicted %{y:,d}, came %{x:,d} tokens<br>"
                    f"%{{customdata[0]}}, %{{customdata[1]}}, {name}<extra></extra>"
                ),
            },
        )
        for at, (name, (color, _)) in enumerate(styles(sorted(by_source, key=source_order)).items())
    ]
    statement = "no samples in this range"
    if pairs:
        twice = sum(pair.predicted_tokens > 2 * pair.output_tokens for pair in pairs) / len(pairs)
        half = sum(2 * pair.predicted_tokens < pair.output_tokens for pair in pairs) / len(pairs)
        statement = (
            f"of {count(len(pairs))} requests, {percent(1 - twice - half)} were predicted "
            f"within a factor of two, {percent(twice)} as more than twice as long, {percent(half)} as less than half"
        )
    shown = f"{count(len(pairs))} of {count(of)}" if of > len(pairs) else f"All {count(of)}"
    axis = _logarithmic(low, high)
    return Chart(
        key="pairs",
        title="Predicted against actual",
        caption=f"{shown} samples of this range; on the dashed line a prediction was right" if pairs else "",
        sentence=f"Predicted against actual: {statement}.",
        across=replace(axis.but(title=axis_title("tokens that came")), time_format="%d %b %H:%M:%S"),
        up=axis.but(title=axis_title("tokens predicted"), fixedrange=False),
        series=[*series, diagonal(low, high)],
        table=table(PAIRS, pairs),
        empty="" if pairs else NO_SAMPLES,
        size="large",
        hover="closest",
    )


def calibration(by_predictor: dict[str, Measures]) -> Chart:
    """Return the share of requests at most as long as the predicted quantile, next to the quantile."""
    names = [name for name in sorted(by_predictor, key=source_order) if by_predictor[name].requests][: len(STYLES)]
    statement = "nothing was predicted in this range"
    if names:
        most = max(names, key=lambda name: by_predictor[name].requests)
        statement = (
            f"of {count(by_predictor[most].requests)} requests predicted by {most}, "
            f"{percent_fine(by_predictor[most].coverage_median)} were at most as long as the median and "
            f"{percent_fine(by_predictor[most].coverage_upper)} at most as long as the 0.9 quantile"
        )

    def points(quantile: str, field: str, style: tuple[str, str], shape: str) -> Series:
        label = f"at most the predicted {quantile}"
        hover = {"hovertemplate": "%{y:.1%} " + label + "<extra></extra>"}
        return Series(
            label, [getattr(by_predictor[name], field) for name in names], style, shape=shape, size=11, more=hover
        )

    return Chart(
        key="calibration",
        title="Calibration",
        caption="Share of requests whose real length was at most the predicted quantile",
        sentence=f"Calibration: {statement}.",
        x=names,
        across=NAMES,
        up=SHARE.but(range=[0, 1.03], tickvals=[0, 0.25, 0.5, 0.75, 0.9, 1], nticks=0),
        series=[
            points("median", "coverage_median", STYLES[0], "circle"),
            points("0.9 quantile", "coverage_upper", STYLES[1], "diamond"),
        ],
        levels=Levels("promised", [0.5, 0.9]),
        table=table(CALIBRATION, [(name, by_predictor[name]) for name in names]),
        empty="" if names else NO_MEASURES,
        size="large",
        hover="closest",
    )


def bucket_title(tokens: int) -> str:
    """Return the range of the bucket that starts at *tokens*: `64 to 127`."""
    last = max(1, 2 * tokens - 1)
    return f"{tokens}" if last <= tokens else f"{tokens:,} to {last:,}"


def error_by_length(by_bucket: dict[int, Measures]) -> Chart:
    """Return absolute error and bias by actual length, in tokens."""
    buckets = [tokens for tokens, measures in by_bucket.items() if measures.requests]
    names = [bucket_title(tokens) for tokens in buckets]
    errors = {tokens: max(0.5, by_bucket[tokens].mae or 0.0) for tokens in buckets}  # zero has no logarithm
    hover = (
        "%{x} tokens: error %{y:,.0f}, bias %{customdata[1]:+,.0f}<br>of %{customdata[0]:,d} requests<extra></extra>"
    )

    def points(label: str, style: tuple[str, str], shape: str, members: list[int]) -> Series:
        numbers = [[by_bucket[tokens].requests, by_bucket[tokens].bias] for tokens in members]
        more = {"customdata": numbers, "hovertemplate": hover}
        x, y = [bucket_title(tokens) for tokens in members], [errors[tokens] for tokens in members]
        return Series(label, y, style, x, shape=shape, size=9, more=more)

    long = [tokens for tokens in buckets if (by_bucket[tokens].bias or 0.0) >= 0]
    statement = "nothing was predicted in this range"
    if buckets:
        worst = max(buckets, key=lambda tokens: by_bucket[tokens].mae or 0.0)
        statement = (
            f"the largest is {quantity(by_bucket[worst].mae)} tokens, for answers of "
            f"{bucket_title(worst)} tokens, with a bias of {signed(by_bucket[worst].bias)}"
        )
    return Chart(
        key="buckets",
        title="Error by length",
        caption="Mean absolute error in tokens by the length that came, on a logarithmic axis",
        sentence=f"Error by length: {statement}.",
        x=names,
        across=Axis(
            {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": names,
                "tickvals": names,
                "ticktext": [_tick(tokens) for tokens in buckets],
                "title": axis_title("length that came, from (tokens)"),
            }
        ),
        up=_logarithmic(min(errors.values(), default=1.0) * 0.7, max(errors.values(), default=1.0) * 1.4),
        series=[
            Series("mean absolute error", list(errors.values()), width=2, more={"hoverinfo": "skip"}),
            points("predicted too long on the whole", ("s2", "solid"), "circle", long),
            points("too short", ("s4", "solid"), "diamond", [tokens for tokens in buckets if tokens not in long]),
        ],
        table=table(BUCKETS, [(tokens, by_bucket[tokens]) for tokens in buckets]),
        empty="" if buckets else NO_MEASURES,
        hover="closest",
    )


def error_over_time(errors: selectors.Series) -> Chart:
    """Return the mean absolute error of the busiest predictors over time."""
    busiest = sorted(sorted(errors.lines, key=source_order), key=lambda n: -sum(w.requests for w in errors.lines[n]))
    named = styles(sorted(busiest[: len(STYLES)], key=source_order))
    series = [
        Series(
            name,
            [window.mae for window in errors.lines[name]],
            style,
            width=2,
            size=4,
            more={"hovertemplate": "%{y:,.0f} tokens"},
        )
        for name, style in named.items()
    ]
    newest = ", ".join(f"{one.label} {quantity(last(one.y))}" for one in series)
    statement = f"mean absolute error in tokens in the newest window of each, {newest}"
    step = f"{errors.step_s // 60} min" if errors.step_s < 3600 else "1 h"
    return Chart(
        key="trend",
        title="Error over time",
        caption=f"Mean absolute error in tokens, by what predicted, in windows of {step}",
        sentence=f"Error over time: {statement if series else 'nothing was predicted in this range'}.",
        x=[timezone.localtime(start) for start in errors.starts],
        across=DAYS,
        up=AMOUNT.but(unit="tokens"),
        series=series,
        empty="" if series else NO_MEASURES,
    )
