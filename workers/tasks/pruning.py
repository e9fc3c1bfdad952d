"""Deletion of what is out of date, in one task that knows what is due."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from django.utils import timezone

from controlplane.applications import services as applications
from controlplane.jobs.models import JobRow
from controlplane.jobs.schedule import HOURLY
from controlplane.lengths import services as lengths
from workers.celery import app
from workers.tasks import housekeeping, planning
from workers.tasks.tick import run_steps

STEPS: Final[dict[str, Callable[[], Any]]] = {
    "prune-ledger": housekeeping.prune_ledger,
    "prune-sign-ins": housekeeping.prune_sign_ins,
    "prune-runs": lambda: applications.prune_runs(timezone.now()),
    "prune-planning": planning.prune_planning,
    "prune-lengths": lambda: lengths.prune(timezone.now()),
}
"""By the names of their jobs. Those in `HOURLY` are due an hour after their last success, the others every time."""


@app.task
def prune() -> None:
    """Do the steps that are due; one that raises is recorded, and the others are done."""
    with planning.only_one("prune") as free:
        recent = JobRow.objects.filter(last_success_at__gt=timezone.now() - timedelta(hours=1))
        done = {*recent.filter(pk__in=HOURLY).values_list("pk", flat=True)}
        if free:
            run_steps({name: step for name, step in STEPS.items() if name not in done})
