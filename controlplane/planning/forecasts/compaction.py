"""Compaction of past forecasts: those of one series made within an hour become one row.

With a forecast per minute, ten windows ahead, each window is forecast ten times. Until it starts, every forecast of it
matters: plans use the newest. For past windows only the last forecast before each is used, drawn and judged by the Forecast
page. A compacted row keeps just that, under the key and time of its last forecast, so that the page is unchanged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Count
from django.db.models.functions import TruncHour

from controlplane.planning.forecasts.selectors import forecasts_of, latest_forecast, windows_of
from controlplane.planning.models import Forecast
from controlplane.tuning.selectors import tuned

HOUR = timedelta(hours=1)
SERIES = ("model", "region", "quantity", "slo_class")
BANDS = ("mean", "lower_80", "upper_80", "lower_95", "upper_95")


@dataclass(frozen=True, slots=True)
class Hour:
    """A series and the start of an hour with several forecasts of it."""

    series: tuple[str, str, str, str]
    begin: datetime


def whole_for() -> timedelta:
    """Return how long forecasts stay uncompacted: at least two rounds or windows."""
    spare_s = 2 * max(tuned().FORECAST_EVERY_S, tuned().FORECAST_WINDOW_S)
    return max(timedelta(hours=tuned().FORECAST_KEEP_HOURS), timedelta(seconds=spare_s))


def due(now: datetime) -> list[Hour]:
    """Return the hours to be compacted, oldest first, including those whose gaps prevent it."""
    until = (now - whole_for()).replace(minute=0, second=0, microsecond=0)
    several = (
        Forecast.objects.filter(made_at__lt=until)
        .order_by()
        .annotate(hour=TruncHour("made_at"))
        .values(*SERIES, "hour")
        .annotate(forecasts=Count("pk"))
        .filter(forecasts__gt=1)
        .order_by("hour")
    )
    return [
        Hour((model, region, quantity, of), hour)
        for model, region, quantity, of, hour in several.values_list(*SERIES, "hour")
    ]


@transaction.atomic
def fold(hour: Hour) -> int:
    """Compact the forecasts of *hour*; return how many rows were removed. The newest of a series is left unchanged."""
    newest = latest_forecast(*hour.series)
    rows = forecasts_of(*hour.series).filter(made_at__gte=hour.begin, made_at__lt=hour.begin + HOUR).order_by("pk")
    return sum(_put_together(run) for run in _runs([row for row in rows if row != newest]))


def _runs(rows: Sequence[Forecast]) -> Iterator[list[Forecast]]:
    """Yield runs of consecutive *rows* by one forecaster whose windows follow each other without a gap."""
    run: list[Forecast] = []
    for row in rows:
        if run and not _follows(row, run[-1]):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _follows(row: Forecast, last: Forecast) -> bool:
    if (row.forecaster, row.window_s) != (last.forecaster, last.window_s):
        return False
    ends = last.start_at + timedelta(seconds=last.window_s * len(windows_of(last)))
    return bool(windows_of(row)) and last.start_at <= row.start_at <= ends


def _put_together(run: Sequence[Forecast]) -> int:
    """Write the last forecast of each window of *run* into its last row, and delete the others."""
    *others, row = run
    if not others:
        return 0
    latest = {window.start: window for each in run for window in windows_of(each)}
    windows = [latest[start] for start in sorted(latest)]
    row.start_at = windows[0].start
    for name in BANDS:
        setattr(row, name, [getattr(window, name) for window in windows])
    row.note = f"{len(run)} forecasts in one: the last forecast of each window. {row.note}".strip()[:255]
    row.save(update_fields=["start_at", "note", *BANDS])
    gone, _ = Forecast.objects.filter(pk__in=[each.pk for each in others]).delete()
    return gone
