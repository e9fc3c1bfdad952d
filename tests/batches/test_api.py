"""Files and batches through a served gateway, by the real SDK."""

import asyncio
import io
import json
from collections import Counter
from datetime import timedelta
from unittest.mock import Mock

import openai
import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError
from django.db.models.fields.files import FieldFile
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Budget, BudgetKind, Tenant, hash_secret
from controlplane.batches import api, feeder, services
from controlplane.batches.models import Batch, BatchLine, StoredFile
from controlplane.events.models import Event
from controlplane.fleet.models import Adapter, Deployment, Model, SloClass
from tests.gateway.conftest import open_sdk, until

CHAT = "/v1/chat/completions"


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 8}


@pytest.fixture(autouse=True)
def here(monkeypatch, settings, tmp_path):
    """Tasks run in this process, and files lie in a folder of the test."""
    settings.STORAGES = settings.STORAGES | {
        "files": {
            "BACKEND": "django.core.files.storage.FileSystemStorage",
            "OPTIONS": {"location": str(tmp_path / "files")},
        }
    }
    tasks = {services.VALIDATE_TASK: services.validate_batch, feeder.FINISH_TASK: services.finish_batch}
    for module in (services, feeder):
        monkeypatch.setattr(module, "send_task", lambda task, *args: tasks[task](*args))
    monkeypatch.setattr(feeder, "TICK_S", 0.05)
    monkeypatch.setattr(feeder, "LEAVE_S", 1.0)


@pytest.fixture
async def client(served):
    async with open_sdk(served, max_retries=0) as client:
        yield client


def input_of(count, *, url=CHAT, **body):
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": url,
            "body": {"model": "m", "messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 3} | body,
        }
        for number in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def upload(client, content, name="in.jsonl"):
    return await client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


async def ended(client, batch, within_s=60.0):
    async with asyncio.timeout(within_s):
        while True:
            batch = await client.batches.retrieve(batch.id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def lines_of(client, file_id):
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def run(client, content, **options):
    file = await upload(client, content)
    return await client.batches.create(
        **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | options
    )


async def test_each_line_gets_one_answer(served, client):
    whole = {
        "id": "x",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        "metrics": {"time_to_first_token_ms": 1.0},  # as vLLM says it, so a whole answer has a TTFT
    }
    raw = json.dumps(whole).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    script = served.backends[0].script
    script.plays, script.piece_s = [head.encode() + raw], 0.05
    batch = await run(client, input_of(40), metadata={"job": "nightly"})
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
    assert batch.metadata == {"job": "nightly"}
    assert batch.error_file_id is None
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = await lines_of(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{number}" for number in range(40))
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in answers)
    assert all(one["response"]["body"]["choices"] == whole["choices"] for one in answers)
    rows = await served.rows()
    assert len(rows) == 40
    assert {row.slo_class for row in rows} == {"flexible"}
    assert batch.usage.output_tokens == sum(row.output_tokens for row in rows)
    live = served.gateway.publisher.summary.snapshot()["fleet"]
    assert live["ttft_p99_ms"] < 0.5 * max(row.ttft_ms for row in rows), "counted from the release"
    assert await database_sync_to_async(BatchLine.objects.count)() == 0


async def test_a_line_that_vllm_refuses_is_in_the_error_file(served, client):
    content = input_of(3) + input_of(1, max_tokens="many").replace(b"line-0", b"wrong")
    batch = await ended(client, await run(client, content))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
    (fault,) = await lines_of(client, batch.error_file_id)
    assert fault["custom_id"] == "wrong"
    assert fault["response"]["status_code"] == 400
    assert fault["response"]["body"]["error"]["param"] == "max_tokens"


async def test_lines_name_adapters_of_their_tenant_and_of_all(served, client):
    """One of another tenant is as one that there is not; those that are served wait and count as their model."""

    def adapt():
        Deployment.objects.update(max_loras=2, max_cpu_loras=2)
        base = Model.objects.get(name="m")
        other = Tenant.objects.create(name="other", default_slo_class=SloClass.objects.get(name="interactive"))
        own = Tenant.objects.exclude(pk=other.pk).get()
        for name, tenant in (("all", None), ("own", own), ("others", other)):
            Adapter.objects.create(name=name, base=base, source=f"acme/{name}", tenant=tenant)

    await database_sync_to_async(adapt)()
    await served.gateway.dispatching.read_inventory()
    content = b"".join(
        input_of(1, model=name).replace(b"line-0", name.encode()) for name in ("others", "nothing", "all", "own")
    )
    failed = await ended(client, await run(client, content))
    faults = [(one.line, one.code, one.message.replace("nothing", "others")) for one in failed.errors.data]
    assert faults == [(line, "model_not_found", "The model 'others' does not exist here.") for line in (1, 2)]
    batch = await ended(client, await run(client, content.split(b"\n", 2)[2]))
    assert (batch.status, batch.request_counts.completed, batch.model) == ("completed", 2, "m")
    assert sorted((row.model, row.adapter) for row in await served.rows()) == [("m", "all"), ("m", "own")]


async def test_an_invalid_file_fails_the_batch_and_says_where(served, client):
    content = input_of(2) + b"{broken\n" + input_of(1)
    batch = await ended(client, await run(client, content))
    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [("invalid_json_line", 3), ("duplicate_custom_id", 4)]
    assert [one["error"]["line"] for one in await lines_of(client, batch.error_file_id)] == [3, 4]
    assert await served.rows() == []


async def test_a_batch_fails_whose_file_is_gone_from_the_store(served, client):
    file = await upload(client, input_of(2))
    row = await database_sync_to_async(StoredFile.objects.get)(pk=file.id)
    row.content.storage.delete(row.content.name)
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = await ended(client, batch, within_s=10.0)
    (error,) = batch.errors.data
    assert (batch.status, error.code, error.param) == ("failed", "file_not_found", "input_file_id")
    assert f"{file.id} is gone" in error.message
    assert [one["error"]["code"] for one in await lines_of(client, batch.error_file_id)] == ["file_not_found"]


async def test_cancelling_lets_running_lines_finish_and_names_the_others(served, client, monkeypatch):
    monkeypatch.setattr(feeder, "MAX_OPEN", 12)
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(30))
    await until(lambda: served.backends[0].running >= 4)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    await asyncio.sleep(0.1)
    monkeypatch.setattr(feeder.Source, "next_lines", read := Mock(return_value=[]))
    await asyncio.sleep(0.4)
    running = served.backends[0].running
    assert (await client.batches.retrieve(batch.id)).status == "cancelling"
    served.backends[0].script.hold.set()
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed == running
    answers, faults = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert {one["error"]["code"] for one in faults} == {"batch_cancelled"}
    assert sorted(one["custom_id"] for one in answers + faults) == sorted(f"line-{number}" for number in range(30))
    assert read.call_count == 0


