"""Usage and cost, counted from the ledger."""

from celery import shared_task
from django.utils import timezone

from controlplane.usage import counting
from workers.tasks.planning import only_one


@shared_task
def count_usage() -> int:
    """Count usage since the last run; return the hours that were written."""
    with only_one("usage") as free:
        return counting.count_usage(timezone.now()) if free else 0
