"""Malformed instance answers: the tenant's response, and the record."""

import asyncio
import json
import logging
from itertools import pairwise

import openai
import pytest
from channels.db import database_sync_to_async
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch import placement
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.answers import EngineFailed
from controlplane.gateway.upstream.sse import Events
from controlplane.tuning.services import put
from tests.examples import at_night_but
from tests.gateway.conftest import open_sdk, until

JSON = b"content-type: application/json\r\n"
HTML = b"content-type: text/html\r\n"
STREAM = b"content-type: text/event-stream\r\n"


def http(status: int, body: bytes, headers: bytes = JSON) -> bytes:
    return b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)


def chunk(text: str = "", finish: str | None = None, **fields) -> dict:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **fields}


def stream(*events: dict | bytes, headers: bytes = STREAM) -> bytes:
    lines = (event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() for event in events)
    return b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (headers, b"".join(line + b"\n\n" for line in lines))


TOKENS = (chunk(), chunk("a"), chunk("b"), chunk("c", "stop"))
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE = b"data: [DONE]"


def plays(served, *pieces: bytes, piece_s: float = 0.0) -> None:
    for backend in served.backends:
        backend.script.plays, backend.script.piece_s = list(pieces), piece_s


async def nothing_is_left(served, caplog) -> None:
    """Assert that no slot is taken, no load is noted, and no exception was logged."""
    gateway = served.gateway
    (row, *_) = await served.rows()
    await until(lambda: not gateway.dispatching.allowances.limits.sequences(row.tenant_id))
    assert gateway.dispatching.topology.fleet.running.sum() == 0
    assert not gateway.dispatching.dispatcher.requests
    assert not gateway.requests._open
    assert [
        record for record in caplog.records if record.exc_info and record.name.startswith("controlplane.gateway")
    ] == []


INVALID_ANSWERS = [
    (http(200, b"all is well"), "text that is not JSON"),
    (http(200, b'"all is well"'), "a JSON string"),
    (http(200, b"null"), "null"),
    (http(200, b"[1,2]"), "a JSON array"),
    (http(200, b"true"), "a JSON boolean"),
    (http(200, b"7"), "a JSON number"),
    (http(200, b""), "nothing"),
    (http(200, b"<html>ok</html>", HTML), "HTML"),
    (http(200, b"{}"), "a JSON object without choices"),
    (http(200, b'{"choices":7}'), "a JSON object"),
    (http(200, b'{"choices":[7]}'), "a JSON object"),
    (http(200, b'{"choices":[{"a":"' + b"\xff" * 9), "text that is not JSON"),
    (http(200, b"[" * 100_000), "text that is not JSON"),
    (http(200, b'{"error":"overloaded"}'), "error 500"),
    (http(200, b'{"object":"error","message":"m","code":503}'), "error 503"),
    (http(200, b'{"choices":[{"finish_reason":"abort"}]}'), "an answer that was given up"),
    (http(204, b"", b""), "status 204 and nothing"),
    (http(302, b"", b"location: http://elsewhere/\r\n"), "status 302 and nothing"),
    (http(404, b"<html>no such page</html>", HTML), "status 404 and HTML"),
    (http(403, b'{"detail":"forbidden"}'), "status 403 and a JSON object"),
]  # fmt: skip


async def test_an_invalid_answer_is_a_failure_of_its_instance(served, caplog, subtests):
    """C67."""
    for answer, came in INVALID_ANSWERS:
        with subtests.test(came):
            plays(served, answer)
            async with await served.chat() as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (502, "upstream_failed")
            assert error["message"].endswith(f" The last one answered with {came}.")
            row = await served.new_row()
            worked = not came.startswith("status")  # with any but 200 and 500 no engine has
            assert (row.outcome, row.status_code, row.prompt_tokens, row.output_tokens) == ("failed", 502, worked, 0)
            assert came in row.trace[0]["lost"]
            await nothing_is_left(served, caplog)


