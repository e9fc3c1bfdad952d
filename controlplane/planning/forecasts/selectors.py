"""Reads of demand and forecasts for pages. Writes are in `services.py`."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import add

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.expressions import Combinable

from controlplane.events.models import Event, Severity
from controlplane.fleet.models import Model, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.forecasts.demand import (
    ASKED,
    COLUMNS,
    DEFERRED,
    EVERY_CLASS,
    LAG,
    MINUTE_S,
    TOKENS,
    asked_from,
    other_classes,
    window_start,
)
from controlplane.planning.models import Forecast, Quantity
from controlplane.rows import narrowed, newest_of_each
from controlplane.tuning.selectors import tuned
from scheduling.model_task import POOLING_TASKS

FORECAST_FAILURES = ("planning.forecasts_failed", "planning.forecaster_failed")
FAILURE_SAID_AGAIN = timedelta(minutes=15)
RECENT = timedelta(minutes=10)

Series = list[float | None]


# Demand


def grid(since: datetime, until: datetime, window_s: int) -> list[datetime]:
    """Return the starts of windows from *since* to *until*, at whole multiples of the window since the epoch."""
    first = window_start(since, window_s)
    count = math.ceil((until - first).total_seconds() / window_s)
    return [first + timedelta(seconds=number * window_s) for number in range(count)]


def demand(
    model: str, region: str, quantity: str, starts: Sequence[datetime], window_s: int, slo_class: str = ""
) -> Series:
    """Return tokens per second of one series in each window starting at *starts* (evenly spaced, oldest first).

    Without a model, of all models that `omitted_from_sums` does not name; without a region, of all regions. None is a gap,
    as in `demand.read`, which reads every series. *slo_class* filters: empty is all interactive classes, or `DEFERRED` or
    `EVERY_CLASS`; *quantity* may be `TOKENS`.
    """
    if not starts:
        return []
    end = starts[-1] + timedelta(seconds=window_s)
    of_models = Q(model=model) if model else ~Q(model__in=omitted_from_sums())
    of_series = of_models & (asked_from(region) if region else Q()) & _of(slo_class)
    rows = (
        MinuteRow.objects.filter(minute__gte=starts[0], minute__lt=end)
        .order_by()
        .values_list("minute")
        .annotate(tokens=Sum(_asked(quantity), filter=of_series))
    )
    begin_s = starts[0].timestamp()
    tokens, minutes = [0] * len(starts), [0] * len(starts)
    for minute, value in rows:
        at = int((minute.timestamp() - begin_s) // window_s)
        tokens[at] += value or 0
        minutes[at] += 1
    return [total / (MINUTE_S * known) if known else None for total, known in zip(tokens, minutes, strict=True)]


def _asked(quantity: str) -> Combinable:
    return ASKED[Quantity.PROMPT] + ASKED[Quantity.OUTPUT] if quantity == TOKENS else ASKED[Quantity(quantity)]


def quantities(quantity: str) -> list[str]:
    """Return the quantities that *quantity* is the sum of."""
    return list(Quantity.values) if quantity == TOKENS else [quantity]


def _of(slo_class: str) -> Q:
    if slo_class == EVERY_CLASS:
        return ~Q(slo_class__in=other_classes(SloKind.OPPORTUNISTIC))
    if slo_class == DEFERRED:
        return Q(slo_class__in=other_classes(SloKind.NON_INTERACTIVE))
    return Q(slo_class=slo_class) if slo_class else ~Q(slo_class__in=other_classes())


def omitted_from_sums() -> set[str]:
    """Return models that sums over the fleet leave out: those without output, where others generate.

    An embedding takes a hundredth of what as many tokens of chat take: in one sum, idle embedding instances would hide
    that those for chat are full.
    """
    tasks = dict(Model.objects.filter(active=True).values_list("name", "task"))
    omitted = {name for name, task in tasks.items() if task in POOLING_TASKS}
    return omitted if len(omitted) < len(tasks) else set()


def _recent(now: datetime, slo_class: str) -> tuple[QuerySet[MinuteRow], int]:
    """Return the counted rows of *slo_class* in the last whole ten minutes, and the seconds of those with any count."""
    until = window_start(now - LAG, MINUTE_S)
    rows = MinuteRow.objects.filter(minute__gte=until - RECENT, minute__lt=until).order_by()
    return rows.filter(_of(slo_class)), MINUTE_S * rows.values("minute").distinct().count()


def demand_now(quantity: str, now: datetime, slo_class: str = "") -> dict[tuple[str, str], float] | None:
    """Return tokens per second by (model, region) over the last ten minutes with counts; None without any.

    Series without requests are left out. *slo_class* filters: empty is all interactive
    classes, or `DEFERRED` or `EVERY_CLASS`; *quantity* may be `TOKENS`.
    """
    rows, known_s = _recent(now, slo_class)
    sums = rows.annotate(own=OWN_REGION).values_list("model", "own").annotate(tokens=Sum(_asked(quantity)))
    return {(model, region): tokens / known_s for model, region, tokens in sums} if known_s else None


@dataclass(frozen=True, slots=True)
class NotServedHere:
    """Demand of a series that was not served, or served by another region, in tokens per second."""

    unserved: float = 0.0
    elsewhere: float = 0.0


def not_served_here(quantity: str, now: datetime, slo_class: str = "") -> dict[tuple[str, str], NotServedHere]:
    """Return demand not served here by (model, region), over the minutes and classes of `demand_now`; omits zeros."""
    rows, known_s = _recent(now, slo_class)
    columns = [COLUMNS[Quantity(each)] for each in quantities(quantity)]
    unserved_tokens = reduce(add, (F(f"unserved_{column}") for column in columns))
    served_tokens = reduce(add, (F(column) for column in columns))
    sums = (
        rows.annotate(own=OWN_REGION)
        .values_list("model", "own")
        .annotate(not_served=Sum(unserved_tokens), spilled=Sum(served_tokens, filter=Q(own_region__gt=""), default=0))
    )
    return {
        (model, region): NotServedHere(unserved / known_s, spilled / known_s)
        for model, region, unserved, spilled in sums
        if unserved or spilled
    }


# Forecasts


@dataclass(frozen=True, slots=True)
class ForecastWindow:
    """Expected tokens per second of one window, by the last forecast made before its end."""

    start: datetime
    mean: float
    lower_80: float
    upper_80: float
    lower_95: float
    upper_95: float


def windows_of(forecast: Forecast) -> list[ForecastWindow]:
    """Return the windows of one forecast, oldest first; a list shorter than the mean ends them."""
    columns = zip(
        forecast.mean, forecast.lower_80, forecast.upper_80, forecast.lower_95, forecast.upper_95, strict=False
    )
    # A start between two whole windows belongs to the one it lies in, so that forecasts of one series line up.
    first = int(forecast.start_at.timestamp()) // forecast.window_s
    return [
        ForecastWindow(datetime.fromtimestamp((first + at) * forecast.window_s, UTC), *values)
        for at, values in enumerate(columns)
    ]


def forecast_failure(now: datetime) -> Event | None:
    """Return the newest event of the last minutes on a series without a forecast; None if none failed.

    The same failure is an event at most once in a quarter of an hour.
    """
    since = now - FAILURE_SAID_AGAIN - timedelta(seconds=2 * tuned().FORECAST_EVERY_S)
    failed = Event.objects.filter(kind__in=FORECAST_FAILURES, severity=Severity.CRITICAL, at__gt=since)
    return failed.order_by("-pk").first()


def tracks(newest: Sequence[Forecast], since: datetime) -> list[list[ForecastWindow]]:
    """Return past (since *since*) and future windows, oldest first, of each series of *newest*, whose windows have one
    length.

    A past window has the last forecast before it, the one used by plans. Forecasts with windows of another length are
    left out.
    """
    if not newest:
        return []
    reach_s = max(row.window_s * (len(row.mean) + 1) for row in newest)
    rows = Forecast.objects.filter(
        made_at__gte=since - timedelta(seconds=reach_s), window_s=newest[0].window_s,
        pk__lte=max(row.pk for row in newest), model__in={row.model for row in newest},
        region__in={row.region for row in newest}, quantity__in={row.quantity for row in newest},
        slo_class__in={row.slo_class for row in newest},
    )  # fmt: skip
    by_series: dict[tuple[str, ...], dict[datetime, ForecastWindow]] = {_series(row): {} for row in newest}
    for row in rows.order_by("pk"):
        if (by_start := by_series.get(_series(row))) is not None:
            by_start.update((window.start, window) for window in windows_of(row))
    return [
        [by_start[start] for start in sorted(by_start) if start >= since]
        for by_start in (by_series[_series(row)] for row in newest)
    ]


def _series(row: Forecast) -> tuple[str, ...]:
    return row.model, row.region, row.quantity, row.slo_class


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of one series' forecasts on past windows, as ratios; None without any window to judge."""

    windows: int
    error: float | None
    """Mean absolute error as a share of each rate; with an empty window, the sum of errors as a share of all demand."""
    coverage_80: float | None
    coverage_95: float | None