async def test_a_batch_expires_at_its_deadline_and_keeps_what_was_done(served, client):
    batch = await run(client, input_of(2))
    await ended(client, batch)
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(10))
    await until(lambda: served.backends[0].running > 0)
    past = timezone.now() - timedelta(seconds=1)
    await database_sync_to_async(Batch.objects.filter(public_id=batch.id).update)(expires_at=past)
    batch = await ended(client, batch)
    assert batch.status == "expired"
    faults = await lines_of(client, batch.error_file_id)
    assert len(faults) == 10
    assert {one["error"]["code"] for one in faults} == {"batch_expired"}
    await until(lambda: served.backends[0].running == 0)


async def test_files_are_listed_paged_read_and_deleted(served, client):
    files = [await upload(client, input_of(1), f"{number}.jsonl") for number in range(3)]
    listed = await client.files.list(limit=2)
    assert [file.id for file in listed.data] == [files[2].id, files[1].id]
    assert listed.has_more
    assert [file.id async for file in client.files.list(order="asc")] == [file.id for file in files]
    assert (await client.files.retrieve(files[0].id)).bytes == len(input_of(1))
    assert (await client.files.content(files[0].id)).content == input_of(1)
    assert (await client.files.delete(files[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(files[0].id)
    assert await database_sync_to_async(StoredFile.objects.count)() == 2


async def test_a_file_that_a_batch_reads_stays(served, client):
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(1))
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        await client.files.delete(batch.input_file_id)
    served.backends[0].script.hold.set()
    await ended(client, batch)
    await client.files.delete(batch.input_file_id)
    assert (await client.batches.retrieve(batch.id)).input_file_id == batch.input_file_id


async def test_a_tenant_sees_nothing_of_another(served, client):
    def add_other():
        other = Tenant.objects.create(name="other", default_slo_class=SloClass.objects.get(name="interactive"))
        ApiKey.objects.create(tenant=other, name="k", prefix="ph_other", sha256=hash_secret("ph_other"))

    batch = await ended(client, await run(client, input_of(1)))
    await database_sync_to_async(add_other)()
    served.secret = "ph_other"
    stranger = open_sdk(served, max_retries=0)
    assert (await stranger.files.list()).data == []
    assert (await stranger.batches.list()).data == []
    for attempt in (
        stranger.files.retrieve(batch.input_file_id),
        stranger.files.content(batch.output_file_id),
        stranger.files.delete(batch.output_file_id),
        stranger.batches.retrieve(batch.id),
        stranger.batches.cancel(batch.id),
        stranger.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    await stranger.close()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "25h"}, "completion_window"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after[seconds]"),
    ],
)
async def test_a_wrong_batch_is_refused_with_its_field(served, client, changes, param):
    file = await upload(client, input_of(1))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | changes
    async with served.http.post(f"{served.url}/v1/batches", json=body, headers=served.headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_errors_have_the_shape_of_openai(served, monkeypatch):
    batch_of = api.batch_of

    def away(key, batch_id):
        if batch_id == "batch_away":
            raise OperationalError("database is locked")
        return batch_of(key, batch_id)

    monkeypatch.setattr(api, "batch_of", away)
    for method, path, status in (
        ("GET", "/v1/files", 401),
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/files", 400),
        ("GET", "/v1/batches?limit=0", 400),
        ("GET", "/v1/batches?after=batch_no", 400),
        ("GET", "/v1/batches/batch_no", 404),
        ("GET", "/v1/batches/batch_away", 503),
    ):
        headers = {} if status == 401 else served.headers
        async with served.http.request(method, f"{served.url}{path}", headers=headers) as response:
            assert response.status == status, path
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
            assert ("retry-after" in response.headers) is (status == 503)


async def test_answers_wait_in_memory_while_the_database_is_away(served, client, monkeypatch):
    record, tries = services.record_answers, []

    def fail_twice(answers, write_rows):
        tries.append(len(answers))
        if len(tries) <= 2:
            raise OperationalError("database is locked")
        return record(answers, write_rows)

    monkeypatch.setattr(services, "record_answers", fail_twice)
    batch = await ended(client, await run(client, input_of(5)))
    assert len(tries) > 2
    assert batch.request_counts.completed == 5
    assert len(await lines_of(client, batch.output_file_id)) == 5


def another_feeder(served, owns=lambda: True):
    """A feeder of the same rows, as another process has; the test calls its `tick`."""
    gateway = served.gateway
    return feeder.Feeder(gateway.http.completions, ledger=gateway.ledger, owns=owns, job=gateway.jobs.add("again", 1.0))


async def test_a_new_process_executes_only_lines_without_an_answer(served, client):
    """What an ended process leaves: some lines answered in the database, the others in no memory."""
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(6))
    await until(lambda: served.backends[0].running > 0)

    def answer_two():
        for line in BatchLine.objects.filter(batch__public_id=batch.id).order_by("-number")[:2]:
            services.record_answers(
                [services.Answer(line.pk, line.batch_id, json.dumps({"custom_id": "x"}), succeeded=True)]
            )

    await database_sync_to_async(answer_two)()
    again = another_feeder(served)
    await again.tick()
    await again.tick()
    assert {line.row.number for line in again._open.values()} == {1, 2, 3, 4}
    await again.close()
    await again.tick()  # as after a lease that was lost and taken again
    assert {line.row.number for line in again._open.values()} == {1, 2, 3, 4}
    await again.close()
    served.backends[0].script.hold.set()
    batch = await ended(client, batch)
    assert batch.request_counts.completed == 6
    assert len(await lines_of(client, batch.output_file_id)) == 6


