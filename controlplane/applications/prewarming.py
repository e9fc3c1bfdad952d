"""The live side of prewarming that has rows: backends of other units are kept warm, and what became of all is written."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from channels.db import database_sync_to_async
from django.db import transaction

from controlplane.accounts.models import Tenant
from controlplane.applications.backends import OF_PROCESS, UNPLACED, Backends, Failure, LikelyUnit
from controlplane.applications.models import PrewarmRow, UnitBackend
from controlplane.dispatch.prewarming import Prewarming, why_likely
from controlplane.dispatch.prewarming_log import Prewarm
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.jobs.record import Job

LOOK_S: Final = 1.0
WRITE_EVERY: Final = 2
"""Looks between two writes,"""
READ_EVERY: Final = 5
"""and between two readings of the backends."""
MOST_ROWS: Final = 20_000
KEPT: Final = timedelta(days=7)
UPDATED: Final = ("place", "why", "warm_at", "settled_at", "fate")


class PrewarmKeeper:
    """Keeps *backends* warm as *prewarming* says while *job*'s process owns the queues, and writes what happened."""

    def __init__(
        self, prewarming: Prewarming, backends: Backends, job: Job, owns: Callable[[], bool] = lambda: True
    ) -> None:
        self.prewarming, self.backends, self.job, self.owns = prewarming, backends, job, owns
        self._looks = 0

    async def run(self) -> None:
        """Look every `LOOK_S` until cancelled; then stop the backends and write what is left."""
        OF_PROCESS.backends = self.backends
        self.prewarming.starts_s = self.backends.starts_s
        try:
            while True:
                with self.job:
                    await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            if OF_PROCESS.backends is self.backends:
                OF_PROCESS.backends = None
            await asyncio.shield(self._stop())

    async def look(self) -> None:
        """Start and stop backends; from time to time read them, and write."""
        if self._looks % READ_EVERY == 0:
            self.backends.apply(await database_sync_to_async(_read)() if self.owns() else [])
        prewarming = self.prewarming
        self.backends.look(
            LikelyUnit(str(call.target.name), why_likely(call), prewarming.called_by(call), call.calls)
            for call in prewarming.due_now("container", "dnn")
        )
        if self._looks % WRITE_EVERY == 0:
            await self.write()
        self._looks += 1

    async def write(self) -> None:
        """Write what is new. Raises what the database raises; then it is written later."""
        taken, failures = self.prewarming.log.take(), list(self.backends.failures)
        if not taken and not failures:
            return
        try:
            await database_sync_to_async(_write)(taken, failures)
        except Exception:
            self.prewarming.log.put_back(taken)
            raise
        for _ in failures:
            self.backends.failures.popleft()

    async def _stop(self) -> None:
        await asyncio.to_thread(self.backends.stop)
        with self.job:
            await self.write()


def _read() -> list[UnitBackend]:
    return list(UnitBackend.objects.all())


@transaction.atomic
def _write(taken: list[Prewarm], failures: list[Failure]) -> None:
    new = [one for one in taken if not one.row]
    tenants = set(Tenant.objects.filter(pk__in={one.called_by.tenant_id for one in new}).values_list("pk", flat=True))
    new = [one for one in new if one.called_by.tenant_id in tenants]
    rows = PrewarmRow.objects.bulk_create([_row(one) for one in new])
    changed = [_row(one) for one in taken if one.row]
    PrewarmRow.objects.bulk_update(changed, UPDATED)
    named = {row.name: row for row in UnitBackend.objects.filter(name__in={failure.backend for failure in failures})}
    for failure in failures:
        rests = f" It rests for {failure.rests_s:.0f} s." if failure.rests_s else ""
        record(
            "backend.warm_failed",
            named.get(failure.backend),
            actor="prewarming",
            reason=f"{failure.why[:400].rstrip('.')}.{rests} Units are served without it.",
            severity=Severity.WARNING,
            inputs={"backend": failure.backend, "tries": failure.tries, "rests_s": failure.rests_s},
        )
    for one, row in zip(new, rows, strict=True):
        one.row = row.pk


def _row(one: Prewarm) -> PrewarmRow:
    tenant_id, application, run = one.called_by
    return PrewarmRow(
        pk=one.row or None,
        tenant_id=tenant_id,
        application=application[:80],
        run=run[:80],
        kind=one.kind,
        backend=one.backend[:160],
        place="" if one.place.startswith(UNPLACED) else one.place[:160],
        why=one.why[:400],
        began_at=datetime.fromtimestamp(one.began_at, UTC),
        warm_at=_moment(one.warm_at),
        settled_at=_moment(one.settled_at),
        fate=one.fate,
    )


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def prune_prewarms(now: datetime) -> int:
    """Delete rows that are older than `KEPT`, and the oldest beyond `MOST_ROWS`; return how many."""
    rows = PrewarmRow.objects.order_by("-pk")
    last = rows.values_list("pk", flat=True)[MOST_ROWS : MOST_ROWS + 1].first()
    deleted = PrewarmRow.objects.filter(began_at__lt=now - KEPT).delete()[0]
    return deleted + (PrewarmRow.objects.filter(pk__lte=last).delete()[0] if last else 0)
