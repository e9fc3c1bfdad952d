"""Writes of files and batches. A batch that was accepted is in the database, and each of its lines gets one answer."""

import contextlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

from django.core.files import File
from django.db import transaction
from django.utils import timezone
from msgspec import Struct
from msgspec.structs import asdict, replace

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.batches.budgets import check_lines_budget
from controlplane.batches.models import ENDED, Batch, BatchLine, BatchStatus, Purpose, StoredFile
from controlplane.batches.progress import with_sample
from controlplane.batches.storage import store_errors
from controlplane.batches.validation import ENDPOINTS, Line, Problem, Served, check_lines, lines_of
from controlplane.events.services import record
from controlplane.fleet.models import Model, SloClass, SloKind
from controlplane.fleet.selectors import adapters_of
from controlplane.gateway.errors import ApiError, invalid, quoted
from controlplane.gateway.ledger.entry import OUTPUT_TOKENS, PROMPT_TOKENS, Row
from controlplane.gateway.ledger.writer import is_away
from controlplane.jobs.broker import send_task
from scheduling.model_task import Task

logger = logging.getLogger(__name__)

VALIDATE_TASK = "workers.tasks.batches.validate"
MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_PROBLEMS = 100
"""Problems of validation that the batch itself shows; the error file has all of them."""
CHUNK_LINES = 500
WINDOW = re.compile(r"([1-9]|1\d|2[0-4])h")
SHORTEST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 2_592_000
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "The batch was cancelled before this request was executed.")
KEY_ENDED = "The API key that made this batch has expired, was revoked or deleted, or its tenant is switched off."
UNFINISHED = {BatchStatus.EXPIRED: EXPIRED, BatchStatus.CANCELLED: CANCELLED}


# Files


def create_file(
    tenant: Tenant, content: File[bytes], filename: str, purpose: str, *, expires_after_s: int | None = None
) -> StoredFile:
    """Store *content*.

    Raises ApiError 413 for an input of more than `MAX_FILE_BYTES`, 503 if the store
    fails. Output may be larger: every answer is kept.
    """
    if content.size > MAX_FILE_BYTES and purpose == Purpose.BATCH:
        raise ApiError(
            413, f"The file has {content.size:,} bytes; {MAX_FILE_BYTES:,} is the most.", code="file_too_large"
        )
    row = StoredFile(
        tenant=tenant,
        filename=filename[:255] or "file.jsonl",
        purpose=purpose,
        size_bytes=content.size,
        expires_at=_expiry(expires_after_s),
    )
    name = f"{row.id}.jsonl"
    try:
        with store_errors(f"write {row.id}"):
            row.content.save(name, content, save=False)
        row.save()
    except Exception:
        with contextlib.suppress(Exception):  # the part that was written would fill a full disk for good
            row.content.storage.delete(row.content.field.generate_filename(row, name))
        raise
    return row


def _expiry(after_s: int | None) -> Any:
    if after_s is None:
        return None
    if not SHORTEST_EXPIRY_S <= after_s <= LONGEST_EXPIRY_S:
        raise invalid(
            f"expires_after.seconds must be from {SHORTEST_EXPIRY_S} to {LONGEST_EXPIRY_S}, not {after_s}.",
            "expires_after[seconds]",
        )
    return timezone.now() + timedelta(seconds=after_s)


def delete_file(row: StoredFile) -> None:
    """Delete *row* and its content. Raises ApiError 409 while a batch still reads it, 503 if the store fails."""
    if Batch.objects.filter(input_file=row).exclude(status__in=ENDED).exists():
        raise ApiError(409, f"{row.id} is read by a batch that has not ended: cancel it first.", code="file_in_use")
    with store_errors(f"delete {row.id}"), contextlib.suppress(FileNotFoundError):
        row.content.storage.delete(str(row.content.name))
    row.delete()


