"""The forecast page's data: one series, and all series."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.console.charts.spec import last
from controlplane.fleet.models import Deployment
from controlplane.fleet.selectors import schedules
from controlplane.planning import selectors as planning
from controlplane.planning.capacity import EndpointLoad, Place, capabilities, capacity_over_time, endpoint_loads
from controlplane.planning.forecasts import demand, selectors
from controlplane.planning.forecasts.selectors import Accuracy, ForecastWindow, NotServedHere, Series
from controlplane.planning.forecasts.services import HOUR_S, by_hour
from controlplane.planning.models import Forecast, PlanStatus, ScalingPlan
from controlplane.planning.titles import title_of

RANGES_H = (1, 6, 24, 72)
USUAL_RANGE_H = 6
POINTS = 600  # of a line
DEMAND_WINDOW_S = 600  # while there is no forecast to take the window from
BY_WINDOW = ("starts", "actual", "expected", "capacity")
RATES = ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
CAPACITY_CHANGES = {PlanStatus.ADVICE, PlanStatus.APPROVED}  # of a plan that would still change something


@dataclass(frozen=True, slots=True)
class Outlook:
    """One series over time: counted and expected demand, and the capacity of instances, in tokens per second.

    *starts*, *actual*, *expected* and *capacity* have one element a window. *planned* is the capacity from *now* on: what
    open plans would change it to, and where there is none, what there is. Capacity is counted in prompt and output tokens
    together and serves all classes: a single quantity or class has none.
    """

    starts: Sequence[datetime]
    window_s: int
    now: datetime
    actual: Series
    expected: Sequence[ForecastWindow | None]
    capacity: Series
    planned: float | None
    unit: str  # "prompt", "output", or both together: "tokens"
    slo_class: str = ""  # as in `OutlookFilter`
    scheduled: Sequence[tuple[datetime, float]] = ()
    """Least capacity from each of these moments on, by scheduled minimums; empty without any."""

    def since_known(self) -> "Outlook":
        """Return the outlook without the windows before the first known one."""
        seen = zip(self.actual, self.expected, self.capacity, strict=True)
        first = next((at for at, known in enumerate(seen) if any(known)), 0)
        return replace(self, **{name: getattr(self, name)[first:] for name in BY_WINDOW})

    @property
    def ahead(self) -> list[ForecastWindow]:
        """Return the windows that are not over yet."""
        length = timedelta(seconds=self.window_s)
        return [window for window in self.expected if window is not None and window.start + length > self.now]

    @property
    def peak(self) -> ForecastWindow | None:
        return max(self.ahead, key=lambda window: window.mean, default=None)

    @property
    def capacity_now(self) -> float | None:
        past = [value for start, value in zip(self.starts, self.capacity, strict=True) if start <= self.now]
        return past[-1] if past else None


@dataclass(frozen=True, slots=True)
class OutlookFilter:
    """Series and time range of a page."""

    model: str  # empty: all models together
    region: str  # empty: all regions together
    quantity: str
    hours: float
    slo_class: str = ""  # empty: all interactive classes together; `DEFERRED`, or `EVERY_CLASS` for both
    days_ahead: int = 0  # by a forecast by hour, where those that are stored end

    @property
    def whole(self) -> bool:
        """Return whether it is in the unit of capacity, of all classes that plans count."""
        return self.quantity == demand.TOKENS and self.slo_class == demand.EVERY_CLASS


@dataclass(frozen=True, slots=True)
class OutlookResult:
    """One series with its newest forecast, and the accuracy of forecasts within the range."""

    outlook: Outlook
    forecast: Forecast | None
    accuracy: Accuracy


def see(asked: OutlookFilter, now: datetime) -> OutlookResult:
    forecasts = _forecasts(asked, now)
    newest = forecasts[0] if forecasts else None
    window_s = newest.window_s if newest else DEMAND_WINDOW_S
    since = now - timedelta(hours=asked.hours)
    rows = [row for row in forecasts if row.window_s == window_s]
    expected = _summed(selectors.tracks(rows, since))
    until = expected[-1].start + timedelta(seconds=window_s) if expected else now
    further = by_hour(asked.model, asked.region, now, 24 * asked.days_ahead) if asked.days_ahead else []
    starts = selectors.grid(since, max(until, now + timedelta(days=asked.days_ahead)), window_s)
    actual = _until_now(starts, window_s, now, asked)
    by_start = {window.start: window for window in expected}
    hours = {window.start: window for window in further}
    counted = {start: value for start, value in zip(starts, actual, strict=True) if start >= since}
    judged = selectors.accuracy(expected, counted)
    stride = -(-len(starts) // POINTS)
    shown = slice((len(starts) - 1) % stride, None, stride)
    loads = endpoint_loads(now) if asked.whole else {}
    capacity = _capacity(starts[shown], window_s, now, asked, loads)
    outlook = Outlook(
        starts=starts[shown],
        window_s=window_s,
        now=now,
        actual=actual[shown],
        expected=[
            by_start.get(start) or (hours.get(demand.window_start(start, HOUR_S)) if start >= until else None)
            for start in starts[shown]
        ],
        capacity=capacity,
        planned=_planned(asked, now, loads) if last(capacity) is not None else None,
        unit=asked.quantity,
        slo_class=asked.slo_class,
        scheduled=_scheduled(asked, starts[0], starts[-1] + timedelta(seconds=window_s))
        if asked.whole and starts
        else (),
    )
    return OutlookResult(outlook, newest, judged)


def _forecasts(asked: OutlookFilter, now: datetime) -> list[Forecast]:
    """Return the newest forecast of the series, or of each endpoint if several are summed."""
    if asked.model and asked.region and asked.quantity != demand.TOKENS and asked.slo_class != demand.EVERY_CLASS:
        newest = selectors.latest_forecast(asked.model, asked.region, asked.quantity, asked.slo_class)
        return [newest] if newest else []
    since = now - timedelta(days=1)
    everywhere = selectors.forecasts_in_force(
        asked.quantity, since, asked.slo_class, model=asked.model, region=asked.region
    )
    omitted = set() if asked.model else selectors.omitted_from_sums()
    served = {endpoint for endpoint in demand.endpoints() if endpoint[0] not in omitted}
    return [row for key, rows in sorted(everywhere.items()) if key in served for row in rows]


def _summed(tracks: Sequence[Sequence[ForecastWindow]]) -> list[ForecastWindow]:
    """Return sums of the windows that all *tracks* have; ends of bands too: the widest band of the sum."""
    by_start: dict[datetime, list[ForecastWindow]] = defaultdict(list)
    for track in tracks:
        for window in track:
            by_start[window.start].append(window)
    return [
        ForecastWindow(start, *(sum(getattr(window, name) for window in windows) for name in RATES))
        for start, windows in sorted(by_start.items())
        if len(windows) == len(tracks)
    ]


def _until_now(starts: Sequence[datetime], window_s: int, now: datetime, asked: OutlookFilter) -> Series:
    """Return the demand of complete windows; None for the others, whose requests are still being counted."""
    end = demand.last_complete(now, window_s)
    over = [start for start in starts if start < end]
    known = selectors.demand(asked.model, asked.region, asked.quantity, over, window_s, asked.slo_class)
    return known + [None] * (len(starts) - len(over))


def _capacity(
    starts: Sequence[datetime], window_s: int, now: datetime, asked: OutlookFilter, loads: Mapping[Place, EndpointLoad]
) -> Series:
    """Return the capacity at the start of each window up to *now*."""
    if not asked.whole:
        return [None] * len(starts)
    # The window that runs now has what there is now.
    moments = [now if start + timedelta(seconds=window_s) > now else start for start in starts if start <= now]
    known = capacity_over_time(asked.model, asked.region, moments, loads)
    return known + [None] * (len(starts) - len(known))


def _planned(asked: OutlookFilter, now: datetime, loads: Mapping[Place, EndpointLoad]) -> float:
    """Return the capacity once every open plan is carried out."""
    plans, able = planning.current_plans(), capabilities()
    there: dict[str, float] = defaultdict(float)
    omitted = set() if asked.model else selectors.omitted_from_sums()
    for load in loads.values():
        if asked.model in ("", load.model) and load.model not in omitted and asked.region in ("", load.region):
            there[load.model] += load.capacity_tokens_per_s or 0.0
    return sum(
        sum(number * able.get((model, gpu_type), 0.0) for gpu_type, number in targets.items())
        if (targets := _targets(plans.get(model), asked.region, now))
        else present
        for model, present in there.items()
    )


def _scheduled(asked: OutlookFilter, since: datetime, until: datetime) -> list[tuple[datetime, float]]:
    """Return the least capacity by scheduled minimums, from each moment on at which it changes."""
    able, each = capabilities(), dict[Place, float]()
    for model, region, gpu_type in Deployment.objects.filter(active=True).values_list(
        "model__name", "region__name", "gpu_type__name"
    ):
        each.setdefault((model, region), able.get((model, gpu_type), 0.0))
    own = [
        (schedule, each[place])
        for place, schedule in schedules().items()
        if place in each and asked.model in ("", place[0]) and asked.region in ("", place[1])
    ]
    begin_s, end_s = since.timestamp(), until.timestamp()
    moments = sorted(
        {at for schedule, _ in own for at, _ in schedule.steps(begin_s, end_s)} | ({end_s} if own else set())
    )
    return [
        (datetime.fromtimestamp(at, UTC), sum(schedule.minimum(at) * able_each for schedule, able_each in own))
        for at in moments
    ]


def _targets(plan: ScalingPlan | None, region: str, now: datetime) -> dict[str, int]:
    """Return planned instances by GPU type in the region, or in all; empty for a plan that no longer changes anything."""
    targets: dict[str, int] = defaultdict(int)
    if plan is not None and plan.status in CAPACITY_CHANGES and plan.valid_until > now:
        for target in plan.targets:
            if region in ("", target["region"]):
                targets[target["gpu_type"]] += target["target"]
    return targets


# All series


def series_rows(
    quantity: str, regions: dict[str, str], now: datetime, slo_class: str = demand.EVERY_CLASS
) -> list[dict[str, Any]]:
    """Yield one row an endpoint: demand now, expected demand, and its share of the capacity, if *quantity* and
    *slo_class* are those in which capacity is counted.
    """
    now_by_series = selectors.demand_now(quantity, now, slo_class)
    not_here = selectors.not_served_here(quantity, now, slo_class=slo_class)
    forecasts = selectors.forecasts_in_force(quantity, now - timedelta(days=1), slo_class)
    loads = endpoint_loads(now)
    whole = OutlookFilter("", "", quantity, 0.0, slo_class).whole
    rows = []
    for model, region in sorted({*loads, *forecasts}):
        load = loads.get((model, region))
        able = load.capacity_tokens_per_s or None if load and whole else None
        of_series = forecasts.get((model, region), [])
        expected = _expected(of_series, now)
        peak, newest = expected["peak"], of_series[0] if of_series else None
        rows.append(
            {
                "model": model,
                "region": region,
                "region_title": regions.get(region, region),
                "ready": load.ready if load else 0,
                "demand": None if now_by_series is None else now_by_series.get((model, region), 0.0),
                **asdict(not_here.get((model, region), NotServedHere())),
                **expected,
                "capacity": able,
                "load": load.load if load and whole else None,
                "use": peak / able if peak is not None and able else None,
                "forecaster": title_of(newest.forecaster) if newest else "",
                "made_at": newest.made_at if newest else None,
                "note": newest.note if newest else "",
            }
        )
    return rows


def _expected(forecasts: Sequence[Forecast], now: datetime) -> dict[str, Any]:
    """Return the next window, and the highest later one with its start, of the sum of *forecasts*; None without any."""
    ahead = _summed([_ahead(row, now) for row in forecasts]) if forecasts else []
    peak = max(ahead, key=lambda window: window.mean, default=None)
    return {
        "next": ahead[0].mean if ahead else None,
        "peak": peak.mean if peak else None,
        "peak_at": peak.start if peak else None,
    }


def _ahead(forecast: Forecast, now: datetime) -> list[ForecastWindow]:
    length = timedelta(seconds=forecast.window_s)
    return [window for window in selectors.windows_of(forecast) if window.start + length > now]
