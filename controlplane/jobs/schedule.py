"""Periodic jobs of Celery and their periods: beat's schedule, with the work that its tasks look for in its place.

Periods that are settings are those in force; beat takes up new ones (`workers.beat`).
"""

from functools import cache

from django.conf import settings

from controlplane.tuning.selectors import tuned

NEEDS = ("redis", "database", "celery", "beat")


@cache
def _names_by_task() -> dict[str, tuple[str, ...]]:
    within = settings.JOBS_WITHIN_TASKS
    return {entry["task"]: within.get(name, (name,)) for name, entry in settings.CELERY_BEAT_SCHEDULE.items()}


def jobs_of(task: str) -> tuple[str, ...]:
    """Names of the jobs that the Celery task named *task* does; none for one that is not periodic."""
    return _names_by_task().get(task, ())


def does_itself(task: str) -> bool:
    """Whether the end of the task is the end of the job; else the jobs within it are recorded where they are done."""
    return all(name in settings.CELERY_BEAT_SCHEDULE for name in jobs_of(task))


HOURLY = ("prune-sign-ins", "prune-runs", "prune-planning", "prune-lengths")
"""Jobs of the task `prune` that are due once an hour."""
LONGEST_PLAN_PERIOD_S = 3600.0
"""Of the strategies' own periods."""


def look_s() -> float:
    """Return the polling interval in seconds for due forecasts and plans."""
    return max(1.0, min(30.0, tuned().FORECAST_EVERY_S / 6, _plan_period_s() / 6))


def _plan_period_s() -> float:
    return tuned().PLAN_EVERY_S or LONGEST_PLAN_PERIOD_S


def beat_periods() -> dict[str, float]:
    """Return the periods in seconds of beat's entries whose period is a setting, by name."""
    return {"forecast-and-plan": look_s()}


def periods() -> dict[str, float]:
    """Return the period in seconds of each job that Celery runs, by name."""
    values, changed = tuned(), beat_periods()
    of_work = dict.fromkeys(HOURLY, 3600.0) | {"forecasts": values.FORECAST_EVERY_S, "plans": _plan_period_s()}
    return {
        job: of_work.get(job) or changed.get(name) or float(entry["schedule"])
        for name, entry in settings.CELERY_BEAT_SCHEDULE.items()
        for job in jobs_of(entry["task"])
    }