@pytest.mark.parametrize("stream", [True, False])
async def test_which_instance_failed_is_in_the_trace_and_not_in_the_answer(served, stream):
    """The caller learns that it failed; the instance is only for operators."""
    served.backends[0].script.status = 500
    answer = await served.chat(stream=stream)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (502, "upstream_failed")
    (row,) = await served.rows()
    assert row.error_message == error["message"]
    assert "m-0" not in error["message"]
    assert {step["lost"] for step in row.trace} == {"m-0: answered 500"}


INVALID_STREAMS = [
    (http(200, b'{"choices":[]}'), "a JSON object and no stream"),
    (http(200, b"<html>", HTML), "HTML and no stream"),
    (http(200, b"", STREAM), ""),
    (stream(b"data: all is well"), "text that is not JSON"),
    (stream(b"data: [1]"), "a JSON array"),
    (stream({"foo": 1}), "an event without choices"),
    (stream(DONE), "an empty stream"),
    (stream({"object": "error", "message": "m", "type": "InternalServerError", "code": 500}), "error 500"),
    (stream(b"event: error\ndata: {}"), "error 500"),
    (stream({"error": None, "detail": "Internal Server Error"}), "error 500"),
    (stream({"error": {"message": "m", "code": "502"}}), "error 502"),
    (stream({"error": "engine"}), "error 500"),
    (stream(b'data:{"error":{"code":500}}'), "error 500"),
    (stream(b'data: { "error" : {"code":500} }'), "error 500"),
]  # fmt: skip


async def test_an_invalid_stream_is_a_failure_of_its_instance(served, caplog, subtests):
    """C67."""
    for answer, came in INVALID_STREAMS:
        with subtests.test(came):
            plays(served, answer)
            async with await served.chat(stream=True) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (502, "upstream_failed")
            assert error["message"].endswith(f" The last one answered with {came}." if came else "before it answered.")
            row = await served.new_row()
            worked = not came.startswith("status")  # with any but 200 and 500 no engine has
            assert (row.outcome, row.status_code, row.prompt_tokens, row.output_tokens) == ("failed", 502, worked, 0)
            await nothing_is_left(served, caplog)


WRONG_EVENTS = [
    b"data: all is well",
    b"data: null",
    b'data: {"choices":',
    b'data: {"object":"error","message":"m","type":"InternalServerError","param":null,"code":500}',
    b'event: error\ndata: {"message":"m"}',
    b'data: {"foo":1}',
]


async def test_a_stream_that_goes_wrong_says_so_behind_what_was_right(served, caplog, subtests):
    """In pieces, and at once."""
    for whole_events in [True, False]:
        for last in WRONG_EVENTS:
            with subtests.test(last=last, whole_events=whole_events):
                answer = stream(chunk(), chunk("a"), last, chunk("b"), DONE)
                cut = answer.index(last) if whole_events else len(answer)
                plays(served, answer[:cut], answer[cut:], piece_s=0.02)
                async with await served.chat(stream=True) as response:
                    events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n") if event]
                assert [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]] == ["", "a"]
                assert json.loads(events[-1])["error"]["code"] == "upstream_interrupted"
                row = await served.new_row()
                assert (row.outcome, row.error_code, row.output_tokens) == ("failed", "upstream_interrupted", 1)
                await nothing_is_left(served, caplog)


BROKEN_OFF = [
    ((chunk(),), 1),
    ((chunk(), chunk("a"), chunk("b", "abort"), DONE), 1),
    ((chunk(), chunk("a"), chunk("b", "error"), DONE), 1),
    ((chunk(), chunk("a"), chunk("b", "stop")), 2),
]


async def test_an_answer_that_was_broken_off_is_not_done(served, caplog, subtests):
    """E1: By a false end, by vLLM's own error, or before all choices have ended."""
    for events, choices in BROKEN_OFF:
        with subtests.test(choices=choices, events=len(events)):
            plays(served, stream(*events))
            async with await served.chat(stream=True, n=choices) as response:
                assert "upstream_interrupted" in await response.text()
            row = await served.new_row()
            assert (row.outcome, row.error_code) == ("failed", "upstream_interrupted")
            assert row.error_message == "The instance that served this request failed before the answer was complete."
            assert row.trace[-1]["lost"].startswith("m-0: ")
            await nothing_is_left(served, caplog)


