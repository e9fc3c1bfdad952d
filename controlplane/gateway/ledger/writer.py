"""The request ledger: rows are collected in memory and written in batches, with their minute series, in one transaction.

Until the database has a row it is kept on disk too (`journal.py`): on start, rows left by a crash or a database outage are
taken up. Rows that may already have been written, since no confirmation arrived, are looked up first.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path
from typing import Any

import orjson
from channels.db import database_sync_to_async
from django.db import DataError, IntegrityError, connection, transaction
from django.db.models import CharField
from msgspec.structs import asdict

from controlplane.accounts.models import ApiKey
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.gateway.ledger import refused
from controlplane.gateway.ledger.entry import COLUMNS, RequestRecord, fit
from controlplane.gateway.ledger.journal import Journal
from controlplane.gateway.models import SERIES, SUMS, LedgerRow, MinuteRow, Outcome
from controlplane.jobs.record import Job

logger = logging.getLogger(__name__)
LOOKED_UP = 500  # rows per query
BATCH_ROWS = 256
"""Rows after which a batch is written, however recent the last one.

The writing thread holds the interpreter half of the time: with a second's rows in one batch, requests of a busy gateway
waited 50 ms at a stretch behind it.
"""
HELD_ROWS = 500_000  # about 400 MB; beyond it the oldest are dropped, with an error logged


REFUSALS = (DataError, IntegrityError, TypeError, ValueError, OverflowError)
"""Errors that a row causes, as opposed to a database that is away. orjson's own errors are among them."""


_QUOTE = connection.ops.quote_name
_ARRIVED = COLUMNS.index("arrived_at")


def _column(at: int, name: str) -> str:
    """Return the expression for column *name* of the row `value`."""
    field = LedgerRow._meta.get_field(name)
    if connection.vendor != "postgresql":
        value = f"json_extract(value, '$[{at}]')"
    else:
        of_text = isinstance(field, CharField)  # a cast would cut what is too long
        value = f"value->>{at}" if of_text else f"(value->>{at})::{field.db_type(connection)}"
    if name == "api_key_id":  # a key that was deleted while its request ran
        return f"(SELECT id FROM {ApiKey._meta.db_table} WHERE id = {value})"  # noqa: S608
    return value


_INSERT = (
    f"INSERT INTO {LedgerRow._meta.db_table} ({', '.join(map(_QUOTE, COLUMNS))}) "
    f"SELECT {', '.join(starmap(_column, enumerate(COLUMNS)))} "
    + ("FROM json_array_elements(%s::json) AS value" if connection.vendor == "postgresql" else "FROM json_each(%s)")
)
"""Takes a whole batch as one JSON text. The database reads it without the interpreter: with a parameter per value, the event
loop stalled at every row, waiting for the interpreter.
"""
_MINUTES = MinuteRow._meta.db_table
_UPSERT_MINUTE = (
    f"INSERT INTO {_MINUTES} ({', '.join(SERIES + SUMS)}) "  # noqa: S608
    f"VALUES ({', '.join(['%s'] * len(SERIES + SUMS))}) "
    # Counted values replace a minute of the demo's past.
    f"ON CONFLICT ({', '.join(SERIES)}) DO UPDATE SET generated = excluded.generated, "
    + ", ".join(
        f"{name} = CASE WHEN {_MINUTES}.generated THEN 0 ELSE {_MINUTES}.{name} END + excluded.{name}" for name in SUMS
    )
)


def minute_sums(entries: Sequence[RequestRecord]) -> dict[tuple[float, str, str, str, str], Counter[str]]:
    """Return what *entries* add to the minute series, by (minute of arrival, model, region, own region, class)."""
    sums: dict[tuple[float, str, str, str, str], Counter[str]] = {}
    for entry in entries:
        key = (entry.arrived_at // 60 * 60, entry.model, entry.region, entry.own_region, entry.slo_class)
        total = sums.setdefault(key, Counter())
        total["requests"] += 1
        total["failed"] += entry.outcome in (Outcome.FAILED, Outcome.REJECTED)
        total["slo_met"] += entry.slo_met is True
        total["slo_judged"] += entry.slo_met is not None
        if not entry.unserved:  # else an instance may have worked for it, and its demand counts below
            total["prompt_tokens"] += entry.prompt_tokens
            total["output_tokens"] += entry.output_tokens
        else:
            total["unserved"] += 1
            total["unserved_prompt_tokens"] += entry.predicted_prompt_tokens
            total["unserved_output_tokens"] += entry.predicted_output_tokens
    return sums


def written_before(entries: Sequence[RequestRecord]) -> set[tuple[str, datetime]]:
    """Return (request id, arrival) of those of *entries* that the ledger has."""
    known: set[tuple[str, datetime]] = set()
    for begin in range(0, len(entries), LOOKED_UP):
        ids = [entry.request_id for entry in entries[begin : begin + LOOKED_UP]]
        known.update(LedgerRow.objects.filter(request_id__in=ids).values_list("request_id", "arrived_at"))
    return known


def write(entries: Sequence[RequestRecord], *, again: bool = False) -> None:
    """Write rows and series in one transaction; with *again*, only those not there yet."""
    if again:
        there = written_before(entries)
        entries = [
            entry for entry in entries if (entry.request_id, datetime.fromtimestamp(entry.arrived_at, UTC)) not in there
        ]

    adapted = connection.ops.adapt_datetimefield_value  # looked up once: Django finds the thread's connection each time

    def adapt(epoch_s: float) -> Any:
        return adapted(datetime.fromtimestamp(epoch_s, UTC))

    rows = [entry.values() for entry in entries]
    for row in rows:
        row[_ARRIVED] = str(adapt(row[_ARRIVED]))
    minutes = [
        (adapt(minute), *names, *(sums[name] for name in SUMS))
        for (minute, *names), sums in minute_sums(entries).items()
    ]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_INSERT, [orjson.dumps(rows).decode()])
        cursor.executemany(_UPSERT_MINUTE, minutes)


