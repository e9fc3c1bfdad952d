"""The scheduler of Celery beat: one line for a broker that is away, or for a schedule file cut off by a crash.

Celery's own prints a traceback of a hundred lines for every periodic task that it could not send, several a second.
"""

import logging
from typing import TYPE_CHECKING, Any

from celery.beat import PersistentScheduler

logger = logging.getLogger(__name__)


class Scheduler(PersistentScheduler):
    """Celery's, with its schedule in a file. Failures to send are logged when they begin, and counted when they end."""

    if TYPE_CHECKING:  # Celery has these two, its types do not

        def _remove_db(self) -> None: ...
        def _open_schedule(self) -> Any: ...

    unsent = 0  # messages that could not be sent since the last that could

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the task of *entry*, if the broker takes it; a task that was not sent comes again at its next time."""
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
        logger.warning("beat: the schedule file cannot be read and is made anew: %s: %s", type(exc).__name__, exc)
        self._remove_db()
        return self._open_schedule()
