"""Fuzzing of a served gateway with thousands of malformed requests and answers: each is answered and counted.

`make test` draws a hundred, the night ten thousand, half of them with streams that are kept for an eviction: `pytest -s
--hypothesis-profile night` of this file. A failure is printed as the bytes sent and played.
"""

import asyncio
import json
import logging
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.dispatch.port import Left
from controlplane.gateway.ledger.entry import REQUEST_ID
from controlplane.gateway.models import LedgerRow
from tests.examples import costly
from tests.gateway.conftest import until

SILENT_S = 20.0
ODD = st.sampled_from(
    [
        None, True, False, 0, -1, 3, 2**31, 2**63, -(2**63) - 1, 2**200, 1.5, 1e308, float("nan"), float("inf"), "", "7",
        "x" * 5000, "\ud83d", "\0", "stop", "error", [], [7], [[]], [None], {}, {"a": 1}, {"message": 7}, {"code": 500},
        {"code": 400, "message": "m"}, {"code": "x" * 900, "message": ["m"]}, "EngineCore encountered an issue",
    ]
)  # fmt: skip
EVENT = {
    "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f",
    "choices": [{"index": 0, "delta": {"content": "t"}, "text": "t", "finish_reason": None, "token_ids": [1]}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    "type": "response.output_text.delta", "sequence_number": 4, "response": {"usage": {"input_tokens": 7}, "error": None},
    "output": [],
}  # fmt: skip
EVENT_PATHS = [
    (), ("id",), ("object",), ("choices",), ("choices", 0), ("choices", 0, "delta"), ("choices", 0, "delta", "content"),
    ("choices", 0, "finish_reason"), ("choices", 0, "token_ids"), ("choices", 0, "text"), ("usage",), ("type",),
    ("response",),
    ("usage", "prompt_tokens"), ("usage", "completion_tokens"), ("system_fingerprint",), ("sequence_number",), ("output",),
    ("response", "usage"), ("response", "error"), ("response", "usage", "input_tokens"), ("error",), ("detail",), ("code",),
    ("message",), ("created",), ("prompt_token_ids",),
]  # fmt: skip
BODY = {
    "model": "m", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "input": "hello", "stream": True,
    "max_tokens": 9,
}  # fmt: skip
BODY_PATHS = [
    (), ("model",), ("messages",), ("messages", 0), ("messages", 0, "content"), ("messages", 0, "role"), ("prompt",),
    ("input",),
    ("stream",), ("max_tokens",), ("max_completion_tokens",), ("max_output_tokens",), ("n",), ("min_tokens",),
    ("ignore_eos",),
    ("stream_options",), ("tools",), ("stop",), ("priority",), ("service_tier",), ("temperature",), ("top_p",),
    ("metadata",),
]  # fmt: skip
CHAT = b"/v1/chat/completions"
BODIES_OF = {
    CHAT: ("model", "messages", "max_tokens"),
    b"/v1/completions": ("model", "prompt", "max_tokens"),
    b"/v1/responses": ("model", "input"),
}
REMOVED = object()


def changed(value, changes):
    """Return *value* with each (path, new value) set, where the path exists."""
    value = json.loads(json.dumps(value))
    for path, new in changes:
        if not path:
            value = value if new is REMOVED else deepcopy(new)
            continue
        place = value
        for name in path[:-1]:
            known = isinstance(place, dict) and name in place
            known = known or (isinstance(place, list) and isinstance(name, int) and name < len(place))
            place = place[name] if known else None
        if isinstance(place, dict) or (isinstance(place, list) and isinstance(path[-1], int) and path[-1] < len(place)):
            if new is not REMOVED:
                place[path[-1]] = deepcopy(new)
            elif isinstance(place, dict):
                place.pop(path[-1], None)
    return value


def changes(paths, most):
    return st.lists(st.tuples(st.sampled_from(paths), ODD | st.just(REMOVED)), max_size=most)


def encoded(value) -> bytes:
    return json.dumps(value).encode()


def json_of(value, paths, edits):
    """Return *value* as JSON, unchanged in one of two cases."""
    return st.just(encoded(value)) | changes(paths, edits).map(lambda made: encoded(changed(value, made)))


EVENTS = json_of(EVENT, EVENT_PATHS, 3)
LINES = st.builds(
    lambda begin, data, end: begin + data + end,
    st.sampled_from(
        [b"data: "] * 20 + [b"data:", b"event: error\ndata: ", b": c\n\ndata: ", b"\xef\xbb\xbfdata: ", b"id: 1\rdata:"]
    ),
    EVENTS | EVENTS | st.sampled_from([b"[DONE]"] * 12 + [b"", b"{", b"null", b"\xff\xfe", b"[" * 9000, b"<html>"]),
    st.sampled_from([b"\n\n"] * 20 + [b"\r\n\r\n", b"\r\r", b"\n", b""]),
)
STREAMS = st.builds(
    lambda lines, end: b"".join(lines) + end,
    st.lists(LINES, min_size=1, max_size=6),
    st.sampled_from([b"data: [DONE]\n\n"] * 3 + [b"", b"data: [DONE]"]),
)
OTHERS = st.binary(max_size=40) | st.just(b"<html>no</html>")
BODIES = {True: STREAMS | STREAMS | STREAMS | EVENTS | OTHERS, False: EVENTS | EVENTS | EVENTS | STREAMS | OTHERS}


HEADS = st.sampled_from(
    [b"content-type: text/event-stream\r\n"] * 10
    + [b""] * 20
    + [
        b"content-type: application/json\r\n", b"content-type: text/html\r\n", b"", b"x: " + b"y" * 9_000 + b"\r\n",
        b"content-type: \xff\r\n", b"location: /\r\n", b"no colon\r\n", b"content-encoding: gzip\r\n",
        b"retry-after: soon\r\n",
        b"transfer-encoding: gzip\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n", b"content-length: 7\r\n",
    ]
)  # fmt: skip
STATUSES = st.sampled_from(
    [b"200"] * 60 + b"100 101 199 201 204 301 302 304 400 401 403 404 408 413 422 429 500 502 503 599 999 0 x".split()
)


@st.composite
def played(draw, streamed: bool) -> list[bytes]:
    """Bytes of an answer, and its chunks."""
    body, framing = (
        draw(BODIES[streamed]),
        draw(st.sampled_from(["close", "close", "length", "chunked", "chunked", "wrong", "bytes"])),
    )
    head = b"HTTP/1.1 %b X\r\n%b" % (draw(STATUSES), draw(HEADS))
    if framing == "bytes":
        answer = draw(st.binary(max_size=60)) + body
    elif framing == "length":
        answer = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "wrong":
        answer = head + b"content-length: %d\r\n\r\n%b" % (draw(st.sampled_from([0, 1, 10**6, 10**30])), body)
    elif framing == "chunked":
        pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
        answer = (
            head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)
        )
        answer += draw(st.sampled_from([b"0\r\n\r\n"] * 4 + [b"", b"zz\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"]))
    else:
        answer = head + b"\r\n" + body
    cuts = sorted(draw(st.lists(st.integers(0, len(answer)), max_size=3)))
    return [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]