async def test_a_large_file_comes_back_whole(served, client):
    content = input_of(9_000)
    assert len(content) > 4 * api.READ_BYTES
    file = await upload(client, content)
    assert file.bytes == len(content)
    received = (await client.files.content(file.id)).content
    assert len(received) == len(content)
    assert received == content


async def test_a_tenant_without_a_non_interactive_class_is_refused(served, client):
    file = await upload(client, input_of(1))
    await database_sync_to_async(SloClass.objects.filter(name="flexible").update)(kind="interactive")
    with pytest.raises(openai.PermissionDeniedError, match="non-interactive"):
        await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def test_files_are_deleted_when_their_time_is_over(served, client):
    file = await client.files.create(
        file=("in.jsonl", io.BytesIO(input_of(1))),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    kept = await upload(client, input_of(1))
    assert await database_sync_to_async(services.delete_expired_files)() == 0
    past = timezone.now() - timedelta(seconds=1)
    await database_sync_to_async(StoredFile.objects.filter(pk=file.id).update)(expires_at=past)
    assert await database_sync_to_async(services.delete_expired_files)() == 1
    assert [one.id for one in (await client.files.list()).data] == [kept.id]


@pytest.mark.parametrize(("bound", "most", "lines"), [("MAX_OPEN", 5, 5), ("MAX_OPEN_BYTES", 1, 1)])
async def test_lines_in_memory_are_bounded_for_each_model_of_a_batch(served, client, monkeypatch, bound, most, lines):
    """So a model that is slow holds up no other."""
    monkeypatch.setattr(feeder, bound, most)
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(30))
    of_other = BatchLine.objects.filter(batch__public_id=batch.id, number__gt=22)
    await database_sync_to_async(of_other.update)(model="other")
    await database_sync_to_async(Batch.objects.filter(public_id=batch.id).update)(model="")
    again = another_feeder(served)
    for _ in range(150):  # the first feeder lets go once it sees the newer epoch
        await again.tick()
        if again._open:
            break
        await asyncio.sleep(0.1)
    assert Counter(line.row.model for line in again._open.values()) == {"m": lines, "other": lines}
    (sources,) = again._sources.values()
    assert {source.model: source.unread for source in sources} == {"m": 22 - lines, "other": 8 - lines}
    await again.close()
    served.backends[0].script.hold.set()


