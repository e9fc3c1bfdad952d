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
from controlplane.console.formats import count, percent, percent_fine, quantity
from controlplane.lengths import selectors
from controlplane.lengths.models import LengthSample, Measures
from controlplane.lengths.selectors import CACHE, LEXICAL, PRIOR, SHADOW
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


def source_order(name: str) -> tuple[int, str]:
    """Caches first, then versions, then the prior; shadows last."""
    if name.startswith(SHADOW):
        return 4, name
    return {CACHE: 0, LEXICAL: 1, PRIOR: 4}.get(name, 3), name


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
