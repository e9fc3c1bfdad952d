"""Through the real Envoy, with the configuration of the docs: by its access log, with whole bodies, and with answers through
the picker, as gateways of the Gateway API Inference Extension are set up."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace

import aiohttp
import pytest
import pytest_asyncio
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.accounts.models import Tenant
from tests.gateway.backend import Backend
from tests.gateway.conftest import do_once, gateway_before, until
from tests.gateway.rows import make_model, make_rows
from tests.picker import envoy
from tests.picker.asking import Picker
from tests.workers.conftest import SLOW, emulator  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.services, pytest.mark.nightly]
MODES = {
    "log": {},
    "buffered": {"request_body_mode": "BUFFERED"},
    "through": {
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
}
SLOTS = 4


@pytest_asyncio.fixture(params=MODES)
async def served(request, transactional_db, emulator, tmp_path, monkeypatch, caplog):  # noqa: F811
    """An emulated instance of "m", below a path, and a scripted one of "s", behind Envoy; nothing may fail unseen."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(settings, "KEY_CACHE_S", 0.1)
    do_once(monkeypatch)
    instance = await emulator.ready("one", profile=SLOW, max_num_seqs=SLOTS)
    scripted = Backend("s-0")
    scripted.script.models = ("s",)
    async with AsyncExitStack() as stack:
        await scripted.start()
        stack.push_async_callback(scripted.stop)
        backends = [SimpleNamespace(name="m-0", url=f"{emulator.url}/one")]
        await database_sync_to_async(make_rows)(backends, regions=["east"], max_num_seqs=SLOTS, queue_bound=100)
        await database_sync_to_async(make_model)("s", scripted.url)
        served = await stack.enter_async_context(gateway_before([*backends, scripted], mode=request.param))
        served.extra |= {"instance": instance, "emulator": emulator}
        picker = Picker(served.gateway)
        port = await picker.start("127.0.0.1:0")
        stack.push_async_callback(picker.stop, 0.0)
        served.url = stack.enter_context(envoy.running(tmp_path, port, **MODES[request.param]))
        await until_answered(served)
        yield served
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


async def until_answered(served):
    async with asyncio.timeout(20):
        while True:
            try:
                async with served.http.get(f"{served.url}/v1/models", headers=served.headers) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def rows_of(served, count):
    """Return the rows of so many requests since the last call, once they have ended: no more, and no fewer."""
    async with asyncio.timeout(10):
        while len(rows := await served.rows()) < served.rows_seen + count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    served.rows_seen += count
    assert len(rows) == served.rows_seen
    return rows[-count:]


async def row_of(served):
    (row,) = await rows_of(served, 1)
    return row


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_whole_answers(served):
    for prompt in ("hello", "x" * 300_000):  # in many messages
        async with await served.chat(
            messages=[{"role": "user", "content": prompt}], max_tokens=6, model="s"
        ) as response:
            assert response.status == 200
            usage = (await response.json())["usage"]
        row = await row_of(served)
        assert (row.outcome, row.status_code, row.streamed) == ("done", 200, False)
        assert (row.prompt_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert not {"Authorization", "X-Api-Key"} & {*served.backends[1].headers[-1]}, "the key is the tenant's"
    forged = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-pilothouse-request": "0"}
    async with await served.chat(forged, max_tokens=5, ignore_eos=True) as response:  # below a path
        assert (await response.json())["usage"]["completion_tokens"] == 5
    assert (await row_of(served)).output_tokens == 5


@pytest.mark.parametrize("wanted", [False, True])
async def test_streams(served, wanted):
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    async with await served.chat(stream=True, max_tokens=20, ignore_eos=True, **options) as response:
        assert (response.status, response.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        events = events_of(await response.text())
    usage = [event["usage"] for event in events if event.get("usage")]
    assert usage or not wanted
    if served.extra["mode"] == "through" and not wanted:
        assert not usage  # stripped
    row = await row_of(served)
    assert (row.outcome, row.output_tokens) == ("done", 20)
    assert row.prompt_tokens > 0
    assert 0 < row.queue_ms <= row.ttft_ms < row.e2e_ms
    assert row.itl_ms > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 6}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}),
    ],
)
async def test_responses_and_messages(served, path, body, stream):
    async with await served.post(path, {"model": "m", "stream": stream, "ignore_eos": True} | body) as response:
        text = await response.text()
        assert response.status == 200, text
    reported = [
        usage for usage in usages_of(json.loads(text) if not stream else events_of(text)) if usage["output_tokens"]
    ]
    row = await row_of(served)
    assert (row.outcome, row.output_tokens) == ("done", reported[-1]["output_tokens"])
    assert row.output_tokens > 0
    assert row.prompt_tokens == reported[-1]["input_tokens"]


