"""Anthropic's Messages API through the gateway, with an emulated vLLM behind, and a scripted one for failures."""

# ruff: noqa: F811 (fixtures that are imported)

import json

import pytest

from controlplane.gateway.admission.validation import Call, Kind, with_prompt
from controlplane.gateway.upstream.answers import Usage
from forecasting.lengths import LengthQuery
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)

HELLO = [{"role": "user", "content": "Is it windy in Oslo?"}]
TOOL = {"name": "weather", "description": "Weather.", "input_schema": {"type": "object", "properties": {}}}


async def call(served, path="/v1/messages", headers=None, **body):
    """Return status, headers and body of a call with the key as Anthropic's SDKs send it."""
    body = {"model": "m", "messages": HELLO} | body
    headers = {"x-api-key": served.secret, "anthropic-version": "2023-06-01"} | (headers or {})
    async with served.http.post(f"{served.url}{path}", json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


def events_of(stream):
    """Return (name, data) of the events of *stream*, without comments."""
    events = []
    for part in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


async def test_a_message_that_is_not_streamed_passes_as_its_instance_answers(emulated):
    asked = {"max_tokens": 6, "system": "Be brief.", "temperature": 0.0, "extra": 1}
    status, headers, body = await call(emulated, **asked)
    assert (status, headers["content-type"]) == (200, "application/json")
    answer = json.loads(body)
    address = emulated.extra["embedder_url"].replace("/two", "/one")
    async with emulated.http.post(f"{address}/v1/messages", json={"model": "m", "messages": HELLO} | asked) as direct:
        expected = await direct.json()
    for each in (answer, expected):
        assert each.pop("id")
        each.pop("content")  # drawn for each request
        each["usage"].pop("output_tokens")
        each.pop("stop_reason")
    assert answer == expected
    (row,) = await emulated.rows()
    assert (row.surface, row.outcome, row.streamed) == ("messages", "done", False)
    assert 0 < row.output_tokens <= 6
    assert row.ttft_ms is None  # its instance does not report it
    assert row.prompt_tokens == answer["usage"]["input_tokens"]


async def test_a_streamed_message_has_the_events_of_anthropic_in_order(emulated):
    """C11."""
    status, headers, body = await call(emulated, max_tokens=5, stream=True)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    events = events_of(body)
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert all(name == data["type"] for name, data in events)
    (row,) = await emulated.rows()
    assert row.output_tokens == events[-2][1]["usage"]["output_tokens"]
    assert row.streamed


async def test_tools_are_called_and_their_results_come_back(emulated):
    asked = {"max_tokens": 40, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    status, _, body = await call(emulated, **asked)
    assert status == 200
    (block,) = json.loads(body)["content"]
    assert (block["type"], block["name"], type(block["input"])) == ("tool_use", "weather", dict)
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "Windy."}]}
    more = [*HELLO, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    status, _, body = await call(emulated, messages=more, tools=[TOOL], max_tokens=4, tool_choice={"type": "none"})
    assert status == 200
    assert json.loads(body)["content"][0]["type"] == "text"


async def test_tokens_of_a_message_are_counted(emulated):
    """C11."""
    status, _, body = await call(emulated, "/v1/messages/count_tokens", system="Be brief.")
    assert (status, json.loads(body)["input_tokens"] > 5) == (200, True)
    (row,) = await emulated.rows()
    assert (row.surface, row.output_tokens) == ("messages/count_tokens", 0)


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "kind", "code"),
    [
        ("/v1/messages", {"x-api-key": "wrong"}, {"max_tokens": 1}, 401, "authentication_error", "invalid_api_key"),
        ("/v1/messages", {}, {"max_tokens": 1, "model": "none"}, 404, "not_found_error", "model_not_found"),
        ("/v1/messages", {}, {"max_tokens": 1, "model": "e"}, 404, "not_found_error", "unsupported_endpoint"),
    ],
)
async def test_errors_have_anthropics_shape(emulated, path, headers, body, status, kind, code):
    answered, sent, data = await call(emulated, path, headers, **body)
    error = json.loads(data)
    assert (answered, error["type"], error["error"]["type"], error["error"]["code"]) == (status, "error", kind, code)
    assert sent["x-should-retry"] == "false"


async def test_claude_codes_own_fields_and_query_are_taken(emulated):
    """C11: parts with `cache_control`, a server's tool without a schema, `?beta=true`."""
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": cached}]
    for path, more in (("/v1/messages?beta=true", {"max_tokens": 4}), ("/v1/messages/count_tokens?beta=true", {})):
        tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
        status, _, data = await call(emulated, path, {"anthropic-beta": "x"}, system=system, tools=tools, **more)
        assert status == 200, data
    assert json.loads(data)["input_tokens"] > 0


# What is read of a body, and of a stream


def read_call(**body) -> Call:
    body = {"model": "m", "messages": HELLO, "max_tokens": 9} | body
    return Call.read(json.dumps(body).encode(), Kind.MESSAGE, max_depth=20)


def test_all_that_a_message_says_counts_as_prompt():
    thought = {"type": "thinking", "thinking": "abc", "signature": "xyz"}
    called = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "hello"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * 500}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, image]},
        {"role": "assistant", "content": [thought, called]},
        {"role": "user", "content": [result]},
    ]
    read_one = read_call(system=[{"type": "text", "text": "sys"}], messages=messages)
    assert read_one.prompt_characters == 3 + 2 + 3 + len('["f",{"a":1}]') + 5
    query = with_prompt(read_one, LengthQuery(text="", prompt_tokens=9, model="m"))
    assert "hello" in query.text


def test_cached_tokens_count_as_prompt():
    usage = Usage()
    usage.update(
        {"input_tokens": 3, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 2, "output_tokens": 7}
    )
    assert (usage.prompt_tokens, usage.output_tokens) == (45, 7)
