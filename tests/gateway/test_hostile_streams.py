"""Streams with typed events from a hostile instance: cut, failed, oddly spaced or silent ones, in the shape of each API."""

import json

import pytest

from tests.gateway.test_answers import plays, quick_pings, stream  # noqa: F401 (a fixture)

USAGE = {"input_tokens": 7, "output_tokens": 2}
MESSAGE = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "content": [],
    "model": "m",
    "stop_reason": None,
    "usage": USAGE,
}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "t\u00e4"}}
MESSAGES = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    DELTA,
    DELTA,
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
    {"type": "message_stop"},
]
RESPONSE = {"id": "r", "object": "response", "output": [], "usage": None}
RESPONSES = [
    {"type": kind, "sequence_number": number, **fields}
    for number, (kind, fields) in enumerate(
        (
            ("response.created", {"response": RESPONSE}),
            ("response.in_progress", {"response": RESPONSE}),
            ("response.output_text.delta", {"delta": "t\u00e4"}),
            ("response.output_text.delta", {"delta": "t\u00e4"}),
            ("response.completed", {"response": RESPONSE | {"usage": USAGE}}),
        )
    )
]
SURFACES = {"messages": MESSAGES, "responses": RESPONSES}
BODIES = {
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "responses": {"input": "hi"},
}
BEGUN = {"messages": 4, "responses": 4}
"""Events up to the last delta."""


def named(event: dict) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}".encode()


async def ask(served, surface: str) -> tuple[int, bytes]:
    body = {"model": "m", "stream": True} | BODIES[surface]
    async with served.post(f"/v1/{surface}", body) as response:
        return response.status, await response.read()


def error_of(surface: str, event: bytes) -> dict:
    """Return the error in the last *event* of a stream, checking its shape."""
    name, _, data = event.partition(b"\ndata: ")
    said = json.loads(data)
    assert (name, said["type"]) == (b"event: error", "error")
    if surface == "responses":
        assert said["sequence_number"] == 4
        return said
    return said["error"]


FAILURES = {
    "it is cut": b"",
    "vLLM's error": b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x","code":500}}\n\n',
    "no JSON": b"data: <html>\n\n",
    "no type": b'data: {"a":1}\n\n',
    "the engine's end": b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n',
}


OF_RESPONSES = {"it failed": b'data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'}


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_stream_that_fails_ends_with_an_error_of_its_api(served, surface, subtests):
    begun = [named(event) for event in SURFACES[surface][: BEGUN[surface]]]
    for what, last in ((OF_RESPONSES if surface == "responses" else {}) | FAILURES).items():
        with subtests.test(what):
            plays(served, stream(*begun) + last)
            status, text = await ask(served, surface)
            *events, error, _ = text.split(b"\n\n")
            assert (status, events) == (200, begun)
            said = error_of(surface, error)
            assert said["code"] == "upstream_interrupted"
            assert surface == "responses" or said["type"] == "api_error"
            row = await served.new_row()
            assert (row.outcome, row.error_code, row.output_tokens) == ("failed", "upstream_interrupted", 2)
            if what == "the engine's end":
                assert await served.becomes("failed")


async def test_oddly_spaced_and_cut_events_are_those_of_the_api(served, subtests):
    for surface, events in SURFACES.items():
        for end, size in ((b"\r\n", 1), (b"\r", 5), (b"\n", 3)):
            with subtests.test(surface=surface, end=end):
                whole = b"".join(named(event) + b"\n\n" for event in events)
                body = b"\xef\xbb\xbf: hello\n\n" + whole.replace(b"event: ", b"event:").replace(b"\n", end)
                plays(served, stream(), *(body[at : at + size] for at in range(0, len(body), size)))
                assert await ask(served, surface) == (200, whole)
                row = await served.new_row()
                assert (row.outcome, row.prompt_tokens, row.output_tokens) == ("done", 7, 2)


@pytest.mark.parametrize("surface", SURFACES)
async def test_a_typed_stream_is_never_silent_and_its_late_first_token_is_an_error_of_its_api(
    served,
    surface,
    quick_pings,  # noqa: F811
):
    """Comment lines come while the opening events, which vLLM sends before its engine has begun, are held back."""
    opening = [named(event) for event in SURFACES[surface][: 1 if surface == "messages" else 2]]
    topology = served.gateway.dispatching.topology
    topology.tuned = topology.tuned.model_copy(update={"FIRST_TOKEN_S": 1.2, "FIRST_TOKEN_FACTOR": 1.0})
    plays(served, stream(*opening), *[b""] * 40, piece_s=0.1)
    status, text = await ask(served, surface)
    assert status == 200
    *pings, error, _ = text.split(b"\n\n")
    assert set(pings) == {b": ping"}
    assert len(pings) >= 3
    name, _, data = error.partition(b"\ndata: ")
    said = json.loads(data)
    assert (name, said["type"], said["error"]["code"]) == (b"event: error", "error", "first_token_late")
    assert surface == "responses" or said["error"]["type"] == "timeout_error"
    assert (await served.new_row()).error_code == "first_token_late"
