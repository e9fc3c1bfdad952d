"""Streams from an instance to the tenant: bytes and counts do not depend on how they arrive, nor on what is parsed."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.serving.http import Responder
from controlplane.gateway.upstream import streams
from controlplane.gateway.upstream.answers import Usage
from controlplane.gateway.upstream.connections import Connection
from controlplane.gateway.upstream.continuation import Kept
from controlplane.gateway.upstream.streams import Stream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(body) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()) + b"\n\n"


def token(text: str, *, finish: str | None = None, field: str = "content", **choice) -> bytes:
    return event(
        {
            "id": "chatcmpl-1",
            "choices": [{"index": 0, "delta": {field: text}, "finish_reason": finish} | choice],
            "usage": None,
        }
    )


USAGE = event({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = event(b"[DONE]")


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Passage:
    """A stream from a connection without a socket to a tenant that may stop reading."""

    def __init__(self, *, include_usage: bool = False, sequences: int = 1) -> None:
        self.written: list[bytes] = []
        self.reads = True
        self.connection = Connection(lambda connection: None)
        self.connection.complete = False
        self.usage = Usage()
        call = SimpleNamespace(include_usage=include_usage, sequences=sequences, kind=Kind.CHAT)
        self.responder = Responder(None, "r-1", self)
        self.responder.started = True
        self.ticket = SimpleNamespace(call=call, output_tokens=0)
        self.stream = Stream(self.ticket, self.responder, self.usage, lambda ticket: None)
        self.stream._connection = self.connection
        self.connection.data_received(HEAD)
        self.connection.pass_to(self.stream._take)

    def write(self, data: bytes) -> bool:
        """As `controlplane.listening.Direct`."""
        if self.reads:
            self.written.append(data)
        return self.reads

    @property
    def body(self) -> bytes:
        """Data that the tenant got or will get."""
        return b"".join((*self.written, *self.responder.held, self.responder.last))


@pytest.fixture
async def loop():
    """Connections ask for the running loop."""


CLOSING = (token(".", finish="stop"), USAGE, DONE)


@pytest.mark.parametrize(
    ("events", "parsed", "output_tokens"),
    [
        ([token(""), token("a"), token(" quick"), token("\n\u00e9"), token('say "usage":{'), *CLOSING], 3, 5),
        ([token(""), token("a", logprobs={"content": []}), token("hm", field="reasoning_content")], 1, 2),
        ([token("", index=at) for at in range(3)] + 5 * [token("a", index=at) for at in (2, 0, 1)], 1, 17),
        ([token(""), event({"choices": [{"finish_reason": None}], "usage": {"completion_tokens": 1}})], 2, 1),
        ([token(""), token("a", finish="stop"), token("b", index=1)], 2, 2),
    ],
)
async def test_events_of_a_token_alone_are_not_parsed(loop, monkeypatch, events, parsed, output_tokens):
    passage, read = Passage(include_usage=True), []
    decoder = streams.read
    monkeypatch.setattr(streams, "read", lambda data: read.append(data) or decoder(data))
    for data in events:
        passage.connection.data_received(framed(data))
    assert (len(read), passage.ticket.output_tokens) == (parsed, output_tokens)
    assert passage.body == b"".join(events)


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "and its end later"])
async def test_an_answer_is_recorded_before_its_tenant_has_the_end(loop, at_once):
    passage, body_then = Passage(), []
    passage.responder.completed = lambda usage: body_then.append(b"".join(passage.written))
    for data in (token(""), token("a", finish="stop")):
        passage.connection.data_received(framed(data))
    passage.connection.data_received(framed(DONE) + b"0\r\n\r\n" * at_once)
    assert body_then
    assert DONE not in body_then[0]
    assert passage.body.endswith(DONE)


async def test_a_tenant_who_does_not_read_is_waited_for(loop):
    passage = Passage()
    passage.connection.data_received(framed(token("")))
    passage.reads = False
    passage.connection.data_received(framed(token("a")))
    assert passage.responder.held == [token("a")]
    passage.connection.data_received(framed(token("b")))
    assert passage.responder.held == [token("a"), token("b")]


TEXTS = st.text(alphabet='ab" \\\n\u00e9{}:,', max_size=6) | st.sampled_from(['"usage":{', "data: [DONE]", '"}]}'])
TOKENS = st.builds(token, TEXTS) | st.builds(
    token, TEXTS, finish=st.sampled_from([None, "stop"]), field=st.sampled_from(["content", "reasoning_content"])
)


@given(
    st.lists(TOKENS, min_size=1, max_size=8),
    st.booleans(),
    st.integers(1, 3),
    st.lists(st.integers(1, 400), max_size=12),
    st.integers(1, 3),
)
def test_the_same_bytes_and_counts_however_it_comes(tokens, include_usage, sequences, cuts, together):
    """C61: Compared with a stream whose every byte is parsed."""
    events = [*tokens, USAGE, DONE]
    chunks = [framed(b"".join(events[at : at + together])) for at in range(0, len(events), together)]
    data, reads = b"".join(chunks), []
    for cut in cuts:
        reads.append(data[:cut])
        data = data[cut:]
    end = b"0\r\n\r\n"
    reads = [read for read in [*reads, data] if read]
    cases = [(True, [*chunks, end]), (True, [*reads, end]), (False, [*chunks, end]), (True, [b"".join(chunks) + end])]
    seen = []

    async def pass_all() -> None:
        for unread, pieces in cases:
            passage = Passage(include_usage=include_usage, sequences=sequences)
            with pytest.MonkeyPatch.context() as patch:
                if not unread:
                    patch.setattr(streams, "tokens_of", lambda piece: 0)
                for piece in pieces:
                    passage.connection.data_received(piece)
            assert len(pieces) > 1 or not passage.written  # what came at once goes on at once, with the answer's end
            usage, course = passage.usage, passage.ticket
            assert passage.connection.complete
            seen.append((passage.body, course.output_tokens, usage.prompt_tokens, usage.output_tokens, usage.whole))

    asyncio.run(pass_all())
    assert seen[0] == seen[1] == seen[2] == seen[3]


# Streams that may be evicted

BODIES = {
    Kind.CHAT: {"model": "m", "messages": [{"role": "user", "content": "say"}], "max_tokens": 50},
    Kind.COMPLETION: {"model": "m", "prompt": "say", "max_tokens": 50},
}


def sent_by_instance(kind, tokens):
    """Return the events of an answer of *tokens*, (text, ids)."""
    chat, head = kind is Kind.CHAT, {"id": "x", "object": streams.EVENT_KIND[kind], "created": 1, "model": "m"}
    events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}]
    events = events if chat else []
    for at, (text, ids) in enumerate(tokens):
        said = {"delta": {"content": text}} if chat else {"text": text}
        ends = {"finish_reason": "stop" if at == len(tokens) - 1 else None}
        prompt = {} if chat else {"prompt_token_ids": [1, 2] if not at else None}
        events.append({"choices": [{"index": 0, **said, "logprobs": None, **ends, **prompt, "token_ids": ids}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens), "total_tokens": 3}})
    written = [json.dumps(head | event, separators=(",", ":"), ensure_ascii=False).encode() for event in events]
    return [b"data: " + event + b"\n\n" for event in (*written, b"[DONE]")]


def carried(kind, pieces):
    """Return what the tenant gets, what is kept, and how many events were parsed."""
    call = Call.read(json.dumps(BODIES[kind] | {"stream": True}).encode(), kind, max_depth=64, most_bytes=10_000)
    ticket = SimpleNamespace(call=call, kept=Kept(), output_tokens=0)
    sent = []
    responder = SimpleNamespace(held=[], write_now=lambda data: sent.append(data) or True, completed=print)
    stream = streams.KeptStream(ticket, responder, Usage(), lambda ticket: None)
    parsed, event_of = [], stream._event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.KeptStream, "_event", lambda self, event: parsed.append(event) or event_of(event))
        for piece in pieces:
            stream._take(piece)
    body = b"".join(sent)
    return (body, ticket.kept.ids, ticket.kept.shown, ticket.kept.prompt_ids, ticket.output_tokens), len(parsed)


@given(
    st.sampled_from(list(BODIES)),
    st.lists(
        st.tuples(st.text('ab"\\\n\u00e9', max_size=3), st.lists(st.integers(0, 999), min_size=1, max_size=2)),
        min_size=2,
    ),
    st.lists(st.integers(1, 400), max_size=5),
)
def test_events_that_are_not_parsed_are_as_those_that_are(kind, tokens, cuts):
    events = sent_by_instance(kind, tokens)
    joined, places = b"".join(events), sorted({0, *cuts})
    cut_anywhere = [joined[begin:end] for begin, end in zip(places, [*places[1:], None], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "tokens_of", lambda piece: 0)
        expected, _ = carried(kind, events)
    for pieces in (events, cut_anywhere, [events[0], events[1], b"".join(events[2:])]):
        assert carried(kind, pieces)[0] == expected


@pytest.mark.parametrize("kind", BODIES)
def test_most_events_are_not_parsed(kind):
    events = sent_by_instance(kind, [("word ", [7 + number]) for number in range(40)])
    assert carried(kind, events)[1] < 8
