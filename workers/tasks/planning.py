"""Forecasts and plans on their schedule, each at most once at a time.

Beat sends tasks often, and a task checks the newest row to see whether its work is due: a restart neither skips nor
repeats a plan. Long work runs on the queue `simulation`, so that commands of instances never wait for a solver.
"""

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator, Sized
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from django.conf import settings
from django.db.models import Max
from django.utils import timezone

from controlplane.jobs.schedule import look_s
from controlplane.jobs.services import recorded
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, PlanStatus, ProjectedFleet, ScalingPlan
from controlplane.planning.plans import projected
from controlplane.planning.plans import services as plans
from controlplane.simulation.whatif import working
from controlplane.tuning.selectors import tuned
from workers.celery import app
from workers.tasks.housekeeping import delete_in_batches

logger = logging.getLogger(__name__)

FORECAST_LIMIT_S = 1800
LONG_WORK = "long_work"
"""Lock of work that takes minutes and can be queued, so that one pool process stays free for short tasks."""
PATIENCE_SHARE = 0.5
"""Longest wait of plans for forecasts in progress, as a share of the time between plans."""


@app.task(soft_time_limit=FORECAST_LIMIT_S, time_limit=FORECAST_LIMIT_S + 20)
def forecast_and_plan() -> None:
    """Make the forecasts and the plans that are due. A failure of one is recorded and leaves the other to be made.

    Plans use the forecasts of the same run; while another worker still makes those, plans wait half a period, and then
    use the previous ones. The first plans wait for the first forecasts.
    """
    with only_one("forecasts") as free:
        now = timezone.now()
        if free and due(Forecast.objects.aggregate(newest=Max("made_at"))["newest"], tuned().FORECAST_EVERY_S, now):
            attempt("forecasts", forecasts.make_forecasts, now)
    with only_one("plans") as free_to_plan:
        now = timezone.now()
        first = not free and not ScalingPlan.objects.exists()
        if free_to_plan and not first:
            models = plans.due(now, look_s() / 2, 0.0 if free else PATIENCE_SHARE)
            if models is not None:
                attempt("plans", partial(plans.make_plans, models=models), now)


@app.task(soft_time_limit=FORECAST_LIMIT_S, time_limit=FORECAST_LIMIT_S + 20)
def fit_forecasters() -> int:
    """Fit the forecasters that are slow to fit, when due; return how many were fitted."""
    with only_one(LONG_WORK) as free:
        return forecasts.fit_forecasters(timezone.now(), requested_work_waits) if free else 0


@app.task(soft_time_limit=FORECAST_LIMIT_S, time_limit=FORECAST_LIMIT_S + 20)
def project_fleet() -> int:
    """Project the fleet of the week ahead, when due; return how many projections were made."""
    with only_one("projection") as free:
        now, newest = timezone.now(), ProjectedFleet.objects.values_list("made_at", flat=True).first()
        return len(projected.make(now)) if free and due(newest, projected.EVERY_S, now) else 0


def prune_planning() -> int:
    """Delete forecasts after `PILOTHOUSE_FORECAST_KEEP_HOURS`, never before two rounds or windows, and plans that were never
    carried out after `PILOTHOUSE_PLANNING_KEEP_DAYS`. Return how many rows were deleted.
    """
    values, now = tuned(), timezone.now()
    rounds = timedelta(seconds=2 * max(values.FORECAST_EVERY_S, values.FORECAST_WINDOW_S))
    kept = max(timedelta(hours=values.FORECAST_KEEP_HOURS), rounds)
    gone = delete_in_batches(Forecast.objects.filter(made_at__lt=now - kept).order_by("made_at"))
    oldest = now - timedelta(days=values.PLANNING_KEEP_DAYS)
    never = [PlanStatus.SHADOW, PlanStatus.SUPERSEDED, PlanStatus.REJECTED]
    return gone + delete_in_batches(
        ScalingPlan.objects.filter(made_at__lt=oldest, status__in=never).order_by("made_at")
    )


def due(newest: datetime | None, every_s: float, now: datetime) -> bool:
    """Return whether a run is due; half a beat early counts, since beat comes late as often as early."""
    return newest is None or (now - newest).total_seconds() >= every_s - look_s() / 2


def attempt(what: str, make: Callable[[datetime], Sized], now: datetime) -> None:
    """Call *make* with *now* as a run of the job *what*, which records a failure."""
    with contextlib.suppress(Exception), recorded(what):
        made = make(now)
        logger.log(logging.INFO if made else logging.DEBUG, "planning: %d %s", len(made), what)


@contextlib.contextmanager
def only_one(name: str) -> Iterator[bool]:
    """Lock *name* on this machine; yield False while another process holds it. The lock ends with its process.

    Between machines, rows are locked by the process that moves something; planning twice at once costs one surplus plan.
    """
    folder = Path(settings.STATE_DIR) / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def requested_work_waits() -> bool:
    """Return whether a what-if of a person is waiting, which competes for processors.

    Periodic work then ends early, and is due again.
    """
    return bool(working.waiting_runs().filter(future__what_if__nightly=False).exists())