async def test_lines_wait_while_their_file_cannot_be_read(served, client, monkeypatch):
    """A store that fails takes no line away: the same ones come when it answers again."""
    broken = [True]
    opened = FieldFile.open

    def open_unless_broken(self, mode="rb"):
        if broken[0]:
            raise OSError("the store is away")
        return opened(self, mode)

    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(6))
    await until(lambda: served.backends[0].running > 0)
    again = another_feeder(served)
    monkeypatch.setattr(FieldFile, "open", open_unless_broken)
    await again.tick()
    assert not again._open
    broken[0] = False
    await again.tick()
    assert len(again._open) == 6
    await again.close()
    served.backends[0].script.hold.set()
    assert (await ended(client, batch)).request_counts.completed == 6


async def test_a_batch_that_a_new_process_takes_up_says_so(served, client):
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(3))
    await until(lambda: served.backends[0].running > 0)
    again = another_feeder(served)
    await again.tick()
    await again.tick()
    row = await database_sync_to_async(Batch.objects.get)(public_id=batch.id)
    assert row.resumed_at is not None
    assert await database_sync_to_async(Event.objects.filter(kind="batch.resumed").count)() == 1
    await again.close()
    served.backends[0].script.hold.set()
    await ended(client, batch)


async def test_a_batch_pauses_while_a_budget_of_dollars_is_spent(served, client):
    """No further line starts, those at instances finish, and the rest runs when the budget is raised."""
    served.backends[0].script.hold = asyncio.Event()
    batch = await run(client, input_of(30))
    await until(lambda: served.backends[0].running >= 4)
    budgets = served.gateway.dispatching.allowances
    budget = await database_sync_to_async(spend_all)(batch.id)
    await budgets.refresh()
    await asyncio.sleep(0.5)
    running = served.backends[0].running
    served.backends[0].script.hold.set()
    await until(lambda: served.backends[0].running == 0)
    await asyncio.sleep(0.5)
    paused = await client.batches.retrieve(batch.id)
    assert (paused.status, paused.request_counts.completed) == ("in_progress", running)
    assert len(served.backends[0].bodies) == running
    await database_sync_to_async(Budget.objects.filter(pk=budget.pk).update)(hard=1_000.0)
    await budgets.refresh()
    batch = await ended(client, batch, within_s=120.0)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (30, 0)
    answers = await lines_of(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{number}" for number in range(30))


async def test_the_lines_of_a_batch_that_is_due_earlier_come_first(served, client, monkeypatch):
    """The lines of the other batch of the model, which fill what may be open, are put back, and none is lost."""
    monkeypatch.setattr(feeder, "MAX_OPEN", 12)
    served.backends[0].script.hold = asyncio.Event()
    first = await run(client, input_of(20))
    await until(lambda: served.backends[0].running > 0)
    second = await run(client, input_of(5), completion_window="1h")
    holding, clock_s = served.gateway.dispatching.dispatcher.holding, served.gateway.dispatching.dispatcher.clock
    await until(lambda: min((one.due_s for one in holding.work.all_of("m")), default=1e9) < clock_s() + 3_700.0)
    served.backends[0].script.hold.set()
    for each, count in ((first, 20), (second, 5)):
        batch = await ended(client, each)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (count, 0)
        answers = await lines_of(client, batch.output_file_id)
        assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{number}" for number in range(count))


def spend_all(public_id):
    """Give the tenant of a batch a budget that is spent."""
    tenant = Batch.objects.get(public_id=public_id).tenant
    return Budget.objects.create(
        tenant=tenant, kind=BudgetKind.USD, hard=10.0, spent_usd=10.0, spent_until=timezone.now()
    )


@pytest.mark.parametrize("purpose", ["batch_output", "fine-tune", "assistants"])
async def test_only_input_of_batches_is_uploaded(client, purpose):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("in.jsonl", io.BytesIO(input_of(1))), purpose=purpose)
    assert refused.value.body["message"].startswith(f"purpose must be batch, not '{purpose}'")
    assert refused.value.body["param"] == "purpose"