def usages_of(value):
    """Yield what is called `usage` in *value*, at any depth."""
    for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from usages_of(part)
    if isinstance(value, dict) and isinstance(value.get("usage"), dict):
        yield value["usage"]


async def test_refusals(served):
    async with served.http.post(f"{served.url}/v1/chat/completions", json={"model": "m"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
    async with await served.chat(model="unknown") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    async with await served.chat(model="s", max_tokens="x") as response:  # by the instance
        assert (response.status, (await response.json())["error"]["message"]) == (400, "Not a number.")
    row = await row_of(served)
    assert (row.outcome, row.status_code, row.error_code) == ("failed", 400, "refused_by_instance")


async def test_the_limit_of_a_tenant(served):
    await database_sync_to_async(Tenant.objects.update)(max_concurrent_requests=1)
    await served.gateway.keys.refresh()
    async with await served.chat(stream=True, max_tokens=30, ignore_eos=True) as running:
        async with await served.chat() as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "concurrency_limit_exceeded"
        await running.read()
    assert {row.outcome for row in await rows_of(served, 2)} == {"done", "rejected"}


async def test_a_client_that_leaves_a_stream(served):
    async with await served.chat(stream=True, max_tokens=500, ignore_eos=True) as response:
        async for line in response.content:
            if line.count(b"content"):
                break
        await asyncio.sleep(0.3)
        response.close()
    row = await row_of(served)
    assert (row.outcome, row.error_code) == ("cancelled", "client_disconnected")
    assert 3 < row.output_tokens < 200
    assert row.prompt_tokens > 0
    await served.extra["emulator"].in_work(0, 0)


async def test_a_client_that_leaves_the_queue(served):
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(await served.chat(stream=True, max_tokens=100, ignore_eos=True))
            for _ in range(SLOTS)
        ]
        waiting = asyncio.create_task(served.chat(stream=True))
        await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 1)
        waiting.cancel()
        row = await row_of(served)
        assert (row.outcome, row.error_code, row.instance) == ("cancelled", "client_disconnected", "")
        for each in running:
            await each.read()
    assert [row.outcome for row in await rows_of(served, SLOTS)] == ["done"] * SLOTS


async def test_an_instance_that_breaks_off(served):
    served.backends[1].script.die = "midway"
    async with await served.chat(model="s", stream=True) as response:
        with suppress(aiohttp.ClientPayloadError):
            assert b"[DONE]" not in await response.read()
    row = await row_of(served)
    assert row.outcome in ("failed", "cancelled")
    assert row.prompt_tokens > 0


async def test_an_instance_that_is_dead(served):
    scripted = served.backends[1]
    await scripted.stop()
    async with await served.chat(model="s", headers={"x-max-wait": "3"}) as response:
        assert response.status in (502, 503)
    row = await row_of(served)
    assert row.outcome in ("failed", "rejected")
    assert (row.prompt_tokens, row.output_tokens) == (0, 0)
    async with await served.chat(max_tokens=2) as response:
        assert response.status == 200
