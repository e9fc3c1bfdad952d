"""Writing what became of a job that Celery runs. A database that does not answer costs the note, never the job."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.db.models import F
from django.db.models.functions import Coalesce, Now
from django.utils import timezone

from controlplane.jobs.models import JobRow
from controlplane.jobs.record import describe, log_failure, log_recovery

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def recorded(*names: str) -> Iterator[None]:
    """One run of the jobs *names*. What raises is noted, logged once, and raised again."""
    began = time.perf_counter()
    try:
        yield
    except Exception as error:
        for name in names:
            note_failure(name, error, time.perf_counter() - began)
        raise
    for name in names:
        note_success(name, time.perf_counter() - began)


def note_success(name: str, duration_s: float) -> None:
    with _patient():
        before = JobRow.objects.filter(pk=name).values_list("failures_in_a_row", flat=True).first()
        _write(
            name,
            last_success_at=timezone.now(),
            failures_in_a_row=0,
            failing_since=None,
            last_duration_s=duration_s,
        )
        if before:
            log_recovery(name, before)


def note_failure(name: str, error: BaseException, duration_s: float | None = None) -> None:
    failures = 1
    with _patient():
        _write(
            name,
            last_error=describe(error),
            last_error_at=timezone.now(),
            failures_in_a_row=F("failures_in_a_row") + 1,
            failing_since=Coalesce("failing_since", Now()),
            failures_total=F("failures_total") + 1,
            last_duration_s=duration_s,
        )
        failures = JobRow.objects.values_list("failures_in_a_row", flat=True).get(pk=name)
    log_failure(name, failures, error)


def _write(name: str, **values: Any) -> None:
    if not JobRow.objects.filter(pk=name).update(**values):
        JobRow.objects.get_or_create(pk=name)
        JobRow.objects.filter(pk=name).update(**values)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        logger.debug("jobs: nothing could be noted: %s", error)