def delete_expired_files() -> int:
    """Delete files whose time is over and that no running batch reads. Returns how many."""
    running = Batch.objects.exclude(status__in=ENDED).values("input_file_id")
    rows = StoredFile.objects.filter(expires_at__lte=timezone.now()).exclude(pk__in=running)
    for row in rows:
        delete_file(row)
    return len(rows)


# Batches


def create_batch(
    key: ApiKey,
    input_file: StoredFile,
    endpoint: str,
    completion_window: str,
    *,
    metadata: dict[str, str] | None = None,
    output_expires_after_s: int | None = None,
) -> Batch:
    """Accept a batch, whose file a Celery worker reads next (`validate_batch`). Raises ApiError 400 for what cannot be."""
    if endpoint not in ENDPOINTS:
        raise invalid(f"endpoint must be one of {', '.join(ENDPOINTS)}, not {quoted(endpoint)}.", "endpoint")
    if not isinstance(completion_window, str) or not (window := WINDOW.fullmatch(completion_window)):
        raise invalid(
            f"completion_window must be whole hours from 1h to 24h, not {quoted(completion_window)}.",
            "completion_window",
        )
    if input_file.purpose != Purpose.BATCH:
        raise invalid(f"{input_file.id} has the purpose {input_file.purpose}, not batch.", "input_file_id")
    class_of(key.tenant)
    _expiry(output_expires_after_s)
    batch = Batch(
        tenant=key.tenant,
        api_key=key,
        input_file=input_file,
        endpoint=endpoint,
        completion_window=completion_window,
        metadata=metadata,
        output_expires_after_s=output_expires_after_s,
        expires_at=timezone.now() + timedelta(hours=int(window[1])),
    )
    with transaction.atomic():
        check_lines_budget(batch, 1)
        batch.save()
        transaction.on_commit(lambda: send_task(VALIDATE_TASK, batch.pk))
    return batch


def class_of(tenant: Tenant) -> SloClass:
    """The SLO class of *tenant*'s lines. Raises ApiError 403 where the tenant may use no non-interactive one."""
    row = tenant.slo_classes.filter(kind=SloKind.NON_INTERACTIVE).order_by("-deadline_s").first()
    if row is None:
        message = "Batches run in a non-interactive SLO class, and this tenant may use none."
        raise ApiError(403, message, code="slo_class_not_allowed")
    return row


def enter(batch_id: int, status: BatchStatus, *, of: Sequence[BatchStatus], **fields: Any) -> bool:
    """Move a batch to *status* from one of the states *of*, with other *fields*; False if it is in none of them."""
    with transaction.atomic():
        batch = Batch.objects.select_for_update().filter(pk=batch_id, status__in=of).first()
        if batch is None:
            return False
        batch.status = status
        batch.moments = {**batch.moments, status.value: int(time.time())}
        for name, value in fields.items():
            setattr(batch, name, value)
        batch.save(update_fields=["status", "moments", *fields])
    return True


def take_up(batch: Batch) -> bool:
    """Become the process that executes the lines of *batch*: what earlier ones answer from now on is refused.

    Return False, and do nothing, where another has done so since *batch* was read.
    """
    with transaction.atomic():
        row = Batch.objects.select_for_update().filter(pk=batch.pk, epoch=batch.epoch).first()
        if row is None:
            return False
        if row.epoch:
            row.moments = {**row.moments, "resumed": int(time.time())}
            record("batch.resumed", row, actor="batches", after={"done": row.ended_lines, "lines": row.total})
        row.epoch += 1
        row.save(update_fields=["epoch", "moments"])
        batch.epoch = row.epoch
    return True


def cancel_batch(batch: Batch) -> None:
    """Let no further line start. Raises ApiError 409 for one that has ended or is being written."""
    if not enter(
        batch.pk,
        BatchStatus.CANCELLING,
        of=(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING),
        ends_as=BatchStatus.CANCELLED,
    ):
        batch.refresh_from_db()
        raise ApiError(409, f"A batch that is {batch.status} cannot be cancelled.", code="batch_not_cancellable")
    batch.refresh_from_db()