BAD = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}


ERRORS_ABOUT_CALLS = [
    ({"error": BAD}, 400),
    ({"object": "error", **BAD}, 400),
    ({"error": {"message": "too long", "type": "invalid_request_error"}}, "400"),
    ({"object": "error", "message": "too long", "type": "BadRequestError", "code": "too_long"}, "too_long"),
]


async def test_an_error_about_the_call_is_the_tenant_s_in_openai_s_shape(served, caplog, subtests):
    """C78: In any form, and despite a status of success."""
    for streamed in [True, False]:
        for said, code in ERRORS_ABOUT_CALLS:
            with subtests.test(said=said, streamed=streamed):
                for begun in (False, True) if streamed else (False,):
                    plays(
                        served,
                        stream(*((chunk(), chunk("a")) if begun else ()), said, DONE)
                        if streamed
                        else http(200, json.dumps(said).encode()),
                    )
                    async with await served.chat(stream=streamed) as response:
                        text = await response.text()
                    assert response.status == (200 if begun else 400)
                    error = json.loads(text.strip().rpartition("data: ")[2])["error"]
                    assert (error["message"], error["code"], error["param"]) == ("too long", code, None)
                    if not begun:
                        assert response.headers["x-should-retry"] == "false"
                row = (await served.rows())[-1]
                assert (row.outcome, row.error_code, row.status_code) == ("failed", "refused_by_instance", 400)
                assert (row.attempts, row.slo_met, "too long" in row.error_message) == (1, None, False)
                await nothing_is_left(served, caplog)


REFUSALS = [
    (400, json.dumps({"object": "error", **BAD}).encode(), "too long"),
    (404, json.dumps({"error": BAD | {"code": 404}}).encode(), "too long"),
    (422, b'{"detail":[{"loc":["body"],"msg":"Field required"}]}', '[{"loc": ["body"], "msg": "Field required"}]'),
    (413, b"<html>413 Request Entity Too Large</html>", "The instance refused the request with status 413."),
    (400, b"", "The instance refused the request with status 400."),
    (400, b'{"error":{"message":"\\ud83d"}}', "?"),
]


async def test_a_refusal_is_in_openai_s_shape(served, subtests):
    """E4."""
    for status, body, message in REFUSALS:
        with subtests.test(message):
            plays(served, http(status, body))
            async with await served.chat() as response:
                error = (await response.json())["error"]
            assert (response.status, error["message"]) == (status, message)
            assert set(error) == {"message", "type", "param", "code"}
            row = await served.new_row()
            assert (row.outcome, row.status_code, row.error_code) == ("failed", status, "refused_by_instance")


async def test_python_s_own_json_is_read_as_every_client_reads_it(served):
    whole = b'{"choices":[{"logprobs":[NaN,-Infinity]}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    plays(served, http(200, whole))
    async with await served.chat() as response:
        assert (response.status, await response.read()) == (200, whole)
    (row,) = await served.rows()
    assert (row.prompt_tokens, row.output_tokens) == (7, 3)


# Usage that was not requested


