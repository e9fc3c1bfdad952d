"""A key that may no longer be used: what was revoked, deleted, out of date or switched off reaches all of its work in 2 s.

Each way a key can end meets each state that work can be in: a new request, one that waits, one that the queue manager holds,
a stream, a batch that waits, one that runs, and access to files.
"""

import asyncio
import io
import json
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.db import connections
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.batches import feeder, services
from controlplane.batches.models import Batch, BatchStatus
from controlplane.gateway.progress import RequestState
from tests import settings as defaults
from tests.examples import at_night_but
from tests.gateway.conftest import until

WITHIN_S = 2.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}
ENDS = {
    "revoked": lambda: ApiKey.objects.update(revoked_at=timezone.now()),
    "deleted": lambda: ApiKey.objects.all().delete(),
    "expired": lambda: ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1)),
    "tenant off": lambda: Tenant.objects.update(active=False),
}


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 1}


@pytest.fixture(autouse=True)
def period_of_users(served, settings, tmp_path, monkeypatch):
    """Keys are read as often as at a user's, and batches' tasks run here."""
    settings.STORAGES = settings.STORAGES | {
        "files": {
            "BACKEND": "django.core.files.storage.FileSystemStorage",
            "OPTIONS": {"location": str(tmp_path / "files")},
        }
    }
    tasks = {services.VALIDATE_TASK: services.validate_batch, feeder.FINISH_TASK: services.finish_batch}

    def finish(task, *args):
        try:
            tasks[task](*args)
        finally:
            connections.close_all()  # of a thread that no one else cleans up

    monkeypatch.setattr(services, "send_task", lambda task, *args: tasks[task](*args))
    monkeypatch.setattr(feeder, "send_task", finish)


def post(served, body, **headers):
    return served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=served.headers | headers)


async def answer(served, body, **headers):
    """(status, error code) of a request that is not streamed."""
    async with post(served, body, **headers) as response:
        return response.status, (await response.json()).get("error", {}).get("code")


async def last_error(served, body):
    """(status, error code of the last event) of a stream."""
    async with post(served, body | {"stream": True}) as response:
        events = (await response.read()).decode().split("\n\n")
        last = next(each for each in reversed(events) if each.startswith("data: "))
        return response.status, json.loads(last.removeprefix("data: ")).get("error", {}).get("code")


