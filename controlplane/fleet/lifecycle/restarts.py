"""Back-off of restarts of failed instances, as Kubernetes does with containers."""

from datetime import datetime, timedelta

from django.utils import timezone

from controlplane.fleet.models import Instance

FIRST = timedelta(seconds=5)
"""After the first failure: a server that only hung for a moment may answer again."""
LONGEST = timedelta(minutes=5)
SETTLED = timedelta(minutes=10)
"""Time after which a ready instance has its failure count reset."""
CRASH_LOOP = 3
"""Failures in a row from which it is said to be in a crash loop."""


def backoff(failures: int) -> timedelta:
    """Return the wait before the next start after *failures* in a row; it doubles with each."""
    return min(LONGEST, FIRST * (1 << min(max(failures - 1, 0), 16)))


def due_at(instance: Instance) -> datetime:
    """Return the time from which the failed *instance* may be started again: at once where a GPU was to blame."""
    if not instance.failures:
        return instance.state_changed_at
    return instance.state_changed_at + backoff(instance.failures)


def is_due(instance: Instance) -> bool:
    return timezone.now() >= due_at(instance)


def loops(instance: Instance) -> bool:
    """Return whether *instance* is in a crash loop, so that its next start does not count."""
    return instance.failures >= CRASH_LOOP
