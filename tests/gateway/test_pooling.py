"""Calls without output through the gateway, against an emulated instance that embeds."""

import asyncio
import base64
import json
import re
import struct
from dataclasses import replace

import numpy as np
import openai
import pytest
from channels.db import database_sync_to_async

from controlplane.accounts.models import Budget, BudgetKind, Tenant
from controlplane.dispatch.live_fleet import heartbeats
from controlplane.fleet.models import Instance, Model
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.models import MinuteRow
from tests.gateway.conftest import open_sdk, until
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)
from workers.emulator.instance import Fault
from workers.traffic.waves import EMBEDDINGS, Waves, streams

K = Kind
HELLO = [{"role": "user", "content": "hello"}]


async def call(served, path, **body):
    body = {"model": "e"} | body
    async with served.post(f"{path}", body) as answer:
        return answer.status, json.loads(await answer.read())


# What is measured before anything is queued


@pytest.mark.parametrize(
    ("kind", "fields", "sequences", "media"),
    [
        (K.EMBEDDING, {"input": "abcd"}, 1, 0),
        (K.EMBEDDING, {"input": ["ab", "cde"]}, 2, 0),
        (K.EMBEDDING, {"input": [1, 2, 3]}, 1, 0),
        (K.EMBEDDING, {"input": [[1, 2], [3]]}, 2, 0),
        (K.EMBEDDING, {"input": []}, 1, 0),
        (K.EMBEDDING, {"messages": [{"content": [{"image_url": {"url": "x" * 999}}]}]}, 1, 999),
        (K.COHERE_EMBED, {"images": ["x" * 999]}, 1, 999),
        (K.RERANK, {"query": "qq", "documents": ["abc", "d"], "anything": None}, 1, 0),
        (K.RENDER_CHAT, {}, 1, 0),
    ],
)
def test_of_a_call_that_passes_inputs_and_size_are_read(kind, fields, sequences, media):
    raw = json.dumps({"model": "e"} | fields).encode()
    asked = Call.read(raw, kind, max_depth=32)
    assert (asked.sequences, asked.prompt_tokens, asked.prompt_characters) == (sequences, None, len(raw) - media)
    assert asked.raw is raw


# Answers


async def test_the_sdk_reads_vectors_and_the_ledger_counts_prompts(emulated):  # noqa: F811
    texts = ["the watch begins quietly", "the instruments agree", "the watch begins quietly"]
    async with open_sdk(emulated, max_retries=0) as client:
        answer = await client.embeddings.create(model="e", input=texts)  # as base64, unless the caller wants floats
        plain = await client.embeddings.create(model="e", input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in answer.data])
    assert vectors.shape == (3, 32)
    assert np.allclose(vectors[0], vectors[2])
    assert not np.allclose(vectors[0], vectors[1])
    assert np.allclose(vectors, [one.embedding for one in plain.data])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    (row, other) = await emulated.rows()
    assert (row.surface, row.outcome, row.model, row.instance) == ("embeddings", "done", "e", "e-0")
    assert (row.prompt_tokens, row.output_tokens) == (answer.usage.prompt_tokens, 0)
    assert (row.predicted_output_tokens, row.itl_ms, row.slo_met) == (0, None, True)
    assert 0 < row.ttft_ms <= row.e2e_ms < row.ttft_ms + 100  # the time of the answer
    assert other.prompt_tokens == row.prompt_tokens
    (minute,) = await database_sync_to_async(lambda: list(MinuteRow.objects.all()))()
    assert (minute.requests, minute.prompt_tokens, minute.output_tokens) == (2, 2 * row.prompt_tokens, 0)


async def test_an_answer_passes_byte_for_byte(emulated):  # noqa: F811
    for encoding in ("float", "base64", "bytes", "bytes_only"):
        body = {"model": "e", "input": ["one two", "three"], "encoding_format": encoding, "priority": 3}
        said = []
        for url in (emulated.url, emulated.extra["embedder_url"]):
            headers = emulated.headers | {"X-Request-Id": "same"}
            async with emulated.http.post(f"{url}/v1/embeddings", json=body, headers=headers) as answer:
                assert answer.status == 200
                said.append((answer.content_type, answer.headers.get("metadata"), await answer.read()))
        through, direct = said
        row = await emulated.new_row()
        assert through[0] == direct[0]
        if encoding == "bytes":
            metadata = json.loads(through[1])
            assert metadata["data"] == json.loads(direct[1])["data"]
            assert metadata["usage"]["prompt_tokens"] == row.prompt_tokens
        if encoding.startswith("bytes"):
            assert through[2] == direct[2]
            assert len(struct.unpack("<64f", through[2])) == 64
        else:
            first, second = (json.loads(one[2]) for one in said)
            assert first | {"created": 0} == second | {"created": 0}
        if encoding == "base64":
            assert len(base64.b64decode(first["data"][0]["embedding"])) == 32 * 4


