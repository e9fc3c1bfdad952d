"""The chart of demand, its forecast with bands, and capacity: the same on every page, of one unit and the same classes."""

from bisect import bisect
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import AMOUNT, DAYS, Chart, Series, Settings, Values, last
from controlplane.console.formats import quantity
from controlplane.planning.forecasts.selectors import ForecastWindow
from controlplane.planning.outlook import Outlook, see
from controlplane.resources.tables import Table
from controlplane.tuning.selectors import tuned

KEY = "demand"
BACK = 3  # times as far as forecasts look ahead
EVERY_S = 10
SMALL = 10.0  # tokens a second
NO_DEMAND = "No request in the time shown. The first one that ends makes the first minute of demand."
ENDS = ("lower_80", "upper_80", "lower_95", "upper_95")
BANDS = [f"{end.replace('_', ' ').capitalize()}% (tok/s)" for end in ENDS]
HEADER = ("Window from", "Actual (tok/s)", "Forecast (tok/s)", *BANDS, "Capacity (tok/s)")


def demand_and_capacity(model: str, now: datetime, size: str = "medium") -> Chart:
    """Return the chart of *model*, or of all (empty), built once in ten seconds: three times as far back as forecasts go."""
    hours = BACK * tuned().FORECAST_WINDOWS * tuned().FORECAST_WINDOW_S / 3600
    key = (KEY, model, size, hours, int(now.timestamp()) // EVERY_S)
    return once(key, lambda: demand_chart(see(model, "", hours, now), model, "", size))


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


def demand_chart(outlook: Outlook, model: str, region: str, size: str) -> Chart:
    """Draw *outlook* of *model* in *region*: demand, forecast bands, capacity, and its least by the clock."""
    outlook = outlook.since_known()
    length = timedelta(seconds=outlook.window_s)
    now = timezone.localtime(outlook.now)
    starts = [timezone.localtime(start) for start in outlook.starts]
    middles = [start + length / 2 for start in starts]
    mean = _field(outlook.expected, "mean")
    forecast = last(mean) is not None
    known = last(outlook.actual) is not None and (any(outlook.actual) or any(outlook.capacity) or forecast)
    # Below that, units of measure would say thousandths of a token: "800m".
    values = (*outlook.actual, *mean, *outlook.capacity, outlook.planned, *(value for _, value in outlook.scheduled))
    small = max(filter(None, values), default=0.0) < SMALL
    digits = ".3~g" if small else ".3s"
    series: list[Series] = []
    if known:
        series.append(Series("demand", outlook.actual, ("text", "solid"), width=2, layer=1))
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
        ahead = [(now, outlook.planned), *((timezone.localtime(at), value) for at, value in outlook.projected)]
        x, y = zip(*ahead, (starts[-1] + length, ahead[-1][1]), strict=True)
        name = "capacity, projected" if outlook.projected else "capacity as planned"
        series.append(Series(name, y, ("s2", "dot"), x, layer=2, more={"line": {"shape": "hv"}}))
    if outlook.scheduled:
        x, y = zip(*((timezone.localtime(at), value) for at, value in outlook.scheduled), strict=True)
        steps = {"line": {"shape": "hv"}, "hovertemplate": f"%{{y:{digits}}}"}
        series.append(Series("scheduled minimum", y, ("s3", "dash"), x, layer=2, more=steps))
    columns = [starts, outlook.actual, mean, *(_field(outlook.expected, end) for end in ENDS), outlook.capacity]
    if outlook.projected:
        moments = [at for at, _ in outlook.projected]
        past_of = [bisect(moments, start) for start in outlook.starts]
        columns.append([outlook.projected[past - 1][1] if past else None for past in past_of])
    header = HEADER if not outlook.projected else (*HEADER, "Capacity, projected (tok/s)")
    minutes = f"{outlook.window_s // 60} min" if outlook.window_s % 60 == 0 else f"{outlook.window_s} s"
    place = region or ("all regions" if model else "all regions and models that generate")
    short = f"; {unforecast_words(outlook)}" if outlook.unforecast and forecast else ""
    if outlook.shut:
        short += f"; left out to the end, as cordoned without one: {', '.join(outlook.shut)}"
    return Chart(
        key=KEY,
        title="Demand, forecast and capacity",
        caption=f"Prompt and output tokens per second of interactive and deferred classes, {place}, by {minutes}{short}",
        sentence=_sentence(outlook),
        x=middles,
        across=DAYS.but(nticks=8),
        up=AMOUNT.but(tickformat="~g" if small else "~s", hoverformat=digits, nticks=7),
        series=series,
        now=now,
        table=Table(header, [list(line) for line in zip(*columns, strict=True)]),
        empty="" if series else NO_DEMAND,
        size=size,
    )


def unforecast_words(outlook: Outlook) -> str:
    """Say that the forecast is short of demand that has none yet."""
    count = outlook.unforecast
    return f"the forecast is short of {count} endpoint{'s' * (count > 1)} whose demand, or a part of it, has none yet"


def _sentence(outlook: Outlook) -> str:
    """Describe the chart for screen readers."""
    parts = []
    newest = last(outlook.actual)
    if newest is not None:
        parts.append(f"the newest full window had {quantity(newest)} prompt and output tokens per second")
    if peak := outlook.peak:
        at = timezone.localtime(peak.start).strftime("%H:%M")
        parts.append(
            f"the forecast peaks at {quantity(peak.mean)} at {at}, "
            f"with 80% between {quantity(peak.lower_80)} and {quantity(peak.upper_80)}"
        )
    if outlook.capacity_now:
        parts.append(f"ready instances can do {quantity(outlook.capacity_now)}")
    return f"Demand: {'; '.join(parts) or 'nothing is known yet'}."
