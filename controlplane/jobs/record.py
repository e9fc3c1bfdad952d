"""Record of one periodic job, and the state that follows: ok, late, failing, or not run yet.

Jobs of the web process keep a `Job` in memory; those that Celery runs keep theirs in a row (`models.JobRow`), read as the
same `Record`. Times are epoch seconds.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import TracebackType
from typing import Any

from controlplane.logs import service_errors

logger = logging.getLogger(__name__)

LEAST_LATE_S = 30.0
"""Least delay before a job is late, else twice its period: restarting a part takes this long."""
START_GRACE_S = 60.0
"""Added for a job that has not run since the process began."""
FAILING_AFTER_S = 10.0
"""Seconds of failure after which a job with a shorter period is failing: one miss is no news."""
LONGEST_ERROR = 500


class JobState(StrEnum):
    OK = "ok"
    LATE = "late"
    FAILING = "failing"
    NEVER = "never"  # not run yet, and not late with it

    @property
    def bad(self) -> bool:
        return self in (JobState.LATE, JobState.FAILING)


@dataclass(slots=True)
class Record:
    """*needs* names the parts of the stack without which the job cannot run."""

    name: str
    kind: str  # celery, or gateway: which process runs it
    period_s: float
    needs: tuple[str, ...] = ()
    last_success_at: float | None = None
    last_error: str = ""
    last_error_at: float | None = None
    failures_in_a_row: int = 0
    failing_since: float | None = None
    failures_total: int = 0
    last_duration_s: float | None = None

    @property
    def last_run_at(self) -> float | None:
        return max((at for at in (self.last_success_at, self.last_error_at) if at is not None), default=None)

    @property
    def due_at(self) -> float | None:
        return None if self.last_run_at is None else self.last_run_at + self.period_s

    def state(self, now: float, started_at: float) -> JobState:
        """Return the state at *now*, in a stack that is watched since *started_at*."""
        if self.failures_in_a_row and (
            self.period_s > FAILING_AFTER_S or now - (self.failing_since or now) > FAILING_AFTER_S
        ):
            return JobState.FAILING
        late_after_s = max(2 * self.period_s, LEAST_LATE_S)
        ran_since = self.last_success_at is not None and self.last_success_at >= started_at
        since = self.last_success_at if ran_since and self.last_success_at is not None else started_at
        if now - since > late_after_s + (0.0 if ran_since else START_GRACE_S):
            return JobState.LATE
        return JobState.NEVER if self.last_success_at is None else JobState.OK

    def as_dict(self, now: float, started_at: float) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"state": self.state(now, started_at).value, "due_at": self.due_at}


class Job(Record):
    """Job of this process. `with job:` is one run; exceptions end there, counted and logged once."""

    _began_s: float = 0.0

    def __enter__(self) -> "Job":
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self.last_duration_s = time.perf_counter() - self._began_s
        if error is None:
            self.succeeded()
        elif isinstance(error, Exception):
            self.failed(error)
            return True
        return False

    @property
    def ok(self) -> bool:
        return not self.failures_in_a_row

    def succeeded(self) -> None:
        if self.failures_in_a_row:
            log_recovery(self.name, self.failures_in_a_row)
        self.last_success_at = time.time()
        self.failures_in_a_row, self.failing_since = 0, None

    def failed(self, error: BaseException) -> None:
        self.last_error, self.last_error_at = describe(error), time.time()
        self.failing_since = self.failing_since or self.last_error_at
        self.failures_in_a_row += 1
        self.failures_total += 1
        log_failure(self.name, self.failures_in_a_row, error)


class Jobs:
    """Periodic jobs of this process, by name."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def add(self, name: str, period_s: float, *needs: str) -> Job:
        job = self._jobs[name] = Job(name, "gateway", period_s, needs)
        return job

    def __getitem__(self, name: str) -> Job:
        return self._jobs[name]

    def records(self) -> list[Record]:
        return list(self._jobs.values())


def describe(error: BaseException) -> str:
    text = str(error).strip()
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:LONGEST_ERROR]


def log_failure(name: str, failures_in_a_row: int, error: BaseException) -> None:
    """Log the first failure in full, then only counts: the 10th, the 100th, …"""
    if failures_in_a_row == 1:
        trace = None if isinstance(error, service_errors()) else error
        logger.log(logging.ERROR if trace else logging.WARNING, "%s: %s", name, describe(error), exc_info=trace)
    elif failures_in_a_row >= 10 and str(failures_in_a_row).strip("0") == "1":
        logger.warning("%s: failed %d times in a row: %s", name, failures_in_a_row, describe(error))


def log_recovery(name: str, failures_in_a_row: int) -> None:
    logger.warning("%s: done again after %d failures in a row", name, failures_in_a_row)


def job_title(name: str) -> str:
    return name.replace("-", " ").capitalize()


def trouble_of(job: Mapping[str, Any]) -> str:
    """The trouble of a job, in a sentence."""
    failures = job["failures_in_a_row"]
    if failures:
        return f"{job['last_error']} ({failures} times in a row)" if failures > 1 else str(job["last_error"])
    if job["last_success_at"] is None:
        return "It has not run yet."
    return f"It was last done {time.time() - job['last_success_at']:.0f} s ago, and is due every {job['period_s']:g} s."
