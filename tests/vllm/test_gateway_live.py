"""A real vLLM server behind the gateway, used with the real `openai` SDK."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import openai
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet import services
from controlplane.fleet.models import Instance
from tests.gateway.conftest import ServedGateway, until
from tests.gateway.rows import SECRET
from tests.vllm.conftest import CONTRACT, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL, VllmFleet
from tests.vllm.gateway import gateway_before
from workers.vllm.metrics import parse

pytestmark = [pytest.mark.vllm, pytest.mark.gate]
MESSAGES = [{"role": "user", "content": "Which way does the wind blow?"}]


@pytest.fixture
async def served(transactional_db, vllm_server, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    async with gateway_before({CONTRACT: vllm_server.url}, MAX_NUM_SEQS, queue_bound=100) as served:
        yield served


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as client:
        yield client


@contextmanager
def frozen(fleet: VllmFleet, *names: str) -> Iterator[None]:
    """Hold servers still, so that work piles up however fast they are; for less than a heartbeat takes to fail."""
    groups = [
        json.loads(fleet.launcher.log_file(name).with_suffix(".json").read_text())["process_id"] for name in names
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
    """vLLM needs a parser even for a named tool (this server has one). Random weights give odd arguments."""
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
    row = await database_sync_to_async(Instance.objects.get)(name=CONTRACT)
    assert row.state == "ready"
    assert row.kv_capacity_tokens == replicas[0].metrics.kv_cache_size_tokens


async def test_priority_decides_the_order_of_service_under_load(served, client, vllm_fleet):
    async def ask(slo_class: str, tokens: int) -> None:
        headers = {"X-SLO-Class": slo_class}
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=headers, **exactly(tokens))

    with frozen(vllm_fleet, CONTRACT):
        busy = [asyncio.create_task(ask("interactive", 60)) for _ in range(MAX_NUM_SEQS)]
        await until(lambda: served.gateway.topology.fleet.running.sum() == MAX_NUM_SEQS)
        late = [asyncio.create_task(ask("flexible", 30)) for _ in range(4)]
        await until(lambda: len(served.gateway.dispatcher.queue) == 4)
        urgent = [asyncio.create_task(ask("interactive", 30)) for _ in range(4)]
        await until(lambda: len(served.gateway.dispatcher.queue) == 8)
    await asyncio.gather(*busy, *late, *urgent)
    rows = (await served.rows())[-12:]
    given = sorted(
        (row.arrived_at.timestamp() + row.queue_ms / 1000, row.slo_class) for row in rows if row.output_tokens == 30
    )
    assert [slo_class for _, slo_class in given] == ["interactive"] * 4 + ["flexible"] * 4


async def test_a_disconnect_frees_the_request_upstream(served, client):
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=16, **exactly(900))
    await anext(stream)
    assert await upstream_running(served) >= 1
    await stream.close()
    async with asyncio.timeout(3):
        while await upstream_running(served):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await until(lambda: served.gateway.topology.fleet.running.sum() == 0)
    row = (await served.rows())[-1]
    assert row.outcome == "cancelled"
    assert row.output_tokens < 16 * 900


async def test_draining_finishes_running_requests(served, client):
    stream = await client.completions.create(model=MODEL, prompt=[9, 9], stream=True, n=8, **exactly(800))
    await anext(stream)

    def drain():
        services.drain(Instance.objects.get(name=CONTRACT), "a test", "maintenance")

    await database_sync_to_async(drain)()
    await until(lambda: served.gateway.topology.fleet.accepting.sum() == 0)
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"] * 8
    row = (await served.rows())[-1]
    assert (row.outcome, row.output_tokens) == ("done", 8 * 800)
