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
from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import CharField

from controlplane.accounts.models import ApiKey
from controlplane.background import spawn
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.gateway.ledger.entry import COLUMNS, RequestRecord
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
DEAD_LETTERS = "ledger-dead-letters.jsonl"
"""File of the state folder with the rows that the database refused, as in a journal: with a journal's name, the next start
writes them again.
"""
OF_THE_DATABASE = ("08", "25", "42", "53", "55", "57", "58")
"""Classes of PostgreSQL's SQLSTATE that are about the database, not about a row: connection, read-only, missing tables or
rights, resources, locks, intervention, system."""


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
    f"ON CONFLICT ({', '.join(SERIES)}) DO UPDATE SET "
    + ", ".join(f"{name} = {_MINUTES}.{name} + excluded.{name}" for name in SUMS)
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


def write_all(entries: Sequence[RequestRecord], folder: Path, *, again: bool = False) -> int:
    """Write as `write` does, and leave what the database refuses in the file `DEAD_LETTERS` of *folder*.

    Return the number of those rows. Raises what `write` raises while the database writes nothing at all.
    """
    refused = _write_others(entries, again=again)
    if refused:
        first, reason = refused[0]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / DEAD_LETTERS).open("ab") as file:
            file.writelines(line_of(entry) + b"\n" for entry, _ in refused)
        logger.error("ledger: the database refuses %d rows, kept in %s: %s", len(refused), file.name, reason)
        record(
            "ledger.refused",
            actor="gateway",
            after={"rows": len(refused), "request_id": first.request_id, "file": DEAD_LETTERS},
            reason=f"The database refuses {len(refused)} ledger row{'s' * (len(refused) > 1)}: {reason[:300]}",
            severity=Severity.CRITICAL,
        )
    return len(refused)


def _write_others(entries: Sequence[RequestRecord], *, again: bool) -> list[tuple[RequestRecord, str]]:
    """Write *entries* by halves, in order; return the rows that the database refuses, with its reasons."""
    try:
        write(entries, again=again)
    except Exception as error:
        if is_away(error):
            raise
        if len(entries) == 1:
            return [(entries[0], f"{type(error).__name__}: {error}".strip())]
        half = len(entries) // 2
        return _write_others(entries[:half], again=again) + _write_others(entries[half:], again=again)
    return []


def is_away(error: Exception) -> bool:
    """Whether the database that raised *error* writes no row at all now: it is away, read-only or not migrated."""
    sqlstate = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, OperationalError | InterfaceError) or sqlstate[:2] in OF_THE_DATABASE


def line_of(entry: RequestRecord) -> bytes:
    """Return the line of *entry* in a journal."""
    try:
        return orjson.dumps(entry.values())
    except TypeError:  # a value of a type that JSON lacks: the database refuses it
        return json.dumps(entry.values(), default=str).encode()


class Ledger:
    def __init__(self, flush_s: float, folder: Path) -> None:
        self.flush_s = flush_s
        self.journal = Journal(folder)
        self.written = 0
        self.given_up = 0
        self.folder = folder
        self.refused = 0
        """Rows that the database refused since the start, now in `DEAD_LETTERS`."""
        self.job = Job("flush-ledger", "gateway", flush_s)
        self._held: list[RequestRecord] = []
        self._writing: list[RequestRecord] = []
        self._again = False  # some of the held rows may be in the database
        self._stopping = False
        self._due = asyncio.Event()  # a batch is full, or the writer stops
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Return the number of rows that the database does not have yet."""
        return len(self._writing) + len(self._held)

    @property
    def trouble(self) -> str:
        """Return what is wrong, in words: rows that wait since the database writes none, or that it refused."""
        said = []
        if (since_s := self.job.failing_since) is not None:
            since = datetime.fromtimestamp(since_s, UTC)
            said.append(f"{self.held} rows wait since {since:%F %T} UTC: {self.job.last_error}")
        if self.refused:
            said.append(f"the database refused {self.refused} rows, kept in {DEAD_LETTERS}")
        return "; ".join(said)

    def add(self, entry: RequestRecord) -> None:
        """Hold *entry* for the next batch."""
        self._held.append(entry)
        self.journal.append(line_of(entry))
        if len(self._held) == BATCH_ROWS:  # with more, the database is away: it is retried in `flush_s`
            self._due.set()

    def write_now(self, entries: Sequence[RequestRecord]) -> None:
        """Write *entries* in the transaction of the caller, who keeps them until it is committed. Raises as `write_all`."""
        if entries:
            refused = write_all(entries, self.folder)
            self.written += len(entries) - refused
            self.refused += refused

    async def start(self) -> None:
        self._held = _read(self.journal.take_up())
        if self._held:
            self._again = True
            logger.info("ledger: %d rows of the last run were taken up", len(self._held))
        self._task = spawn(self._run(), "ledger")

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
                self._writing = batch
                try:
                    await self._write(batch)
                finally:
                    self._writing = []
        return not self._held or self.job.ok

    async def _write(self, batch: list[RequestRecord]) -> None:
        """Write *batch*; hold it again when the database raises."""
        self.journal.cut()
        try:
            refused = await database_sync_to_async(write_all)(batch, self.folder, again=self._again)
        except Exception:
            self._held, self._writing = batch + self._held, []
            self._again = True
            if len(self._held) > HELD_ROWS:
                self.given_up += len(self._held) - HELD_ROWS
                self._held = self._held[-HELD_ROWS:]
                logger.critical("ledger: memory is full, %d rows were given up so far", self.given_up)
            raise
        self._again = False
        self.journal.forget()
        self.written += len(batch) - refused
        self.refused += refused

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
            entries.append(RequestRecord(*json.loads(line)).ended())
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            logger.warning("ledger: a row of the last run cannot be read and is left out")
    return entries