USAGE_NOT_REQUESTED = [{}, {"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}]


async def test_no_event_has_a_usage_that_was_not_requested(served, subtests):
    """C22: From a server that sends it with each event, or with the last one that has a choice."""
    for options in USAGE_NOT_REQUESTED:
        with subtests.test(options=options):
            plays(served, stream(*(event | {"usage": USAGE} for event in TOKENS), DONE))
            async with await served.chat(stream=True, stream_options=options) as response:
                events = [
                    json.loads(event[6:])
                    for event in (await response.text()).split("\n\n")
                    if event[6:] not in ("", "[DONE]")
                ]
            assert events == list(TOKENS)
            assert served.backends[0].bodies[0]["stream_options"] == {"include_usage": True}
            row = await served.new_row()
            assert (row.prompt_tokens, row.output_tokens) == (7, 3)


async def test_the_usage_that_was_asked_for_stays_with_every_event(served):
    events = [event | {"usage": USAGE} for event in TOKENS]
    options = {"include_usage": True, "continuous_usage_stats": True}
    plays(served, stream(*events, DONE))
    async with await served.chat(stream=True, stream_options=options) as response:
        text = await response.text()
    assert [json.loads(event[6:]) for event in text.split("\n\n")[:-2]] == events
    assert served.backends[0].bodies[0]["stream_options"] == options


# The standard of server-sent events


def test_events_of_every_form():
    of = lambda data: [(event.name, event.data) for event in Events().feed(data)]  # noqa: E731
    assert of(b"data: a\n\n") == of(b"data:a\r\n\r\n") == of(b"\xef\xbb\xbfdata: a\r\r") == [(b"", b"a")]
    assert of(b": ping\n\n:\n\ndata: a\n\n") == of(b"\n\n\nid: 1\nretry: 2\ndata: a\n:\n\n") == [(b"", b"a")]
    assert of(b"data: a\ndata:b\ndata\n\n") == [(b"", b"a\nb\n")]
    assert of(b"event: x\n\ndata: a\nevent: y\n\n") == [(b"y", b"a")]
    assert of(b"data:  a\n\ndata: b") == [(b"", b" a")]


LINES = st.sampled_from(
    [b"data: {}", b"data:{}", b"data:  x\xef\xbb\xbf", b"event: e", b": c", b"id: 1", b"", b"data", b"x"]
)


@given(
    st.lists(LINES, max_size=12),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.integers(1, 9), max_size=30),
)
def test_events_are_the_same_wherever_they_are_cut(lines, end, mark, cuts):
    """C61."""
    data = mark + b"".join(line + end for line in lines)
    whole = Events()
    wanted, cut, got = whole.feed(data), Events(), []
    while data:
        size = cuts.pop() if cuts else len(data)
        got += cut.feed(data[:size])
        data = data[size:]
    assert got == wanted
    canonical = b"".join(event.raw + b"\n\n" for event in wanted)
    assert Events().feed(canonical) == wanted
    if not lines or lines[-2:] == [b"", b""]:
        assert whole.between or end == b"\r"  # then a LF may follow


def test_an_event_without_an_end_is_held_within_bounds(monkeypatch):
    monkeypatch.setattr("controlplane.gateway.upstream.sse.MAX_EVENT_BYTES", 100)
    events = Events()
    for _ in range(25):
        assert events.feed(b"data") == []
    with pytest.raises(EngineFailed, match="more than 100 bytes"):
        events.feed(b"data")


@pytest.mark.parametrize(
    ("end", "size"),
    at_night_but(
        [(b"\r\n", 1), (b"\r", 7)], [(end, size) for end in (b"\r\n", b"\r", b"\n") for size in (1, 7, 10_000)]
    ),
)
async def test_a_stream_of_another_server_s_form_is_the_tenant_s_in_one_form(served, end, size):
    answer = stream(*TOKENS, chunk() | {"choices": [], "usage": USAGE}, DONE)
    head, _, body = answer.partition(b"\r\n\r\n")
    wanted = stream(*TOKENS, DONE).partition(b"\r\n\r\n")[2]
    body = b"\xef\xbb\xbf: ping\n\n" + body.replace(b"data: ", b"data:").removesuffix(b"\n")
    body = body.replace(b"\n", end)
    plays(served, head + b"\r\n\r\n", *(body[at : at + size] for at in range(0, len(body), size)))
    async with await served.chat(stream=True) as response:
        assert await response.read() == wanted
    (row,) = await served.rows()
    assert (row.outcome, row.prompt_tokens, row.output_tokens) == ("done", 7, 3)


async def test_an_answer_without_end_is_cut_off(served, caplog, monkeypatch):
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 1000)
    plays(served, http(200, b'{"choices":[],"x":"' + b"y" * 2000 + b'"}'))
    async with await served.chat() as response:
        assert response.status == 502
        assert "more than 1000 bytes" in (await response.json())["error"]["message"]
    await nothing_is_left(served, caplog)