def end_key_of(batch: Batch) -> None:
    """Cancel *batch*, whose key may no longer be used, and say so in its errors."""
    errors = [_shown(Problem("invalid_api_key", KEY_ENDED))]
    with transaction.atomic():
        of = (BatchStatus.IN_PROGRESS,)
        if enter(batch.pk, BatchStatus.CANCELLING, of=of, ends_as=BatchStatus.CANCELLED, errors=errors):
            batch.refresh_from_db(fields=["status", "ends_as", "errors", "moments"])
            record("batch.key_ended", batch, actor="batches", after={"done": batch.ended_lines, "lines": batch.total})


def validate_batch(batch_id: int) -> bool:
    """Read the input file line by line and store its requests; the batch is in progress or failed afterwards.

    Run again after a crash it begins again from the first line. A file that is gone from the store fails the batch, and so
    does a mistake of ours. Returns whether the batch is in progress. Raises ApiError 503 if the store of files fails, and
    what a database raises that is away: the batch stays as it is.
    """
    batch = (
        Batch.objects.select_related("input_file", "api_key", "tenant")
        .filter(pk=batch_id, status=BatchStatus.VALIDATING)
        .first()
    )
    if batch is None:
        return False
    if batch.api_key is None or not batch.has_key:
        return _fail(batch, [Problem("invalid_api_key", KEY_ENDED)], 0)
    try:
        return _validate(batch, batch.api_key.allowed_models)
    except ApiError as error:
        if error.status != 404:
            raise
        why = (
            f"The content of the input file {batch.input_file_id} is gone: upload it again and create the batch again."
        )
        problem = Problem("file_not_found", why, param="input_file_id")
    except Exception as error:
        if is_away(error):
            raise
        logger.exception("%s cannot be validated", batch.public_id)
        problem = Problem(
            "internal_error", "Something failed on our side as the file was read. Create the batch again."
        )
    return _fail(batch, [problem], 0)


def _validate(batch: Batch, allowed: list[str]) -> bool:
    every = [(name, task, name) for name, task in Model.objects.values_list("name", "task")]
    adapters = adapters_of(batch.tenant_id).filter(active=True)
    every += adapters.values_list("name", "base__task", "base__name")
    models = {name: Served(Task(task), base) for name, task, base in every if not allowed or name in allowed}
    problems: list[Problem] = []
    total, named = 0, set()
    with store_errors(f"read {batch.input_file_id}"), batch.input_file.content.open("rb") as file:
        checked = check_lines(lines_of(file), batch.endpoint, models)
        while chunk := list(islice(checked, CHUNK_LINES)):
            lines = [one for one in chunk if isinstance(one, Line)]
            problems += [one for one in chunk if isinstance(one, Problem)]
            named |= {line.model for line in lines}
            total += len(lines)
            _store_lines(batch, lines if not problems else [])
            shown = {"lines_read": total, "errors": [_shown(problem) for problem in problems[:MAX_PROBLEMS]]}
            if not Batch.objects.filter(pk=batch.pk, status=BatchStatus.VALIDATING).update(**shown):
                break  # cancelled meanwhile
    if problems:
        return _fail(batch, problems, total)
    model = named.pop() if len(named) == 1 else ""
    samples = [(time.time(), 0)]
    batch.model = model
    try:
        with transaction.atomic():
            check_lines_budget(batch, total)
            of = (BatchStatus.VALIDATING,)
            return enter(batch.pk, BatchStatus.IN_PROGRESS, of=of, total=total, model=model, samples=samples)
    except ApiError as error:
        return _fail(batch, [Problem(error.code, error.message)], total)


def _store_lines(batch: Batch, lines: Sequence[Line]) -> None:
    BatchLine.objects.bulk_create([BatchLine(batch=batch, **asdict(line)) for line in lines], ignore_conflicts=True)


