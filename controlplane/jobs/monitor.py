"""What this process knows of every periodic job and every part of the stack.

Jobs of this process are in its memory, those of Celery in rows; if Celery or beat is dead, the rows grow old. While a part
is down, the jobs that need it are marked: their trouble is the part's. `controlplane.alerts.problems` says what is wrong.
"""

import time
from collections.abc import Callable
from typing import Any

from channels.db import database_sync_to_async

from controlplane.jobs import selectors
from controlplane.jobs.parts import Part, PartState, Since
from controlplane.jobs.record import Job, Jobs, Record

READ_S = 2.0
SETTLE_S = 60.0
"""After a part came back, jobs that need it have so long to run before they are in trouble themselves."""


class Monitor:
    """*parts* returns the parts with their present states."""

    def __init__(self, jobs: Jobs, parts: Callable[[], list[Part]]) -> None:
        self.jobs = jobs
        self.job: Job = jobs.add("watch-jobs", READ_S, "database")
        self.started_at = time.time()
        self._parts = parts
        self._since = Since()
        self._celery: list[Record] = []
        self._back_at: dict[str, float] = {}

    def records(self) -> list[Record]:
        return [*self._celery, *self.jobs.records()]

    def parts(self) -> list[Part]:
        parts = self._parts()
        self._since.mark(parts)
        return parts

    def report(self) -> dict[str, Any]:
        """`{"jobs": [...], "parts": [...]}` of this moment; `quiet` marks a job whose trouble is a part's."""
        now, parts = time.time(), self.parts()
        down = self._down(parts, now)
        jobs = [
            job.as_dict(now, self.started_at) | {"quiet": bool(down.intersection(job.needs))} for job in self.records()
        ]
        return {"jobs": jobs, "parts": [part.as_dict() for part in parts]}

    def last_run_at(self) -> float | None:
        """When a worker last ended a periodic task, epoch seconds."""
        return max((job.last_run_at for job in self._celery if job.last_run_at), default=None)

    async def read(self) -> None:
        """Read the rows of Celery's jobs. Raises what the database raises."""
        self._celery = await database_sync_to_async(selectors.celery_records)()

    def _down(self, parts: list[Part], now: float) -> set[str]:
        """Names of the parts that are down, or came back so recently that what needs them may not have run yet."""
        for part in parts:
            if part.state in (PartState.DOWN, PartState.STARTING):
                self._back_at[part.name] = now
        return {name for name, at in self._back_at.items() if now - at < SETTLE_S}


current: Monitor | None = None
"""The monitor of this process, while its gateway runs."""


def report() -> dict[str, Any]:
    """Return the states of jobs and parts known to this process; without a gateway, those of Celery's jobs from rows."""
    if current is not None:
        return current.report()
    now = time.time()
    return {"jobs": [job.as_dict(now, now) | {"quiet": False} for job in selectors.celery_records()], "parts": []}
