"""A refusal that quotes its request reaches the client alone: no row, trace, event, log or span has it. D24."""

import json
import logging

import pytest
from channels.db import database_sync_to_async
from django.apps import apps

from tests.gateway.test_answers import STREAM, http, plays
from tests.gateway.test_tracing import collector, spans_of, traced

__all__ = ["collector", "traced"]

PROMPT = "Please keep to yourself that zebra-7731 met Oğuzhan Größer in Kyōto at nine"
MARKS = ("zebra", "oğuzhan", "größer", "kyōto", "yourself", "o\\u011f", "ky\\u014d")


def openai(status: int, message: str) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return http(status, json.dumps({"error": error}).encode())


def in_stream(message: str) -> bytes:
    event = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()
    return b"HTTP/1.1 200 OK\r\n%b\r\ndata: %b\n\n" % (STREAM, event)


WHOLE = f"1 validation error: messages.0 [type=missing, input_value={{'content': '{PROMPT}'}}, input_type=dict]"
ANSWERS = {
    "pydantic": openai(400, WHOLE),
    "pydantic as JSON": openai(422, json.dumps([{"loc": ["body"], "msg": "bad", "input": {"content": PROMPT}}])),
    "template": openai(400, "Conversation roles must alternate, got 'zebra-7731' after \"Größer\""),
    "template without quotes": openai(400, "unexpected word zebra-7731 at line 3 near OĞUZHAN"),
    "cut off": openai(400, f"cannot parse {PROMPT[30:52]}..."),
    "escaped": openai(400, f"cannot parse {PROMPT!a}"),
    "fastapi": http(400, json.dumps({"detail": [{"msg": "zebra-7731 is wrong", "input": PROMPT}]}).encode()),
    "plain text of another server": http(400, f"I do not like {PROMPT}".encode(), b"content-type: text/plain\r\n"),
    "not about the request": openai(500, f"worker died at zebra-7731: {PROMPT}"),
    "a server that is busy": http(429, f"too much of Größer, {PROMPT}".encode(), b"retry-after: 1\r\n"),
    "no server": http(503, f"no room for zebra-7731 {PROMPT}".encode()),
    "no model": http(404, json.dumps({"error": {"message": PROMPT, "param": "model", "code": 404}}).encode()),
    "in a stream": in_stream(WHOLE),
    "in a stream, by a word": in_stream("bad word zebra-7731"),
}


def every_row() -> str:
    """All that the database holds but the tenant's own answers."""
    return json.dumps(
        [list(model._base_manager.values()) for model in apps.get_models() if model._meta.managed], default=str
    )


def quoted(text: str) -> list[str]:
    return [mark for mark in MARKS if mark in text.lower()]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_sink_has_it(collector, traced, caplog, stream, subtests):
    caplog.set_level(logging.DEBUG, "controlplane")
    served = traced
    messages = [{"role": "user", "content": PROMPT}]
    for said, answers in ANSWERS.items():
        with subtests.test(said):
            plays(served, answers)
            async with await served.chat(messages=messages, stream=stream, max_tokens=5) as response:
                answer = await response.text()
            assert "error" in answer
            row = await served.new_row()
            assert row.error_message
    rows = await database_sync_to_async(every_row)()
    assert quoted(rows) == []
    assert quoted(caplog.text) == []
    spans = await spans_of(collector, 2 * len(ANSWERS))
    assert quoted(str(spans)) == []
    assert quoted(json.dumps(served.gateway.publisher.summary.snapshot(), default=str)) == []
    async with served.http.get(f"{served.url}/metrics") as metrics:
        assert quoted(await metrics.text()) == []


async def test_the_client_gets_it_whole(served):
    plays(served, openai(400, WHOLE))
    async with await served.chat(messages=[{"role": "user", "content": PROMPT}]) as response:
        assert (await response.json())["error"]["message"] == WHOLE
