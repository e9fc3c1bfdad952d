"""Unstreamed answers assembled from streams: content, timing, failures."""

import asyncio
import json

import pytest
from django.conf import settings

from controlplane.gateway.upstream import whole_answer
from tests.gateway.conftest import until
from tests.gateway.test_answers import DONE, USAGE, http, nothing_is_left, plays, stream

CLOSING = {"id": "c", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [], "usage": USAGE}
MESSAGE = {
    "role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None, "function_call": None,
    "reasoning": None,
}  # fmt: skip
NONE_ELSE = dict.fromkeys(
    ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params",
     "ec_transfer_params", "metrics")
)  # fmt: skip


def piece(finish: str | None = None, index: int = 0, *, delta: dict, **choice) -> dict:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **choice}
    return {"id": "c", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [choice]}


def called(index: int, arguments: str | None = None, **first) -> dict:
    function = {name: first.pop(name) for name in ("name",) if name in first}
    return {"tool_calls": [{"index": index, **first, "function": function | {"arguments": arguments}}]}


def logprob(token: str) -> dict:
    return {"content": [{"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}]}


ROLE = {"role": "assistant", "content": ""}
ANSWERS = {
    "text": ([piece(delta=ROLE), *(piece(delta={"content": each}) for each in ("a", " \n", "\"é", "\\", "😀", "\ud83d")),
              piece("stop", delta={"content": ""}, stop_reason=7)],
             [{"content": 'a \n"é\\😀\ufffd'}], {"finish_reason": "stop", "stop_reason": 7}),
    "nothing": ([piece(delta=ROLE), piece("stop", delta={"content": ""})], [{"content": ""}], {"finish_reason": "stop"}),
    "thought": ([piece(delta=ROLE), piece(delta={"reasoning": "h"}), piece(delta={"reasoning": "m"}),
                 piece(delta={"content": "a"}), piece("length", delta={})],
                [{"content": "a", "reasoning": "hm"}], {"finish_reason": "length"}),
    "thought of older servers": (
        [piece(delta=ROLE), piece(delta={"reasoning_content": "h"}), piece(delta={"reasoning_content": "m"}),
         piece("length", delta={"content": None})], [{"reasoning_content": "hm"}], {"finish_reason": "length"}),
    "log probabilities": (
        [piece(delta=ROLE), *(piece(delta={"content": each}, logprobs=logprob(each)) for each in "abc"),
         piece("stop", delta={}, logprobs={"content": []})], [{"content": "abc"}],
        {"finish_reason": "stop", "logprobs": {"content": [logprob(each)["content"][0] for each in "abc"]}}),
    "ids of tokens": ([piece(delta=ROLE) | {"prompt_token_ids": [1, 2]}, piece(delta={"content": "a"}, token_ids=[7]),
                       piece(delta={"content": "a"}, token_ids=[7]), piece("stop", delta={}, token_ids=[])],
                      [{"content": "aa"}], {"finish_reason": "stop", "token_ids": [7, 7]}),
    "tools": ([piece(delta=ROLE), piece(delta=called(0, "", id="x", type="function", name="f")),
               piece(delta=called(0, '{"a"')), piece(delta=called(1, id="y", type="function", name="g")),
               piece(delta=called(1, "{}")), piece(delta=called(0, ": 1}")), piece("tool_calls", delta={})],
              [{"tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                               {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}],
              {"finish_reason": "tool_calls"}),
    "several": ([*(piece(delta=ROLE, index=index) for index in (0, 1)),
                 *(piece(delta={"content": f"{each}{index}"}, index=index) for each in "abcd" for index in (1, 0)),
                 *(piece("stop", delta={"content": "."}, index=index) for index in (1, 0))],
                [{"content": "a0b0c0d0."}, {"content": "a1b1c1d1."}], {"finish_reason": "stop"}),
    "what is not known here": ([piece(delta=ROLE | {"mood": "fair"}), piece("stop", delta={"content": "a"}, weight=2)],
                               [{"content": "a", "mood": "fair"}], {"finish_reason": "stop", "weight": 2}),
}  # fmt: skip


def chunked(data: bytes, size: int) -> list[bytes]:
    """Return the answer *data* in HTTP chunks of each event, or of *size* bytes."""
    head, _, body = data.partition(b"\r\n\r\n")
    if size:
        parts = [body[at : at + size] for at in range(0, len(body), size)]
    else:
        parts = [part + b"\n\n" for part in body.removesuffix(b"\n\n").split(b"\n\n")]
    pieces = [
        head + b"\r\ntransfer-encoding: chunked\r\n\r\n",
        *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts),
    ]
    return [*pieces, b"0\r\n\r\n"]


async def test_pieces_become_the_answer(served, subtests):
    """Event by event, cut anywhere, and at once."""
    for name, (events, messages, ends) in ANSWERS.items():
        for size in (0, 37, 10**6):
            with subtests.test(name, size=size):
                data = stream(*(json.dumps(each, separators=(",", ":")).encode().join([b"data: ", b""]) for each in events),
                              CLOSING, DONE)  # fmt: skip
                plays(served, *chunked(data, size), piece_s=0.0 if size == 37 else 0.001)
                async with await served.chat(n=len(messages)) as response:
                    answer = json.loads(await response.read())
                expected = {"logprobs": None, "stop_reason": None, "token_ids": None, "routed_experts": None, **ends}
                usage = USAGE | {"prompt_tokens_details": None, "completion_tokens_details": None}
                assert answer == NONE_ELSE | {
                    "id": "c", "object": "chat.completion", "created": 5, "model": "m", "usage": usage,
                    "choices": [{"index": at, "message": MESSAGE | each, **expected} for at, each in enumerate(messages)],
                    "prompt_token_ids": [1, 2] if name == "ids of tokens" else None,
                }  # fmt: skip
                row = await served.new_row()
                assert (row.outcome, row.streamed, row.prompt_tokens, row.output_tokens) == ("done", False, 7, 3)
                assert 0 < row.ttft_ms <= row.e2e_ms
                assert row.slo_met is True


async def test_its_tokens_are_timed_and_its_slo_is_judged(served):
    """The tenant sees one answer after 1.6 s, but its late first token is known and counted."""
    script = served.backends[0].script
    script.first_token_s, script.tokens, script.token_s = 1.1, 6, 0.1
    async with await served.chat() as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "t0 t1 t2 t3 t4 t5 "
    (row,) = await served.rows()
    assert 1100 <= row.ttft_ms < row.e2e_ms - 400
    assert 100 <= row.itl_ms < 200
    assert row.slo_met is False
    assert (served.backends[0].bodies[0]["stream"], row.streamed) == (True, False)


async def test_it_is_switched_off_by_a_setting(served, monkeypatch):
    monkeypatch.setattr(served.gateway.http.completions, "stream_all", False)
    async with await served.chat() as response:
        assert response.status == 200
    assert "stream" not in served.backends[0].bodies[0]
    (row,) = await served.rows()
    assert (row.ttft_ms, row.slo_met, row.trace[0]["in_one_piece"]) == (None, None, "streams are switched off")
    assert settings.STREAM_ALL


async def test_a_busy_gateway_asks_for_short_ones_in_one_piece(served, monkeypatch):
    load, backend = served.gateway.http.completions.load, served.backends[0]
    monkeypatch.setattr(load, "look", lambda: None)
    seen = []
    for share, limit in ((0.5, 200), (0.7, 200), (0.7, 2000)):
        monkeypatch.setattr(load, "share", share)
        async with await served.chat(max_tokens=limit, min_tokens=limit) as response:
            assert response.status == 200
        row = await served.new_row()
        seen.append(("stream" in backend.bodies[-1], row.ttft_ms is not None, row.trace[0].get("in_one_piece")))
    why = "the gateway was busy, and it was expected to be short"
    assert seen == [(True, True, None), (False, False, why), (True, True, None)]


FIRST_TOKENS_MS = [(None, False), (40, True), (10**6, True), (-1, False), ("soon", False), (float("inf"), False)]


async def test_an_answer_in_one_piece_is_timed_by_its_server(served, subtests):
    """A vLLM with `--enable-per-request-metrics` reports the time of the first token."""
    for first_ms, timed in FIRST_TOKENS_MS:
        with subtests.test(first_ms=first_ms):
            said = {"id": "x", "choices": [], "usage": USAGE, "metrics": {"time_to_first_token_ms": first_ms}}
            plays(served, http(200, json.dumps(said).encode()))
            backend = served.backends[0]
            backend.script.hold = asyncio.Event()
            asked = asyncio.create_task(served.chat(prompt_logprobs=1))
            await until(lambda: backend.running == 1)  # noqa: B023
            await asyncio.sleep(0.05)
            backend.script.hold.set()
            async with await asked as response:
                assert (await response.json())["metrics"]
            row = await served.new_row()
            assert "stream" not in served.backends[0].bodies[0]
            assert (row.ttft_ms is not None) is (row.slo_met is not None) is timed
            if first_ms == 40:
                assert row.ttft_ms - row.queue_ms == pytest.approx(40.0)
                assert row.ttft_ms < row.e2e_ms
            if timed:
                assert row.ttft_ms <= row.e2e_ms


async def test_a_server_that_knows_no_streams_answers_all_the_same(served):
    plays(served, http(200, b'{"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'))
    async with await served.chat() as response:
        assert (await response.json())["id"] == "x"
    (row,) = await served.rows()
    assert (row.outcome, row.output_tokens, row.ttft_ms) == ("done", 3, None)


ENDS = piece("stop", delta={"content": "c"})
NO_ANSWERS = [
    ([piece(delta=ROLE), {"error": {"message": "m", "type": "InternalServerError", "code": 500}}, DONE], 502, "error 500"),
    ([piece(delta=ROLE), piece("abort", delta={})], 502, "an answer that was given up"),
    ([piece(delta=ROLE), piece(delta={"content": "a"})], 502, ""),
    ([piece(delta=ROLE), piece(delta={"content": 7}), ENDS, DONE], 502, "a text that is none"),
    ([piece(delta=ROLE), piece(delta={}, index=9), ENDS, DONE], 502, "a choice 9 of 1"),
    ([piece(delta=ROLE), piece(delta={}, index=-1), ENDS, DONE], 502, "a choice -1 of 1"),
    ([piece(delta=ROLE), piece(delta={}, index="x"), ENDS, DONE], 502, "a JSON object"),
    ([piece(delta=ROLE), piece(delta=[7]), ENDS, DONE], 502, "a JSON object"),
    ([piece(delta=ROLE), piece(delta={"tool_calls": 7}), ENDS, DONE], 502, "a JSON object"),
    ([piece(delta=ROLE), piece(delta={"tool_calls": [{"index": 10**9}]}), ENDS, DONE], 502, "a tool call 1000000000"),
    ([piece(delta=ROLE), piece(delta={}, logprobs={"content": 7}), ENDS, DONE], 502, "a list that is none"),
    ([piece(delta=ROLE), piece(delta={}, logprobs=[]), ENDS, DONE], 502, "a JSON object"),
    ([b'data: {"choices":[{"index":0,"delta":{"content":"\\x"}}]}',
      ENDS, DONE], 502, "text that is not JSON"),
    ([piece(delta=ROLE), {"error": {"message": "bad", "type": "BadRequestError", "code": 400}}, DONE], 400, ""),
    ([DONE], 502, "an empty stream"),
]  # fmt: skip


async def test_an_error_within_its_stream_is_an_error_of_http(served, caplog, subtests):
    for events, status, came in NO_ANSWERS:
        with subtests.test(came):
            plays(served, stream(*events))
            async with await served.chat() as response:
                error = (await response.json())["error"]
            assert response.status == status
            if status == 502:
                assert error["code"] == "upstream_failed"
                assert error["message"].endswith(came + "." if came else "")
            else:
                assert (error["message"], error["code"], response.headers["x-should-retry"]) == ("bad", 400, "false")
            row = await served.new_row()
            assert (row.outcome, row.status_code) == ("failed", status)
            await nothing_is_left(served, caplog)


async def test_a_text_that_passed_unread_is_none_in_the_end(served):
    """Tokens like the one before are not parsed one by one, whether they come alone or together: the result is the same."""
    token = json.dumps(piece(delta={"content": "a"}), separators=(",", ":")).encode()
    bad = token.replace(b'"a"', b'"\\x"')
    events = [*(b"data: " + each for each in (token, token, bad, token)), ENDS, DONE]
    for pieces in (chunked(stream(*events), 0), [stream(*events)]):
        plays(served, *pieces, piece_s=0.01)
        async with await served.chat() as response:
            assert response.status == 502
            assert (await response.json())["error"]["message"].endswith("a text that is none.")


async def test_an_oversized_answer_is_a_failure(served, monkeypatch):
    monkeypatch.setattr(whole_answer, "MOST_ANSWER_BYTES", 100)
    script = served.backends[0].script
    script.tokens = 200
    async with await served.chat(max_tokens=200) as response:
        assert response.status == 502
        assert "more than 100 bytes" in (await response.json())["error"]["message"]
    assert len(served.backends[0].bodies) > 1


class TestTwo:
    @pytest.fixture
    def gateway_options(self):
        return {"regions": ["east", "east"]}

    async def test_it_may_start_over_on_another_instance_at_any_time(self, served):
        """Nothing was sent yet: the tenant sees one answer, made entirely by the second, with its times."""
        script = served.backends[0].script
        for each in served.backends:
            each.script.tokens, each.script.token_s = 5, 0.02
        script.die = "midway"
        served.backends[1].script.first_token_s = 0.3
        answers = [await served.chat() for _ in range(4)]
        texts = [(await each.json())["choices"][0]["message"]["content"] for each in answers]
        assert texts == ["t0 t1 t2 t3 t4 "] * 4
        rows = await served.rows()
        assert {row.outcome for row in rows} == {"done"}
        again = [row for row in rows if row.attempts == 2]
        assert again
        assert all(row.ttft_ms >= 300 and row.output_tokens == 5 for row in again)

    async def test_both_fail_and_it_ends(self, served):
        for each in served.backends:
            each.script.die, each.script.tokens = "engine", 4
        async with await served.chat() as response:
            assert (response.status, (await response.json())["error"]["code"]) == (422, "request_ends_engines")
        assert sum(len(each.bodies) for each in served.backends) == 2


async def test_its_tenant_leaves_and_its_instance_stops(served):
    backend = served.backends[0]
    backend.script.tokens, backend.script.token_s = 1000, 0.02
    asked = asyncio.create_task(served.chat())
    await until(lambda: any(each.output_tokens > 3 for each in served.gateway.dispatcher._requests.values()))
    asked.cancel()
    await until(lambda: backend.aborted == 1)
    await until(lambda: not served.gateway.dispatcher._requests)
    (row,) = await served.rows()
    assert (row.outcome, row.error_code) == ("cancelled", "client_disconnected")


async def test_no_comment_line_is_in_it(served, monkeypatch):
    monkeypatch.setattr("controlplane.gateway.serving.http.PING_S", 0.1)
    served.backends[0].script.first_token_s = 0.5
    async with await served.chat() as response:
        assert (response.status, response.content_type) == (200, "application/json")
        assert (await response.json())["choices"]


async def test_a_response_is_the_one_of_the_last_event(served):
    body = {"model": "m", "input": "hello"}
    async with served.http.post(f"{served.url}/v1/responses", json=body, headers=served.headers) as response:
        answer = await response.json()
    assert answer == {"id": "r", "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}}
    (row,) = await served.rows()
    assert (row.outcome, row.prompt_tokens, row.output_tokens) == ("done", 7, 3)
    assert 0 < row.ttft_ms <= row.e2e_ms


async def test_an_answer_does_not_wait_for_a_stream_that_lingers(served):
    served.backends[0].script.lingers_s = 5.0
    async with asyncio.timeout(3), await served.chat() as response:
        assert (await response.json())["choices"]
