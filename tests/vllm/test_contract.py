"""One contract, two servers: what Pilothouse relies on must hold for vLLM and for its emulation.

The OpenAI SDK and the metrics parser are the only clients where they can be. Shapes of answers (keys and types, at every
depth) are compared with those recorded from vLLM in `shapes.json`; `RECORD_SHAPES=1` with `-m vllm` records them again.
What is not generation is in `test_contract_control.py`.
"""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.vllm.calls import CHAT, COMPLETION, CONTINUOUS, EXACT, MESSAGES, RESPONSE, USAGE, events, post
from tests.vllm.conftest import MAX_MODEL_LEN, MODEL, Server

# One server for all of them, so that each takes a fraction of a second.
pytestmark = pytest.mark.gate
SHAPES = Path(__file__).parent / "shapes.json"


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


# Shapes


def shape(value: Any) -> Any:
    """Return keys and types at every depth; a list by its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def compare_shape(server: Server, name: str, value: Any) -> None:
    recorded = json.loads(SHAPES.read_text()) if SHAPES.exists() else {}
    if server.kind == "vllm" and os.environ.get("RECORD_SHAPES") == "1":
        recorded[name] = shape(value)
        SHAPES.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
    if server.kind == "vllm" or not name.startswith("response"):  # the emulated one has what SDKs need of responses
        assert shape(value) == recorded[name]


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("completion", "/v1/completions", COMPLETION),
        ("completion of two", "/v1/completions", {**COMPLETION, "n": 2}),
        ("chat", "/v1/chat/completions", CHAT),
        ("chat of two", "/v1/chat/completions", {**CHAT, "n": 2}),
        ("response", "/v1/responses", RESPONSE),
        ("unknown model", "/v1/completions", {**COMPLETION, "model": "nobody"}),
        ("wrong type", "/v1/completions", {**COMPLETION, "max_tokens": "many"}),
    ],
)
async def test_shape_of_bodies(server: Server, http: aiohttp.ClientSession, name: str, path: str, body: Any) -> None:
    _, answer, _ = await post(http, server, path, body)
    compare_shape(server, name, answer)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("completion events", "/v1/completions", COMPLETION),
        ("completion events with usage", "/v1/completions", {**COMPLETION, **USAGE}),
        ("completion events with continuous usage", "/v1/completions", {**COMPLETION, **CONTINUOUS}),
        ("chat events", "/v1/chat/completions", CHAT),
        ("chat events with usage", "/v1/chat/completions", {**CHAT, **USAGE}),
        ("chat events with continuous usage", "/v1/chat/completions", {**CHAT, **CONTINUOUS}),
    ],
)
async def test_shape_of_events(server: Server, http: aiohttp.ClientSession, name: str, path: str, body: Any) -> None:
    """Return the first, the middle and the last events; equal shapes in a row count once,
    because tokens may share an event.
    """
    shapes: list[Any] = []
    for event in await events(http, server, path, {**body, "temperature": 0}):
        if not shapes or shape(event) != shape(shapes[-1]):
            shapes.append(event)
    compare_shape(server, name, {str(number): event for number, event in enumerate(shapes)})


async def test_shape_of_response_events(server: Server, http: aiohttp.ClientSession) -> None:
    """Named events, the last of which has the usage; nothing follows it."""
    async with http.post(f"{server.url}/v1/responses", json={**RESPONSE, "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *blocks, rest = (await response.text()).split("\n\n")
    assert rest == ""
    shapes: list[Any] = []
    for number, block in enumerate(blocks):
        name, data = block.removeprefix("event: ").split("\ndata: ")
        event = json.loads(data)
        assert (event["type"], event["sequence_number"]) == (name, number)
        if not shapes or shape(event) != shape(shapes[-1]):
            shapes.append(event)
    kinds = [event["type"] for event in shapes if event["type"] != "response.in_progress"]
    assert kinds[:3] == ["response.created", "response.output_item.added", "response.content_part.added"]
    assert shapes[-1]["response"]["usage"]["output_tokens"] == RESPONSE["max_output_tokens"]
    compare_shape(server, "response events", {str(number): event for number, event in enumerate(shapes)})


async def test_shape_of_models(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{server.url}/v1/models") as response:
        compare_shape(server, "models", await response.json())


# The SDK


async def test_plain_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=20, extra_body=EXACT
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens > 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content


async def test_plain_response(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Hello"}], max_output_tokens=20, extra_body=EXACT
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens == 20
    assert answer.usage.input_tokens > 5
    assert (answer.status, answer.object) == ("incomplete", "response")
    assert answer.output_text
    with pytest.raises(openai.NotFoundError, match="not found"):
        await sdk.responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")


async def test_streamed_completion(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.completions.create(
        model=MODEL,
        prompt=[7] * 10,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXACT,
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 20)
    assert len({chunk.id for chunk in chunks}) == 1
    assert 2 < len(chunks) <= 21


async def test_streamed_chat(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXACT,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_continuous_usage(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await sdk.completions.create(
        model=MODEL, prompt=[7] * 10, max_tokens=6, stream=True, stream_options=options, extra_body=EXACT
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_a_stop_string_ends_plain_and_streamed_answers(sdk: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": MODEL, "prompt": "Hello engine", "max_tokens": 60, "seed": 11, "extra_body": EXACT}
    whole = (await sdk.completions.create(**ask)).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    choice = (await sdk.completions.create(**ask, stop=[stop])).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == stop
    stream = await sdk.completions.create(**ask, stop=[stop], stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "completion_tokens", "choices"),
    [
        ({"prompt": [7] * 10}, 10, 16, 1),  # max_tokens is 16 unless the request says
        ({"prompt": [[1, 2], [3, 4, 5]], "max_tokens": 6}, 5, 12, 2),
        ({"prompt": [7] * 10, "max_tokens": 6, "n": 3}, 10, 18, 3),
        ({"prompt": [7] * (MAX_MODEL_LEN - 4), "max_tokens": 100}, MAX_MODEL_LEN - 4, 4, 1),  # cut to the context
        ({"prompt": [7] * 10, "max_tokens": 9, "min_tokens": 9, "ignore_eos": False}, 10, 9, 1),
    ],
)
async def test_lengths(
    server: Server,
    http: aiohttp.ClientSession,
    fields: dict[str, Any],
    prompt_tokens: int,
    completion_tokens: int,
    choices: int,
) -> None:
    status, answer, _ = await post(http, server, "/v1/completions", {"model": MODEL, **EXACT, **fields})
    assert status == 200
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (
        prompt_tokens,
        completion_tokens,
    )
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices))


async def test_request_ids(server: Server, http: aiohttp.ClientSession) -> None:
    for path, body, prefix in (("/v1/completions", COMPLETION, "cmpl-"), ("/v1/chat/completions", CHAT, "chatcmpl-")):
        async with http.post(server.url + path, json=body, headers={"X-Request-Id": "abc"}) as response:
            assert (await response.json())["id"] == f"{prefix}abc"
            assert "X-Request-Id" not in response.headers


# Bad requests

TOO_LONG = f"This model's maximum context length is {MAX_MODEL_LEN} tokens."
BAD: list[tuple[str, dict[str, Any], int, str, str | None, str]] = [
    ("completions", {"model": "nobody"}, 404, "NotFoundError", "model", "The model `nobody` does not exist."),
    ("completions", {"max_tokens": -1}, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got -1."),
    ("completions", {"max_tokens": 0}, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got 0."),
    ("completions", {"max_tokens": "many"}, 400, "Bad Request", "body.max_tokens", "1 validation error:"),
    ("completions", {"max_tokens": 5000}, 400, "BadRequestError", "max_tokens", "max_tokens=5000 cannot be greater"),
    ("completions", {"max_tokens": 2, "min_tokens": 5}, 400, "BadRequestError", None, "min_tokens must be less than"),
    ("completions", {"prompt": [5] * (MAX_MODEL_LEN + 1)}, 400, "BadRequestError", "input_tokens", TOO_LONG),
    ("completions", {"prompt": "x" * 60_000}, 400, "BadRequestError", "input_text", TOO_LONG),
    ("completions", {"prompt": ""}, 400, "BadRequestError", "prompt", "Either prompt or prompt_embeds must be"),
    ("completions", {"prompt": []}, 400, "BadRequestError", None, "You must pass at least one prompt"),
    ("completions", {"prompt": [[]]}, 400, "BadRequestError", None, "The decoder prompt cannot be empty"),
    (
        "completions",
        {"temperature": 3},
        400,
        "BadRequestError",
        "temperature",
        "temperature must be in [0, 2], got 3.0.",
    ),
    ("completions", {"top_p": 2}, 400, "BadRequestError", "top_p", "top_p must be in (0, 1], got 2.0."),
    ("completions", {"n": 0}, 400, "BadRequestError", None, "n must be at least 1, got 0."),
    ("completions", {"priority": "high"}, 400, "Bad Request", "body.priority", "1 validation error:"),
    ("completions", {"stop": 5}, 400, "Bad Request", "body.stop", "2 validation errors:"),
    ("completions", {"stream_options": {}, "stream": False, "max_tokens": 1}, 200, "", None, ""),
    (
        "completions",
        {"stream_options": {"include_usage": True}},
        400,
        "BadRequestError",
        "stream_options",
        "Stream options can only be defined when `stream=True`.",
    ),
    ("responses", {"input": ...}, 400, "Bad Request", "body.input", "1 validation error:"),
    (
        "responses",
        {"background": True},
        400,
        "invalid_request_error",
        "background",
        "This vLLM engine does not support",
    ),
    (
        "responses",
        {"previous_response_id": "r"},
        404,
        "invalid_request_error",
        "response_id",
        "Response with id 'r' not",
    ),
    ("chat/completions", {"messages": ...}, 400, "Bad Request", "body.messages", "1 validation error:"),
    ("chat/completions", {"messages": []}, 400, "BadRequestError", None, "Cannot apply chat template to an empty"),
    ("chat/completions", {"max_tokens": -5}, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1"),
    ("chat/completions", {"max_completion_tokens": 5000}, 400, "BadRequestError", "max_completion_tokens", "max_compl"),
]


@pytest.mark.parametrize(("path", "fields", "status", "kind", "param", "message"), BAD)
async def test_bad_requests(
    server: Server,
    http: aiohttp.ClientSession,
    path: str,
    fields: dict[str, Any],
    status: int,
    kind: str,
    param: str | None,
    message: str,
) -> None:
    base = {"chat/completions": CHAT, "responses": RESPONSE, "completions": COMPLETION}[path]
    body = {name: value for name, value in {**base, **fields}.items() if value is not ...}
    got, answer, _ = await post(http, server, f"/v1/{path}", body)
    assert got == status, answer
    if status != 200:
        error = answer["error"]
        assert (error.keys(), error["code"]) == ({"message", "type", "param", "code"}, status)
        if server.kind == "vllm":  # the emulated one refuses in words of its own
            assert (error["type"], error["param"]) == (kind, param)
            assert error["message"].startswith(message)


@pytest.mark.parametrize("raw", [b"{not json", b"", b"[1]", b"null"])
async def test_bodies_that_cannot_be_read(server: Server, http: aiohttp.ClientSession, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{server.url}/v1/completions", data=raw, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "Bad Request"


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("POST", "/v1/embeddings", 404, "Not Found"),
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
    ],
)
async def test_routes_that_are_not_there(
    server: Server, http: aiohttp.ClientSession, method: str, path: str, status: int, detail: str
) -> None:
    async with http.request(method, server.url + path) as response:
        assert response.status == status
        assert await response.json() == {"detail": detail}
