"""The Responses API and tool calls through the gateway: OpenAI SDK, an emulated vLLM behind, scripted ones for failures."""

import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
import pytest_asyncio
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.gateway.admission.validation import Call, Kind, with_prompt
from controlplane.gateway.errors import ApiError
from forecasting.lengths import LengthQuery
from tests.gateway.conftest import do_once, gateway_before, open_sdk, until
from tests.gateway.rows import make_model, make_rows
from tests.workers.conftest import spec
from workers.emulator.server import Fleet, make_app, run

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}]
TOOLS = [{"type": "function", "name": "weather", "description": "Weather.", "parameters": WEATHER, "strict": False}]
ASKED = [{"role": "user", "content": "Is it windy in Oslo?"}]


@pytest_asyncio.fixture
async def emulated(transactional_db, monkeypatch):
    """A gateway with an emulated instance of "m", which generates, one of "e", which embeds, and one of "w", which hears."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    do_once(monkeypatch)
    async with AsyncExitStack() as stack:
        fleet = Fleet()
        options = {
            "enable_auto_tool_choice": True,
            "enable_scale_out": True,
            "max_model_len": 32_768,
        }
        fleet.put("one", spec(output_median_tokens=12, **options))
        fleet.put("two", spec(model="e", task="embed", embedding_dimensions=32, max_num_seqs=8))
        fleet.put("three", spec(model="w", task="transcription", output_median_tokens=12, max_num_seqs=8))
        runner = await run(make_app(fleet), "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        backend = SimpleNamespace(name="m-0", url=f"{address}/one")
        await database_sync_to_async(make_rows)([backend], regions=["east"], max_num_seqs=8, queue_bound=100)
        await database_sync_to_async(make_model)("e", f"{address}/two", task="embed", context_tokens=1024)
        await database_sync_to_async(make_model)("w", f"{address}/three", task="transcription", context_tokens=448)
        extra = {
            "instance": fleet.instances["one"],
            "embedder": fleet.instances["two"],
            "url": f"{address}/one",
            "embedder_url": f"{address}/two",
        }
        yield await stack.enter_async_context(gateway_before([backend] * 3, **extra))


@pytest_asyncio.fixture
async def client(emulated):
    async with open_sdk(emulated, max_retries=0) as sdk:
        yield sdk


async def test_a_whole_response(emulated, client):
    answer = await client.responses.create(
        model="m", input="Write about the watch.", instructions="Be brief.", max_output_tokens=8,
        extra_headers={"X-SLO-Class": "flexible"},
    )  # fmt: skip
    assert (answer.object, answer.instructions, answer.max_output_tokens) == ("response", "Be brief.", 8)
    assert answer.usage.output_tokens <= 8
    assert answer.usage.input_tokens > 8
    assert len(answer.output_text.split()) in (answer.usage.output_tokens, answer.usage.output_tokens - 1)
    (row,) = await emulated.rows()
    assert (row.outcome, row.slo_class, row.streamed) == ("done", "flexible", False)
    assert (row.prompt_tokens, row.output_tokens) == (answer.usage.input_tokens, answer.usage.output_tokens)
    assert 0 < row.predicted_output_tokens <= 8
    assert row.predicted_prompt_tokens > 0


async def test_a_streamed_response_has_typed_events_in_order(emulated, client):
    """C79: as AIPerf and vLLM's bench have it, its inter-token latency is the mean of the request, not a gap."""
    events = [
        event
        async for event in await client.responses.create(
            model="m", input=ASKED, stream=True, max_output_tokens=6, extra_body={"ignore_eos": True}
        )
    ]
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 6,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == response.output_text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (row,) = await emulated.rows()
    assert (row.outcome, row.streamed, row.output_tokens) == ("done", True, 6)
    assert row.prompt_tokens == response.usage.input_tokens
    assert 0 < row.ttft_ms <= row.e2e_ms
    assert row.itl_ms == pytest.approx((row.e2e_ms - row.ttft_ms) / 5)


async def test_a_conversation_with_a_tool_through_responses(emulated, client):
    """C66."""
    called = await client.responses.create(model="m", input=ASKED, tools=TOOLS, tool_choice="required")
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert set(json.loads(call.arguments)) == {"city", "unit", "days"}
    said = await client.responses.create(
        model="m",
        tools=TOOLS,
        input=[
            *ASKED,
            call.model_dump(include={"type", "name", "arguments", "call_id"}),
            {"type": "function_call_output", "call_id": call.call_id, "output": "9 m/s from the west"},
        ],
    )
    assert said.output_text
    assert said.usage.input_tokens > called.usage.input_tokens
    events = [
        event
        async for event in await client.responses.create(
            model="m", input=ASKED, tools=TOOLS, tool_choice={"type": "function", "name": "weather"}, stream=True
        )
    ]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == done.arguments
    assert json.loads(done.arguments)["unit"] in ("celsius", "fahrenheit")
    row = (await emulated.rows())[-1]
    assert row.output_tokens == events[-1].response.usage.output_tokens == len(pieces) + 1