@pytest.mark.parametrize(
    "piece", [b"x: %b\r\n" % (b"y" * 1000), b"\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n"]
)
async def test_headers_without_end_are_no_answer(served, caplog, monkeypatch, piece):
    monkeypatch.setattr("controlplane.gateway.upstream.connections.MAX_HEAD_BYTES", 20_000)
    plays(served, b"HTTP/1.1 100 Continue\r\n", *[piece * 50] * 40)
    async with await served.chat() as response:
        assert response.status == 502
    (row,) = await served.rows()
    assert "no answer within 20000 bytes of headers" in row.trace[0]["lost"]
    await nothing_is_left(served, caplog)


# Time


@pytest.fixture
def quick_pings(monkeypatch):
    monkeypatch.setattr("controlplane.gateway.serving.http.PING_S", 0.3)


@pytest.mark.parametrize("headers_first", [True, False])
async def test_a_stream_whose_first_token_is_late_is_never_silent(served, quick_pings, headers_first):
    """C08: Status, headers and comment lines are sent while the instance is silent, and continue between tokens."""
    answer = stream(*TOKENS, DONE)
    cuts = (answer.index(b"\r\n\r\n") + 4, answer.index(b"data: ", answer.index(b'"a"')))
    pieces = [answer[: cuts[0]], answer[cuts[0] : cuts[1]], answer[cuts[1] :]]
    if not headers_first:
        pieces = [b"", pieces[0] + pieces[1], pieces[2]]
    plays(served, *pieces, piece_s=1.5)
    loop = asyncio.get_running_loop()
    began_s, came_s, text = loop.time(), [], b""
    async with await served.chat(stream=True) as response:
        assert loop.time() - began_s < 1.2
        async for piece in response.content.iter_any():
            came_s.append(loop.time())
            text += piece
    assert max(after - before for before, after in pairwise(came_s)) < 1.2
    assert text.count(b": ping\n\n") >= 4
    assert text.replace(b": ping\n\n", b"") == answer.partition(b"\r\n\r\n")[2]
    (row,) = await served.rows()
    assert (row.outcome, row.output_tokens, row.attempts) == ("done", 3, 1)


async def test_a_stream_that_speaks_has_no_pings(served, quick_pings):
    plays(
        served,
        *(stream(*TOKENS, DONE)[at : at + 40] for at in range(0, 900, 40)),
        piece_s=0.01,
    )
    async with await served.chat(stream=True) as response:
        assert b"ping" not in await response.read()


async def test_a_first_token_may_take_as_long_as_its_prompt_takes_many_times_over(served, monkeypatch):
    """C07: A slow answer is not retried: elsewhere it would take as long."""
    monkeypatch.setattr(served.gateway.upstream, "silence_s", 0.1)
    served.backends[0].script.first_token_s = 0.5
    async with await served.chat(stream=True) as response:
        assert response.status == 200
        assert (await response.text()).endswith("data: [DONE]\n\n")
    monkeypatch.setattr(placement, "plain_cost_s", lambda fleet, instance, tokens: (tokens * 0.02, 0.0))

    # As read from rows: the inventory that is read every second brings it again.
    for name, value in (("FIRST_TOKEN_S", 0.01), ("FIRST_TOKEN_FACTOR", 1.0)):
        await database_sync_to_async(put)(name, value, "test")
    await until(lambda: served.gateway.dispatching.topology.tuned.FIRST_TOKEN_FACTOR == 1.0)
    async with await served.chat(
        stream=True, messages=[{"role": "user", "content": "a long prompt " * 40}]
    ) as response:
        assert response.status == 200
    async with await served.chat(stream=True) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "first_token_late"
        assert response.headers["x-should-retry"] == "false"
    rows = await served.rows()
    assert [(row.outcome, row.attempts) for row in rows] == [("done", 1), ("done", 1), ("failed", 1)]
    assert len(served.backends[0].bodies) == 3


@pytest.mark.parametrize("said", [b": ping\n\n", b'event: response.created\ndata: {"type":"response.created"}\n\n'])
async def test_events_without_a_token_do_not_prolong_the_wait_for_one(served, quick_pings, said):
    plays(served, stream(), *[said] * 60, piece_s=0.05)
    topology = served.gateway.dispatching.topology
    topology.tuned = topology.tuned.model_copy(update={"FIRST_TOKEN_S": 0.3, "FIRST_TOKEN_FACTOR": 1.0})
    async with served.post("/v1/responses", {"model": "m", "input": "hi", "stream": True}) as response:
        assert "first_token_late" in await response.text()
    (row,) = await served.rows()
    assert (row.outcome, row.error_code, row.attempts) == ("failed", "first_token_late", 1)
    assert row.e2e_ms < 1500


