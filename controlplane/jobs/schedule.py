"""Which periodic jobs Celery runs, and how often: beat's schedule, with the work that its tasks look for in its place."""

from functools import cache

from django.conf import settings

NEEDS = ("redis", "database", "celery", "beat")


@cache
def _names_by_task() -> dict[str, tuple[str, ...]]:
    within = settings.JOBS_WITHIN_TASKS
    return {entry["task"]: tuple(within.get(name, (name,))) for name, entry in settings.CELERY_BEAT_SCHEDULE.items()}


def jobs_of(task: str) -> tuple[str, ...]:
    """Names of the jobs that the Celery task named *task* does; none for one that is not periodic."""
    return _names_by_task().get(task, ())


def does_itself(task: str) -> bool:
    """Whether the end of the task is the end of the job; else the jobs within it are recorded where they are done."""
    return all(name in settings.CELERY_BEAT_SCHEDULE for name in jobs_of(task))


def periods() -> dict[str, float]:
    """Seconds between two runs of each job that Celery runs, by name."""
    seconds: dict[str, float] = {}
    for name, entry in settings.CELERY_BEAT_SCHEDULE.items():
        seconds |= settings.JOBS_WITHIN_TASKS.get(name, {name: float(entry["schedule"])})
    return seconds
