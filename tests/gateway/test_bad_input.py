"""Bad input: each case gets OpenAI's error shape with the right status, and nothing is queued or written for it."""

import gzip
import io
import json

import pytest

from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.errors import ApiError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def deep(levels: int) -> dict:
    body: dict = {}
    for _ in range(levels):
        body = {"a": body}
    return body


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (CHAT | {"model": None}, "missing_required_parameter", "model"),
        (CHAT | {"model": 5}, "missing_required_parameter", "model"),
        (CHAT | {"extra": deep(600)}, "json_too_deep", None),
        (CHAT | {"extra": [1, deep(600)]}, "json_too_deep", None),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "json_too_deep", None),
        (b"{model: m}", "invalid_json", None),
        (b'{"model":"m","temperature":NaN}', "invalid_json", None),
        (b"[1, 2]", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model":"m","seed":1e999}', "invalid_json", None),
    ],
)
@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION, Kind.RERANK])
def test_a_wrong_body_is_refused_and_its_field_is_named(kind, body, code, param):
    with pytest.raises(ApiError) as refused:
        Call.read(body if isinstance(body, bytes) else json.dumps(body).encode(), kind, max_depth=512)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert error.message


WRONG = {
    "messages": (None, [], "hi", [7], [{"content": "x"}], [{"role": 5, "content": 3}]),
    "input": (None, [], 7, [7], [{"type": 5}]),
    "prompt": (None, "", [], [1, "a"], [1, -4], [[1], ["a"]], {"a": 1}),
    "max_tokens": (-1, 0, "nine", [9], 10**15, 1.5, "NaN"),
    "n": (0, 20_000, "x"),
    "stream": ("maybe", 7, []),
    "stream_options": ("x", [], {"include_usage": "maybe"}),
    "priority": ("first", 2**70, []),
    "tools": ({}, "x", 7),
    "system": (3, [3]),
    "instructions": (["x"], 7),
    "temperature": ("hot", 3),
}


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION, Kind.RESPONSE, Kind.MESSAGE, Kind.CHAT_BATCH])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_another_field_is_left_to_vllm(kind, name):
    body = {"messages": CHAT["messages"], "prompt": "hi", "input": "hi", "model": "m", "max_tokens": 9}
    for value in WRONG[name]:
        call = Call.read(json.dumps(body | {name: value}).encode(), kind, max_depth=512)
        assert call.body[name] == value
        assert call.sequences >= 1
        assert call.max_tokens is None or call.min_tokens <= call.max_tokens


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"model": "\xe9"}', "byte 11, 0xe9, is not UTF-8."), (gzip.compress(b"{}", mtime=0), "send it uncompressed")],
)
def test_of_what_is_no_text_the_place_is_said(body, said):
    with pytest.raises(ApiError, match=said):
        Call.read(body, Kind.CHAT, max_depth=512)


OF_REQUESTS = [  # fields, headers, status, code, param
    (b"{", {}, 400, "invalid_json", None),
    ({"model": "nope"}, {}, 404, "model_not_found", "model"),
    ({"a": "x" * 10_000_000}, {}, 413, "request_too_large", None),
    ({}, {"X-Region": "mars"}, 400, "unknown_region", "X-Region"),
    ({}, {"Content-Encoding": "gzip"}, 415, "unsupported_encoding", "Content-Encoding"),
    ({}, {"X-SLO-Class": "gold"}, 400, "unknown_slo_class", "X-SLO-Class"),
    ({}, {"X-SLO-Class": "forbidden"}, 403, "slo_class_not_allowed", "X-SLO-Class"),
    ({}, {"X-SLO-Class": "a b"}, 400, "invalid_value", "X-SLO-Class"),
    ({"service_tier": "gold"}, {}, 400, "unknown_slo_class", "service_tier"),
    ({"service_tier": 4}, {}, 400, "invalid_type", "service_tier"),
    ({}, {"Authorization": ""}, 401, "invalid_api_key", None),
    ({}, {"Authorization": "Bearer ph_wrong"}, 401, "invalid_api_key", None),
    ({}, {"Authorization": "Basic abc"}, 401, "invalid_api_key", None),
    ({}, {"Authorization": "Bearer \u00ff\u00fe"}, 401, "invalid_api_key", None),
]


async def test_a_wrong_request_is_refused_in_openai_shape(served):
    """E5."""
    wrong = []
    for fields, headers, status, code, param in OF_REQUESTS:
        data = io.BytesIO(fields if isinstance(fields, bytes) else json.dumps(CHAT | fields).encode())
        sent = {key: value for key, value in (served.headers | headers).items() if value}
        async with served.http.post(f"{served.url}/v1/chat/completions", data=data, headers=sent) as response:
            error = (await response.json()).get("error", {})
        got = (response.status, error.get("code"), error.get("param"))
        if got != (status, code, param) or set(error) != {"message", "type", "param", "code"} or not error["message"]:
            wrong.append((code, got, error))
        if response.headers.get("x-should-retry") != "false" or not response.headers.get("x-request-id"):
            wrong.append((code, "headers", dict(response.headers)))
    assert wrong == []
    assert served.backends[0].bodies == []
    assert len(served.gateway.dispatching.dispatcher.queue) == 0
    assert all(row.status_code != 200 for row in await served.rows())


async def test_wrong_method(served):
    for method, path in (("GET", "chat/completions"), ("POST", "models"), ("DELETE", "completions")):
        async with served.http.request(method, f"{served.url}/v1/{path}", headers=served.headers) as response:
            assert response.status == 405
            assert response.headers["Allow"]


async def test_a_body_in_chunks_is_cut_off_when_it_grows_too_large(served):
    async def chunks():
        for _ in range(200):
            yield b"x" * 50_000

    async with served.http.post(f"{served.url}/v1/chat/completions", data=chunks(), headers=served.headers) as response:
        assert response.status == 413


async def test_models(served):
    async with served.http.get(f"{served.url}/v1/models", headers=served.headers) as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["object"]) == ("m", "model")
    async with served.http.get(f"{served.url}/v1/models/m", headers=served.headers) as response:
        assert (await response.json())["id"] == "m"
    async with served.http.get(f"{served.url}/v1/models/other", headers=served.headers) as response:
        assert response.status == 404
    async with served.http.get(f"{served.url}/v1/models") as response:
        assert response.status == 401
