"""Answer the lines of batches alongside tenants' requests, as requests of a non-interactive class.

The queue manager of the dispatcher holds and releases them (`controlplane.dispatch.holding`); a bounded number of lines of a
model is open at a time, and the rest is announced, so that deadlines are planned for with all of it.

The feeder runs in the process that owns the regions and keeps nothing that may not be lost: the next process reads each line
that has no answer in the database again. So a line may be executed twice; it is answered once, and paid once: its row of the
ledger is written with its answer. A process that another one has followed, and that comes back, answers nothing
(`Batch.epoch`).
"""

import asyncio
import copy
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.conf import settings
from django.db.models import Count, Q
from django.db.models.fields.files import FieldFile
from django.utils import timezone
from msgspec import Struct, structs

from controlplane.background import spawn
from controlplane.batches import services
from controlplane.batches.models import Batch, BatchLine, BatchStatus
from controlplane.batches.services import Answer
from controlplane.batches.storage import store_errors
from controlplane.dispatch.port import Backlog
from controlplane.gateway.admission.keys import Grant, SloTerms
from controlplane.gateway.admission.validation import Kind, read_body
from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import LOST, REQUEST_ID, Row
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.serving.completions import Completions
from controlplane.gateway.serving.http import HttpRequest, Responder
from controlplane.jobs.broker import send_task
from controlplane.jobs.record import Job
from scheduling.queueing.promises import ADMIT

logger = logging.getLogger(__name__)

TICK_S = 0.5
MAX_OPEN, MAX_OPEN_BYTES = 512, 64 * 1024 * 1024
"""Lines of a model that are in memory, held or running. As many of a tenant may wait for another try, without bodies."""
FINISH_TASK = "workers.tasks.batches.finish"
SPENT = "budget_spent"
"""Of errors that say no retry makes sense, the one after which a line is tried again: its budget may be raised."""
FAILURES = frozenset({500, 504})
"""Statuses of a failure, as is an error with which the last instance answered."""
MAX_TRIES = 3
"""Tries that fail, of one line; then the error is its answer."""
LONGEST_PAUSE_S = 60.0
LEAVE_S = 10.0
"""For so long a batch that another process took up is left alone: the lease says by then which of them owns it."""


class InputLine(Struct):
    """A line of an input file, as far as it matters once it was validated."""

    body: msgspec.Raw


_input_line = msgspec.json.Decoder(InputLine)


class OpenLine(Struct, eq=False):
    """A line in memory."""

    row: BatchLine
    source: "Source"
    epoch: int
    """Of its batch."""
    raw: bytes = b""
    failures: int = 0
    pause_s: float = 1.0
    again_s: float = 0.0
    """Time of its next try, on the loop's clock."""
    task: asyncio.Task[None] | None = None


class Tried(Struct):
    """How one execution of a line ended. *by_instance*: with an error of the instance; *again*: for want of capacity."""

    status: int
    body: bytes
    by_instance: bool = False
    again: bool = False

    @property
    def failed(self) -> bool:
        return self.by_instance or self.status in FAILURES


