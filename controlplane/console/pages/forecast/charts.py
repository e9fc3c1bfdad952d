"""Charts of the forecast page: demand against its forecast and capacity, and how forecasters did in backtests."""

from collections.abc import Sequence
from datetime import datetime, timedelta
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
    local,
    scatter,
)
from controlplane.console.formats import count, percent_fine, quantity
from controlplane.console.pages.forecast.selectors import Outlook, Score
from controlplane.planning.selectors import Series, Window

SMALL = 10.0  # tokens a second
FORECASTERS_SHOWN = len(STYLES)


def _field(expected: Sequence[Window | None], name: str) -> Series:
    return [None if window is None else getattr(window, name) for window in expected]


def _runs(series: Series) -> list[slice]:
    """Where *series* is known without a gap, from left to right."""
    runs, begin = [], None
    for at, value in enumerate([*series, None]):
        if value is not None and begin is None:
            begin = at
        elif value is None and begin is not None:
            runs.append(slice(begin, at))
            begin = None
    return runs


def _band(times: Sequence[datetime], outlook: Outlook, share: int) -> list[go.Scatter]:
    """Two invisible lines with the ground between them filled, for each run: ground would be filled askew over a gap."""
    edge = Line(f"{share} %", "var(--s1)")
    lower, upper = (_field(outlook.expected, f"{side}_{share}") for side in ("lower", "upper"))
    traces = []
    for run in _runs(upper):
        traces += [
            scatter(times[run], upper[run], edge, 0, hoverinfo="skip"),
            scatter(times[run], lower[run], edge, 0, hoverinfo="skip", fill="tonexty", fillcolor="var(--s1-soft)"),
        ]
    return traces


def demand_and_forecast(outlook: Outlook, empty: str) -> Chart:
    """Demand, forecast with its bands, and capacity as steps. *empty* is what to say when there is nothing to draw."""
    outlook = outlook.since_known()
    half = timedelta(seconds=outlook.window_s / 2)
    starts = [timezone.localtime(start) for start in outlook.starts]
    middles = [start + half for start in starts]
    known = any(value is not None for value in outlook.actual)
    mean = _field(outlook.expected, "mean")
    if known and not any(outlook.actual) and not any(outlook.capacity) and not any(value is not None for value in mean):
        known, empty = False, f"No request{_of_class(outlook)} was counted in the time shown."
    legend: list[Line] = []
    traces: list[Any] = []
    # Below that, units of measure would say thousandths of a token: "800m".
    small = max(filter(None, (*outlook.actual, *mean, *outlook.capacity, outlook.planned)), default=0.0) < SMALL
    digits = ".3~g" if small else ".3s"
    if any(value is not None for value in mean):
        # A line of the legend for each band: the inner ground lies over the outer one and is darker.
        traces += [*_band(middles, outlook, 95), *_band(middles, outlook, 80)]
        expected = Line("forecast, with 80 and 95 % bands", "var(--s1)", "dash")
        hover = f"%{{y:{digits}}}, 80 %: %{{customdata[0]:{digits}}} to %{{customdata[1]:{digits}}}"
        bounds = list(zip(_field(outlook.expected, "lower_80"), _field(outlook.expected, "upper_80"), strict=True))
        shown = scatter(middles, mean, expected, 2, customdata=bounds, hovertemplate=hover)
        traces.append(shown.update(name="forecast"))
        legend.append(expected)
    if known:
        actual = Line("actual", "var(--text)")
        traces.append(scatter(middles, outlook.actual, actual, 2))
        legend.insert(0, actual)
    if any(outlook.capacity) and (known or legend):
        capacity = Line("capacity of ready instances", "var(--s2)")
        past = [(start, value) for start, value in zip(starts, outlook.capacity, strict=True) if value is not None]
        past.append((timezone.localtime(outlook.now), past[-1][1]))
        steps = scatter([at for at, _ in past], [value for _, value in past], capacity, 1.75)
        traces.append(steps.update(name="capacity", line={"shape": "hv"}))
        legend.append(capacity)
    if outlook.planned is not None and legend:
        planned = Line("as planned", "var(--s2)", "dot")
        ahead = [timezone.localtime(outlook.now), starts[-1] + 2 * half]
        traces.append(scatter(ahead, [outlook.planned] * 2, planned))
        legend.append(planned)
    now = {
        "type": "line",
        "yref": "paper",
        "x0": local(timezone.localtime(outlook.now)),
        "x1": local(timezone.localtime(outlook.now)),
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--border-strong)", "width": 1},
    }
    axes = {
        "xaxis": {"tickformatstops": TIME_TICKS, "hoverformat": "%d %b %H:%M", "nticks": 8},
        "yaxis": {"tickformat": "~g" if small else "~s", "hoverformat": digits, "nticks": 7},
    }
    drawn = as_json(traces, layout(height=LARGE_HEIGHT, shapes=[now], **axes)) if legend else None
    return Chart(
        key="forecast",
        title="Demand and forecast" if outlook.slo_class else "Demand, forecast and capacity",
        caption=f"{_what(outlook)} per second, in windows of {_length(outlook.window_s)}",
        sentence=_outlook_sentence(outlook),
        header=(
            "Window from",
            "Actual (tok/s)",
            "Forecast (tok/s)",
            *(f"{side} {share} % (tok/s)" for share in (80, 95) for side in ("Lower", "Upper")),
            "Capacity (tok/s)",
        ),
        rows=[
            [start, actual, *_numbers(window), capacity]
            for start, actual, window, capacity in zip(
                starts, outlook.actual, outlook.expected, outlook.capacity, strict=True
            )
        ],
        figure=drawn,
        legend=tuple(legend),
        empty="" if drawn else empty,
        size="large",
        time_format="%d %b %H:%M",
    )