@st.composite
def sent(draw, streamed: bool) -> tuple[bytes, bytes]:
    """Headers and body of a request."""
    path = draw(st.sampled_from([*BODIES_OF] * 8 + [b"/v1/x", b"/v1/models"]))
    fields = BODIES_OF.get(path, BODIES_OF[CHAT])
    body = {name: BODY[name] for name in fields} | {"stream": streamed}
    data = draw(
        json_of(body, BODY_PATHS, 2) | json_of(body, BODY_PATHS, 1) | st.sampled_from([b"{", b"\xff", b"[" * 9000])
    )
    odd = draw(
        st.sampled_from(
            [b""] * 20
            + [
                b"x-region: nowhere\r\n", b"x-region: \xff\r\n", b"x-slo-class: flexible\r\n", b"x-slo-class: none\r\n",
                b"x-stainless-retry-count: 99999\r\n", b"x-application: " + b"a" * 900 + b"\r\n", b"accept: x\r\n",
            ]
        )
    )  # fmt: skip
    return b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n%b" % (
        path,
        len(data),
        odd,
    ), data


@dataclass
class Instance:
    """Plays each request the answer stored under its id; answers others well."""

    plays: dict[str, list[bytes]] = field(default_factory=dict)
    asked: Counter = field(default_factory=Counter)
    kept: int = 0  # requests whose tokens' ids are asked for

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                fields = dict(line.partition(": ")[::2] for line in head.split("\r\n"))
                self.kept += b'"return_token_ids":true' in await reader.readexactly(int(fields["content-length"]))
                name = fields["x-request-id"]
                self.asked[name] += 1
                if name in self.plays:
                    for piece in self.plays[name]:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    break
                answer = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture
