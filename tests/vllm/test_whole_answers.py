"""What a tenant gets who asks for no stream is what vLLM itself answers, though it was streamed and put together."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import ServedGateway
from tests.vllm.conftest import MODEL, Server
from tests.vllm.test_gateway_live import served  # noqa: F401  # a fixture

pytestmark = [pytest.mark.vllm]
CHAT, COMPLETION, RESPONSE, MESSAGE = "chat/completions", "completions", "responses", "messages"
MESSAGES = [{"role": "user", "content": "Which way does the wind blow? 😀"}]
WIND = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "wind", "parameters": WIND}}
BY_NAME = {"type": "function", "function": {"name": "wind"}}
LIMIT = {CHAT: "max_tokens", COMPLETION: "max_tokens", RESPONSE: "max_output_tokens", MESSAGE: "max_tokens"}
PROMPT = {CHAT: {"messages": MESSAGES}, COMPLETION: {"prompt": "A pilot house is"}, RESPONSE: {"input": "Is it windy?"}}
PROMPT[MESSAGE] = {"messages": MESSAGES}
CHANGES = ("id", "created", "created_at", "call_id", "request_id", "item_id")  # from call to call

CASES = [
    (CHAT, {}),
    (CHAT, {"n": 2, "temperature": 0.8, "seed": 7}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}),
    (CHAT, {"logprobs": True, "n": 3, "temperature": 1.0, "seed": 3}),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"stop": ["e"]}),
    (CHAT, {"max_tokens": 1}),
    (CHAT, {"stream": False, "priority": 3}),
    (CHAT, {"stop_token_ids": list(range(200, 900)), "include_stop_str_in_output": True}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WIND}}, "max_tokens": 60}),
    (CHAT, {"temperature": 5 / 3, "seed": 1, "max_tokens": 90}),
    (COMPLETION, {}),
    (COMPLETION, {"prompt": ["A pilot", "What did"], "n": 2, "temperature": 0.7, "seed": 5}),
    (COMPLETION, {"logprobs": 2}),
    (COMPLETION, {"logprobs": 0, "prompt": ["a", "b c"], "n": 2, "seed": 1, "temperature": 1}),
    (COMPLETION, {"return_token_ids": True, "prompt": ["one", "two"], "n": 2, "temperature": 1, "seed": 1}),
    (COMPLETION, {"prompt": [1, 2, 3, 40]}),
    (RESPONSE, {}),
    (RESPONSE, {"instructions": "Be brief.", "metadata": {"a": "b"}}),
    (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "w", "schema": WIND}}, "max_output_tokens": 60}),
    (RESPONSE, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    (MESSAGE, {}),
    (MESSAGE, {"system": "Be brief.", "metadata": {"user_id": "u"}, "stop_sequences": ["e"]}),
    (MESSAGE, {"max_tokens": 1, "service_tier": "standard_only"}),
]  # fmt: skip
IN_ONE_PIECE = [
    (CHAT, {"prompt_logprobs": 1}),
    (CHAT, {"use_beam_search": True, "n": 2}),
    (CHAT, {"echo": True}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"tools": [TOOL], "tool_choice": BY_NAME, "max_tokens": 60}),
    (CHAT, {"tools": [TOOL], "tool_choice": BY_NAME, "max_tokens": 60, "n": 2, "temperature": 1, "seed": 2}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90}),
    (COMPLETION, {"prompt_logprobs": 0}),
    (COMPLETION, {"echo": True}),
    (COMPLETION, {"echo": True, "max_tokens": 0}),
    (COMPLETION, {"echo": True, "logprobs": 1}),
    (COMPLETION, {"use_beam_search": True, "n": 2}),
    (RESPONSE, {"tools": [{"type": "function", "name": "wind", "parameters": WIND}], "tool_choice": "auto"}),
    (MESSAGE, {"tools": [{"name": "wind", "input_schema": WIND}], "tool_choice": {"type": "auto"}}),
]
REFUSED = [
    (CHAT, {"max_tokens": 10**6}),
    (CHAT, {"response_format": {"type": "json_schema"}}),
    (CHAT, {"logit_bias": {"5000000": 1}}),
    (COMPLETION, {"logprobs": 500}),
    (RESPONSE, {"max_output_tokens": 10**6}),
]


def plain(value: Any) -> Any:
    """*value* less what changes from call to call, numbers to five digits: a prompt that is cached is computed otherwise."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in CHANGES}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


async def both(served: ServedGateway, server: Server, path: str, body: dict) -> tuple[tuple, tuple]:  # noqa: F811
    """Return status and answer of the server, and through the gateway."""
    body = {"model": MODEL, **PROMPT[path], LIMIT[path]: 12, "temperature": 0, **body}
    answers = []
    for url, headers in ((server.url, {}), (served.url, served.headers)):
        async with served.http.post(f"{url}/v1/{path}", json=body, headers=headers) as response:
            answers.append((response.status, json.loads(await response.text())))
    return answers[0], answers[1]


def named(cases: list) -> list:
    return [pytest.param(*case, id=f"{case[0].partition('/')[0]} {json.dumps(case[1])[:60]}") for case in cases]


@pytest.mark.parametrize(("path", "body"), named(CASES))
async def test_a_whole_answer_is_vllm_s_own(served, vllm_server, path, body):  # noqa: F811
    (status, direct), (ours, through) = await both(served, vllm_server, path, body)
    assert (status, ours) == (200, 200), (direct, through)
    assert plain(through) == plain(direct)
    assert list(through) == list(direct), "in its order too"
    (row,) = await served.rows()
    assert (row.outcome, row.streamed) == ("done", False)
    assert 0 < row.ttft_ms <= row.e2e_ms
    assert row.slo_met is not None


@pytest.mark.parametrize(("path", "body"), named(IN_ONE_PIECE))
async def test_what_no_stream_carries_comes_in_one_piece(served, vllm_server, path, body):  # noqa: F811
    (status, direct), (ours, through) = await both(served, vllm_server, path, body)
    assert (status, ours) == (200, 200), (direct, through)
    assert plain(through).keys() == plain(direct).keys()
    (row,) = await served.rows()
    assert (row.ttft_ms, row.slo_met) == (None, None)
    assert row.trace[0]["in_one_piece"]


@pytest.mark.parametrize(("path", "body"), named(REFUSED))
async def test_a_refusal_is_vllm_s_own(served, vllm_server, path, body):  # noqa: F811
    (status, direct), (ours, through) = await both(served, vllm_server, path, body)
    assert 400 <= status < 500
    assert (ours, plain(through)) == (status, plain(direct))
