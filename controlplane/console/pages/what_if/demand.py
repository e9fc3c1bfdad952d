"""The chart of the form: demand as measured and forecast, and as the rows of the form edit it; a burst can be dragged."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart, Series, local
from controlplane.console.pages.forecast.charts import demand_and_forecast
from controlplane.console.pages.forecast.selectors import Asked, see
from controlplane.console.pages.models.selectors import EVERY_S, hours_back
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.planning.models import Quantity
from controlplane.simulation.whatif.changes.base import Values

KEY: Final = "what-if-demand"
NO_DEMAND: Final = "No demand is known yet: a simulation draws requests from what came in the last hour."
POINTS: Final = 121
"""Of the edited line."""
Rate = Callable[[datetime], float]
"""Tokens a second that are expected at a moment."""


def demand_chart(edits: Sequence[Values], models: Sequence[str], horizon_s: float, region: str = "") -> Chart:
    """Demand of *region* (all of them if it is empty), with *edits* of the kind demand laid over its forecast."""
    now = timezone.now()

    def build() -> tuple[Chart, dict[tuple[str, str], Rate]]:
        whole = see(Asked("", region, TOKENS, hours_back(), EVERY_CLASS), now).outlook
        own = {
            (model, quantity): _rate(see(Asked(model, region, quantity, 1.0, EVERY_CLASS), now).outlook.ahead)
            for model in models
            for quantity in Quantity.values
        }
        return demand_and_forecast(whole, NO_DEMAND), own

    chart, rates = once((KEY, region, tuple(models), int(now.timestamp()) // EVERY_S), build)
    caption = "Prompt and output tokens per second of all classes; drag the edges of a burst, or its top"
    chart = replace(chart, key=KEY, title="Demand", caption=caption, size="medium")
    known = [edit for edit in edits if edit["kind"] == "demand" and region in ("", *edit.get("regions", [region]))]
    if not known or chart.empty or not any(rate(now) for rate in rates.values()):
        return chart
    step = horizon_s / (POINTS - 1)
    times = [at * step for at in range(POINTS)]
    # A step is drawn as one: its edges are points of the line too.
    edges = [edit[name] for edit in known for name in ("from_s", "until_s") if edit.get(name) is not None]
    times = sorted({*times, *(edge + by for edge in edges for by in (-0.5, 0.5) if 0 <= edge + by <= horizon_s)})
    values = [round(sum(_edited(known, series, rate, now, at) for series, rate in rates.items()), 3) for at in times]
    moments = [timezone.localtime(now + timedelta(seconds=at)) for at in times]
    line = Series("as edited", values, ("s4", "solid"), moments, width=2, layer=3)
    return replace(chart, series=[*chart.series, line], shapes=_handles(known, times, values, now))


def _rate(ahead: Sequence[Any]) -> Rate:
    """The forecast of the windows *ahead*, the last of them held; 0 without one."""
    known = [(window.start, window.mean) for window in ahead]

    def at(moment: datetime) -> float:
        value = 0.0
        for start, mean in known:
            if value and start > moment:
                break
            value = mean
        return float(value)

    return at


def _edited(edits: Sequence[Values], series: tuple[str, str], rate: Rate, now: datetime, at_s: float) -> float:
    """Tokens a second of a model and quantity after *edits*, *at_s* after the start."""
    model, quantity = series
    factor, shift_s = 1.0, 0.0
    for edit in edits:
        if edit.get("models") and model not in edit["models"]:
            continue
        match edit["edit"]:
            case "shift":
                shift_s += edit["shift_s"]
            case "lengths":
                factor *= edit[quantity]
            case _:
                factor *= 1.0 + (edit["by"] - 1.0) * _strength(edit, at_s)
    return factor * rate(now + timedelta(seconds=max(0.0, at_s - shift_s)))


def _strength(edit: Values, at_s: float) -> float:
    """How much of a factor is reached, 0 to 1: it is reached and left along its ramp."""
    begin_s, until_s, ramp_s = edit.get("from_s", 0.0), edit.get("until_s", float("inf")), edit.get("ramp_s", 0.0)
    if not begin_s <= at_s < until_s:
        return 0.0
    if not ramp_s:
        return 1.0
    return float(min(1.0, (at_s - begin_s) / ramp_s, (until_s - at_s) / ramp_s))


def _handles(edits: Sequence[Values], times: Sequence[float], values: Sequence[float], now: datetime) -> list[Values]:
    """A rectangle for each burst, which may be dragged; `whatif.js` writes what comes of it into the row."""
    handles = []
    for number, edit in enumerate(edit for edit in edits if edit["edit"] == "burst"):
        inside = [
            value for at, value in zip(times, values, strict=True) if edit.get("from_s", 0.0) <= at <= edit["until_s"]
        ]
        handles.append(
            {
                "type": "rect",
                "editable": True,
                "name": f"burst-{number}",
                "x0": local(timezone.localtime(now + timedelta(seconds=edit.get("from_s", 0.0)))),
                "x1": local(timezone.localtime(now + timedelta(seconds=edit["until_s"]))),
                "y0": 0,
                "y1": max(inside, default=0.0),
                "line": {"color": "var(--s4)", "width": 1},
                "fillcolor": "var(--s4)",
                "opacity": 0.16,
                "layer": "below",
            }
        )
    return handles
