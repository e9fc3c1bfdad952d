"""The request ledger: rows are gathered in memory and written in batches, with their minute series, in one transaction.

A clean stop writes everything. A crash loses at most the rows of the last `LEDGER_FLUSH_S`. While the database cannot be
written, rows wait in memory; what is still there at a clean stop goes to a spill file that the next start reads.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from channels.db import database_sync_to_async
from django.db import connection, transaction

from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome

logger = logging.getLogger(__name__)
HELD_ROWS = 500_000  # about 400 MB; beyond it the oldest are given up, loudly


class Entry(NamedTuple):
    """One ledger row; the order of the fields is the order of the columns in `INSERT`."""

    request_id: str
    arrived_at: float  # epoch seconds
    tenant_id: int
    api_key_id: int | None
    model: str
    slo_class: str
    region: str
    instance: str
    application: str
    run: str
    unit: str
    streamed: bool
    outcome: str
    status_code: int
    error_code: str
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None
    slo_met: bool | None
    attempts: int
    trace: str  # JSON


_QUOTE = connection.ops.quote_name
_INSERT_LEDGER = (
    f"INSERT INTO {LedgerRow._meta.db_table} ({', '.join(map(_QUOTE, Entry._fields))}) "  # noqa: S608 - our own names
    f"VALUES ({', '.join(['%s'] * len(Entry._fields))})"
)
_SUMS = ("requests", "failed", "slo_met", "slo_judged", "prompt_tokens", "output_tokens")
_MINUTES = MinuteRow._meta.db_table
_UPSERT_MINUTE = (
    f"INSERT INTO {_MINUTES} (minute, model, region, slo_class, {', '.join(_SUMS)}) "  # noqa: S608
    f"VALUES ({', '.join(['%s'] * (4 + len(_SUMS)))}) "
    "ON CONFLICT (minute, model, region, slo_class) DO UPDATE SET "
    + ", ".join(f"{name} = {_MINUTES}.{name} + excluded.{name}" for name in _SUMS)
)


def minute_sums(entries: Sequence[Entry]) -> dict[tuple[float, str, str, str], Counter[str]]:
    """What *entries* add to the minute series, by (minute of arrival, model, region, class)."""
    sums: dict[tuple[float, str, str, str], Counter[str]] = {}
    for entry in entries:
        key = (entry.arrived_at // 60 * 60, entry.model, entry.region, entry.slo_class)
        total = sums.setdefault(key, Counter())
        total["requests"] += 1
        total["failed"] += entry.outcome in (Outcome.FAILED, Outcome.REJECTED)
        total["slo_met"] += entry.slo_met is True
        total["slo_judged"] += entry.slo_met is not None
        total["prompt_tokens"] += entry.prompt_tokens
        total["output_tokens"] += entry.output_tokens
    return sums


def write(entries: Sequence[Entry]) -> None:
    """Write rows and series in one transaction."""

    def adapt(epoch_s: float) -> Any:
        return connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(epoch_s, UTC))

    rows = [(entry[0], adapt(entry[1]), *entry[2:]) for entry in entries]
    minutes = [
        (adapt(minute), model, region, slo_class, *(sums[name] for name in _SUMS))
        for (minute, model, region, slo_class), sums in minute_sums(entries).items()
    ]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.executemany(_INSERT_LEDGER, rows)
        cursor.executemany(_UPSERT_MINUTE, minutes)


class Ledger:
    def __init__(self, flush_s: float, spill: Path) -> None:
        self.flush_s = flush_s
        self.spill = spill
        self.written = 0
        self.given_up = 0
        self._held: list[Entry] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def add(self, entry: Entry) -> None:
        self._held.append(entry)

    async def start(self) -> None:
        if self.spill.exists():
            lines = self.spill.read_bytes().splitlines()
            self._held = [Entry(*orjson.loads(line)) for line in lines]
            self.spill.unlink()
            logger.warning("ledger: %d rows of the last run were taken up from %s", len(lines), self.spill)
        self._task = asyncio.create_task(self._run(), name="ledger")

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self.flush_s)
            await self.flush()

    async def flush(self) -> bool:
        """Write what is held; False if the database could not be written, in which case the rows stay held."""
        if not self._held:
            return True
        batch, self._held = self._held, []
        try:
            await database_sync_to_async(write)(batch)
        except Exception as error:
            self._held = batch + self._held
            if len(self._held) > HELD_ROWS:
                self.given_up += len(self._held) - HELD_ROWS
                self._held = self._held[-HELD_ROWS:]
                logger.critical("ledger: memory is full, %d rows were given up so far", self.given_up)
            logger.error("ledger: %d rows could not be written and are held: %s", len(self._held), error)
            return False
        self.written += len(batch)
        return True

    async def stop(self) -> None:
        self._stopping.set()  # not a cancellation, which would lose the batch that is being written
        if self._task:
            await self._task
        if not await self.flush():
            self.spill.write_bytes(b"".join(orjson.dumps(tuple(entry)) + b"\n" for entry in self._held))
            logger.error("ledger: %d rows are kept in %s for the next start", len(self._held), self.spill)