async def fuzzed(served, monkeypatch):
    """The gateway, with errors in the log and rows by request recorded; its instance never rests."""
    instance, gateway = Instance(), served.gateway
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0, limit=2**20)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    send = gateway.requests.send

    def unhurt(record) -> None:
        send(replace(record, failure="") if isinstance(record, Left) else record)

    origin = gateway.upstream._origin
    monkeypatch.setattr(gateway.requests, "send", unhurt)
    monkeypatch.setattr(gateway.upstream, "_origin", lambda name, ready_at, _: origin(name, ready_at, address))
    rows, add = Counter(), gateway.ledger.add

    def noted(entry) -> None:
        rows[entry[REQUEST_ID]] += 1
        add(entry)

    monkeypatch.setattr(gateway.ledger, "add", noted)
    errors: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(self.format(record))

    handler = Errors(logging.ERROR)
    logging.getLogger().addHandler(handler)
    served.extra |= {"instance": instance, "rows": rows, "errors": errors, "count": 0, "statuses": Counter()}
    yield served
    logging.getLogger().removeHandler(handler)
    server.close()
    print(dict(sorted(served.extra["statuses"].items())), sum(rows.values()), "rows", instance.kept, "kept")


async def exchanged(served, name: str, head: bytes, body: bytes) -> bytes:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"%bauthorization: Bearer %b\r\nx-request-id: %b\r\n\r\n%b"
        % (head, served.secret.encode(), name.encode(), body)
    )
    try:
        async with asyncio.timeout(SILENT_S):
            return await reader.read()
    finally:
        writer.close()


@settings(
    costly(few=125, many=5_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize(
    "gateway_options", [{"ordering_policy": "priority"}, {"ordering_policy": "qlm"}], ids=["passed", "kept"]
)
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@given(st.tuples(st.booleans().flatmap(sent), st.booleans().flatmap(played)))
async def test_whatever_comes_is_answered_and_nothing_of_it_is_left(fuzzed, case):
    gateway, seen = fuzzed.gateway, fuzzed.extra
    seen["count"] += 1
    name, other = f"odd-{seen['count']}", f"other-{seen['count']}"
    instance: Instance = seen["instance"]
    instance.plays[name] = case[1]
    well = b'{"model":"m","prompt":"well"}'
    innocent = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n" % len(well),
        well,
    )
    answers = await asyncio.gather(exchanged(fuzzed, name, *case[0]), exchanged(fuzzed, other, *innocent))
    del instance.plays[name]
    status = int(answers[0][9:12])
    seen["statuses"][status] += 1
    assert status in {200, 400, 403, 404, 405, 413, 422, 429, 502} | set(range(400, 500))
    if status >= 400:
        assert json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"].keys() >= {"message", "type", "param", "code"}
    assert answers[1].startswith(b"HTTP/1.1 200 ")
    assert answers[1].endswith(b'"completion_tokens":3}}')
    assert seen["rows"][other] == 1
    assert seen["rows"][name] == 1 or (not instance.asked[name] and not seen["rows"][name])
    await until(lambda: not gateway.http.active)
    assert [use.sequences for use in gateway.dispatching.allowances.limits._use.values()] == [0]
    assert gateway.dispatching.topology.fleet.running.sum() == 0
    assert not gateway.dispatching.dispatcher.requests
    assert not gateway.requests._open
    assert seen["errors"] == []
    if seen["count"] % 50 == 0:
        assert await gateway.ledger.flush()
        assert gateway.ledger.refused == 0
        assert await LedgerRow.objects.acount() == sum(seen["rows"].values())
