"""Celery beat's scheduler: periods from settings, and one log line for an absent broker or a broken schedule file.

Celery's own logs a traceback of a hundred lines for every periodic task that it could not send, several a second.
"""

import logging
from typing import TYPE_CHECKING, Any

from celery.beat import PersistentScheduler
from celery.schedules import schedule
from django.db import DatabaseError, InterfaceError, connections

from controlplane.jobs.schedule import beat_periods

logger = logging.getLogger(__name__)

WAKE_S = 1.0
"""Longest sleep, which bounds the delay until a changed period takes effect."""


class Scheduler(PersistentScheduler):
    """Celery's persistent scheduler. Failures to send are logged when they begin, and counted when they end.

    It wakes every `WAKE_S` and applies changed periods.
    """

    if TYPE_CHECKING:  # Celery has these two, its types do not

        def _remove_db(self) -> None: ...
        def _open_schedule(self) -> Any: ...

    _heap: Any  # Celery's: entries by when they are due; None has it rebuilt

    unsent = 0  # messages that could not be sent since the last that could

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due; return the seconds until the next call."""
        self.take_up_periods()
        return min(super().tick(*args, **kwargs), WAKE_S)

    def take_up_periods(self) -> None:
        """Apply the periods in force to entries whose period is a setting; keep the last while the database is away."""
        try:
            periods = beat_periods()
        except (DatabaseError, InterfaceError):
            connections.close_all()
            return
        for name, period_s in periods.items():
            entry = self.schedule.get(name)
            if entry is not None and entry.schedule != schedule(period_s):
                entry.schedule = schedule(period_s)
                entry.options = {**(entry.options or {}), "expires": period_s}
                self._heap = None
                logger.info("beat: %s runs every %g s", name, period_s)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the task of *entry* if the broker accepts it; otherwise it is sent at its next time."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except Exception as error:
            if not self.unsent:
                logger.warning("beat: periodic tasks cannot be sent, the broker does not answer: %s", error)
            self.unsent += 1
        else:
            if self.unsent:
                logger.warning("beat: the broker answers again; %d periodic tasks were not sent", self.unsent)
            self.unsent = 0

    def _destroy_open_corrupted_schedule(self, exc: Exception) -> Any:
        logger.warning("beat: the schedule file cannot be read and is rebuilt: %s: %s", type(exc).__name__, exc)
        self._remove_db()
        return self._open_schedule()