def _fail(batch: Batch, problems: Sequence[Problem], total: int) -> bool:
    texts = (
        json.dumps({"id": None, "custom_id": None, "response": None, "error": _shown(problem)}) for problem in problems
    )
    file = _write_file(batch, "errors", texts)
    of, first = (BatchStatus.VALIDATING,), [_shown(problem) for problem in problems[:MAX_PROBLEMS]]
    enter(batch.pk, BatchStatus.FAILED, of=of, errors=first, error_file=file, total=total)
    BatchLine.objects.filter(batch=batch).delete()
    return False


def _shown(problem: Problem) -> dict[str, Any]:
    return {"code": problem.code, "line": problem.line, "message": problem.message, "param": problem.param}


def _write_file(batch: Batch, name: str, texts: Iterable[str | None]) -> StoredFile | None:
    """A file of *texts*, one a line, in place of that of an earlier attempt; None without any."""
    filename = f"{batch.public_id}_{name}.jsonl"
    for earlier in StoredFile.objects.filter(tenant=batch.tenant, filename=filename, purpose=Purpose.BATCH_OUTPUT):
        delete_file(earlier)
    with tempfile.TemporaryFile() as spool:
        size = sum(spool.write((text or "").encode() + b"\n") for text in texts)
        if not size:
            return None
        spool.seek(0)
        content = File(spool, name)
        content.size = size
        return create_file(
            batch.tenant,
            content,
            filename,
            Purpose.BATCH_OUTPUT,
            expires_after_s=batch.output_expires_after_s,
        )


class Answer(Struct):
    """The answer to a line, as it stands in the output or error file."""

    line_id: int
    batch_id: int
    text: str
    succeeded: bool
    row: Row | None = None
    """Of the ledger, for the execution that gave it; None: it was not executed."""
    epoch: int | None = None
    """Of its batch, when the process that executed it took that up; None: of any."""


REFUSED_TEXT = ("answer_not_stored", "The answer could not be stored.")


def record_answers(
    answers: Iterable[Answer], write_rows: Callable[[list[Row]], None] = lambda rows: None
) -> list[Answer]:
    """Write *answers*, each chunk in one transaction with their rows of the ledger: what is answered is paid once.

    Return those that are not kept: their line has an answer, or another process took its batch up. One that the database
    refuses is replaced by an error. Raises what the database raises while it writes nothing.
    """
    of_line: dict[int, Answer] = {}
    not_kept = [answer for answer in answers if of_line.setdefault(answer.line_id, answer) is not answer]
    every = list(of_line.values())
    for at in range(0, len(every), CHUNK_LINES):
        not_kept += _record(every[at : at + CHUNK_LINES], write_rows)
    return not_kept


def _record(answers: Sequence[Answer], write_rows: Callable[[list[Row]], None]) -> list[Answer]:
    try:
        with transaction.atomic():
            return _write_answers(answers, write_rows)
    except Exception as error:
        if is_away(error) or (len(answers) == 1 and answers[0].text == ""):
            raise
        if len(answers) == 1:
            logger.error("batches: an answer cannot be stored: %s", type(error).__name__)
            return _record([replace(answers[0], text="", succeeded=False)], write_rows)
        half = len(answers) // 2
        return _record(answers[:half], write_rows) + _record(answers[half:], write_rows)


def _write_answers(answers: Sequence[Answer], write_rows: Callable[[list[Row]], None]) -> list[Answer]:
    keys = [answer.line_id for answer in answers]
    locked = BatchLine.objects.select_for_update().filter(pk__in=keys, answer__isnull=True).order_by("pk")
    lines = {line.pk: line for line in locked.select_related("batch")}
    in_use = Batch.objects.select_for_update().filter(pk__in={line.batch_id for line in lines.values()})
    batches = {batch.pk: batch for batch in in_use.order_by("pk")}
    kept, not_kept = [], []
    for answer in answers:
        line = lines.get(answer.line_id)
        if line is None or answer.epoch not in (None, batches[line.batch_id].epoch):
            not_kept.append(answer)
            continue
        line.answer, line.succeeded = answer.text or error_text(line, *REFUSED_TEXT), answer.succeeded
        kept.append(answer)
    BatchLine.objects.bulk_update([lines[one.line_id] for one in kept], ["answer", "succeeded"], batch_size=100)
    write_rows([one.row for one in kept if one.row is not None])
    for batch in batches.values():
        _count(batch, [one for one in kept if one.batch_id == batch.pk])
    return not_kept


