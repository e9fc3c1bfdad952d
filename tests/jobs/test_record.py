"""What a job's record says of it, and that a failure is said once and counted after that."""

import logging

import pytest
from django.db import OperationalError

from controlplane.jobs.record import LEAST_LATE_S, START_GRACE_S, Job, JobState, Record


def record(period_s: float, **values) -> Record:
    return Record("forecasts", "celery", period_s, **values)


@pytest.mark.parametrize(
    ("period_s", "ago_s", "state"),
    [
        (60.0, 119.0, JobState.OK),
        (60.0, 121.0, JobState.LATE),
        (0.1, 29.0, JobState.OK),  # a part of the stack may be started again meanwhile
        (0.1, LEAST_LATE_S + 1, JobState.LATE),
        (3600.0, 7100.0, JobState.OK),
        (3600.0, 7300.0, JobState.LATE),
    ],
)
def test_late_is_twice_the_period_after_the_last_success(period_s, ago_s, state):
    assert record(period_s, last_success_at=10_000.0 - ago_s).state(10_000.0, started_at=0.0) == state


def test_one_that_never_ran_has_a_grace_from_the_start():
    limit_s = 120.0 + START_GRACE_S
    assert record(60.0).state(1000.0 + limit_s - 1, started_at=1000.0) == JobState.NEVER
    assert record(60.0).state(1000.0 + limit_s + 1, started_at=1000.0) == JobState.LATE


def test_jobs_done_before_a_night_off_are_not_late_in_the_morning():
    night = record(60.0, last_success_at=1000.0)
    assert night.state(50_010.0, started_at=50_000.0) == JobState.OK
    assert night.state(50_000.0 + 120.0 + START_GRACE_S + 1, started_at=50_000.0) == JobState.LATE


def test_a_failure_counts_at_once_where_the_next_run_is_far_and_after_a_while_where_it_is_near():
    failed = {"failures_in_a_row": 1, "failing_since": 995.0, "last_success_at": 990.0}
    assert record(60.0, **failed).state(1000.0, 0.0) == JobState.FAILING
    assert record(1.0, **failed).state(1000.0, 0.0) == JobState.OK
    assert record(1.0, **failed).state(1006.0, 0.0) == JobState.FAILING


class TestJob:
    def run(self, job: Job, error: Exception | None = None) -> None:
        with job:
            if error:
                raise error

    def test_a_run_that_raises_is_counted_and_goes_no_further(self):
        job = Job("floor", "gateway", 1.0)
        self.run(job, ValueError("no such endpoint"))
        self.run(job, ValueError("no such endpoint"))
        assert (job.failures_in_a_row, job.failures_total, job.ok) == (2, 2, False)
        assert job.last_error == "ValueError: no such endpoint"
        assert job.last_success_at is None
        self.run(job)
        assert (job.failures_in_a_row, job.failures_total, job.ok) == (0, 2, True)
        assert job.last_success_at is not None
        assert job.due_at == job.last_success_at + 1.0
        assert job.last_duration_s is not None

    def test_being_cancelled_is_no_failure_and_is_not_held_up(self):
        import asyncio

        job = Job("floor", "gateway", 1.0)
        with pytest.raises(asyncio.CancelledError), job:
            raise asyncio.CancelledError
        assert job.ok

    def test_a_thousand_failures_are_four_lines_and_one_traceback(self, caplog):
        job = Job("forecasts", "gateway", 1.0)
        for _ in range(1000):
            self.run(job, IndexError("out of range"))
        self.run(job)
        lines = [entry.getMessage() for entry in caplog.records]
        assert lines == [
            "forecasts: IndexError: out of range",
            *(f"forecasts: failed {n} times in a row: IndexError: out of range" for n in (10, 100, 1000)),
            "forecasts: done again after 1000 failures in a row",
        ]
        assert caplog.text.count("Traceback") == 1

    def test_a_service_that_does_not_answer_has_no_traceback(self, caplog):
        self.run(Job("flush-ledger", "gateway", 1.0), OperationalError("database is locked"))
        assert "Traceback" not in caplog.text
        assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
