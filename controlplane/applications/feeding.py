"""Feed demand graphs to the process that owns the queues, which ranks runs by them."""

import asyncio
from datetime import datetime
from typing import Any, Final

from channels.db import database_sync_to_async
from django.db.models import Max

from controlplane.applications.models import Application
from controlplane.applications.selectors import known_graph
from controlplane.jobs.record import Job
from scheduling.applications.standings import KnownGraph

LOOK_S: Final = 5.0
LEARN_AGAIN_S: Final = 60.0
"""Shortest time between two readings of the graph of one application: one takes 0.1 s of a thread."""


class GraphFeeder:
    """*graphs* are those of the dispatcher, by (tenant id, application name)."""

    def __init__(self, graphs: dict[Any, KnownGraph], job: Job) -> None:
        self.graphs, self.job = graphs, job
        self._read: dict[int, tuple[datetime, float]] = {}
        """By application: end of the latest run that its graph knows, and when it was read."""

    async def run(self) -> None:
        """Look every `LOOK_S` until cancelled."""
        while True:
            with self.job:
                await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    async def look(self, now_s: float) -> bool:
        """Read the graph of one application that has learned since, the one read longest ago; false if there is none."""
        read = await database_sync_to_async(self._next)(now_s)
        if read is None:
            return False
        application, latest, graph = read
        self._read[application.pk] = latest, now_s
        if graph is not None:
            self.graphs[application.tenant_id, application.name] = graph
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
        _, _, application = min(due, key=lambda each: each[:2])
        return application, application.latest, known_graph(application)
