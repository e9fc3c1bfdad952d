"""Demand over time, as counted and as forecast, beside the capacity of instances: one truth for every page.

All of it is in the unit of capacity, prompt and output tokens per second of the classes that plans count: interactive and
deferred.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from controlplane.events.models import Event
from controlplane.fleet.models import Deployment
from controlplane.fleet.selectors import cordoned_for_good, schedules
from controlplane.planning import selectors as planning
from controlplane.planning.capacity import EndpointLoad, Place, capabilities, capacity_over_time, endpoint_loads
from controlplane.planning.forecasts import demand, selectors
from controlplane.planning.forecasts.demand import DEFERRED, EVERY_CLASS, TOKENS
from controlplane.planning.forecasts.selectors import Accuracy, ForecastWindow, Series
from controlplane.planning.forecasts.services import HOUR_S, by_hour
from controlplane.planning.models import Forecast, PlanStatus, ProjectedFleet, ScalingPlan
from controlplane.tuning.selectors import tuned

POINTS = 600  # of a line
BY_WINDOW = ("starts", "actual", "expected", "capacity")
RATES = ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
CAPACITY_CHANGES = {PlanStatus.ADVICE, PlanStatus.APPROVED}  # of a plan that would still change something
MADE_WITHIN = timedelta(days=1)  # of a forecast that is in force


@dataclass(frozen=True, slots=True)
class Outlook:
    """Demand, forecast and capacity in tokens per second; *starts*, *actual*, *expected* and *capacity* by window.

    *planned* is the capacity from *now* on: what open plans would change it to, and where there is none, what there is.
    """

    starts: Sequence[datetime]
    window_s: int
    now: datetime
    actual: Series
    expected: Sequence[ForecastWindow | None]
    capacity: Series
    planned: float | None
    projected: Sequence[tuple[datetime, float]]
    """Capacity from each of these moments on, after now, by the projected fleet; empty without one or further hours."""
    shut: Sequence[str]
    """Places that it leaves out to its end, as their cordon has none."""
    scheduled: Sequence[tuple[datetime, float]]
    """Least capacity from each of these moments on, by scheduled minimums; empty without any."""
    forecast: Forecast | None
    """The newest."""
    note: str
    """What a simpler forecaster, which stands in, says of it."""
    accuracy: Accuracy
    """Of past forecasts within the range."""
    unforecast: int
    """Endpoints with demand of which none, or not that of all classes, is in the forecast."""

    def since_known(self) -> "Outlook":
        """Return the outlook without the windows before the first demand or forecast."""
        seen = zip(self.actual, self.expected, strict=True)
        first = next((at for at, known in enumerate(seen) if any(known)), 0)
        return replace(self, **{name: getattr(self, name)[first:] for name in BY_WINDOW})

    @property
    def peak(self) -> ForecastWindow | None:
        """The highest window ahead."""
        return peak_of((window for window in self.expected if window is not None), self.window_s, self.now)

    @property
    def capacity_now(self) -> float | None:
        past = [value for start, value in zip(self.starts, self.capacity, strict=True) if start <= self.now]
        return past[-1] if past else None

    @property
    def stale(self) -> bool:
        """Whether a newer forecast is overdue."""
        return self.forecast is not None and self.now - self.forecast.made_at > 2 * timedelta(
            seconds=tuned().FORECAST_EVERY_S
        )

    @property
    def failure(self) -> Event | None:
        """Why forecasters failed, where a forecast is missing or overdue."""
        return selectors.forecast_failure(self.now) if self.forecast is None or self.stale else None


def see(model: str, region: str, hours: float, now: datetime, hours_ahead: int = 0) -> Outlook:
    """Return the outlook of *model* in *region* over the last *hours* and as far as is forecast; empty names are all.

    For *hours_ahead* there is a forecast by hour beyond those by window that plans follow.
    """
    forecasts = _forecasts(model, region, now)
    newest = forecasts[0] if forecasts else None
    window_s = newest.window_s if newest else tuned().FORECAST_WINDOW_S
    since = now - timedelta(hours=hours)
    expected = summed(selectors.tracks([row for row in forecasts if row.window_s == window_s], since))
    until = expected[-1].start + timedelta(seconds=window_s) if expected else now
    further = by_hour(model, region, now, hours_ahead) if hours_ahead else []
    starts = selectors.grid(since, max(until, now + timedelta(hours=hours_ahead)), window_s)
    end = demand.last_complete(now, window_s)
    over = [start for start in starts if start < end]  # requests of the others are still being counted
    actual = selectors.demand(model, region, TOKENS, over, window_s, EVERY_CLASS)
    counted = {start: value for start, value in zip(over, actual, strict=True) if start >= since}
    by_start = {window.start: window for window in expected}
    hourly = {window.start: window for window in further if window.start + timedelta(seconds=HOUR_S) > until}
    stride = -(-len(starts) // POINTS)
    places = range((len(starts) - 1) % stride, len(starts), stride)
    shown = [starts[at] for at in places]
    loads = endpoint_loads(now)
    # The window that runs now has what there is now.
    moments = [now if start + timedelta(seconds=window_s) > now else start for start in shown if start <= now]
    capacity = capacity_over_time(model, region, moments, loads)
    known = any(value is not None for value in capacity)
    projected = _projected(model, region, now, hours_ahead) if known and hours_ahead else []
    return Outlook(
        starts=shown,
        window_s=window_s,
        now=now,
        actual=[_mean(actual[at : at + stride]) for at in places],
        expected=[by_start.get(start) or hourly.get(demand.window_start(start, HOUR_S)) for start in shown],
        capacity=capacity + [None] * (len(shown) - len(capacity)),
        planned=_planned(model, region, now, loads) if known else None,
        projected=projected,
        shut=cordoned_for_good(region) if projected else [],
        scheduled=_scheduled(model, region, starts[0], starts[-1] + timedelta(seconds=window_s)),
        forecast=newest,
        note=next((row.note for row in forecasts if row.note), ""),
        accuracy=selectors.accuracy(expected, counted),
        unforecast=_unforecast(model, region, forecasts, now),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _forecasts(model: str, region: str, now: datetime) -> list[Forecast]:
    """Return the newest forecasts of each endpoint that is served."""
    in_force = selectors.forecasts_in_force(TOKENS, now - MADE_WITHIN, EVERY_CLASS, model=model, region=region)
    omitted = set() if model else selectors.omitted_from_sums()
    served = {endpoint for endpoint in demand.endpoints() if endpoint[0] not in omitted}
    return [row for key, rows in sorted(in_force.items()) if key in served for row in rows]


def _unforecast(model: str, region: str, forecasts: Sequence[Forecast], now: datetime) -> int:
    omitted = set() if model else selectors.omitted_from_sums()
    known = {(row.model, row.region, row.slo_class) for row in forecasts}
    return len(
        {
            place
            for group in ("", DEFERRED)
            for place, rate in (selectors.demand_now(TOKENS, now, group) or {}).items()
            if rate and model in ("", place[0]) and region in ("", place[1]) and place[0] not in omitted
            if (*place, group) not in known
        }
    )


def summed(tracks: Sequence[Sequence[ForecastWindow]]) -> list[ForecastWindow]:
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


def peak_of(windows: Iterable[ForecastWindow], window_s: int, now: datetime) -> ForecastWindow | None:
    """Return the highest of the *windows* that are not over yet."""
    length = timedelta(seconds=window_s)
    return max((each for each in windows if each.start + length > now), key=lambda each: each.mean, default=None)


def peaks(now: datetime) -> dict[str | Place, ForecastWindow]:
    """Return the highest window ahead of each endpoint and, by its name, of each model over its regions."""
    rows: dict[str | Place, list[Forecast]] = defaultdict(list)
    for place, of_place in selectors.forecasts_in_force(TOKENS, now - MADE_WITHIN, EVERY_CLASS).items():
        rows[place] += of_place
        rows[place[0]] += of_place
    found = {
        key: peak_of(summed([selectors.windows_of(row) for row in own]), own[0].window_s, now)
        for key, own in rows.items()
    }
    return {key: peak for key, peak in found.items() if peak}


def _planned(model: str, region: str, now: datetime, loads: Mapping[Place, EndpointLoad]) -> float:
    """Return the capacity once every open plan is carried out."""
    plans, able = planning.current_plans(), capabilities()
    there: dict[str, float] = defaultdict(float)
    omitted = set() if model else selectors.omitted_from_sums()
    for load in loads.values():
        if model in ("", load.model) and load.model not in omitted and region in ("", load.region):
            there[load.model] += load.capacity_tokens_per_s or 0.0
    return sum(
        sum(number * able.get((name, gpu_type), 0.0) for gpu_type, number in targets.items())
        if (targets := _targets(plans.get(name), region, now))
        else present
        for name, present in there.items()
    )


def _projected(model: str, region: str, now: datetime, hours: int) -> list[tuple[datetime, float]]:
    """Return the capacity of the newest projected fleet from each moment after *now* within *hours*."""
    row, able = ProjectedFleet.objects.filter(made_at__gt=now - MADE_WITHIN).first(), capabilities()
    omitted = set() if model else selectors.omitted_from_sums()
    rates = [
        np.array(counts) * able.get((name, gpu_type), 0.0)
        for name, place, gpu_type, counts in (row.places if row else ())
        if model in ("", name) and region in ("", place) and name not in omitted
    ]
    if row is None or not rates:
        return []
    moments, until = [datetime.fromtimestamp(at_s, UTC) for at_s in row.moments], now + timedelta(hours=hours)
    return [(at, float(value)) for at, value in zip(moments, np.sum(rates, axis=0), strict=True) if now < at < until]


def _scheduled(model: str, region: str, since: datetime, until: datetime) -> list[tuple[datetime, float]]:
    """Return the least capacity by scheduled minimums, from each moment on at which it changes."""
    able, each = capabilities(), dict[Place, float]()
    for name, place, gpu_type in Deployment.objects.filter(active=True).values_list(
        "model__name", "region__name", "gpu_type__name"
    ):
        each.setdefault((name, place), able.get((name, gpu_type), 0.0))
    own = [
        (schedule, each[place])
        for place, schedule in schedules().items()
        if place in each and model in ("", place[0]) and region in ("", place[1])
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
