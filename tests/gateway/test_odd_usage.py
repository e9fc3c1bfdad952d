"""Whatever usage an instance reports, the answer is its tenant's, and its tokens are counted."""

import json

import pytest

from tests.gateway.test_answers import DONE, TOKENS, chunk, http, nothing_is_left, plays, stream

USAGES = [
    "oops", None, [], [1], 7, True, {}, {"prompt_tokens": "abc", "completion_tokens": "1"}, {"prompt_tokens": None},
    {"completion_tokens": None}, {"prompt_tokens": -3, "completion_tokens": -1}, {"completion_tokens": 2**70},
    {"prompt_tokens": 1.5, "completion_tokens": [1]}, {"prompt_tokens_details": "x", "completion_tokens": {}},
    {"input_tokens": "x", "output_tokens": None}, {"prompt_tokens": "7", "completion_tokens": "3"}, "many",
    {"prompt_tokens": 1e300, "completion_tokens": True}, [7, 3],
]  # fmt: skip
TEXT = "one two three four five six"
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
SURFACES = {
    "chat/completions": (MESSAGES, {"choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "stop"}]}),
    "completions": ({"prompt": "hello"}, {"choices": [{"index": 0, "text": TEXT, "finish_reason": "stop"}]}),
    "responses": ({"input": "hello"}, {"id": "r", "output": [{"content": [{"type": "output_text", "text": TEXT}]}]}),
    "messages": (
        MESSAGES | {"max_tokens": 9},
        {"type": "message", "content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn"},
    ),
}


async def ask(served, path: str, body: dict) -> tuple[int, dict]:
    async with served.post(f"/v1/{path}", {"model": "m"} | body) as response:
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize("path", SURFACES)
async def test_an_odd_usage_passes_and_tokens_are_counted(served, caplog, subtests, path):
    """A9, for an instance that answers in one piece."""
    body, answer = SURFACES[path]
    for usage in USAGES:
        with subtests.test(repr(usage)):
            plays(served, http(200, json.dumps(answer | {"usage": usage}).encode()))
            assert await ask(served, path, body) == (200, answer | {"usage": usage})
            row = await served.new_row()
            assert (row.outcome, row.status_code) == ("done", 200)
            assert row.prompt_tokens == row.predicted_prompt_tokens > 0
            assert 5 <= row.output_tokens <= 9
            await nothing_is_left(served, caplog)


async def test_an_odd_usage_of_a_stream_is_not_believed(served, caplog, subtests):
    for usage in USAGES:
        with subtests.test(repr(usage)):
            plays(served, stream(*TOKENS, chunk() | {"choices": [], "usage": usage}, DONE))
            async with await served.chat(stream=True) as response:
                assert response.status == 200
                await response.read()
            row = await served.new_row()
            assert (row.outcome, row.output_tokens) == ("done", 3)  # as counted
            assert 0 < row.prompt_tokens < 100  # as predicted
            await nothing_is_left(served, caplog)


NO_ANSWERS = [
    b"", b"null", b"[1]", b'"x"', b"7", b"{}", b"all is well", b"\xff\xfe", b"<html>", b'{"choices":7}', b'{"output":7}',
    b'{"content":{}}', b"[" * 5000,
]  # fmt: skip


async def test_what_is_no_answer_is_a_failure_that_leaves_nothing(served, caplog, subtests):
    for path, (body, _) in SURFACES.items():
        for answer in NO_ANSWERS:
            with subtests.test(path=path, answer=answer[:20]):
                plays(served, http(200, answer))
                status, error = await ask(served, path, body)
                assert (status, error["error"]["code"]) == (502, "upstream_failed")
                assert (await served.new_row()).outcome == "failed"
                await nothing_is_left(served, caplog)