# The Responses API


@pytest.mark.parametrize("begun", [True, False])
async def test_an_sdk_sees_an_error_of_a_stream_of_responses(served, begun):
    """C13: With a name, a type and the next number, as the API has it, and in the form that its SDKs raise."""
    item = {"id": "i", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    opened = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "status": "in_progress"}
    of_part = {"item_id": "i", "output_index": 0, "content_index": 0}
    said = {
        "response.created": {"response": opened},
        "response.in_progress": {"response": opened},
        "response.output_item.added": {"output_index": 0, "item": item},
        "response.content_part.added": of_part | {"part": {"type": "output_text", "text": "", "annotations": []}},
        "response.output_text.delta": of_part | {"delta": "t", "logprobs": []},
    }
    events = [
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}".encode()
        for number, (kind, fields) in enumerate(said.items())
    ][: 5 if begun else 2]
    plays(served, stream(*events))
    async with served.post("/v1/responses", {"model": "m", "input": "hi", "stream": True}) as response:
        text = await response.text()
    if not begun:
        assert response.status == 502
        return
    name, _, data = text.split("\n\n")[-2].partition("\ndata: ")
    error = json.loads(data)
    assert name == "event: error"
    assert (error["type"], error["sequence_number"], error["code"]) == ("error", 5, "upstream_interrupted")
    assert {"message", "param"} < set(error)
    async with open_sdk(served, max_retries=0) as client:
        created = await client.responses.create(model="m", input="hi", stream=True)
        assert [(await anext(created)).type for _ in said] == list(said)
        with pytest.raises(openai.APIError, match="before the answer was complete"):
            await anext(created)
        async with client.responses.stream(model="m", input="hi") as streamed:
            for _ in said:
                await anext(streamed)
            with pytest.raises(openai.APIError, match="before the answer was complete"):
                await anext(streamed)


# Slots


STEPS_THAT_RAISE = [
    "requests.submit", "requests.leave", "requests.finished", "requests.began", "requests.headers_received",
    "requests.place_again", "records.close", "dispatching.measures.take", "records.send", "records.lengths.prior.learn",
    "records.ledger.add", "upstream.carry", "upstream.connections.get", "upstream.connections.put_back",
    "upstream._streamed", "requests.placed", "completions.admission.entries.enter",
]  # fmt: skip


@pytest.mark.parametrize("streamed", at_night_but([True], [True, False]))
async def test_a_slot_is_given_back_whatever_raises(served, monkeypatch, streamed, subtests):
    logging.getLogger("controlplane.gateway").setLevel(logging.CRITICAL)
    try:
        for step in STEPS_THAT_RAISE:
            with subtests.test(step):
                raise_once(served.gateway, step, monkeypatch)
                async with await served.chat(stream=streamed) as response:
                    await response.read()
                await until(lambda: served.gateway.http.active == 0)
                assert [use.sequences for use in served.gateway.dispatching.allowances.limits._use.values()] == [0]
                if step == "upstream.carry":
                    assert response.status == 500
                    row = (await served.rows())[-1]
                    assert (row.outcome, row.status_code, row.error_code) == ("failed", 500, "internal_error")
                async with await served.chat() as response:
                    assert response.status == 200
    finally:
        logging.getLogger("controlplane.gateway").setLevel(logging.NOTSET)


def raise_once(gateway, step: str, monkeypatch) -> None:
    *path, name = step.split(".")
    owner = gateway.http if path[0] == "completions" else gateway
    for attribute in path:
        owner = getattr(owner, attribute)
    before = getattr(owner, name)

    def broken(*args, **kwargs):
        monkeypatch.setattr(owner, name, before)
        raise ZeroDivisionError(step)

    monkeypatch.setattr(owner, name, broken)
