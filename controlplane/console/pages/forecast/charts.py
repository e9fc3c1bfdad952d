"""Chart of the forecast page: demand against its forecast and capacity."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.utils import timezone

from controlplane.console.charts.spec import AMOUNT, DAYS, Chart, Series, Settings, Values, last
from controlplane.console.formats import quantity
from controlplane.console.pages.forecast.selectors import Outlook
from controlplane.planning.forecasts.demand import DEFERRED, EVERY_CLASS, TOKENS
from controlplane.planning.forecasts.selectors import ForecastWindow
from controlplane.resources.tables import Table

SMALL = 10.0  # tokens a second
ENDS = ("lower_80", "upper_80", "lower_95", "upper_95")
HEADER = (
    "Window from",
    "Actual (tok/s)",
    "Forecast (tok/s)",
    *(f"{end.replace('_', ' ').capitalize()}% (tok/s)" for end in ENDS),
    "Capacity (tok/s)",
)


def _field(expected: Sequence[ForecastWindow | None], name: str) -> Values:
    return [None if window is None else getattr(window, name) for window in expected]


def _runs(series: Values) -> list[slice]:
    """Return the slices in which *series* is known without a gap, from left to right."""
    runs, begin = [], None
    for at, value in enumerate([*series, None]):
        if value is not None and begin is None:
            begin = at
        elif value is None and begin is not None:
            runs.append(slice(begin, at))
            begin = None
    return runs


def _band(times: Sequence[datetime], outlook: Outlook, share: int) -> list[Series]:
    """Return two invisible lines with the ground between them filled, for each run without a gap."""
    lower, upper = (_field(outlook.expected, f"{side}_{share}") for side in ("lower", "upper"))
    edge = {"hoverinfo": "skip"}
    filled = {**edge, "fill": "tonexty", "fillcolor": "var(--s1-soft)"}
    return [
        Series(f"{share}%", end[run], x=times[run], width=0, listed=False, layer=-1, more=more)
        for run in _runs(upper)
        for end, more in ((upper, edge), (lower, filled))
    ]


def demand_and_forecast(outlook: Outlook, empty: str) -> Chart:
    """Return the chart of demand, forecast bands and capacity steps. *empty* is the text for an empty one."""
    outlook = outlook.since_known()
    length = timedelta(seconds=outlook.window_s)
    now = timezone.localtime(outlook.now)
    starts = [timezone.localtime(start) for start in outlook.starts]
    middles = [start + length / 2 for start in starts]
    mean = _field(outlook.expected, "mean")
    known, forecast = last(outlook.actual) is not None, last(mean) is not None
    if known and not any(outlook.actual) and not any(outlook.capacity) and not forecast:
        known, empty = False, f"No request{_of_class(outlook)} was counted in the time shown."
    # Below that, units of measure would say thousandths of a token: "800m".
    values = (*outlook.actual, *mean, *outlook.capacity, outlook.planned, *(value for _, value in outlook.scheduled))
    small = max(filter(None, values), default=0.0) < SMALL
    digits = ".3~g" if small else ".3s"
    series: list[Series] = []
    if known:
        series.append(Series("actual", outlook.actual, ("text", "solid"), width=2, layer=1))
    if forecast:
        bounds = list(zip(*(_field(outlook.expected, end) for end in ENDS[:2]), strict=True))
        hover = f"%{{y:{digits}}}, 80%: %{{customdata[0]:{digits}}} to %{{customdata[1]:{digits}}}"
        more = {"name": "forecast", "customdata": bounds, "hovertemplate": hover}
        # A line of the legend for each band: the inner ground lies over the outer one and is darker.
        series += [*_band(middles, outlook, 95), *_band(middles, outlook, 80)]
        series.append(Series("forecast, 80 and 95%", mean, ("s1", "dash"), width=2, more=more))
    if any(outlook.capacity) and series:
        past = [(start, value) for start, value in zip(starts, outlook.capacity, strict=True) if value is not None]
        past.append((now, past[-1][1]))
        x, y = zip(*past, strict=True)
        steps: Settings = {"name": "capacity", "line": {"shape": "hv"}}
        series.append(Series("capacity", y, ("s2", "solid"), x, layer=2, more=steps))
    if outlook.planned and series:
        series.append(Series("as planned", [outlook.planned] * 2, ("s2", "dot"), [now, starts[-1] + length], layer=2))
    if outlook.scheduled:
        x, y = zip(*((timezone.localtime(at), value) for at, value in outlook.scheduled), strict=True)
        hover = {"line": {"shape": "hv"}, "hovertemplate": f"%{{y:{digits}}}"}
        series.append(Series("scheduled minimum", y, ("s3", "dash"), x, layer=2, more=hover))
    bands = (_field(outlook.expected, end) for end in ENDS)
    columns = [starts, outlook.actual, mean, *bands, outlook.capacity]
    return Chart(
        key="forecast",
        title="Demand, forecast and capacity" if outlook.capacity_now is not None else "Demand and forecast",
        caption=f"{unit_title(outlook.unit)}{_of_class(outlook)} per second, in windows of {_length(outlook.window_s)}",
        sentence=_outlook_sentence(outlook),
        x=middles,
        across=DAYS.but(nticks=8),
        up=AMOUNT.but(tickformat="~g" if small else "~s", hoverformat=digits, nticks=7),
        series=series,
        now=now,
        table=Table(HEADER, [list(line) for line in zip(*columns, strict=True)]),
        empty="" if series else empty,
        size="large",
    )


def unit_title(unit: str) -> str:
    """Return the title of a quantity, or of both together, to begin a sentence."""
    return "Prompt and output tokens" if unit == TOKENS else f"{unit.capitalize()} tokens"


def _of_class(outlook: Outlook) -> str:
    if outlook.slo_class == EVERY_CLASS:
        return " of interactive and deferred classes"
    return f" of the {'deferred' if outlook.slo_class == DEFERRED else 'interactive'} classes"


def _length(seconds: int) -> str:
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _outlook_sentence(outlook: Outlook) -> str:
    """Describe the chart for screen readers."""
    parts = []
    newest = last(outlook.actual)
    if newest is not None:
        parts.append(f"the newest full window had {quantity(newest)} {unit_title(outlook.unit).lower()} per second")
    if peak := outlook.peak:
        at = timezone.localtime(peak.start).strftime("%H:%M")
        parts.append(
            f"the forecast peaks at {quantity(peak.mean)} at {at}, "
            f"with 80% between {quantity(peak.lower_80)} and {quantity(peak.upper_80)}"
        )
    if outlook.capacity_now:
        parts.append(f"ready instances can do {quantity(outlook.capacity_now)}")
    return f"Demand{_of_class(outlook)}: {'; '.join(parts) or 'nothing is known yet'}."
