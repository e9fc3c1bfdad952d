"""The contract, second part: load, metrics, order, disconnects, admission, sleep and adapters, of both servers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.oracles.histograms import Ended, quantile, since
from tests.vllm.calls import COMPLETION, begun, ended, generate, idle, post, reached, rest
from tests.vllm.conftest import MAX_MODEL_LEN, MAX_NUM_QUEUED_REQS, MAX_NUM_SEQS, MODEL, Server
from workers.vllm.client import VllmClient, VllmError

pytestmark = pytest.mark.gate


@pytest.fixture
async def control(server: Server, http: aiohttp.ClientSession) -> AsyncIterator[VllmClient]:
    """The control client; the server is idle and awake before and after each test."""
    client = VllmClient(server.url, http, timeout_s=30)
    await idle(client)
    yield client
    await client.wake_up()
    await idle(client)


async def test_health_and_version(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    assert await control.health()
    assert await control.version() == "0.32.0"
    (card,) = await control.models()
    assert (card.id, card.max_model_len, card.parent) == (MODEL, MAX_MODEL_LEN, None)
    for method in ("GET", "POST"):
        async with http.request(method, f"{server.url}/ping") as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_metrics_count_what_was_done(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    before, ended_before = await control.metrics(), await ended(http, server)
    await asyncio.gather(*(generate(http, server, 8, prompt=[number] * 20) for number in range(1, 6)))
    async with asyncio.timeout(30):
        while (done := await ended(http, server)).e2e_s.count < ended_before.e2e_s.count + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    after = await control.metrics()
    assert after.model_name == MODEL
    assert after.prompt_tokens_total - before.prompt_tokens_total == 100
    assert after.generation_tokens_total - before.generation_tokens_total == 40
    assert done.success_total["length"] - ended_before.success_total["length"] == 5
    assert since(done.ttft_s, ended_before.ttft_s).count == 5
    assert since(done.itl_s, ended_before.itl_s).count == 35
    assert set(done.success_total) == {"stop", "length", "abort", "error", "repetition"}
    assert after.kv_cache_size_tokens == after.num_gpu_blocks * after.block_size > MAX_MODEL_LEN
    ttft = quantile(since(done.ttft_s, ended_before.ttft_s), 0.5)
    assert ttft is not None
    assert ttft > 0


async def test_prefix_cache_counters(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    prompt = [number % 900 + 3 for number in range(600)]
    before = await control.metrics()
    for _ in range(2):
        await generate(http, server, 1, prompt=prompt)
    after = await control.metrics()
    assert after.prefix_queries_total - before.prefix_queries_total == 1200
    hits = after.prefix_hits_total - before.prefix_hits_total
    assert hits == 600 // after.block_size * after.block_size


async def test_priority_order_under_load(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    """All slots are taken and free up one after another; waiting requests are taken by priority, lower first."""
    order: list[int] = []

    async def one(priority: int, tokens: int) -> None:
        await generate(http, server, tokens, priority=priority)
        order.append(priority)

    await control.sleep(level=0)
    tasks = [asyncio.create_task(one(-100, 300 + 150 * slot)) for slot in range(MAX_NUM_SEQS)]
    tasks += [asyncio.create_task(one(priority, 2)) for priority in (5, 1, -3)]
    await asyncio.sleep(1.0)
    assert not order
    await control.wake_up()
    await asyncio.gather(*tasks)
    assert [priority for priority in order if priority > -100] == [-3, 1, 5]
    assert order[0] == -100


async def test_disconnect_frees_a_streamed_request(
    server: Server, http: aiohttp.ClientSession, control: VllmClient
) -> None:
    before = await ended(http, server)
    (await begun(http, server, 4000)).close()
    await idle(control)
    await gone(http, server, control, before)


async def test_disconnect_frees_a_plain_request(
    server: Server, http: aiohttp.ClientSession, control: VllmClient
) -> None:
    before = await ended(http, server)
    call = asyncio.create_task(http.post(f"{server.url}/v1/completions", json={**COMPLETION, "max_tokens": 4000}))
    await reached(control, lambda m: m.running == 1)
    call.cancel()
    await idle(control)
    await gone(http, server, control, before)


async def gone(http: aiohttp.ClientSession, server: Server, control: VllmClient, before: Ended) -> None:
    """Nothing is left of a request whose caller left, and it does not count as finished."""
    after = await ended(http, server)
    assert after.success_total == before.success_total
    assert after.generation_tokens_total - before.generation_tokens_total < 4000
    assert (await control.metrics()).kv_usage_ratio == 0


async def test_admission(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    async def one() -> tuple[int, Any, Any]:
        return await post(http, server, "/v1/completions", {**COMPLETION, "max_tokens": 300})

    answers = await asyncio.gather(*(one() for _ in range(MAX_NUM_QUEUED_REQS + 20)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= MAX_NUM_QUEUED_REQS
    _, answer, headers = next(item for item in answers if item[0] == 503)
    assert answer["error"] == {
        "message": "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
    assert "Retry-After" not in headers


async def test_a_request_hangs_while_the_server_sleeps(
    server: Server, http: aiohttp.ClientSession, control: VllmClient
) -> None:
    await control.sleep(level=1)
    assert await control.is_sleeping()
    assert await control.health()
    task = asyncio.create_task(generate(http, server, 3))
    await asyncio.sleep(0.5)
    assert not task.done()
    m = await control.metrics()
    assert (m.sleeping, m.running, m.waiting) == (True, 0, 0)
    await control.wake_up()
    assert not await control.is_sleeping()
    assert (await task)["usage"]["completion_tokens"] == 3
    assert not (await control.metrics()).sleeping


async def test_the_head_of_a_stream_comes_at_once(
    server: Server, http: aiohttp.ClientSession, control: VllmClient
) -> None:
    """Status 200 does not mean that the request has run: the gateway must not take it for the first token."""
    await control.sleep(level=0)
    async with http.post(f"{server.url}/v1/completions", json={**COMPLETION, "stream": True}) as response:
        assert response.status == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await response.content.readany()
        await control.wake_up()
        assert b"data: " in await response.content.readany()


async def test_sleep_aborts_running_requests(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    before = await ended(http, server)
    response = await begun(http, server, 4000)
    await control.sleep(level=1, mode="abort")
    chunks = await rest(response)
    assert chunks[-2]["choices"][0]["finish_reason"] == "abort"
    assert chunks[-1]["usage"]["completion_tokens"] < 4000
    after = await ended(http, server)
    assert after.success_total["abort"] - before.success_total["abort"] == 1


async def test_sleep_waits_for_running_requests(
    server: Server, http: aiohttp.ClientSession, control: VllmClient
) -> None:
    response = await begun(http, server, 400)
    await control.sleep(level=1, mode="wait")
    chunks = await rest(response)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 400
    assert await control.is_sleeping()


async def test_sleep_keeps_running_requests(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    response = await begun(http, server, 2000)
    await control.sleep(level=0, mode="keep")
    produced = (await control.metrics()).generation_tokens_total
    await asyncio.sleep(0.3)
    assert (await control.metrics()).generation_tokens_total == produced
    await control.wake_up()
    assert (await rest(response))[-1]["usage"]["completion_tokens"] == 2000


async def test_waking_in_parts(control: VllmClient) -> None:
    await control.sleep(level=1)
    await control.wake_up(["weights"])
    assert await control.is_sleeping()
    await control.wake_up(["kv_cache"])
    assert not await control.is_sleeping()


async def test_adapters(server: Server, http: aiohttp.ClientSession, control: VllmClient) -> None:
    await control.load_lora_adapter("poet", server.adapter)
    cards = await control.models()
    assert [(card.id, card.parent, card.root) for card in cards[1:]] == [("poet", MODEL, server.adapter)]
    answer = await generate(http, server, 3, model="poet")
    assert answer["model"] == "poet"
    with pytest.raises(VllmError, match="has already been loaded") as caught:
        await control.load_lora_adapter("poet", server.adapter)
    assert caught.value.status == 400
    await control.unload_lora_adapter("poet")
    status, answer, _ = await post(http, server, "/v1/completions", {**COMPLETION, "model": "poet"})
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize(
    ("call", "body", "status", "kind"),
    [
        ("load", {}, 400, "Bad Request"),
        ("load", {"lora_name": "x", "lora_path": "/no/such/adapter"}, 404, "NotFoundError"),
        ("load", {"lora_name": MODEL, "lora_path": "/no/such/adapter"}, 400, "InvalidUserInput"),
        ("load", {"lora_name": "", "lora_path": ""}, 400, "InvalidUserInput"),
        ("unload", {"lora_name": "x"}, 404, "NotFoundError"),
        ("unload", {"lora_name": ""}, 400, "InvalidUserInput"),
    ],
)
async def test_wrong_adapters(
    server: Server, http: aiohttp.ClientSession, call: str, body: object, status: int, kind: str
) -> None:
    got, answer, _ = await post(http, server, f"/v1/{call}_lora_adapter", body)
    assert (got, answer["error"]["type"]) == (status, kind)
