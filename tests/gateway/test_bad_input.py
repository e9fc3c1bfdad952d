"""Bad input: each case gets OpenAI's error shape with the right status, and nothing is queued or written for it."""

import gzip
import io
import json

import pytest

from controlplane.gateway.admission.validation import Kind, parse
from controlplane.gateway.errors import ApiError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def deep(levels: int) -> dict:
    body: dict = {}
    for _ in range(levels):
        body = {"a": body}
    return body


OF_CHATS = [  # fields alongside those of `CHAT`, or a whole body; code, param
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "missing_required_parameter", "messages"),
    ({"messages": [{"content": "x"}]}, "invalid_type", "messages[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content"),
    ({"model": None}, "missing_required_parameter", "model"),
    ({"model": 5}, "missing_required_parameter", "model"),
    ({"max_tokens": -1}, "integer_out_of_range", "max_tokens"),
    ({"max_tokens": "nine"}, "invalid_type", "max_tokens"),
    ({"max_tokens": [9]}, "invalid_type", "max_tokens"),
    ({"max_tokens": 10**30}, "integer_out_of_range", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ({"max_completion_tokens": 0}, "integer_out_of_range", "max_completion_tokens"),
    ({"n": 0}, "integer_out_of_range", "n"),
    ({"n": 20_000}, "integer_out_of_range", "n"),
    ({"temperature": 3}, "decimal_out_of_range", "temperature"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    ({"top_p": 1.5}, "decimal_out_of_range", "top_p"),
    ({"stream": "maybe"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "maybe"}}, "invalid_type", "stream_options.include_usage"),
    ({"stop": [1]}, "invalid_type", "stop"),
    ({"priority": "first"}, "invalid_type", "priority"),
    ({"extra": deep(600)}, "json_too_deep", None),
    (b'{"a":' * 3000 + b"1" + b"}" * 3000, "json_too_deep", None),
    (b"{model: m}", "invalid_json", None),
    (b'{"model":"m","temperature":NaN}', "invalid_json", None),
    (b"[1, 2]", "invalid_json", None),
    (b"", "invalid_json", None),
    (b'{"model":"m","seed":1e999}', "invalid_json", None),
]
OF_TEXTS = [
    ({"max_tokens": 0}, "integer_out_of_range", "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "invalid_value", "min_tokens"),
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, "missing_required_parameter", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
    ({"prompt": [1, -4]}, "invalid_type", "prompt"),
    ({"prompt": [[1], ["a"]]}, "invalid_type", "prompt"),
    ({"prompt": {"a": 1}}, "invalid_type", "prompt"),
    ({"extra": [1, deep(600)]}, "json_too_deep", None),
]


@pytest.mark.parametrize(
    ("kind", "body", "code", "param"),
    [(Kind.CHAT, body if isinstance(body, bytes) else CHAT | body, *said) for body, *said in OF_CHATS]
    + [(Kind.COMPLETION, TEXT | body, *said) for body, *said in OF_TEXTS],
)
def test_a_wrong_body_is_refused_and_its_field_is_named(kind, body, code, param):
    with pytest.raises(ApiError) as refused:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind, max_depth=512)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert error.message


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"model": "\xe9"}', "byte 11, 0xe9, is not UTF-8."), (gzip.compress(b"{}", mtime=0), "send it uncompressed")],
)
def test_of_what_is_no_text_the_place_is_said(body, said):
    with pytest.raises(ApiError, match=said):
        parse(body, Kind.CHAT, max_depth=512)


OF_REQUESTS = [  # fields, headers, status, code, param
    ({"n": 0}, {}, 400, "integer_out_of_range", "n"),
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
        data = io.BytesIO(json.dumps(CHAT | fields).encode())
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
    assert len(served.gateway.dispatcher.queue) == 0
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
