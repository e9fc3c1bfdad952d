"""Feed application runs to the process that owns the queues: demand graphs, and the calls of runs in progress."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Final

from channels.db import database_sync_to_async
from django.db.models import Max, Q, QuerySet
from django.utils import timezone

from controlplane.applications.models import Application, ApplicationRun, RunOutcome, UnitReport
from controlplane.applications.selectors import known_graph
from controlplane.applications.services import IDLE, MAX_CALLS, SESSION_IDLE, calls_of
from controlplane.dispatch.port import RunReport
from controlplane.dispatch.runs import MAX_OPENED, MAX_UNIT_S, ApplicationRuns
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.applications.recording import SESSION_UNITS
from scheduling.applications.standings import KnownGraph, PastCall

PERIOD_S: Final = 5.0
LEARN_AGAIN_S: Final = 60.0
"""Shortest time between two readings of the graph of one application: one takes 0.3 s of a thread."""
MAX_READS: Final = 10
"""Graphs read at once."""
RESUMED: Final = SESSION_IDLE
"""A run in progress is resumed if a call of it came within this."""
STOPPED: Final = timedelta(days=1)
"""After a restart, calls of runs that were stopped within this are still refused."""
MAX_ROWS: Final = 20_000
"""Latest ledger rows that are searched for runs in progress."""
MAX_RESUMED: Final = 1_000
"""Runs in progress that are resumed, those heard of last."""


class GraphFeeder:
    """Feeds *runs*, those of the dispatcher, while this process owns *shards* of models."""

    def __init__(self, runs: ApplicationRuns, shards: Callable[[], Collection[str]]) -> None:
        self.runs, self.shards = runs, shards
        self._due_s = -math.inf
        self._read: dict[int, tuple[datetime, float]] = {}
        """By application: the end of its latest run, and when its graph was read."""
        self._resumed: frozenset[str] = frozenset()
        """Shards whose runs were resumed when this process took them over."""

    async def feed(self, now_s: float) -> None:
        """Resume runs, and read graphs, once in `PERIOD_S`."""
        if now_s < self._due_s:
            return
        await self.resume()
        self.runs.deadlines = await database_sync_to_async(deadlines)()
        for _ in range(MAX_READS):
            if not await self.tick(now_s):
                break
        self._due_s = now_s + PERIOD_S

    async def resume(self) -> int:
        """Once this process owns another shard, resume the runs in progress that it does not know; return how many."""
        shards = frozenset(self.shards())
        if shards <= self._resumed:
            self._resumed = shards
            return 0
        reports, ended = await database_sync_to_async(_in_progress)(timezone.now())
        self._resumed = shards
        for report in reports:
            self.runs.report(report)
        return self.runs.resume((application, run, calls) for (application, run), calls in ended.items())

    async def tick(self, now_s: float) -> bool:
        """Read the graph of one application that has learned since, the one read longest ago; false if there is none."""
        read = await database_sync_to_async(self._next)(now_s)
        if read is None:
            return False
        application, latest, graph = read
        self._read[application.pk] = latest, now_s
        if graph is not None:
            self.runs.graphs[application.tenant_id, application.name] = graph
        return True

    def _next(self, now_s: float) -> tuple[Application, datetime, KnownGraph | None] | None:
        rows = Application.objects.annotate(latest=Max("runs__ended_at")).filter(latest__isnull=False)
        due = []
        for row in rows:
            known, read_s = self._read.get(row.pk, (None, float("-inf")))
            if row.latest != known and now_s - read_s >= LEARN_AGAIN_S:
                due.append((read_s, row.pk, row))
        if not due:
            return None
        application = min(due, key=lambda each: each[:2])[2]
        return application, application.latest, known_graph(application)


def deadlines() -> dict[tuple[int, str], float]:
    """Return the seconds that operators give runs, by tenant id and application, where they do."""
    rows = Application.objects.values_list("tenant_id", "name", "run_deadline_s")
    return {(tenant, name): seconds for tenant, name, seconds in rows if seconds is not None}


RunKey = tuple[int, str, str]
"""Tenant id, application and run."""


def _key(run: ApplicationRun) -> RunKey:
    return run.application.tenant_id, run.application.name, run.run


def _in_progress(now: datetime) -> tuple[list[RunReport], dict[tuple[tuple[int, str], str], list[PastCall]]]:
    return reports_in_progress(now), calls_in_progress(now)


def reports_in_progress(now: datetime) -> list[RunReport]:
    """Return what was said of runs in progress: deadlines, units that run, those that began last first; and stopped runs."""
    due = ApplicationRun.objects.filter(ended_at=None, closed_at=None).exclude(deadline_s=None)
    opened = [
        RunReport("opened", *_key(run), due_s=(run.deadline_s or 0.0) - (now - run.began_at).total_seconds())
        for run in due.select_related("application")[:MAX_OPENED]
    ]
    stopped = ApplicationRun.objects.filter(outcome=RunOutcome.STOPPED, closed_at__gt=now - STOPPED)
    opened += [RunReport("stopped", *_key(run)) for run in stopped.select_related("application")[:MAX_OPENED]]
    return opened + [
        RunReport(
            *("began", *_key(unit.run), unit.pk, unit.unit),
            backend=unit.backend,
            ago_s=(now - unit.began_at).total_seconds(),
        )
        for unit in _units(now).filter(ended_at=None).order_by("-began_at")[:MAX_ROWS]
    ]


def _units(now: datetime) -> QuerySet[UnitReport]:
    """Return reported units of runs in progress, without those that were given up."""
    rows = UnitReport.objects.filter(run__ended_at=None, run__closed_at=None, failed=False)
    given_up = Q(ended_at=None, began_at__lt=now - timedelta(seconds=MAX_UNIT_S))
    return rows.exclude(given_up).select_related("run__application")


def calls_in_progress(now: datetime) -> dict[tuple[tuple[int, str], str], list[PastCall]]:
    """Return the ended calls and reported units of runs that are not idle yet, by ((tenant id, application), run)."""
    latest = LedgerRow.objects.filter(arrived_at__gt=now - RESUMED).order_by("-pk")[:MAX_ROWS]
    heard: dict[RunKey, datetime] = {}
    sessions: set[RunKey] = set()
    for row in latest.only("tenant_id", "application", "run", "unit", "arrived_at", "e2e_ms"):
        key = row.tenant_id, row.application, row.run
        if row.application and row.run:
            heard[key] = max(heard.get(key, row.arrived_at), row.ended_at or row.arrived_at)
            if row.unit in SESSION_UNITS:
                sessions.add(key)
    units: dict[RunKey, list[PastCall]] = defaultdict(list)
    for unit in _units(now).order_by("-began_at")[:MAX_ROWS]:
        key = _key(unit.run)
        heard[key] = max(heard.get(key, unit.began_at), unit.ended_at or now)
        if unit.ended_at is not None:
            began_s, ended_s = ((now - at).total_seconds() for at in (unit.began_at, unit.ended_at))
            units[key].append(PastCall(unit.unit, began_s, ended_s, 0, unit.duration_s))
    active = sorted(
        (key for key, at in heard.items() if now - at < (SESSION_IDLE if key in sessions else IDLE)),
        key=lambda key: heard[key],
        reverse=True,
    )
    ended: dict[tuple[tuple[int, str], str], list[PastCall]] = defaultdict(list)
    for tenant_id, application, run in active[:MAX_RESUMED]:
        for row in calls_of(tenant_id, application, run).order_by("-arrived_at")[:MAX_CALLS]:
            began_s, ended_s = ((now - at).total_seconds() for at in (row.arrived_at, row.ended_at or row.arrived_at))
            output = row.output_tokens if row.outcome == Outcome.DONE else None
            own = row.own_region or row.region
            call = PastCall(row.unit, began_s, ended_s, row.prompt_tokens, output, model=row.model, region=own)
            ended[(tenant_id, application), run].append(call)
        ended[(tenant_id, application), run] += units[tenant_id, application, run]
    return dict(ended)