CALLS = [
    ("/rerank", {"query": "the watch", "documents": ["the sun", "the watch begins"], "top_n": 1}, "results"),
    ("/v1/rerank", {"query": "the watch", "documents": ["the sun", "the watch begins"]}, "results"),
    ("/v2/rerank", {"query": "the watch", "documents": "the sun"}, "results"),
    ("/score", {"text_1": "a", "text_2": ["a", "b"]}, "data"),
    ("/v1/score", {"queries": "a", "documents": "b"}, "data"),
    ("/pooling", {"input": "a b"}, "data"),
    ("/tokenize", {"prompt": "hello world"}, "tokens"),
    ("/v1/tokenize", {"messages": [{"role": "user", "content": "hello"}]}, "tokens"),
    ("/detokenize", {"tokens": [1, 2, 3]}, "prompt"),
    ("/tokenize", {"model": "m", "prompt": "hello world"}, "tokens"),
    ("/v2/embed", {"texts": ["a b", "c"], "embedding_types": ["float", "binary"]}, "embeddings"),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "a b"}]}]}, "meta"),
    ("/v1/chat/completions/render", {"model": "m", "messages": HELLO}, "token_ids"),
    ("/v1/responses/render", {"model": "m", "input": "hello"}, "token_ids"),
    ("/v1/messages/render", {"model": "m", "max_tokens": 3, "messages": HELLO}, "token_ids"),
]


async def test_each_call_is_answered_and_counted(emulated, subtests):  # noqa: F811
    """C63."""
    for path, body, field in CALLS:
        with subtests.test(path=path, **body):
            status, said = await call(emulated, path, **body)
            assert (status, field in said) == (200, True), said
            row = await emulated.new_row()
            surface = path if path == "/v2/embed" else re.sub("^/v[12]", "", path)
            assert (row.surface, row.outcome, row.output_tokens) == (surface[1:], "done", 0)
            units = said.get("meta", {}).get("billed_units", {})
            assert row.prompt_tokens == said.get("usage", {}).get("prompt_tokens", units.get("input_tokens", 0))
            if path == "/rerank":
                assert [(one["index"], one["document"]["text"]) for one in said["results"]] == [(1, "the watch begins")]


NOT_SERVED = [
    ("/v1/embeddings", "m", "/v1/chat/completions"),
    ("/rerank", "m", "/v1/chat/completions"),
    ("/v1/chat/completions", "e", "/v1/embeddings"),
    ("/v1/responses", "e", "/v1/embeddings"),
    ("/classify", "e", "/v1/embeddings"),
]


async def test_what_a_model_does_not_serve_is_one_clear_error(emulated):  # noqa: F811
    for path, model, served in NOT_SERVED:
        status, said = await call(emulated, path, model=model, input="hi", messages=HELLO, query="a", documents="b")
        error = said["error"]
        assert (status, error["code"], error["param"], error["type"]) == (
            404, "unsupported_endpoint", "model", "invalid_request_error"
        )  # fmt: skip
        assert f"The model {model!r} does not serve {path}. It serves" in error["message"]
        assert served in error["message"]
    assert await emulated.rows() == []


async def test_an_instance_that_renders_nothing_says_so(emulated):  # noqa: F811
    instance = emulated.extra["instance"]
    instance.spec = instance.spec.model_copy(update={"enable_scale_out": False})
    status, said = await call(emulated, "/v1/completions/render", model="m", prompt="a")
    assert status == 404
    assert "--enable-scale-out" in said["error"]["message"]
    assert (await emulated.new_row()).outcome == "failed"


async def test_prompts_are_rendered_each(emulated):  # noqa: F811
    status, said = await call(emulated, "/v1/completions/render", model="m", prompt=["a b", "c"])
    assert status == 200
    assert [len(one["token_ids"]) for one in said] == [1, 1]
    assert (await emulated.new_row()).outcome == "done"
    status, said = await call(emulated, "/v1/completions/render", model="m", prompt="")
    assert status == 400, said


async def test_a_batch_of_chats_has_a_choice_for_each(emulated):  # noqa: F811
    asked = {"model": "m", "messages": [HELLO, HELLO, HELLO], "max_tokens": 5, "ignore_eos": True, "stream": True}
    status, said = await call(emulated, "/v1/chat/completions/batch", **asked)
    assert (status, [one["index"] for one in said["choices"]]) == (200, [0, 1, 2])
    row = await emulated.new_row()
    assert (row.surface, row.outcome, row.streamed) == ("chat/completions/batch", "done", False)
    assert (row.output_tokens, row.prompt_tokens) == (15, said["usage"]["prompt_tokens"])
    assert row.predicted_output_tokens == 15


async def test_vllms_refusal_is_the_tenants_answer(emulated):  # noqa: F811
    async with open_sdk(emulated, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="e", input="x" * 9000)
    assert "maximum context length is 1024 tokens" in refused.value.message
    (row,) = await emulated.rows()
    assert (row.outcome, row.error_code, row.status_code, row.prompt_tokens) == (
        "failed",
        "refused_by_instance",
        400,
        0,
    )


