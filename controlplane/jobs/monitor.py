"""Watches every periodic job and every part of the stack from the web process, and says when one goes wrong or recovers.

Jobs of this process are in its memory, those of Celery in rows; if Celery or beat is dead, the rows grow old, and that is
what is noticed. What begins and what ends is one event each. While a part is down, the jobs that need it are not
reported one by one: its event says why. What cannot be written waits until the database answers again.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from channels.db import database_sync_to_async
from django.db import transaction

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.jobs import selectors
from controlplane.jobs.models import JobRow
from controlplane.jobs.parts import Part, PartState, Since
from controlplane.jobs.record import Job, Jobs, JobState, Record, trouble_of

ACTOR = "monitor"
LOOK_S = 2.0
DOWN_AFTER_S = 10.0
"""A part that is started again within this is seen on the System page, and is no event."""
SETTLE_S = 60.0
"""After a part came back, jobs that need it have so long to run before they are reported."""
MOST_WAITING = 500
PART = "part "

Notice = tuple[str, str, str]  # what (a job, or "part NAME"), its trouble ("" when it is over), why


class Monitor:
    """*parts* says how the parts stand now; *leads* whether this process is the one that writes events."""

    def __init__(self, jobs: Jobs, parts: Callable[[], list[Part]], leads: Callable[[], bool]) -> None:
        self.jobs = jobs
        self.job: Job = jobs.add("watch-jobs", LOOK_S, "database")
        self.started_at = time.time()
        self._parts, self._leads = parts, leads
        self._since = Since()
        self._celery: list[Record] | None = None  # None until the rows were read once
        self._noticed: dict[str, str] | None = None
        self._waiting: deque[Notice] = deque(maxlen=MOST_WAITING)
        self._back_at: dict[str, float] = {}

    # Reads

    def records(self) -> list[Record]:
        return [*(self._celery or []), *self.jobs.records()]

    def parts(self) -> list[Part]:
        parts = self._parts()
        self._since.mark(parts)
        return parts

    def report(self) -> dict[str, Any]:
        """`{"jobs": [...], "parts": [...]}` as it stands now; `quiet` marks a job whose trouble is a part's."""
        now, parts = time.time(), self.parts()
        down = self._down(parts, now)
        jobs = [
            job.as_dict(now, self.started_at) | {"quiet": bool(down.intersection(job.needs))} for job in self.records()
        ]
        return {"jobs": jobs, "parts": [part.as_dict() for part in parts]}

    def last_run_at(self) -> float | None:
        """When a worker last ended a periodic task, epoch seconds."""
        return max((job.last_run_at for job in self._celery or [] if job.last_run_at), default=None)

    # Once in `LOOK_S`

    async def look(self) -> None:
        """Read the rows, and write what has changed. Raises what the database raises."""
        # First what memory knows: with the database away, its end must not go unnoticed.
        if self._noticed is not None:
            self._notice()
        self._celery = await database_sync_to_async(selectors.celery_records)()
        if self._noticed is None:
            self._noticed = await database_sync_to_async(selectors.noticed)()
        while self._waiting:
            if self._leads():
                await database_sync_to_async(write_notice)(self._waiting[0])
            self._waiting.popleft()

    def _notice(self) -> None:
        now, parts = time.time(), self.parts()
        down = self._down(parts, now)
        for part in parts:
            trouble = "down" if part.state == PartState.DOWN and now - (part.since or now) > DOWN_AFTER_S else ""
            if part.state in (PartState.OK, PartState.STANDBY) or trouble:
                self._change(PART + part.name, trouble, part.detail)
        for job in self.records():
            state = job.state(now, self.started_at)
            if state == JobState.OK:
                self._change(job.name, "", "")
            elif state.bad and not down.intersection(job.needs):
                self._change(job.name, state.value, trouble_of(job.as_dict(now, self.started_at)))

    def _down(self, parts: list[Part], now: float) -> set[str]:
        """Names of the parts that are down, or came back so lately that what needs them may not have run yet."""
        for part in parts:
            if part.state in (PartState.DOWN, PartState.STARTING):
                self._back_at[part.name] = now
        return {name for name, at in self._back_at.items() if now - at < SETTLE_S}

    def _change(self, what: str, trouble: str, reason: str) -> None:
        assert self._noticed is not None
        before = self._noticed.get(what, "")
        if bool(before) != bool(trouble):
            self._waiting.append((what, trouble, reason))
        if trouble:
            self._noticed[what] = trouble
        else:
            self._noticed.pop(what, None)


@transaction.atomic
def write_notice(notice: Notice) -> None:
    """One event about what begins or is over, and the row that remembers it."""
    what, trouble, reason = notice
    row, _ = JobRow.objects.get_or_create(pk=what)
    if bool(row.noticed) == bool(trouble):
        return  # another process was first
    JobRow.objects.filter(pk=what).update(noticed=trouble)
    kind = "part" if what.startswith(PART) else "job"
    record(
        f"{kind}.{trouble or 'recovered'}",
        row,
        actor=ACTOR,
        before={"state": row.noticed or "ok"},
        after={"state": trouble or "ok"},
        reason=reason,
        severity=Severity.CRITICAL
        if trouble in ("down", "failing")
        else Severity.WARNING
        if trouble
        else Severity.INFO,
    )


current: Monitor | None = None
"""The monitor of this process, while its gateway runs."""


def report() -> dict[str, Any]:
    """Return the states of jobs and parts known to this process; without a gateway, those of Celery's jobs from rows."""
    if current is not None:
        return current.report()
    now = time.time()
    return {"jobs": [job.as_dict(now, now) | {"quiet": False} for job in selectors.celery_records()], "parts": []}
