"""Forecasts are folded after their time: fewer rows, and the page shows and judges what it did before."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.planning.forecasts import compaction, selectors
from controlplane.planning.models import Forecast
from workers.tasks import housekeeping
from workers.tasks import planning as tasks

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
NOW = datetime(2026, 3, 2, 12, 20, tzinfo=UTC)
AHEAD = 10
SERIES = ("llama", "us-east", "output", "")


@pytest.fixture(autouse=True)
def pace(settings, monkeypatch):
    settings.FORECAST_WINDOW_S, settings.FORECAST_EVERY_S = 60, 60.0
    settings.FORECAST_KEEP_HOURS, settings.PLANNING_KEEP_DAYS = 2.0, 2.0
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    monkeypatch.setattr(tasks.timezone, "now", lambda: NOW)


def forecast(minutes_ago, slo_class="", forecaster="blend", window_s=60, **values):
    """Return one forecast per minute, each with its own numbers."""
    made_at = NOW - timedelta(minutes=minutes_ago)
    bands = {
        name: [1000.0 * minutes_ago + 10 * at + number for at in range(AHEAD)]
        for number, name in enumerate(compaction.BANDS)
    }
    start = made_at.replace(second=0)
    names = dict(zip(compaction.SERIES, (*SERIES[:3], slo_class), strict=True))
    return Forecast(
        made_at=made_at, start_at=start, forecaster=forecaster, window_s=window_s, **names, **bands, **values
    )


def make(minutes, **values):
    Forecast.objects.bulk_create(forecast(ago, **values) for ago in reversed(minutes))


def shown(hours=72, slo_class=""):
    """Return what the page draws and judges: the windows without their rows' keys."""
    newest = selectors.latest_forecast(*SERIES[:3], slo_class)
    (windows,) = selectors.tracks([newest], NOW - timedelta(hours=hours))
    return [(window.start, *(getattr(window, name) for name in compaction.BANDS)) for window in windows]


def test_an_hour_of_forecasts_becomes_one_row_and_the_page_shows_the_same():
    make(range(6 * 60))
    before = {hours: shown(hours) for hours in (1, 3, 4.5, 6, 72)}
    keys = set(Forecast.objects.values_list("pk", flat=True))
    tasks.prune_planning()
    assert {hours: shown(hours) for hours in before} == before
    # Made since 10:00 as they were; 6:21 to 6:59, 7, 8 and 9 o'clock in a row each.
    assert Forecast.objects.count() == 141 + 4
    assert set(Forecast.objects.values_list("pk", flat=True)) < keys
    row = Forecast.objects.filter(made_at__lt=NOW - timedelta(hours=3)).first()
    assert (row.made_at.hour, row.made_at.minute) == (8, 59)
    assert (row.start_at.hour, row.start_at.minute) == (8, 0)
    assert len(row.mean) == len(row.upper_95) == 60 + AHEAD - 1
    assert row.note == "60 forecasts in one: the last forecast of each window."
    assert tasks.prune_planning() == 0


def test_each_series_for_itself():
    make(range(180, 300))
    make(range(180, 300), slo_class="flexible")
    make([10], slo_class="flexible"), make([10])
    before = shown(), shown(slo_class="flexible")
    tasks.prune_planning()
    assert (shown(), shown(slo_class="flexible")) == before
    assert Forecast.objects.exclude(slo_class="").count() == Forecast.objects.filter(slo_class="").count() == 4


def test_what_does_not_follow_stays_a_separate_row():
    """A gap longer than the forecast, another forecaster, windows of another length."""
    make(range(310, 315)), make([309], window_s=600), make(range(302, 309))
    make(range(250, 260), forecaster="ets", note="few windows"), make(range(240, 250))
    make([*range(180, 190), *range(210, 220)]), make([5])
    before = shown()
    tasks.prune_planning()
    assert shown() == before
    notes = [
        (row.made_at.strftime("%H:%M"), row.note.partition(":")[0]) for row in Forecast.objects.order_by("made_at")
    ]
    assert notes == [
        ("07:10", "5 forecasts in one"),
        ("07:11", ""),
        ("07:18", "7 forecasts in one"),
        ("08:10", "10 forecasts in one"),
        ("08:20", "10 forecasts in one"),
        ("08:50", "10 forecasts in one"),
        ("09:20", "10 forecasts in one"),
        ("12:15", ""),
    ]
    assert Forecast.objects.get(forecaster="ets").note.endswith("few windows")


def test_the_newest_of_a_series_that_ended_stays_as_it_was_made():
    make(range(300, 310))
    newest = selectors.latest_forecast(*SERIES)
    tasks.prune_planning()
    kept = selectors.latest_forecast(*SERIES)
    assert (kept.pk, kept.mean, kept.note) == (newest.pk, newest.mean, "")


def test_old_ones_are_deleted_in_batches(settings, monkeypatch):
    monkeypatch.setattr(housekeeping, "BATCH_ROWS", 7)
    monkeypatch.setattr(housekeeping, "MIN_PAUSE_S", 0.0)
    settings.PLANNING_KEEP_DAYS = 1.0
    make([1, *range(1500, 1520)])
    assert tasks.prune_planning() == 20
    assert Forecast.objects.count() == 1
    make(range(1600, 1650))
    assert tasks.prune_planning() == 50
    assert not Forecast.objects.filter(made_at__lt=NOW - timedelta(days=1)).exists()
