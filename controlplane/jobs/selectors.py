"""Reading what is noted of the jobs that Celery runs."""

from datetime import datetime

from django.db.models import Max

from controlplane.jobs.models import JobRow
from controlplane.jobs.record import Record
from controlplane.jobs.schedule import NEEDS, periods


def celery_records() -> list[Record]:
    """Every job that Celery runs, in the order of its schedule; one that never ran has only its name and period."""
    rows = {row.name: row for row in JobRow.objects.all()}
    records = []
    for name, period_s in periods().items():
        record = Record(name, "celery", period_s, NEEDS)
        if row := rows.get(name):
            record.last_success_at, record.last_error_at = _epoch_s(row.last_success_at), _epoch_s(row.last_error_at)
            record.failing_since = _epoch_s(row.failing_since)
            record.last_error, record.last_duration_s = row.last_error, row.last_duration_s
            record.failures_in_a_row, record.failures_total = row.failures_in_a_row, row.failures_total
        records.append(record)
    return records


def last_sign_of_life() -> datetime | None:
    """When any of these jobs last succeeded: before the stack starts, about when its last run ended."""
    at: datetime | None = JobRow.objects.aggregate(at=Max("last_success_at"))["at"]
    return at


def _epoch_s(at: datetime | None) -> float | None:
    return at.timestamp() if at else None
