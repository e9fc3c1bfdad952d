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

from controlplane.fleet.models import Adapter, Deployment, Instance, Model
from tests.gateway.conftest import until
from tests.gateway.rows import SECRET
from tests.vllm.conftest import CONTRACT, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL, VllmFleet
from tests.vllm.gateway import gateway_before

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
    replicas = list(served.gateway.dispatching.topology.replicas.values())
    await until(lambda: sum(replica.metrics.generation_tokens_total for replica in replicas) >= 5)
    for replica in replicas:
        assert replica.metrics.model_name == MODEL
        assert replica.metrics.kv_cache_size_tokens > MAX_MODEL_LEN
        assert (
            served.gateway.dispatching.topology.fleet.kv_capacity_tokens[replica.slot]
            == replica.metrics.kv_cache_size_tokens
        )
    row = await database_sync_to_async(Instance.objects.get)(name=CONTRACT)
    assert row.state == "ready"
    assert row.kv_capacity_tokens == replicas[0].metrics.kv_cache_size_tokens


async def test_adapters_are_models_that_are_loaded_and_unloaded(served, client, adapter, vllm_server):
    """Two fit into memory: the one that was not used for longest is unloaded for a third, and loaded again when used."""
    names = ("poet", "lawyer", "cook")

    def make_rows() -> None:
        Deployment.objects.update(max_loras=1, max_cpu_loras=2)
        for name in names:
            Adapter.objects.create(name=name, base=Model.objects.get(name=MODEL), source=str(adapter))

    await database_sync_to_async(make_rows)()
    await served.gateway.dispatching.read_inventory()
    listed = {model.id: model.parent for model in (await client.models.list()).data}
    assert listed == {MODEL: None} | dict.fromkeys(names, MODEL)

    async def loaded() -> set[str]:
        async with served.http.get(f"{vllm_server.url}/v1/models") as response:
            return {card["id"] for card in (await response.json())["data"]} & set(names)

    try:
        for name in ("poet", "lawyer", "poet", "cook"):
            answer = await client.chat.completions.create(model=name, messages=MESSAGES, **exactly(5))
            assert (answer.model, answer.usage.completion_tokens) == (name, 5)
        while "lawyer" in await loaded():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await loaded() == {"poet", "cook"}
        streamed = await client.completions.create(model="lawyer", prompt="I", stream=True, **exactly(5))
        assert {chunk.model async for chunk in streamed} == {"lawyer"}
    finally:
        for name in await loaded():
            await served.http.post(f"{vllm_server.url}/v1/unload_lora_adapter", json={"lora_name": name})
    rows = await served.rows()
    assert [row.trace[0]["adapter_was"] for row in rows] == [
        "not loaded", "not loaded", "in CPU memory", "not loaded", "not loaded"
    ]  # fmt: skip
    assert {row.model for row in rows} == {MODEL}
