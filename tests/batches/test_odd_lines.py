"""Whatever becomes of a line, it gets one answer, is paid once, and holds up no other."""

import asyncio
import json

import pytest
from channels.db import database_sync_to_async

from controlplane import background
from controlplane.batches import feeder, services
from controlplane.batches.models import Batch, BatchLine
from controlplane.gateway.errors import ApiError, unavailable
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.serving.completions import Completions
from tests.batches.test_api import another_feeder, client, ended, here, input_of, lines_of, run
from tests.gateway.conftest import until
from tests.gateway.test_answers import http, plays
from tests.triggers import refuse, stop_refusing

__all__ = ["client", "here"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(feeder, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture(autouse=True)
def no_task_dies():
    before = background.dead.copy()
    yield
    assert background.dead == before


def whole(usage: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"content": "a b c d"}}], "usage": usage}).encode()


async def everything(client, batch):
    """The ended batch and its lines, of both files."""
    batch = await ended(client, batch)
    lines = await lines_of(client, batch.output_file_id) + await lines_of(client, batch.error_file_id)
    return batch, lines


async def paid(served) -> tuple[int, int]:
    """(prompt, output) tokens that tenants pay."""
    rows = [row for row in await served.rows() if not row.lost]
    return sum(row.prompt_tokens for row in rows), sum(row.output_tokens for row in rows)


@pytest.mark.parametrize(
    "usage",
    ["oops", None, [], 7, {}, {"prompt_tokens": "abc"}, {"prompt_tokens": None}, {"prompt_tokens": -3},
     {"completion_tokens": 2**70}, {"prompt_tokens": 1.5}, {"prompt_tokens": [1]}, {"input_tokens": "x"}],
)  # fmt: skip
async def test_an_answer_with_an_odd_usage_is_the_answer_and_counted(served, client, usage):
    """B1, A9."""
    plays(served, http(200, whole(usage)))
    batch, lines = await everything(client, await run(client, input_of(3)))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines} == {"a b c d"}
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == await paid(served)
    assert batch.usage.output_tokens >= 3
    assert len(served.backends[0].bodies) == 3


@pytest.mark.parametrize(
    "answer",
    [
        http(200, b"all is well"),
        http(200, b"[1]"),
        http(200, b"null"),
        http(200, b"{}"),
        http(500, b'{"error":{"message":"bad \\u0000","code":500}}'),
        http(500, b"<html>"),
        http(503, b""),
    ],
)
async def test_a_line_that_instances_fail_is_tried_three_times(served, client, answer):
    """B2."""
    plays(served, answer)
    batch, lines = await everything(client, await run(client, input_of(3)))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (0, 3)
    assert {line["response"]["status_code"] for line in lines} == {502}
    rows = await served.rows()
    assert len(rows) == 3 * feeder.MAX_TRIES
    assert sum(row.lost for row in rows) == 3 * (feeder.MAX_TRIES - 1)
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == await paid(served)


def refusing(monkeypatch, error, of=b"", most=10):
    """Have the first *most* executions of lines with *of* in them refused with *error*; return those, as they come."""
    complete, refused = Completions.complete, []

    async def refuse(self, grant, raw, *args, **options):
        if of in raw and len(refused) < most:
            refused.append(raw)
            raise error
        await complete(self, grant, raw, *args, **options)

    monkeypatch.setattr(Completions, "complete", refuse)
    return refused


@pytest.mark.parametrize(
    ("status", "code", "retry_after_s", "tries"),
    [
        (503, "model_unavailable", 15.0, 10),
        (429, "rate_limit_exceeded", 1.0, 10),
        (429, "budget_spent", None, 10),
        (429, "run_limit_reached", None, 1),
        (409, "run_stopped", None, 1),
        (503, "adapter_unavailable", None, 1),
        (504, "first_token_late", None, feeder.MAX_TRIES),
    ],
)
async def test_a_line_waits_for_capacity_and_any_other_refusal_is_its_answer(
    served, client, monkeypatch, status, code, retry_after_s, tries
):
    refused = refusing(monkeypatch, ApiError(status, "no", code=code, retry_after_s=retry_after_s))
    _, (line,) = await everything(client, await run(client, input_of(1)))
    assert len(refused) == tries
    assert line["response"]["status_code"] == (200 if tries == 10 else status)
    assert tries == 10 or line["response"]["body"]["error"]["code"] == code