def _count(batch: Batch, answers: Sequence[Answer]) -> None:
    """Count *answers*; the tokens are those of the ledger, so that the batch's usage is what its tenant pays."""
    succeeded = sum(answer.succeeded for answer in answers)
    batch.completed += succeeded
    batch.failed += len(answers) - succeeded
    rows = [answer.row for answer in answers if answer.row is not None]
    batch.input_tokens += sum(row[PROMPT_TOKENS] for row in rows)
    batch.output_tokens += sum(row[OUTPUT_TOKENS] for row in rows)
    batch.samples = with_sample(batch.samples, time.time(), batch.ended_lines) or batch.samples
    batch.save(update_fields=["completed", "failed", "input_tokens", "output_tokens", "samples"])


def finish_batch(batch_id: int) -> bool:
    """Write the files of a batch that is `finalizing`, and end it. Run again after a crash it writes them again.

    Raises ApiError 503 if the store of files fails: the batch stays as it is.
    """
    batch = Batch.objects.filter(pk=batch_id, status=BatchStatus.FINALIZING).first()
    if batch is None:
        return False
    ends_as = BatchStatus(batch.ends_as or BatchStatus.COMPLETED)
    if ends_as in UNFINISHED:
        _answer_unfinished(batch, ends_as)
    lines = BatchLine.objects.filter(batch=batch).order_by("number")
    texts = {
        succeeded: lines.filter(succeeded=succeeded).values_list("answer", flat=True).iterator(CHUNK_LINES)
        for succeeded in (True, False)
    }
    output, errors = _write_file(batch, "output", texts[True]), _write_file(batch, "errors", texts[False])
    files = {"output_file": output, "error_file": errors}
    if not enter(batch_id, ends_as, of=(BatchStatus.FINALIZING,), total=lines.count(), **files):
        return False
    record("batch.ended", batch, actor="batches", after={"status": ends_as.value, "completed": batch.completed})
    while keys := list(BatchLine.objects.filter(batch=batch).values_list("pk", flat=True)[:CHUNK_LINES]):
        BatchLine.objects.filter(pk__in=keys).delete()
    return True


def _answer_unfinished(batch: Batch, ends_as: BatchStatus) -> None:
    code, message = UNFINISHED[ends_as]
    waiting = BatchLine.objects.filter(batch=batch, answer__isnull=True).select_related("batch").order_by("number")
    while chunk := list(waiting[:CHUNK_LINES]):
        record_answers(
            [Answer(line.pk, batch.pk, error_text(line, code, message), False) for line in chunk],
        )


def request_id(line: BatchLine) -> str:
    return f"batch_req_{line.batch.public_id.removeprefix('batch_')}_{line.number}"


def error_text(line: BatchLine, code: str, message: str) -> str:
    """Line of the error file for a request that was not executed."""
    error = {"code": code, "message": message}
    return json.dumps({"id": request_id(line), "custom_id": line.custom_id, "response": None, "error": error})


def due_work() -> tuple[list[int], list[int]]:
    """Batches whose files wait to be read, the smallest first, and those whose files wait to be written."""
    validating = Batch.objects.filter(status=BatchStatus.VALIDATING).order_by("input_file__size_bytes", "pk")
    return (
        list(validating.values_list("pk", flat=True)),
        list(Batch.objects.filter(status=BatchStatus.FINALIZING).values_list("pk", flat=True)),
    )