def _numbers(window: Window | None) -> list[float | None]:
    if window is None:
        return [None] * 5
    return [window.mean, window.lower_80, window.upper_80, window.lower_95, window.upper_95]


def _what(outlook: Outlook) -> str:
    return f"{outlook.unit.capitalize()} tokens{_of_class(outlook)}"


def _of_class(outlook: Outlook) -> str:
    return f" of the class {outlook.slo_class}" if outlook.slo_class else ""


def _length(seconds: int) -> str:
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _outlook_sentence(outlook: Outlook) -> str:
    """What the chart says to who does not see it."""
    parts = []
    newest = next((value for value in reversed(outlook.actual) if value is not None), None)
    if newest is not None:
        parts.append(f"the newest full window had {quantity(newest)} {outlook.unit} tokens per second")
    if peak := outlook.peak:
        at = timezone.localtime(peak.start).strftime("%H:%M")
        parts.append(
            f"the forecast peaks at {quantity(peak.mean)} at {at}, "
            f"with 80 % between {quantity(peak.lower_80)} and {quantity(peak.upper_80)}"
        )
    if outlook.capacity_now:
        parts.append(f"ready instances can do {quantity(outlook.capacity_now)}")
    of = f"Demand{_of_class(outlook)}"
    return f"{of}: {'; '.join(parts)}." if parts else f"{of}: nothing is known yet."


# Backtests


def error_by_horizon(scores: Sequence[Score], window_s: int, what: str) -> Chart:
    """Mean APE against how far ahead a forecaster looked; the six best forecasters."""
    shown = [score for score in scores if any(value is not None for value in score.by_horizon)][:FORECASTERS_SHOWN]
    longest = max((len(score.by_horizon) for score in shown), default=0)
    ahead = [(at + 1) * window_s / 60 for at in range(longest)]
    legend = tuple(
        Line(score.title, f"var(--{color})", dash) for score, (color, dash) in zip(shown, STYLES, strict=False)
    )
    values = [[*score.by_horizon, *[None] * (longest - len(score.by_horizon))] for score in shown]
    traces = [
        go.Scatter(
            x=ahead,
            y=series,
            mode="lines+markers",
            name=line.label,
            line={"color": line.color, "dash": line.dash, "width": 2},
            marker={"color": line.color, "size": 6},
        )
        for series, line in zip(values, legend, strict=True)
    ]
    axes = {
        "xaxis": {"type": "linear", "ticksuffix": " min", "hoverformat": ",.0f", "rangemode": "tozero"},
        "yaxis": {"tickformat": ".0%", "hoverformat": ".1%"},
    }
    sentence = "Error by horizon: no backtest has measured it."
    if shown and values[0][0] is not None:
        first, end = values[0][0], next(value for value in reversed(values[0]) if value is not None)
        sentence = (
            f"Error by horizon: {shown[0].title} is off by {percent_fine(first)} one window ahead "
            f"and by {percent_fine(end)} at {count(ahead[-1])} minutes."
        )
    return Chart(
        key="horizon",
        title="Error by horizon",
        caption=f"Mean absolute percentage error by minutes ahead, {what}",
        sentence=sentence,
        header=("Ahead (min)", *(f"{score.title} (ratio)" for score in shown)),
        rows=[[minutes, *row] for minutes, *row in zip(ahead, *values, strict=True)],
        figure=as_json(traces, layout(**axes)) if shown else None,
        legend=legend,
        empty="" if shown else "No backtest has measured the error by horizon yet.",
    )


def coverage(scores: Sequence[Score], what: str) -> Chart:
    """Share of windows within each band, beside what the band promises."""
    shown = [score for score in scores if score.coverage_80 is not None or score.coverage_95 is not None]
    legend = (
        Line("80 % band", "var(--s1)", shape="circle"),
        Line("95 % band", "var(--s2)", shape="diamond"),
        Line("promised", "var(--crit)", "dash"),
    )
    names = [score.title for score in shown]
    traces = [
        go.Scatter(
            x=names,
            y=[getattr(score, field) for score in shown],
            mode="markers",
            name=line.label,
            marker={"color": line.color, "size": 11, "symbol": line.shape},
            hovertemplate="%{y:.1%}",
        )
        for field, line in zip(("coverage_80", "coverage_95"), legend[:2], strict=True)
    ]
    promised = level_lines([0.80, 0.95])
    lowest = min([value for score in shown for value in (score.coverage_80, score.coverage_95) if value], default=0.8)
    axes = {
        "xaxis": {"type": "category", "tickangle": None, "automargin": True, "nticks": 0},
        "yaxis": {
            "tickformat": ".0%",
            "range": [max(0.0, min(0.7, lowest - 0.05)), 1.01],
            "rangemode": "normal",
        },
    }
    sentence = "Coverage: no backtest has measured it."
    if shown:
        sentence = (
            f"Coverage: of {shown[0].title}'s bands, the 80 % one holds {percent_fine(shown[0].coverage_80)} "
            f"and the 95 % one {percent_fine(shown[0].coverage_95)} of the windows."
        )
    return Chart(
        key="coverage",
        title="Coverage of the bands",
        caption=f"Share of windows within each band, {what}",
        sentence=sentence,
        header=("Forecaster", "Within the 80 % band (ratio)", "Within the 95 % band (ratio)"),
        rows=[[score.title, score.coverage_80, score.coverage_95] for score in shown],
        figure=as_json(traces, layout(shapes=promised, **axes)) if shown else None,
        legend=legend if shown else (),
        empty="" if shown else "No backtest has measured coverage yet.",
    )