async def test_models_say_what_they_do(emulated):  # noqa: F811
    async with open_sdk(emulated) as client:
        models = {model.id: model.to_dict() for model in (await client.models.list()).data}
    assert {name: model["task"] for name, model in models.items()} == {
        "e": "embed", "m": "generate", "w": "transcription"
    }  # fmt: skip
    assert (models["e"]["root"], models["e"]["parent"], models["e"]["max_model_len"]) == ("e", None, 1024)
    (permission,) = models["e"]["permission"]
    assert permission["object"] == "model_permission"


# Limits, budgets, failures


async def test_prompt_tokens_alone_count_towards_limits(emulated):  # noqa: F811
    await database_sync_to_async(Tenant.objects.update)(tokens_per_minute=100)
    await asyncio.sleep(0.3)
    await emulated.gateway.keys.refresh()
    first, _ = await call(emulated, "/v1/embeddings", input=["abcd" * 8] * 3)  # 24 tokens
    second, said = await call(emulated, "/v1/embeddings", input=["abcd" * 90] * 2)
    tokens, _ = await call(emulated, "/tokenize", prompt="abcd" * 400)
    assert (first, second, said["error"]["code"], tokens) == (200, 429, "rate_limit_exceeded", 200)
    assert emulated.gateway.dispatching.allowances.limits.sequences(1) == 0


async def test_a_budget_of_tokens_counts_prompts(emulated):  # noqa: F811
    await database_sync_to_async(Budget.objects.create)(kind=BudgetKind.TOKENS, hard=60)
    await emulated.gateway.dispatching.allowances.refresh()
    statuses = [(await call(emulated, "/v1/embeddings", input="abcd" * 25))[0] for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_a_client_that_leaves_takes_its_inputs_off_the_engine(emulated):  # noqa: F811
    embedder = emulated.extra["embedder"]
    embedder.set_fault(Fault("slow", factor=3000.0))
    body = {"model": "e", "input": ["abcd"] * 4}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await emulated.post("/v1/embeddings", body)
    await until(lambda: embedder.unfinished == 0)
    embedder.set_fault(Fault())
    await until(lambda: emulated.gateway.active == 0)
    (row,) = await emulated.rows()
    assert row.outcome == "cancelled"
    replica = next(one for one in emulated.gateway.dispatching.topology.replicas.values() if one.name == "e-0")
    fleet = emulated.gateway.dispatching.topology.fleet
    assert (fleet.running[replica.slot], fleet.kv_tokens[replica.slot]) == (0, 0)


async def test_a_failing_instance_is_tried_again_and_then_said(emulated):  # noqa: F811
    emulated.extra["embedder"].set_fault(Fault("garbled", ratio=1.0))
    status, said = await call(emulated, "/v1/embeddings", input="a")
    assert status in (502, 503), said


async def test_a_task_that_changes_is_known_at_once(emulated):  # noqa: F811
    await database_sync_to_async(Model.objects.filter(name="e").update)(task="classify")
    await emulated.gateway.dispatching.read_inventory()
    status, said = await call(emulated, "/v1/embeddings", input="a")
    assert (status, "/classify" in said["error"]["message"]) == (404, True)


async def test_a_server_of_another_task_does_not_become_ready(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(heartbeats, "IDENTIFY_EVERY_S", 0.5)

    def register():
        Model.objects.filter(name="e").update(task="generate")
        Instance.objects.filter(name="e-0").update(state="loading")

    await database_sync_to_async(register)()
    await emulated.gateway.dispatching.read_inventory()
    instance = await wait_for_state("e-0", "failed")
    assert instance.state_reason == (
        "it does not answer /v1/chat/completions: the task of e is set to generate, and its server's is embed"
    )
    await database_sync_to_async(Model.objects.filter(name="e").update)(task="embed")
    await database_sync_to_async(Instance.objects.filter(name="e-0").update)(state="loading")
    await emulated.gateway.dispatching.read_inventory()
    await wait_for_state("e-0", "ready")


async def wait_for_state(name, state):
    async with asyncio.timeout(30):
        while True:
            instance = await database_sync_to_async(Instance.objects.get)(name=name)
            if instance.state == state:
                return instance
            await asyncio.sleep(0.05)


async def test_the_demos_embeddings_are_served(emulated):  # noqa: F811
    key = emulated.headers["Authorization"].removeprefix("Bearer ")
    kinds = {"interactive": replace(EMBEDDINGS["interactive"], peak_per_s=40.0)}
    (stream,) = streams([("e", "east", 1024)], {"interactive": key}, kinds=kinds)
    waves = Waves(f"{emulated.url}/v1", [stream], seed=1)
    run = asyncio.create_task(waves.run())
    await until(lambda: waves.done >= 20)
    run.cancel()
    await asyncio.wait([run])
    rows = [row for row in await emulated.rows() if row.outcome == "done"]
    assert len(rows) >= 20
    assert {(row.surface, row.output_tokens, row.slo_class) for row in rows} == {("embeddings", 0, "interactive")}
    assert len({row.prompt_tokens for row in rows}) > 10