async def test_lines_that_wait_for_another_try_stop_no_other_batch(served, client, monkeypatch):
    monkeypatch.setattr(feeder, "LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(feeder, "MAX_OPEN", 16)
    error = unavailable("no", code="adapters_unavailable", retry_after_s=15)
    refused = refusing(monkeypatch, error, b"stuck", most=1000)
    stuck = await run(client, input_of(100).replace(b"say", b"stuck"), completion_window="1h")
    await until(lambda: len(refused) >= 16)
    batch, _ = await everything(client, await run(client, input_of(6)))
    assert batch.request_counts.completed == 6
    assert len(set(refused)) <= 2 * 16
    await client.batches.cancel(stuck.id)
    assert (await ended(client, stuck)).status == "cancelled"


async def test_vectors_in_bytes_are_an_error_of_their_line(served, client, monkeypatch):
    """B1: valid for vLLM, but no answer that a file of JSON lines can hold."""

    async def execute(self, line):
        return feeder.Tried(200, b"\x00\xff\xfe" if line.row.number == 2 else b'{"data": []}')

    monkeypatch.setattr(feeder.Feeder, "_execute", execute)
    batch, lines = await everything(client, await run(client, input_of(3)))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    (fault,) = [line for line in lines if line["error"]]
    assert fault["custom_id"] == "line-1"
    assert fault["error"]["code"] == "answer_not_json"


@pytest.mark.parametrize("raises", ["answer_of", "_body_of"])
async def test_an_exception_of_one_line_is_its_error_alone(served, client, monkeypatch, raises):
    of_line = getattr(feeder, raises)

    def fail(*args):
        if b"say 1" in bytes(args[-1]) or getattr(args[0], "number", 0) == 2:
            raise ZeroDivisionError
        return of_line(*args)

    if raises == "answer_of":
        monkeypatch.setattr(feeder, raises, fail)
    else:  # what is in the file is no longer what was validated
        monkeypatch.setattr(feeder.Source, "_read", lambda self, row: b"{" if row.number == 2 else _read(self, row))
    batch, lines = await everything(client, await run(client, input_of(3)))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    assert sorted(line["custom_id"] for line in lines) == ["line-0", "line-1", "line-2"]


_read = feeder.Source._read


async def test_an_answer_that_the_database_refuses_is_an_error_of_its_line(served, client):
    when = "NEW.answer LIKE '%line-1\"%choices%'"
    await database_sync_to_async(refuse)(BatchLine._meta.db_table, "UPDATE", when)
    try:
        batch, lines = await everything(client, await run(client, input_of(5)))
    finally:
        await database_sync_to_async(stop_refusing)()
    assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 1)
    (fault,) = [line for line in lines if line["error"]]
    assert (fault["custom_id"], fault["error"]["code"]) == ("line-1", "answer_not_stored")


async def test_one_batch_that_raises_holds_up_no_other(served, client, monkeypatch):
    sources_of = feeder._sources_of

    def fail(batch):
        if batch.total == 2:
            raise RuntimeError("this one")
        return sources_of(batch)

    monkeypatch.setattr(feeder, "_sources_of", fail)
    bad = await run(client, input_of(2))
    good, _ = await everything(client, await run(client, input_of(3)))
    assert good.request_counts.completed == 3
    assert served.gateway.jobs["feed-batches"].last_error == "RuntimeError: this one"
    monkeypatch.undo()
    await client.batches.cancel(bad.id)


async def test_a_batch_takes_what_chat_takes(served, client):
    """B4."""
    content = input_of(2).replace(b"say 1", rb"say \ud800")
    batch, _ = await everything(client, await run(client, content))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    async with await served.chat() as response:
        assert response.status == 200
    asked = {body["messages"][0]["content"] for body in served.backends[0].bodies}
    assert "say \ufffd" in asked


async def test_a_process_that_comes_back_answers_nothing(served, client):
    """D26: its answers are refused, and nobody pays for them."""
    served.backends[0].script.hold = asyncio.Event()
    frozen_owns = [True]
    batch = await run(client, input_of(6))
    await until(lambda: served.backends[0].running > 0)
    following = another_feeder(served)  # takes it from the gateway's own, which is frozen from now on
    row = await database_sync_to_async(Batch.objects.get)(public_id=batch.id)
    frozen_owns[0] = False
    taken = await database_sync_to_async(services.take_up)(row)
    assert taken
    served.backends[0].script.hold.set()  # the frozen one gets its answers
    await until(lambda: served.gateway.ledger.held > 0 or served.gateway.ledger.written > 0)
    row = await database_sync_to_async(Batch.objects.get)(public_id=batch.id)
    assert (row.completed, row.failed) == (0, 0)
    following._epochs[row.pk] = row.epoch
    await until(lambda: len(served.backends[0].bodies) >= 6)

    async def follow() -> None:
        while True:
            await following.tick()
            await asyncio.sleep(0.05)

    ticking = asyncio.create_task(follow())
    try:
        batch, lines = await everything(client, batch)
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await following.close()
    assert batch.request_counts.completed == 6
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(6))
    rows = await served.rows()
    assert sum(not each.lost for each in rows) == 6
    assert any(each.lost for each in rows)
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == await paid(served)


async def test_what_a_killed_process_had_executed_is_paid_once(served, client):
    """B5, D26: a row is written with its answer, so that of a lost answer there is none."""
    batch = await run(client, input_of(6))
    row = await database_sync_to_async(Batch.objects.get)(public_id=batch.id)
    killed = another_feeder(served)
    while len(killed._answers) < 3:
        await killed._follow(await database_sync_to_async(feeder._running_batches)())
        await killed._read_lines()
        await asyncio.sleep(0.05)
        row = await database_sync_to_async(Batch.objects.get)(public_id=batch.id)
        if row.completed:
            break
    for line in killed._open.values():
        line.task.cancel()
    batch, lines = await everything(client, batch)
    await killed.close()
    assert batch.request_counts.completed == len(lines) == 6
    assert await database_sync_to_async(LedgerRow.objects.filter(lost=False).count)() == 6
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == await paid(served)


@pytest.mark.django_db
def test_answers_are_kept_by_epoch_and_counted_once(key):
    from tests.batches.test_budgets import batch_of

    batch = batch_of(key, 2)
    lines = list(BatchLine.objects.select_related("batch").order_by("number"))
    assert services.take_up(batch)
    stale = Batch.objects.get()
    stale.epoch -= 1
    assert not services.take_up(stale), "another was first"
    old, new = (
        [services.Answer(line.pk, batch.pk, f'"{name}"', succeeded=True, epoch=epoch) for line in lines]
        for name, epoch in (("old", batch.epoch - 1), ("new", batch.epoch))
    )
    assert services.record_answers(old) == old
    assert services.record_answers(new[:1]) == []
    assert services.record_answers([*new, *new]) == [new[0]]
    batch.refresh_from_db()
    assert (batch.completed, batch.failed) == (2, 0)
    assert set(BatchLine.objects.values_list("answer", flat=True)) == {'"new"'}
