"""Usage and cost, counted from the ledger."""

from celery import shared_task
from django.utils import timezone

from controlplane.usage import budgets, counting
from workers.tasks.planning import only_one


@shared_task
def count_usage() -> int:
    """Count usage since the last run; return the hours that were written."""
    with only_one("usage") as free:
        if not free:
            return 0
        now = timezone.now()
        written = counting.count_usage(now)
        budgets.count_budgets(now)
        return written