def write_each(entries: Sequence[RequestRecord], *, again: bool = False) -> list[tuple[RequestRecord, str]]:
    """Write as `write` does; halve a refused batch until the rows that the database refuses are isolated.

    Return those with its reasons; all others are written, in order. Raises what `write` raises when the database is away.
    """
    try:
        write(entries, again=again)
    except REFUSALS as error:
        if len(entries) == 1:
            return [(entries[0], f"{type(error).__name__}: {error}".strip())]
        half = len(entries) // 2
        return write_each(entries[:half], again=again) + write_each(entries[half:], again=again)
    return []


def bounded(entry: RequestRecord) -> RequestRecord:
    """Return *entry* bounded, or unchanged where that fails: then the database refuses it."""
    try:
        return entry.bounded()
    except (TypeError, ValueError):
        return entry


def write_all(entries: Sequence[RequestRecord], folder: Path, *, again: bool = False) -> int:
    """Write *entries*, and quarantine in *folder* those that the database refuses; return their number."""
    if not fit(entries):
        entries = list(map(bounded, entries))
    rows = write_each(entries, again=again)
    if rows:
        refused.quarantine(folder, [(asdict(entry), reason) for entry, reason in rows])
        first, reason = rows[0]
        record(
            "ledger.refused",
            actor="gateway",
            after={"rows": len(rows), "request_id": str(first.request_id)},
            reason=f"The database refuses {len(rows)} ledger row{'s' * (len(rows) > 1)}: {reason[:300]}",
            severity=Severity.CRITICAL,
        )
    return len(rows)


class Ledger:
    def __init__(self, flush_s: float, folder: Path) -> None:
        self.flush_s = flush_s
        self.journal = Journal(folder)
        self.written = 0
        self.given_up = 0
        self.folder = folder
        self.refused = refused.count(folder)
        """Rows in quarantine, as last counted: `manage.py ledger_refused` may have removed some since."""
        self.job = Job("flush-ledger", "gateway", flush_s)
        self._held: list[RequestRecord] = []
        self._again = False  # some of the held rows may be in the database
        self._stopping = False
        self._due = asyncio.Event()  # a batch is full, or the writer stops
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def add(self, entry: RequestRecord) -> None:
        """Hold *entry* for the next batch, whatever it contains: its values are checked when it is written."""
        self._held.append(entry)
        try:
            line = orjson.dumps(entry.values())
        except TypeError:  # a number of more than 64 bits, a lone surrogate, a type that JSON lacks
            line = json.dumps(entry.values(), default=str).encode()
        self.journal.append(line)
        if len(self._held) == BATCH_ROWS:  # with more, the database is away: it is retried in `flush_s`
            self._due.set()

    async def start(self) -> None:
        self._held = _read(self.journal.take_up())
        if self._held:
            self._again = True
            logger.info("ledger: %d rows of the last run were taken up", len(self._held))
        self._task = asyncio.create_task(self._run(), name="ledger")

    async def _run(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.flush_s):
                    await self._due.wait()
            self._due.clear()
            await self.flush()

    async def flush(self) -> bool:
        """Write the held rows; return False if the database could not be written, and keep the rows held."""
        batch, self._held = self._held, []
        with self.job:
            if batch:
                await self._write(batch)
        return not self._held or self.job.ok

    async def _write(self, batch: list[RequestRecord]) -> None:
        """Write *batch*; hold it again when the database raises."""
        self.journal.cut()
        try:
            left_out = await database_sync_to_async(write_all)(batch, self.folder, again=self._again)
        except Exception:
            self._held = batch + self._held
            self._again = True
            if len(self._held) > HELD_ROWS:
                self.given_up += len(self._held) - HELD_ROWS
                self._held = self._held[-HELD_ROWS:]
                logger.critical("ledger: memory is full, %d rows were given up so far", self.given_up)
            raise
        self._again = False
        self.journal.forget()
        self.written += len(batch) - left_out
        self.refused = refused.count(self.folder)

    async def stop(self) -> None:
        self._stopping = True  # not a cancellation, which would lose the batch being written
        self._due.set()
        if self._task:
            await self._task
        await self.flush()
        if left := self.journal.close():
            logger.error("ledger: %d rows are kept in %s for the next start", len(self._held), left[0].parent)


def _read(lines: Sequence[bytes]) -> list[RequestRecord]:
    """Return rows from the lines of a journal, without a line cut off by a crash."""
    entries = []
    for line in lines:
        try:
            entries.append(RequestRecord(*json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            logger.warning("ledger: a row of the last run cannot be read and is left out")
    return entries
