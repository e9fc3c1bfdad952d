"""What a Celery worker runs for beat is noted in rows: by the base of all tasks, not by hand in each."""

import pytest
from celery.exceptions import TimeLimitExceeded
from django.conf import settings

from controlplane.jobs import schedule, selectors
from controlplane.jobs.models import JobRow
from controlplane.jobs.task import note_lost
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.plans import services as plans
from workers.tasks import planning as tasks
from workers.tasks import tick as ticking
from workers.tasks.tick import tick

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def state(settings, tmp_path):
    settings.STATE_DIR = tmp_path


def broken(*_):
    raise IndexError("index 12 is out of bounds")


def test_a_run_is_noted_with_its_duration():
    tick.apply(("advance-swaps",))
    row = JobRow.objects.get(pk="advance-swaps")
    assert row.last_success_at is not None
    assert row.last_duration_s > 0
    assert row.failures_total == 0


def test_a_direct_call_is_only_a_call():
    ticking.advance_swaps()
    assert not JobRow.objects.exists()


def test_failures_are_counted_logged_once_and_recovered_from(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(ticking, "open_swaps", broken)
        for _ in range(3):
            tick.apply(("advance-swaps",))
    row = JobRow.objects.get(pk="advance-swaps")
    assert (row.failures_in_a_row, row.failures_total) == (3, 3)
    assert row.last_error == "IndexError: index 12 is out of bounds"
    assert row.failing_since is not None
    assert caplog.text.count("Traceback") == 1
    tick.apply(("advance-swaps",))
    row.refresh_from_db()
    assert (row.failures_in_a_row, row.failing_since, row.failures_total) == (0, None, 3)
    assert "done again after 3 failures" in caplog.text


def test_work_within_a_task_has_its_own_record(monkeypatch):
    monkeypatch.setattr(forecasts, "make_forecasts", lambda now: [])
    monkeypatch.setattr(plans, "make_plans", broken)
    tasks.forecast_and_plan.apply()
    rows = {row.name: row for row in JobRow.objects.all()}
    assert set(rows) == {"forecasts", "plans"}
    assert rows["forecasts"].last_success_at is not None
    assert rows["plans"].failures_in_a_row == 1


def test_a_task_that_fails_around_its_work_fails_all_of_it(monkeypatch):
    monkeypatch.setattr(tasks, "only_one", broken)
    tasks.forecast_and_plan.apply()
    assert set(JobRow.objects.filter(failures_in_a_row=1).values_list("pk", flat=True)) == {"forecasts", "plans"}


def test_a_task_that_was_killed_is_noted_by_the_main_process():
    note_lost(sender=tasks.fit_forecasters, exception=TimeLimitExceeded(20))
    assert JobRow.objects.get(pk="fit-forecasters").last_error.startswith("TimeLimitExceeded")


def test_every_entry_of_the_schedule_is_watched():
    """A new periodic task cannot be forgotten: its job is read from beat's own schedule."""
    watched = {record.name: record.period_s for record in selectors.celery_records()}
    for name, entry in settings.CELERY_BEAT_SCHEDULE.items():
        for job in schedule.jobs_of(entry["task"]):
            assert job in watched, name
    assert watched["forecasts"] == settings.FORECAST_EVERY_S
    assert watched["plans"] == schedule.LONGEST_PLAN_PERIOD_S
    assert "forecast-and-plan" not in watched