async def batch_of(served, count=3):
    lines = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
        for number in range(count)
    )
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", io.BytesIO("\n".join(map(json.dumps, lines)).encode()), filename="in.jsonl")
    async with served.http.post(f"{served.url}/v1/files", data=form, headers=served.headers) as response:
        file_id = (await response.json())["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with served.post("/v1/batches", body) as response:
        return (await response.json())["id"], file_id


def open_requests(served, *states):
    return [one for one in served.gateway.requests._open.values() if one.state in states]


def test_the_period_leaves_time_within_two_seconds():
    assert defaults.KEY_CACHE_S <= WITHIN_S / 2


@pytest.mark.parametrize("how", ENDS)
async def test_requests_end(served, how):
    """In each state: 401, or an error event where a stream has begun; the instance is left, and each has its ledger row."""
    script = served.backends[0].script
    script.tokens, script.token_s = 2_000, 0.02
    stream = asyncio.create_task(last_error(served, CHAT))
    await until(lambda: open_requests(served, RequestState.STREAMING))
    queued = asyncio.create_task(answer(served, CHAT))
    held = asyncio.create_task(answer(served, CHAT, **{"X-SLO-Class": "flexible"}))
    await until(lambda: len(open_requests(served, RequestState.WAITING)) == 2)
    assert len(served.gateway.dispatching.dispatcher.holding) == 1

    await database_sync_to_async(ENDS[how])()
    async with asyncio.timeout(20):
        assert await stream == (200, "invalid_api_key")
        assert await queued == (401, "invalid_api_key")
        assert await held == (401, "invalid_api_key")
    assert await answer(served, CHAT) == (401, "invalid_api_key")
    await until(lambda: served.backends[0].running == 0)
    assert not open_requests(served, *RequestState)
    assert not served.gateway.dispatching.dispatcher.requests
    assert len(served.gateway.dispatching.dispatcher.holding) == 0
    async with asyncio.timeout(10):
        while len(rows := await served.rows()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {(row.error_code, row.api_key_id is None) for row in rows} == {("invalid_api_key", how == "deleted")}


async def test_a_body_that_is_still_on_its_way_is_not_served(served):
    """The key was good when the head came."""

    async def slowly():
        yield json.dumps(CHAT).encode()[:20]
        await until(lambda: served.gateway.http.active)
        await database_sync_to_async(ENDS["revoked"])()
        await asyncio.sleep(0.6)  # longer than the keys of this test are kept
        yield json.dumps(CHAT).encode()[20:]

    head = served.headers | {"Content-Type": "application/json"}
    async with served.http.post(f"{served.url}/v1/chat/completions", data=slowly(), headers=head) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
    assert not served.backends[0].bodies


@pytest.mark.parametrize(
    ("how", "state"),
    at_night_but(
        [("revoked", "waiting"), ("deleted", "running"), ("expired", "validating"), ("tenant off", "running")],
        [(how, state) for how in ENDS for state in ("waiting", "running", "validating")],
    ),
)
async def test_batches_end(served, how, state):
    """No line starts, those that run are cut off, and what was not executed is in the error file."""
    script = served.backends[0].script
    script.hold = asyncio.Event()
    if state == "waiting":  # for the instance, which another request has
        other = asyncio.create_task(answer(served, CHAT))
        await until(lambda: served.backends[0].running)
    if state == "validating":
        waits = asyncio.get_running_loop().create_future()
        validate = services.send_task
        services.send_task = lambda *_: waits.get_loop().call_soon_threadsafe(waits.set_result, 1)
    batch_id, file_id = await batch_of(served)
    if state == "validating":
        await waits
    else:
        await until(lambda: served.gateway.requests._open)
    if state == "running":
        await until(lambda: served.backends[0].running)

    await database_sync_to_async(ENDS[how])()
    if state == "validating":
        pk = (await database_sync_to_async(Batch.objects.get)(public_id=batch_id)).pk
        await database_sync_to_async(validate)(services.VALIDATE_TASK, pk)
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        async with served.http.get(f"{served.url}{path}", headers=served.headers) as response:
            assert response.status == 401, path
    async with asyncio.timeout(20):
        while True:
            batch = await database_sync_to_async(Batch.objects.select_related("error_file").get)(public_id=batch_id)
            if batch.status in (BatchStatus.CANCELLED, BatchStatus.FAILED):
                break
            await asyncio.sleep(0.05)
    assert batch.status == (BatchStatus.FAILED if state == "validating" else BatchStatus.CANCELLED)
    assert batch.errors[0]["code"] == "invalid_api_key"
    if state != "validating":
        path = batch.error_file.content.path
        assert len(await asyncio.to_thread(lambda: Path(path).read_text().splitlines())) == 3
    await until(lambda: served.backends[0].running == 0)
    if state == "waiting":
        assert await other == (401, "invalid_api_key")
    assert len(served.backends[0].bodies) <= 1, "no line began afterwards"


async def test_a_batch_of_a_deleted_restricted_key_does_not_get_the_rights_of_its_tenant(served):
    """Its rights went with it."""
    await database_sync_to_async(ApiKey.objects.update)(allowed_models=["another"])
    served.backends[0].script.hold = asyncio.Event()
    await asyncio.sleep(0.5)
    services.send_task = lambda *_: None
    batch_id, _ = await batch_of(served)
    await database_sync_to_async(ApiKey.objects.all().delete)()
    pk = (await database_sync_to_async(Batch.objects.get)(public_id=batch_id)).pk
    await database_sync_to_async(services.validate_batch)(pk)
    assert (await database_sync_to_async(Batch.objects.get)(pk=pk)).status == BatchStatus.FAILED
    assert not served.backends[0].bodies