class LineRows:
    """Rows of the ledger of executions that ended, by request id, until it is known whether their answer is kept."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        self._rows[row[REQUEST_ID]] = row

    def pop(self, request_id: str) -> Row | None:
        return self._rows.pop(request_id, None)


class Source:
    """Lines of a batch for one model: its file, and a cursor before which all are in memory or done, but *unread*.

    *waiting*: those that are tried again, by number.
    """

    def __init__(self, batch: Batch, grant: Grant, model: str, unread: int) -> None:
        self.batch, self.grant, self.model, self.unread = batch, grant, model, unread
        self.cursor, self.waiting = 0, dict[int, OpenLine]()
        self._file: FieldFile | None = None
        self._closed = False

    def next_lines(self, count: int, most_bytes: int, due: Collection[int]) -> list[tuple[BatchLine, bytes]]:
        """Return at most *count* lines without an answer and their bodies, *due* ones first; none begins after *most_bytes*.

        Reads the database and the file. Raises ApiError 404 or 503 if the store of files fails: the same lines come next.
        """
        rows = list(
            BatchLine.objects.filter(Q(number__in=due) | Q(number__gt=self.cursor))
            .filter(batch_id=self.batch.pk, model=self.model, answer__isnull=True)
            .select_related("batch")
            .order_by("number")[:count]
        )
        ends = accumulate(row.size_bytes for row in rows)
        first = [row for row, end in zip(rows, ends, strict=True) if end - row.size_bytes < most_bytes]
        with store_errors(f"read {self.batch.input_file_id}"):
            if self._file is None and rows:
                self._file = self.batch.input_file.content.open("rb")
            lines = [(row, _body_of(self._read(row))) for row in first]
        new = [row.number for row in first if row.number > self.cursor]
        self.unread = max(0, self.unread - len(new)) if len(rows) == count or len(first) < len(rows) else 0
        self.cursor = max([self.cursor, *new])
        if self._closed:  # while this thread read
            self.close()
        return lines

    def _read(self, row: BatchLine) -> bytes:
        assert self._file is not None
        self._file.seek(row.offset)
        return bytes(self._file.read(row.size_bytes))

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()


class Feeder:
    def __init__(self, completions: Completions, *, ledger: Ledger, owns: Callable[[], bool], job: Job) -> None:
        self.completions, self.ledger, self.owns, self.job = copy.copy(completions), ledger, owns, job
        self.completions.records = copy.copy(completions.records)
        self.completions.records.ledger = self._rows = LineRows()
        self._sources: dict[int, list[Source]] = {}
        """By batch, one for each model that its lines name."""
        self._open: dict[int, OpenLine] = {}
        self._answers: list[Answer] = []
        self._announced: set[str] = set()
        self._epochs: dict[int, int] = {}
        """Of the batches that this process took up."""
        self._leave_until_s: dict[int, float] = {}
        """On the loop's clock, by batch that another process took up."""

    async def run(self) -> None:
        """Look every `TICK_S` until cancelled; lines that run then are cut off and tried again by the next process."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                with self.job:
                    if self.owns():
                        await self.tick()
                    else:
                        await self.close()
        finally:
            await self.close()

    async def close(self) -> None:
        """Cut off what runs and close the files."""
        await self._let_go(list(self._open.values()))
        for batch_id in list(self._sources):
            self._close(batch_id)  # the next ones begin with every line that has no answer
        self._epochs.clear()

    def _close(self, batch_id: int) -> None:
        for source in self._sources.pop(batch_id, ()):
            source.close()

    async def tick(self) -> None:
        """Write answers, read batches, open lines, announce the others.

        An error of one batch holds up no other. Raises the first one in the end.
        """
        await self._write()
        batches = await database_sync_to_async(_running_batches)()
        errors = await self._follow(batches) + await self._read_lines()
        self._announce(batches)
        if errors:
            raise errors[0]

    async def _write(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            try:
                lost = await database_sync_to_async(services.record_answers)(answers, self.ledger.write_now)
            except BaseException:
                self._answers = answers + self._answers
                raise
            for answer in lost:
                self._lose(answer.row)

    def _lose(self, row: Row | None) -> None:
        """Have *row* written, of an execution whose answer is not kept."""
        if row is not None:
            row[LOST] = True
            self.ledger.add(row)

    async def _follow(self, batches: list[Batch]) -> list[Exception]:
        """Drop what has ended, expire what is late, and have the files written of what is whole; return the errors."""
        running, errors = {batch.pk: batch for batch in batches}, []
        for batch_id in self._sources.keys() - running.keys():
            self._close(batch_id)
            await self._let_go([line for line in self._open.values() if line.row.batch_id == batch_id])
        for batch_id in self._epochs.keys() - running.keys():
            del self._epochs[batch_id]
        for batch in batches:
            try:
                await self._follow_one(batch)
            except Exception as error:
                errors.append(error)
        return errors

    async def _follow_one(self, batch: Batch) -> None:
        if await self._is_of_another(batch):
            return
        mine = [line for line in self._open.values() if line.row.batch_id == batch.pk]
        if not batch.has_key and batch.status == BatchStatus.IN_PROGRESS:
            await database_sync_to_async(services.end_key_of)(batch)
        late = batch.expires_at <= timezone.now() or not batch.has_key
        if late or batch.status == BatchStatus.CANCELLING:
            # Lines that run finish when the batch is cancelled; at its deadline or without its key they are cut off.
            await self._pause(batch)
            if late:
                await self._let_go(mine)
            pending = any(answer.batch_id == batch.pk for answer in self._answers)
            if any(line.row.pk in self._open for line in mine) or pending:
                return
            ends_as = BatchStatus.CANCELLED if batch.status == BatchStatus.CANCELLING else BatchStatus.EXPIRED
            await self._finish(batch, ends_as)
        elif batch.completed + batch.failed >= batch.total and not mine:
            await self._finish(batch, BatchStatus.COMPLETED)
        elif self.completions.admission.entries.spent(batch.tenant_id, batch.api_key_id or 0, batch.model):
            await self._pause(batch)
        elif batch.pk not in self._sources:
            if batch.pk not in self._epochs:
                if not await database_sync_to_async(services.take_up)(batch):
                    return
                self._epochs[batch.pk] = batch.epoch
            try:
                self._sources[batch.pk] = await database_sync_to_async(_sources_of)(batch)
            except ApiError as error:
                logger.warning("%s waits: %s", batch.public_id, error.message)
                return
            await self._put_back_behind(batch)

    async def _is_of_another(self, batch: Batch) -> bool:
        """Return whether another process took *batch* up, a moment ago; then what runs of it here is cut off."""
        now_s = asyncio.get_running_loop().time()
        if self._epochs.get(batch.pk, batch.epoch) != batch.epoch:
            logger.warning("%s was taken up by another process; its lines are left to that", batch.public_id)
            self._close(batch.pk)
            await self._let_go([line for line in self._open.values() if line.row.batch_id == batch.pk])
            del self._epochs[batch.pk]
            self._leave_until_s[batch.pk] = now_s + LEAVE_S
        if now_s < self._leave_until_s.get(batch.pk, now_s):
            return True
        self._leave_until_s.pop(batch.pk, None)
        return False

    async def _put_back_behind(self, batch: Batch) -> None:
        """Put back the lines of batches that are due later than *batch*, which comes now, where they would be in its way."""
        models = {source.model for source in self._sources[batch.pk]}
        for sources in list(self._sources.values()):
            if any(source.model in models and source.batch.expires_at > batch.expires_at for source in sources):
                await self._pause(sources[0].batch)

    async def _pause(self, batch: Batch) -> None:
        """Start no further line of *batch*; what waits is read again once it has a source again."""
        self._close(batch.pk)
        at_instances = self.completions.requests.at_instances()
        mine = [line for line in self._open.values() if line.row.batch_id == batch.pk]
        await self._let_go([line for line in mine if services.request_id(line.row) not in at_instances])

    async def _finish(self, batch: Batch, ends_as: BatchStatus) -> None:
        of = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
        await database_sync_to_async(services.enter)(batch.pk, BatchStatus.FINALIZING, of=of, ends_as=ends_as)
        self._close(batch.pk)
        await asyncio.to_thread(send_task, FINISH_TASK, batch.pk)

    async def _read_lines(self) -> list[Exception]:
        """Open lines, those of batches with the earliest deadline first; return the errors."""
        errors: list[Exception] = []
        every = [source for sources in self._sources.values() for source in sources]
        open_lines = Counter(line.row.model for line in self._open.values())
        open_bytes, waiting = Counter[str](), Counter[tuple[int, str]]()
        for line in self._open.values():
            open_bytes[line.row.model] += line.row.size_bytes
        for source in every:
            waiting[source.batch.tenant_id, source.model] += len(source.waiting)
        now_s = asyncio.get_running_loop().time()
        for source in sorted(every, key=lambda one: one.batch.expires_at):
            due = [number for number, line in source.waiting.items() if line.again_s <= now_s]
            may_wait = MAX_OPEN - waiting[source.batch.tenant_id, source.model]
            probes = 0 if source.waiting else MAX_OPEN // 16  # the tenant's lines that wait stop no other batch of it
            free = min(MAX_OPEN - open_lines[source.model], max(may_wait, len(due), probes))
            free_bytes = MAX_OPEN_BYTES - open_bytes[source.model]
            if min(free, free_bytes) <= 0 or not (source.unread or due):
                continue
            try:
                lines = await database_sync_to_async(source.next_lines)(free, free_bytes, due)
            except ApiError as error:
                logger.warning("%s waits: %s", source.batch.public_id, error.message)
                continue
            except Exception as error:
                errors.append(error)
                continue
            for row, raw in lines:
                if row.pk in self._open:  # it ran on while its batch was paused
                    continue
                self._take(row, raw, source)
            open_lines[source.model] += len(lines)
            open_bytes[source.model] += sum(row.size_bytes for row, _ in lines)
        return errors

    def _announce(self, batches: list[Batch]) -> None:
        """Announce the lines that are not open yet to the queue manager."""
        requests, now = self.completions.requests, timezone.now()
        due: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for batch in batches:
            for source in self._sources.get(batch.pk, ()):
                if lines := source.unread + len(source.waiting):
                    due_s = requests.clock() + (batch.expires_at - now).total_seconds()
                    due[source.model].append((due_s, lines))
        for model in self._announced | due.keys():
            requests.send(Backlog(model, tuple(due.get(model, ()))))
        self._announced = set(due)

    def _take(self, row: BatchLine, raw: bytes, source: Source) -> None:
        line = source.waiting.pop(row.number, None) or OpenLine(row, source, self._epochs[source.batch.pk])
        line.raw = raw
        self._open[line.row.pk] = line
        line.task = spawn(self._answer(line), "answer batch line")

    async def _let_go(self, lines: list[OpenLine]) -> None:
        """Forget *lines*; those that run are cut off."""
        tasks = []
        for line in lines:
            self._open.pop(line.row.pk, None)
            if line.task is not None:
                line.task.cancel()
                tasks.append(line.task)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, line: OpenLine) -> None:
        """Execute *line*; keep its answer until it is written, or after a failure that may pass have it wait."""
        request_id = services.request_id(line.row)
        try:
            tried = await self._execute(line)
            if line.row.pk not in self._open:
                return
            line.failures += tried.failed
            if line.failures < MAX_TRIES and (tried.failed or tried.again):
                self._wait(line)
                return
            try:
                answer = answer_of(line.row, tried.status, tried.body)
            except Exception:  # else its batch would wait for it until the deadline
                logger.exception("line %s: its answer cannot be read", request_id)
                answer = Answer(line.row.pk, line.row.batch_id, "", succeeded=False)
            answer.row, answer.epoch = self._rows.pop(request_id), line.epoch
            del self._open[line.row.pk]
            self._answers.append(answer)
        finally:
            self._lose(self._rows.pop(request_id))

    def _wait(self, line: OpenLine) -> None:
        """Have *line* read again after a pause, longer each time; at once by a source that begins later."""
        line.raw, line.pause_s = b"", min(2.0 * line.pause_s, LONGEST_PAUSE_S)
        line.again_s = asyncio.get_running_loop().time() + line.pause_s
        del self._open[line.row.pk]
        for source in self._sources.get(line.row.batch_id, ()):
            if source.model == line.row.model:
                source.waiting[line.row.number] = line

    async def _execute(self, line: OpenLine) -> Tried:
        now, batch = time.time(), line.source.batch
        terms = line.source.grant.default_terms.within(max(1, int(batch.expires_at.timestamp() - now)))
        grant = replace(line.source.grant, default_terms=terms, terms={terms.slo_class: terms})
        headers = {b"x-slo-class": terms.slo_class.encode()}
        answer = Collected()
        request_id = services.request_id(line.row)
        request = HttpRequest("POST", batch.endpoint, headers, receive=_no_message, request_id=request_id)
        responder = Responder(answer.send, request.request_id)
        try:
            kind, age_s = Kind(batch.endpoint.removeprefix("/v1/")), now - batch.created_at.timestamp()
            await self.completions.complete(grant, line.raw, request, responder, kind, age_s=max(0.0, age_s))
        except ApiError as error:
            self.completions.records.count_error(error)
            again = error.retry_after_s is not None or error.code == SPENT
            return Tried(error.status, error.body(), error.by_instance, again)
        except Exception:
            logger.exception("line %s failed", request.request_id)
            failure = ApiError(500, "Something failed on our side.", code="internal_error")
            return Tried(500, failure.body())
        return Tried(answer.status, b"".join(answer.body), again=answer.again)


class Collected:
    """An answer, kept instead of sent."""

    def __init__(self) -> None:
        self.status, self.again = 499, True
        self.body: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.again = message["status"], (b"x-should-retry", b"true") in message["headers"]
        else:
            self.body.append(message.get("body", b""))


async def _no_message() -> dict[str, Any]:
    """Never: a batch has no connection that could close."""
    await asyncio.Event().wait()
    raise AssertionError


NO_JSON = ("answer_not_json", "The answer is no JSON, as a line has to be: ask for `encoding_format` float or base64.")


def _body_of(line: bytes) -> bytes:
    """Return the body of the input *line*, for the gateway to judge; nothing of a line that has none any longer."""
    try:
        try:
            return bytes(_input_line.decode(line).body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return bytes(_input_line.decode(read_body(line, settings.MAX_JSON_DEPTH)[1]).body)
    except (ApiError, msgspec.MsgspecError, ValueError, RecursionError):
        return b""


def answer_of(row: BatchLine, status: int, body: bytes) -> Answer:
    """The line of the output file, or of the error file for any status but 200 and for an answer that is no JSON."""
    try:
        value = json.loads(body, parse_constant=lambda _: None) if body else None
        response = {"status_code": status, "request_id": services.request_id(row), "body": value}
        line = {"id": services.request_id(row), "custom_id": row.custom_id, "response": response, "error": None}
        return Answer(row.pk, row.batch_id, json.dumps(line), status == 200)
    except (ValueError, RecursionError):
        return Answer(row.pk, row.batch_id, services.error_text(row, *NO_JSON), False)


def _running_batches() -> list[Batch]:
    states = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    return list(
        Batch.objects.filter(status__in=states).select_related("input_file", "tenant", "api_key").order_by("expires_at")
    )


def _sources_of(batch: Batch) -> list[Source]:
    """Return the sources of the lines of *batch* that have no answer. Raises ApiError 403 as `grant_of`."""
    grant = grant_of(batch)
    unread = BatchLine.objects.filter(batch=batch, answer__isnull=True).order_by().values_list("model")
    return [Source(batch, grant, model, count) for model, count in unread.annotate(Count("pk"))]


def grant_of(batch: Batch) -> Grant:
    """Grant of the lines of *batch*. Raises ApiError 403 where its tenant may use no non-interactive class any longer."""
    tenant = batch.tenant
    assert batch.api_key is not None, "batches without a usable key are cancelled"
    window_s = int((batch.expires_at - batch.created_at) / timedelta(seconds=1))
    terms = structs.replace(SloTerms.of(services.class_of(tenant)).within(window_s), if_unreachable=ADMIT)
    return Grant(
        key_id=batch.api_key.pk,
        tenant_id=tenant.pk,
        tenant=tenant.name,
        max_concurrent_requests=1 << 30,
        tokens_per_minute=0,
        rates=False,
        models=frozenset(batch.api_key.allowed_models),
        default_terms=terms,
        terms={terms.slo_class: terms},
    )
