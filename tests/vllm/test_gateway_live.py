"""Two real vLLM servers behind the gateway, used with the real `openai` SDK. The last test kills one of them."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from types import SimpleNamespace

import aiohttp
import openai
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.models import Instance
from controlplane.gateway.process import Gateway
from controlplane.planning.execution import floor as floor_rows
from tests.gateway.conftest import ServedGateway, serving, until
from tests.gateway.rows import SECRET, make_rows
from tests.vllm.conftest import MAX_MODEL_LEN, MODEL, VllmFleet, finish
from workers.vllm.metrics import parse

pytestmark = pytest.mark.vllm
NAMES = ("pair-a", "pair-b")
SEQUENCES = 2  # that each server runs at a time
MESSAGES = [{"role": "user", "content": "Which way does the wind blow?"}]


@pytest.fixture
async def served(transactional_db, vllm_pair, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    backends = [SimpleNamespace(name=name, url=url) for name, url in zip(NAMES, vllm_pair, strict=True)]
    options = {"max_num_seqs": SEQUENCES, "queue_bound": 100, "model_name": MODEL}
    await database_sync_to_async(make_rows)(backends, regions=["here", "here"], **options)
    await database_sync_to_async(Instance.objects.update)(state="loading")  # the gateway is to find that they are up
    async with AsyncExitStack() as stack:
        gateway = Gateway(floor_rows)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = await stack.enter_async_context(serving(gateway))
        await until(lambda: gateway.topology.fleet.accepting.sum() == 2, 20)
        yield ServedGateway(gateway, url, backends, http)


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as client:
        yield client


@contextmanager
def frozen(fleet: VllmFleet) -> Iterator[None]:
    """Hold both servers still, so that work piles up however fast they are; for less than a heartbeat takes to fail."""
    groups = [
        json.loads(fleet.launcher.log_file(name).with_suffix(".json").read_text())["process_id"] for name in NAMES
    ]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


def exactly(tokens: int) -> dict:
    return {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}


async def upstream_running(served: ServedGateway) -> int:
    total = 0
    for backend in served.backends:
        async with served.http.get(f"{backend.url}/metrics") as response:
            total += parse(await response.read()).running
    return total


async def test_plain_and_streamed_answers_with_usage(served, client):
    plain = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **exactly(12))
    assert plain.usage.completion_tokens == 12
    assert plain.choices[0].finish_reason == "length"
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **exactly(20)
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    text = await client.completions.create(model=MODEL, prompt=[5, 6, 7, 8], **exactly(9))
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (4, 9)
    rows = await served.rows()
    assert [(row.outcome, row.output_tokens) for row in rows] == [("done", 12), ("done", 20), ("done", 9)]
    assert [row.prompt_tokens for row in rows] == [plain.usage.prompt_tokens] * 2 + [4]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Kiel", "Hamburg"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


async def test_a_named_tool_is_called_through_the_gateway(served, client):
    """vLLM needs a parser even for a tool that is named (these servers have one). Random weights make odd arguments."""
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": named, "max_tokens": 200}
    plain = await client.chat.completions.create(**asked)
    (call,) = plain.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert (call.type, bool(call.function.arguments)) == ("function", True)
    stream = await client.chat.completions.create(**asked, stream=True)
    parts = [
        call.function async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()
    ]
    assert {part.name for part in parts if part.name} == {"weather"}
    rows = await served.rows()
    assert [row.outcome for row in rows] == ["done", "done"]
    assert all(row.output_tokens > 0 for row in rows)


async def test_the_servers_own_refusal_comes_through(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=MODEL, prompt=[5] * (MAX_MODEL_LEN + 10), max_tokens=5)


async def test_metrics_are_read(served, client):
    await client.chat.completions.create(model=MODEL, messages=MESSAGES, **exactly(5))
    replicas = list(served.gateway.topology.replicas.values())
    await until(lambda: sum(replica.metrics.generation_tokens_total for replica in replicas) >= 5)
    for replica in replicas:
        assert replica.metrics.model_name == MODEL
        assert replica.metrics.kv_cache_size_tokens > MAX_MODEL_LEN
        assert served.gateway.topology.fleet.kv_capacity_tokens[replica.slot] == replica.metrics.kv_cache_size_tokens
    row = await database_sync_to_async(Instance.objects.get)(name=NAMES[0])
    assert row.state == "ready"
    assert row.kv_capacity_tokens == replicas[0].metrics.kv_cache_size_tokens


async def test_priority_decides_who_is_served_first_under_load(served, client, vllm_fleet):
    async def ask(slo_class: str, tokens: int) -> None:
        headers = {"X-SLO-Class": slo_class}
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=headers, **exactly(tokens))

    with frozen(vllm_fleet):
        busy = [asyncio.create_task(ask("interactive", 60)) for _ in range(2 * SEQUENCES)]
        await until(lambda: served.gateway.topology.fleet.running.sum() == 2 * SEQUENCES)
        late = [asyncio.create_task(ask("flexible", 30)) for _ in range(4)]
        await until(lambda: served.gateway.dispatcher.waiting_count == 4)
        urgent = [asyncio.create_task(ask("interactive", 30)) for _ in range(4)]
        await until(lambda: served.gateway.dispatcher.waiting_count == 8)
    await asyncio.gather(*busy, *late, *urgent)
    rows = (await served.rows())[-12:]
    given = sorted(
        (row.arrived_at.timestamp() + row.queue_ms / 1000, row.slo_class) for row in rows if row.output_tokens == 30
    )
    assert [slo_class for _, slo_class in given] == ["interactive"] * 4 + ["flexible"] * 4


async def test_a_disconnect_frees_the_request_upstream(served, client):
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=24, **exactly(900))
    await anext(stream)
    assert await upstream_running(served) >= 1
    await stream.close()
    async with asyncio.timeout(3):
        while await upstream_running(served):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await until(lambda: served.gateway.topology.fleet.running.sum() == 0)
    row = (await served.rows())[-1]
    assert row.outcome == "cancelled"
    assert row.output_tokens < 24 * 900


async def test_draining_finishes_what_runs(served, client):
    stream = await client.completions.create(model=MODEL, prompt=[9, 9], stream=True, n=16, **exactly(800))
    await anext(stream)
    (busy,) = [replica for replica in served.gateway.topology.replicas.values() if replica.requests]

    def drain():
        services.drain(Instance.objects.get(name=busy.name), "a test", "maintenance")

    await database_sync_to_async(drain)()
    await until(lambda: served.gateway.topology.fleet.accepting.sum() == 1)
    for _ in range(3):
        await client.completions.create(model=MODEL, prompt=[4], **exactly(3))
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"] * 16
    rows = (await served.rows())[-4:]
    assert {row.instance for row in rows if row.output_tokens == 3} == {name for name in NAMES if name != busy.name}
    assert [row.output_tokens for row in rows if row.instance == busy.name] == [16 * 800]


async def test_a_killed_instance_is_noticed_and_its_requests_go_to_the_other(served, client, vllm_fleet: VllmFleet):
    """Both servers are frozen while requests are given to them and queue up; then one is killed, and the other goes on."""
    with frozen(vllm_fleet):
        asked = [
            asyncio.create_task(client.completions.create(model=MODEL, prompt=[index + 1], **exactly(20)))
            for index in range(2 * SEQUENCES + 6)
        ]
        await until(lambda: served.gateway.dispatcher.waiting_count == 6)
        assert served.gateway.topology.fleet.running.sum() == 2 * SEQUENCES
        await asyncio.to_thread(finish, vllm_fleet.launcher.stop(NAMES[1], grace_s=0))
        killed_s = time.monotonic()

    def failed() -> bool:
        return Instance.objects.get(name=NAMES[1]).state == "failed"

    async with asyncio.timeout(10):
        while not await database_sync_to_async(failed)():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert time.monotonic() - killed_s < 5.0
    event = await database_sync_to_async(Event.objects.filter(kind="instance.moved").latest)("id")
    assert (event.subject, event.after["state"]) == (NAMES[1], "failed")
    answers = await asyncio.gather(*asked)
    assert [answer.usage.completion_tokens for answer in answers] == [20] * len(asked)
    rows = (await served.rows())[-len(asked) :]
    assert {(row.instance, row.outcome) for row in rows} == {(NAMES[0], "done")}
    assert sorted(row.attempts for row in rows) == [1] * (SEQUENCES + 6) + [2] * SEQUENCES
