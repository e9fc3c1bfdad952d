"""Following the runs of applications in the ledger."""

from celery import shared_task
from django.utils import timezone

from controlplane.applications import services
from workers.tasks.planning import only_one


@shared_task
def follow_runs() -> int:
    """Update runs that have new calls and end idle ones; returns how many ended."""
    with only_one("applications") as free:
        return services.follow_runs(timezone.now()) if free else 0