def accuracy(expected: Iterable[ForecastWindow], actual: dict[datetime, float | None]) -> Accuracy:
    """Judge *expected* against *actual* tokens per second by window start."""
    came, errors, within_80, within_95 = [], [], [], []
    for window in expected:
        value = actual.get(window.start)
        if value is None:
            continue
        within_80.append(window.lower_80 <= value <= window.upper_80)
        within_95.append(window.lower_95 <= value <= window.upper_95)
        came.append(value)
        errors.append(abs(window.mean - value))
    if all(came):
        error = _mean([error / value for error, value in zip(errors, came, strict=True)])
    else:
        error = sum(errors) / sum(came) if any(came) else None
    return Accuracy(len(came), error, _mean(within_80), _mean(within_95))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def latest_forecasts(quantity: str, since: datetime) -> dict[tuple[str, str], Forecast]:
    """Return the newest forecast of each (model, region), all interactive classes together, made after *since*."""
    rows = Forecast.objects.filter(quantity=quantity, slo_class="", made_at__gte=since)
    return {(row.model, row.region): row for row in newest_of_each(rows, "model", "region")}


def forecasts_in_force(
    quantity: str, since: datetime, slo_class: str = "", *, model: str = "", region: str = ""
) -> dict[tuple[str, str], list[Forecast]]:
    """Return the newest forecasts after *since* that add up to *quantity* and *slo_class* by (model, region), interactive
    first.

    Deferred classes are forecast while they have demand: a forecast older than its endpoint's newest by more than two
    rounds is of demand that has ended.
    """
    every = Q(slo_class__in=("", DEFERRED))
    of_class = every if slo_class == EVERY_CLASS else Q(slo_class=slo_class)
    made = Forecast.objects.filter(of_class, quantity__in=quantities(quantity), made_at__gte=since)
    newest = newest_of_each(narrowed(made, model=model, region=region), "model", "region", "quantity", "slo_class")
    by_endpoint: dict[tuple[str, str], list[Forecast]] = defaultdict(list)
    for row in newest.order_by("slo_class", "pk"):
        by_endpoint[row.model, row.region].append(row)
    stale = timedelta(seconds=2 * tuned().FORECAST_EVERY_S)
    in_force = {}
    for place, rows in by_endpoint.items():
        oldest = max(row.made_at for row in rows) - stale
        present = [row for row in rows if not row.slo_class or row.made_at >= oldest or len(rows) == 1]
        if {row.quantity for row in present} == set(quantities(quantity)):  # half of a sum is no forecast
            in_force[place] = present
    return in_force