async def test_a_streamed_tool_call_counts_its_tokens(emulated, client):
    stream = await client.chat.completions.create(
        model="m", messages=ASKED, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True},
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    calls = [
        chunk.choices[0].delta.tool_calls[0] for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls
    ]
    assert (calls[0].function.name, calls[0].type) == ("weather", "function")
    assert all(call.id is None for call in calls[1:])
    assert "city" in json.loads("".join(call.function.arguments for call in calls))
    (row,) = await emulated.rows()
    assert row.output_tokens == chunks[-1].usage.completion_tokens == len(calls)


async def test_a_client_that_leaves_stops_the_response(emulated, client):
    stream = await client.responses.create(
        model="m", input="x", stream=True, max_output_tokens=900, extra_body={"ignore_eos": True}
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: emulated.extra["instance"].unfinished == 0)
    rows = await emulated.rows()
    while not rows:
        rows = await emulated.rows()
    assert (rows[0].outcome, rows[0].error_code) == ("cancelled", "client_disconnected")
    assert 0 < rows[0].output_tokens < 900


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_what_needs_stored_responses_is_refused(fields, param):
    with pytest.raises(ApiError) as refused:
        Call.read(json.dumps({"model": "m", "input": "x", **fields}).encode(), Kind.RESPONSE, max_depth=20)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported_parameter", param)


def test_what_a_length_is_predicted_from():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "name": "weather", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "wind"},
    ]
    body = {"model": "m", "input": items, "instructions": "brief", "max_output_tokens": 9}
    call = Call.read(json.dumps(body).encode(), Kind.RESPONSE, max_depth=20)
    assert call.turns[0] == ("system", "brief")
    assert [role for role, _ in call.turns] == ["system", "user", "assistant", "tool"]
    assert (call.prompt_characters, call.max_tokens) == (5 + 5 + 2 + 4, 9)
    query = with_prompt(call, LengthQuery("", 9))
    assert query.turns == 4
    assert "wind" in query.text
    more = Call.read(json.dumps({**body, "tools": TOOLS}).encode(), Kind.RESPONSE, max_depth=20)
    assert more.prompt_characters - call.prompt_characters == len(json.dumps(TOOLS, separators=(",", ":")))


async def test_the_bytes_of_a_response_are_the_tenant_s_own_with_our_priority(served):
    raw = b'{ "model":"m", "input":"hi", "stream": true, "include":[] }'
    async with served.http.post(f"{served.url}/v1/responses", data=raw, headers=served.headers) as response:
        events = (await response.text()).split("\n\n")
    assert served.backends[0].raw == [b'{"priority":0,' + raw[1:]]
    assert [event.splitlines()[0] for event in events[:3]] == [
        "event: response.created", "event: response.in_progress", "event: response.output_item.added",
    ]  # fmt: skip
    assert len(events) == 3 + 3 + 1 + 1  # opening and item, tokens, completion, and the rest after the last blank line
    (row,) = await served.rows()
    assert (row.prompt_tokens, row.output_tokens) == (7, 3)


@pytest.mark.parametrize(("tier", "passed"), [("flexible", "auto"), ("flex", "flex")])
async def test_a_class_named_as_tier_is_not_for_vllm(served, tier, passed):
    """vLLM refuses every `service_tier` that is not OpenAI's."""
    body = {"model": "m", "input": "hi", "stream": True, "service_tier": tier}
    async with served.post("/v1/responses", body) as response:
        assert response.status == 200
    assert served.backends[0].bodies[0] == {**body, "priority": 5000, "service_tier": passed}
    (row,) = await served.rows()
    assert row.slo_class == "flexible"


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])
async def test_a_server_lost_before_its_engine_began_is_replaced_unseen(served):
    """vLLM sends `response.created` before its engine has the request: that is no first token and is held back."""
    for backend in served.backends:
        backend.script.die = "opened"
    request = served.post("/v1/responses", {"model": "m", "input": "hi", "stream": True})
    async with request as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "upstream_failed"
    served.backends[1].script.die = ""
    async with served.post("/v1/responses", {"model": "m", "input": "hi", "stream": True}) as response:
        text = await response.text()
    assert text.count("event: response.created") == 1
    assert text.count(".delta\n") == 3
    assert (await served.rows())[-1].outcome == "done"
