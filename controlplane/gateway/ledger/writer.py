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
from controlplane.gateway.ledger.entry import ARRIVED_AT, COLUMNS, REQUEST_ID, Row, completed, picker
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
_SUMMED = picker(
    *("arrived_at", "model", "region", "own_region", "slo_class", "outcome", "slo_met", "unserved"),
    *("prompt_tokens", "output_tokens", "predicted_prompt_tokens", "predicted_output_tokens"),
)


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


def minute_sums(rows: Sequence[Row]) -> dict[tuple[float, str, str, str, str], Counter[str]]:
    """Return what *rows* add to the minute series, by (minute of arrival, model, region, own region, class)."""
    sums: dict[tuple[float, str, str, str, str], Counter[str]] = {}
    for arrived_at, model, region, own_region, slo_class, outcome, met, unserved, *tokens in map(_SUMMED, rows):
        total = sums.setdefault((arrived_at // 60 * 60, model, region, own_region, slo_class), Counter())
        total["requests"] += 1
        total["failed"] += outcome == Outcome.FAILED
        total["refused"] += outcome == Outcome.REJECTED
        total["slo_met"] += met is True
        total["slo_judged"] += met is not None
        prompt, output, predicted_prompt, predicted_output = tokens
        if not unserved:  # else an instance may have worked for it, and its demand counts below
            total["prompt_tokens"] += prompt
            total["output_tokens"] += output
        else:
            total["unserved"] += 1
            total["unserved_prompt_tokens"] += predicted_prompt
            total["unserved_output_tokens"] += predicted_output
    return sums


def written_before(rows: Sequence[Row]) -> set[tuple[str, datetime]]:
    """Return (request id, arrival) of those of *rows* that the ledger has."""
    known: set[tuple[str, datetime]] = set()
    for begin in range(0, len(rows), LOOKED_UP):
        ids = [row[REQUEST_ID] for row in rows[begin : begin + LOOKED_UP]]
        known.update(LedgerRow.objects.filter(request_id__in=ids).values_list("request_id", "arrived_at"))
    return known


def write(rows: Sequence[Row], *, again: bool = False) -> None:
    """Write rows and series in one transaction; with *again*, only those not there yet."""
    if again:
        there = written_before(rows)
        rows = [row for row in rows if (row[REQUEST_ID], datetime.fromtimestamp(row[ARRIVED_AT], UTC)) not in there]

    adapted = connection.ops.adapt_datetimefield_value  # looked up once: Django finds the thread's connection each time

    def adapt(epoch_s: float) -> Any:
        return adapted(datetime.fromtimestamp(epoch_s, UTC))

    dated = [list(row) for row in rows]
    for row in dated:
        row[ARRIVED_AT] = str(adapt(row[ARRIVED_AT]))
    minutes = [
        (adapt(minute), *names, *(sums[name] for name in SUMS)) for (minute, *names), sums in minute_sums(rows).items()
    ]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_INSERT, [orjson.dumps(dated).decode()])
        cursor.executemany(_UPSERT_MINUTE, minutes)


def write_all(rows: Sequence[Row], folder: Path, *, again: bool = False) -> int:
    """Write as `write` does, and leave what the database refuses in the file `DEAD_LETTERS` of *folder*.

    Return the number of those rows. Raises what `write` raises while the database writes nothing at all.
    """
    refused = _write_others(rows, again=again)
    if refused:
        first, reason = refused[0]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / DEAD_LETTERS).open("ab") as file:
            file.writelines(line_of(row) + b"\n" for row, _ in refused)
        logger.error("ledger: the database refuses %d rows, kept in %s: %s", len(refused), file.name, reason)
        record(
            "ledger.refused",
            actor="gateway",
            after={"rows": len(refused), "request_id": first[REQUEST_ID], "file": DEAD_LETTERS},
            reason=f"The database refuses {len(refused)} ledger row{'s' * (len(refused) > 1)}: {reason[:300]}",
            severity=Severity.CRITICAL,
        )
    return len(refused)


def _write_others(rows: Sequence[Row], *, again: bool) -> list[tuple[Row, str]]:
    """Write *rows* by halves, in order; return the rows that the database refuses, with its reasons."""
    try:
        write(rows, again=again)
    except Exception as error:
        if is_away(error):
            raise
        if len(rows) == 1:
            return [(rows[0], f"{type(error).__name__}: {error}".strip())]
        half = len(rows) // 2
        return _write_others(rows[:half], again=again) + _write_others(rows[half:], again=again)
    return []


def is_away(error: Exception) -> bool:
    """Whether the database that raised *error* writes no row at all now: it is away, read-only or not migrated."""
    sqlstate = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, OperationalError | InterfaceError) or sqlstate[:2] in OF_THE_DATABASE


def line_of(row: Row) -> bytes:
    """Return the line of *row* in a journal."""
    try:
        return orjson.dumps(row)
    except TypeError:  # a value of a type that JSON lacks: the database refuses it
        return json.dumps(row, default=str).encode()


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
        self._held: list[Row] = []
        self._writing: list[Row] = []
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

    def add(self, row: Row) -> None:
        """Hold *row* for the next batch."""
        self._held.append(row)
        self.journal.append(line_of(row))
        if len(self._held) == BATCH_ROWS:  # with more, the database is away: it is retried in `flush_s`
            self._due.set()

    def write_now(self, rows: Sequence[Row]) -> None:
        """Write *rows* in the transaction of the caller, who keeps them until it is committed. Raises as `write_all`."""
        if rows:
            refused = write_all(rows, self.folder)
            self.written += len(rows) - refused
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

    async def _write(self, batch: list[Row]) -> None:
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


def _read(lines: Sequence[bytes]) -> list[Row]:
    """Return rows from the lines of a journal, without a line cut off by a crash."""
    rows = []
    for line in lines:
        try:
            rows.append(completed(json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            logger.warning("ledger: a row of the last run cannot be read and is left out")
    return rows
