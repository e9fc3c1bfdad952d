"""Bad input: each case gets OpenAI's error shape with the right status, and nothing is queued or written for it."""

import io
import json

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def deep(levels: int) -> dict:
    body: dict = {}
    for _ in range(levels):
        body = {"a": body}
    return body


CASES = [
    # name, path, body, headers, status, code, param
    ("no messages", "chat/completions", {"model": "m"}, {}, 400, "missing_required_parameter", "messages"),
    ("empty messages", "chat/completions", CHAT | {"messages": []}, {}, 400, "missing_required_parameter", "messages"),
    (
        "message without role",
        "chat/completions",
        CHAT | {"messages": [{"content": "x"}]},
        {},
        400,
        "invalid_type",
        "messages[0]",
    ),
    (
        "content is a number",
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": 3}]},
        {},
        400,
        "invalid_type",
        "messages[0].content",
    ),
    ("no model", "chat/completions", {"messages": CHAT["messages"]}, {}, 400, "missing_required_parameter", "model"),
    ("model is a number", "chat/completions", CHAT | {"model": 5}, {}, 400, "missing_required_parameter", "model"),
    ("unknown model", "chat/completions", CHAT | {"model": "nope"}, {}, 404, "model_not_found", "model"),
    (
        "negative max_tokens",
        "chat/completions",
        CHAT | {"max_tokens": -1},
        {},
        400,
        "integer_out_of_range",
        "max_tokens",
    ),
    ("zero max_tokens", "completions", TEXT | {"max_tokens": 0}, {}, 400, "integer_out_of_range", "max_tokens"),
    ("max_tokens is text", "chat/completions", CHAT | {"max_tokens": "nine"}, {}, 400, "invalid_type", "max_tokens"),
    ("max_tokens is a list", "chat/completions", CHAT | {"max_tokens": [9]}, {}, 400, "invalid_type", "max_tokens"),
    ("max_tokens of 10^30", "chat/completions", CHAT | {"max_tokens": 10**30}, {}, 400, "invalid_type", "max_tokens"),
    ("max_tokens is a fraction", "chat/completions", CHAT | {"max_tokens": 1.5}, {}, 400, "invalid_type", "max_tokens"),
    (
        "max_completion_tokens",
        "chat/completions",
        CHAT | {"max_completion_tokens": 0},
        {},
        400,
        "integer_out_of_range",
        "max_completion_tokens",
    ),
    ("min over max", "completions", TEXT | {"max_tokens": 2, "min_tokens": 3}, {}, 400, "invalid_value", "min_tokens"),
    ("n of zero", "chat/completions", CHAT | {"n": 0}, {}, 400, "integer_out_of_range", "n"),
    ("n too large", "chat/completions", CHAT | {"n": 20_000}, {}, 400, "integer_out_of_range", "n"),
    ("temperature", "chat/completions", CHAT | {"temperature": 3}, {}, 400, "decimal_out_of_range", "temperature"),
    ("temperature is text", "chat/completions", CHAT | {"temperature": "hot"}, {}, 400, "invalid_type", "temperature"),
    ("top_p", "chat/completions", CHAT | {"top_p": 1.5}, {}, 400, "decimal_out_of_range", "top_p"),
    ("stream is text", "chat/completions", CHAT | {"stream": "maybe"}, {}, 400, "invalid_type", "stream"),
    (
        "stream_options without stream",
        "chat/completions",
        CHAT | {"stream_options": {"include_usage": True}},
        {},
        400,
        "invalid_value",
        "stream_options",
    ),
    (
        "include_usage is text",
        "chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": "maybe"}},
        {},
        400,
        "invalid_type",
        "stream_options.include_usage",
    ),
    ("stop", "chat/completions", CHAT | {"stop": [1]}, {}, 400, "invalid_type", "stop"),
    ("priority is text", "chat/completions", CHAT | {"priority": "first"}, {}, 400, "invalid_type", "priority"),
    ("no prompt", "completions", {"model": "m"}, {}, 400, "missing_required_parameter", "prompt"),
    ("empty prompt", "completions", TEXT | {"prompt": ""}, {}, 400, "missing_required_parameter", "prompt"),
    ("prompt of mixed types", "completions", TEXT | {"prompt": [1, "a"]}, {}, 400, "invalid_type", "prompt"),
    ("negative token ids", "completions", TEXT | {"prompt": [1, -4]}, {}, 400, "invalid_type", "prompt"),
    ("nested token ids", "completions", TEXT | {"prompt": [[1], ["a"]]}, {}, 400, "invalid_type", "prompt"),
    ("prompt is an object", "completions", TEXT | {"prompt": {"a": 1}}, {}, 400, "invalid_type", "prompt"),
    ("deep JSON", "chat/completions", CHAT | {"extra": deep(600)}, {}, 400, "json_too_deep", None),
    ("deep behind numbers", "completions", TEXT | {"extra": [1, deep(600)]}, {}, 400, "json_too_deep", None),
    (
        "JSON deeper than the parser",
        "chat/completions",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        {},
        400,
        "json_too_deep",
        None,
    ),
    ("not JSON", "chat/completions", b"{model: m}", {}, 400, "invalid_json", None),
    ("NaN", "chat/completions", b'{"model":"m","temperature":NaN}', {}, 400, "invalid_json", None),
    ("JSON list", "chat/completions", b"[1, 2]", {}, 400, "invalid_json", None),
    ("empty body", "chat/completions", b"", {}, 400, "invalid_json", None),
    ("number without end", "chat/completions", b'{"model":"m","seed":1e999}', {}, 400, "invalid_json", None),
    ("10 MB body", "chat/completions", b'{"a":"' + b"x" * 10_000_000 + b'"}', {}, 413, "request_too_large", None),
    ("unknown region", "chat/completions", CHAT, {"X-Region": "mars"}, 400, "unknown_region", "X-Region"),
    ("gzip", "chat/completions", CHAT, {"Content-Encoding": "gzip"}, 415, "unsupported_encoding", "Content-Encoding"),
    ("unknown class", "chat/completions", CHAT, {"X-SLO-Class": "gold"}, 400, "unknown_slo_class", "X-SLO-Class"),
    (
        "class of others",
        "chat/completions",
        CHAT,
        {"X-SLO-Class": "forbidden"},
        403,
        "slo_class_not_allowed",
        "X-SLO-Class",
    ),
    ("class that is no name", "chat/completions", CHAT, {"X-SLO-Class": "a b"}, 400, "invalid_value", "X-SLO-Class"),
    (
        "unknown service tier",
        "chat/completions",
        CHAT | {"service_tier": "gold"},
        {},
        400,
        "unknown_slo_class",
        "service_tier",
    ),
    (
        "service tier is a number",
        "chat/completions",
        CHAT | {"service_tier": 4},
        {},
        400,
        "invalid_type",
        "service_tier",
    ),
    ("embeddings", "embeddings", {"model": "m", "input": "x"}, {}, 404, "unsupported_endpoint", None),
    ("images", "images/generations", {"prompt": "x"}, {}, 404, "unsupported_endpoint", None),
    ("ranking", "rerank", {"model": "m", "query": "x"}, {}, 404, "unsupported_endpoint", None),
    ("a count of a response's input", "responses/input_tokens", {"input": "x"}, {}, 404, "unsupported_endpoint", None),
    ("unknown path", "thoughts", {"prompt": "x"}, {}, 404, "unknown_url", None),
    ("no key", "chat/completions", CHAT, {"Authorization": ""}, 401, "invalid_api_key", None),
    ("wrong key", "chat/completions", CHAT, {"Authorization": "Bearer ph_wrong"}, 401, "invalid_api_key", None),
    ("wrong scheme", "chat/completions", CHAT, {"Authorization": "Basic abc"}, 401, "invalid_api_key", None),
    (
        "key that is no text",
        "chat/completions",
        CHAT,
        {"Authorization": "Bearer \u00ff\u00fe"},
        401,
        "invalid_api_key",
        None,
    ),
]


async def test_bad_input_is_refused_in_openai_shape(served):
    wrong = []
    for name, path, body, headers, status, code, param in CASES:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {key: value for key, value in (served.headers | headers).items() if value}
        async with served.http.post(f"{served.url}/v1/{path}", data=io.BytesIO(data), headers=sent) as response:
            answer = await response.json()
            error = answer.get("error", {})
            got = (response.status, error.get("code"), error.get("param"))
            if (
                got != (status, code, param)
                or set(error) != {"message", "type", "param", "code"}
                or not error["message"]
            ):
                wrong.append((name, got, error))
            if response.headers.get("x-should-retry") != "false" or not response.headers.get("x-request-id"):
                wrong.append((name, "headers", dict(response.headers)))
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


async def test_the_instances_own_refusal_is_the_tenants_answer(served):
    served.backends[0].script.status = 400
    async with await served.chat() as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "scripted"
    (row,) = await served.rows()
    assert (row.outcome, row.status_code, row.slo_met) == ("failed", 400, None)
