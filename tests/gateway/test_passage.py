"""Streams from an instance to the tenant: chunks pass unchanged; bytes and counts do not depend on chunking."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.serving.http import Responder
from controlplane.gateway.upstream.answers import Usage
from controlplane.gateway.upstream.connections import Connection, chunk_begin
from controlplane.gateway.upstream.streams import MOST_SHAPES, Stream

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

    def __init__(self, *, whole_chunks: bool = True, include_usage: bool = False, sequences: int = 1) -> None:
        self.written: list[bytes] = []
        self.reads = True
        self.taken = 0
        self.connection = Connection(lambda connection: None)
        self.connection.complete = False
        self.usage = Usage()
        call = SimpleNamespace(include_usage=include_usage, sequences=sequences, kind=Kind.CHAT)
        self.responder = Responder(None, "r-1", self)
        self.responder.started = True
        self.ticket = SimpleNamespace(call=call, whole=None, output_tokens=0, first_token_s=0.0)
        self.stream = Stream(self.ticket, self.responder, self.usage, "", self.began)
        self.stream._connection = self.connection
        self.connection.data_received(HEAD)
        self.connection.pass_to(self.take, self.stream._take_chunk if whole_chunks else None)

    def began(self, ticket):
        ticket.first_token_s = 1.0

    def take(self, piece: bytes) -> bool:
        self.taken += 1
        return self.stream._take(piece)

    # As `controlplane.listening.Direct`

    def write(self, data: bytes) -> bool:
        return self.write_chunk(framed(data))

    def write_chunk(self, chunk: bytes) -> bool:
        if self.reads:
            self.written.append(chunk)
        return self.reads

    @property
    def body(self) -> bytes:
        """Data that the tenant got or will get."""
        body, left = b"", b"".join(self.written)
        while left:
            size, _, left = left.partition(b"\r\n")
            body, left = body + left[: int(size, 16)], left[int(size, 16) + 2 :]
        return body + b"".join(self.responder.held) + self.responder.last


@pytest.fixture
async def loop():
    """Connections ask for the running loop."""


async def test_tokens_alone_pass_as_they_came(loop):
    passage = Passage()
    for data in (token(""), token("a"), token(" quick"), token(" fox"), token("\n\u00e9")):
        passage.connection.data_received(framed(data))
    assert passage.taken == 1  # the first, after which the others look alike
    assert passage.written == [
        framed(data) for data in (token(""), token("a"), token(" quick"), token(" fox"), token("\n\u00e9"))
    ]
    assert passage.ticket.output_tokens == 4  # the first is for the role
    closing = (token(".", finish="stop"), USAGE, DONE)
    for data in closing:
        passage.connection.data_received(framed(data))
    passage.connection.data_received(b"0\r\n\r\n")
    assert passage.taken == 4
    assert passage.connection.complete
    assert (passage.usage.prompt_tokens, passage.usage.output_tokens, passage.usage.whole) == (7, 3, True)


async def test_what_says_more_than_a_text_is_looked_at(loop):
    passage = Passage(include_usage=True)
    quoted, other = token('say "usage":{'), token("hm", field="reasoning_content")
    for data in (token(""), token("a"), quoted, token("b", logprobs={"content": []}), other, token("c"), USAGE):
        passage.connection.data_received(framed(data))
    assert passage.taken == 5  # all but "a" and "c", which are like ones before them
    assert passage.usage.output_tokens == 3


async def test_several_choices_pass_unread(loop):
    passage = Passage(sequences=3, include_usage=True)
    for index in range(3):
        passage.connection.data_received(framed(token("", index=index)))
    for _ in range(20):
        for index in (2, 0, 1):
            passage.connection.data_received(framed(token("a", index=index)))
    assert passage.taken == 3
    assert passage.ticket.output_tokens == 60


async def test_shapes_are_learnt_within_bounds(loop):
    passage = Passage()
    for index in range(3 * MOST_SHAPES):
        passage.connection.data_received(framed(token("a", index=index)))
        passage.connection.data_received(framed(token("b", index=index)))
    assert passage.taken == MOST_SHAPES + 2 * 2 * MOST_SHAPES


async def test_a_tenant_who_does_not_read_is_waited_for(loop):
    passage = Passage()
    passage.connection.data_received(framed(token("")))
    passage.reads = False
    passage.connection.data_received(framed(token("a")))
    assert passage.responder.held == [token("a")]
    passage.connection.data_received(framed(token("b")))
    assert passage.responder.held == [token("a"), token("b")]


async def test_a_size_that_came_in_part_is_not_taken_for_a_chunk(loop):
    """The rest of a larger chunk looks like a whole one."""
    passage = Passage()
    passage.connection.data_received(framed(token("")))
    small = framed(token("a"))
    large = token("b" * (256 + chunk_begin(small) - len(small) + len(token(""))))
    assert b"%x" % len(large) == b"1" + b"%x" % (len(large) - 256)
    data = framed(large)
    passage.connection.data_received(data[:1])
    passage.connection.data_received(data[1:])
    assert passage.body == token("") + large


@pytest.mark.parametrize(
    ("data", "begin"),
    [
        (b"5\r\nhello\r\n", 3),
        (b"5\r\nhell\r\n\r\n", 0),
        (b"05\r\nhello\r\n", 0),
        (b" 5\r\nhello\r\n", 0),
        (b"5;a\r\nhello\r\n", 0),
        (b"5\r\nhello\r\n1\r\na\r\n", 0),
        (b"5\r\nhello", 0),
        (b"0\r\n\r\n", 0),
        (b"a\r\n", 0),
        (b"", 0),
    ],
)
def test_one_chunk_from_its_size_to_its_end(data, begin):
    assert chunk_begin(data) == begin


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
        for whole_chunks, pieces in cases:
            passage = Passage(whole_chunks=whole_chunks, include_usage=include_usage, sequences=sequences)
            for piece in pieces:
                passage.connection.data_received(piece)
            assert len(pieces) > 1 or not passage.written  # what came at once goes on at once, with the answer's end
            withheld = passage.stream._withheld
            rest = withheld.rest() if withheld is not None else b""
            usage, course = passage.usage, passage.ticket
            assert passage.connection.complete
            seen.append(
                (passage.body + rest, course.output_tokens, usage.prompt_tokens, usage.output_tokens, usage.whole)
            )

    asyncio.run(pass_all())
    assert seen[0] == seen[1] == seen[2] == seen[3]
