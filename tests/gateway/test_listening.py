"""Many concurrent connections are accepted within few loop iterations; an answer takes few system calls."""

import asyncio
import gc
import platform
import resource
import socket
import weakref

import pytest
import uvicorn

from controlplane.gateway.errors import STOPPING
from controlplane.gateway.serving.http import HttpRequest, Responder
from controlplane.listening import (
    ACCEPTED_PER_ITERATION,
    DIRECT,
    MAX_HEAD_BYTES,
    HttpProtocol,
    create_loop,
    keep_freed_memory,
)

CLIENTS = 200


class Greeting(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


def greeted(clients: list[socket.socket]) -> int:
    greeted = 0
    for client in clients:
        with client:
            client.settimeout(5)
            greeted += client.recv(16) == b"hello"
    return greeted


async def iterations_until_accepted() -> int:
    """Return the loop iterations until each of `CLIENTS`, all connected beforehand, is accepted."""
    loop, accepted = asyncio.get_running_loop(), []

    def accept():
        accepted.append(None)
        return Greeting()

    server = await loop.create_server(accept, "127.0.0.1", 0, backlog=1024)
    address = server.sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(CLIENTS)]
    iterations = 0
    while len(accepted) < CLIENTS:
        await asyncio.sleep(0)
        iterations += 1
    assert await asyncio.to_thread(greeted, clients) == CLIENTS
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    return iterations


def test_connections_are_accepted_many_at_a_time():
    with asyncio.Runner(loop_factory=create_loop) as runner:
        iterations = runner.run(iterations_until_accepted())
    assert iterations <= CLIENTS // ACCEPTED_PER_ITERATION + 5


def protocol_of(answer, writes: list[bytes]) -> HttpProtocol:
    """Return the protocol of a new connection to the ASGI application *answer*, which adds what it writes to *writes*."""

    class Recorder(asyncio.Transport):
        def write(self, data):
            writes.append(bytes(data))

        def is_closing(self):
            return b"closed" in writes

        def close(self):
            writes.append(b"closed")

    options = {"http": HttpProtocol, "lifespan": "off", "log_level": "critical", "access_log": False}
    config = uvicorn.Config(answer, **options, server_header=False)
    config.load()
    protocol = HttpProtocol(config, uvicorn.server.ServerState(), {})
    protocol.connection_made(Recorder())
    return protocol


async def written_of(answer, *, method=b"POST", before=b"", times=1) -> list[bytes]:
    """Return the transport writes of one request to the ASGI application *answer*, or of *times* requests in
    sequence.
    """
    writes: list[bytes] = []
    protocol = protocol_of(answer, writes)
    for _ in range(times):
        protocol.data_received(b"%b / HTTP/1.1\r\nHost: x\r\n%bContent-Length: 2\r\n\r\n{}" % (method, before))
        while protocol.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    return writes


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begins", "is_refused"),
    [
        (b"GET /", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Big: ", True),
        (CHUNKED + b"0\r\nX-Big: ", False),  # its answer may have begun
    ],
)
async def test_a_head_that_does_not_end_closes_its_connection(begins, is_refused):
    """50 MB of one header, without a key, kept the process from all others for half a minute."""
    writes: list[bytes] = []

    async def silent(scope, receive, send):
        await asyncio.Event().wait()

    protocol = protocol_of(silent, writes)
    protocol.data_received(begins)
    piece, pieces = b"y" * 2**15, 0
    while b"closed" not in writes:
        protocol.data_received(piece)
        pieces += 1
    assert pieces == MAX_HEAD_BYTES // len(piece) + 1
    assert [write.partition(b"\r\n")[0] for write in writes] == [
        *([b"HTTP/1.1 431 Request Header Fields Too Large"] if is_refused else []),
        b"closed",
    ]
    protocol.connection_lost(None)
    for task in protocol.tasks:
        task.cancel()


async def test_a_long_body_is_no_long_head():
    async def answer(scope, receive, send):
        size = 0
        while (message := await receive())["body"] or message["more_body"]:
            size += len(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})

    writes: list[bytes] = []
    protocol = protocol_of(answer, writes)
    protocol.data_received(CHUNKED)
    for _ in range(40):
        protocol.data_received(b"8000\r\n" + b"y" * 2**14)
        protocol.data_received(b"y" * 2**14 + b"\r\n")
        await asyncio.sleep(0)
    protocol.data_received(b"0\r\n\r\n")
    while protocol.tasks:  # noqa: ASYNC110
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    assert str(40 * 2**15).encode() in b"".join(writes)


async def test_the_head_goes_out_with_the_body():
    async def answer(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    writes = await written_of(answer, before=b"Expect: 100-continue\r\n")
    assert writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert writes[1].startswith(b"HTTP/1.1 200 OK\r\n")
    assert writes[1].endswith(b"\r\n\r\nhello")
    assert writes[2:] == [b"closed"]


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"POST", 204), (b"GET", 304)])
async def test_an_answer_without_a_body_has_its_head(method, status):
    """As a load balancer's `/healthz`: without a body the head has nothing to wait for."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    head, *_ = await written_of(answer, method=method)
    assert head.startswith(b"HTTP/1.1 %d " % status)


async def test_a_stream_is_written_without_a_message():
    async def answer(scope, receive, send):
        write = scope["extensions"][DIRECT]["answer"].write
        assert not write(b"too soon")  # no status was sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert write(b"first")
        assert write(b"second")
        send.__self__.flow.pause_writing()
        assert not write(b"the client does not read")
        send.__self__.flow.resume_writing()
        await send({"type": "http.response.body", "body": b"third"})
        assert not write(b"too late")

    head, *pieces, closed = await written_of(answer)
    assert head.endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert pieces == [b"6\r\nsecond\r\n", b"5\r\nthird\r\n0\r\n\r\n"]
    assert closed == b"closed"


async def test_a_stream_needs_no_message_at_all():
    async def answer(scope, receive, send):
        direct = scope["extensions"][DIRECT]["answer"]
        assert not direct.finish(b"too soon")
        assert direct.begin(200, [(b"content-type", b"text/event-stream")], b"first")
        assert not direct.begin(200, [], b"again")
        assert direct.write(b"second")
        assert direct.finish(b"third") if scope["method"] == "POST" else direct.finish(b"")
        assert not direct.finish(b"")

    for method, last in ((b"POST", b"5\r\nthird\r\n0\r\n\r\n"), (b"GET", b"0\r\n\r\n")):
        head, *pieces, closed = await written_of(answer, method=method)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert (pieces, closed) == ([b"6\r\nsecond\r\n", last], b"closed")


async def test_a_stream_that_is_complete_is_one_write():
    async def answer(scope, receive, send):
        direct = scope["extensions"][DIRECT]["answer"]
        assert direct.begin(200, [(b"content-type", b"text/event-stream")], b"all", last=True)
        assert not direct.finish(b"")

    head, closed = await written_of(answer, method=b"POST")
    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n3\r\nall\r\n0\r\n\r\n")
    assert closed == b"closed"


@pytest.mark.parametrize(("most", "whole"), [(6, True), (5, False), (0, False)])
async def test_a_body_in_pieces_is_joined_or_left_to_messages(most, whole):
    read, messages = [], []

    async def answer(scope, receive, send):
        read.append(await scope["extensions"][DIRECT]["answer"].body(most))
        while not whole and (not messages or messages[-1].get("more_body")):
            messages.append(await receive())

    for pieces in ((b"ab", b"cd", b"ef"), (b"a", b"bcde")):  # the client of the second one leaves before its end
        read.clear(), messages.clear()
        protocol = protocol_of(answer, [])
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n")
        for piece in pieces:
            await asyncio.sleep(0)
            protocol.data_received(piece)
        if len(pieces) == 2:
            protocol.connection_lost(ConnectionResetError())
        while protocol.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        came = b"".join(message.get("body", b"") for message in messages)
        if len(pieces) == 3:
            assert (read, came) == ([b"abcdef"], b"") if whole else ([None], b"abcdef")
        else:
            assert read == [None]
            assert whole or messages[-1] == {"type": "http.disconnect"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other allocators")
def test_freed_memory_is_used_again():
    """Or each body of an agent costs a hundred page faults, several times."""
    assert keep_freed_memory()
    bytes(300_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        bytes(300_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


async def test_a_client_that_goes_away_is_noticed_at_once():
    heard, answering = [], asyncio.Event()

    async def answer(scope, receive, send):
        watch = scope["extensions"][DIRECT]["answer"].watch
        watch(lambda: heard.append("not any more"))
        watch(lambda: heard.append("the client went away"))
        answering.set()
        await asyncio.sleep(0)
        watch(None)
        watch(lambda: heard.append("it had gone before"))

    protocol = protocol_of(answer, [])
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    await answering.wait()
    protocol.connection_lost(ConnectionResetError())
    assert heard == ["the client went away"]
    while protocol.tasks:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert heard == ["the client went away", "it had gone before"]


async def test_without_our_server_the_message_is_waited_for():
    heard, gone = [], asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {"method": "POST", "path": "/v1/completions", "headers": []}
    unwatch = HttpRequest.of(scope, receive).on_disconnect(lambda: heard.append("kept"))
    HttpRequest.of(scope, receive).on_disconnect(lambda: heard.append("dropped"))()
    gone.set()
    while not heard:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert heard == ["kept"]
    unwatch()


async def test_an_application_that_fails_after_its_head():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    head, *rest = await written_of(answer)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert set(rest) == {b"closed"}


async def test_another_server_is_sent_messages():
    """Without the extension, writes are held until they can be awaited."""
    sent = []

    async def send(message):
        sent.append(message)

    responder = Responder(send, "a-request", None)
    await responder.start(200, b"text/event-stream", stream=True)
    assert not responder.write_now(b"first ")
    assert not responder.write_now(b"second")
    await responder.drain()
    assert sent[1:] == [{"type": "http.response.body", "body": b"first second", "more_body": True}]
    assert not responder.held


async def test_a_whole_answer_is_written_at_once():
    async def answer(scope, receive, send):
        direct = scope["extensions"][DIRECT]["answer"]
        assert await direct.body(1) is None  # larger than that, and nothing was read
        assert await direct.body(2) == b"{}"
        assert direct.answer(429, [(b"content-length", b"5"), (b"retry-after", b"1")], b"hello")
        assert not direct.answer(200, [(b"content-length", b"0")], b"")
        assert (await receive())["type"] == "http.disconnect"

    head, closed = await written_of(answer)
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert head.endswith(b"content-length: 5\r\nretry-after: 1\r\n\r\nhello")
    assert closed == b"closed"


@pytest.mark.parametrize(
    ("method", "before", "headers"),
    [
        (b"HEAD", b"", []),
        (b"POST", b"Connection: close\r\n", []),
        (b"POST", b"", [(b"connection", b"close")]),
        (b"POST", b"Expect: 100-continue\r\n", []),
    ],
)
async def test_what_uvicorn_has_more_to_do_for_is_left_to_it(method, before, headers):
    async def answer(scope, receive, send):
        direct = scope["extensions"][DIRECT]["answer"]
        headers.append((b"content-length", b"5"))
        assert not direct.answer(200, headers, b"hello")
        assert (await direct.body(10) is None) == (b"Expect" in before)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    writes = await written_of(answer, method=method, before=before)
    assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert writes[-1] == b"closed"


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
async def test_a_request_that_was_answered_is_freed_at_once(method):
    """Not by the garbage collector, which would have to walk a dozen objects for each, and everything else waiting."""
    cycles = []

    async def answer(scope, receive, send):
        cycles.append(weakref.ref(send.__self__))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    gc.disable()
    try:
        await written_of(answer, method=method, times=3)
        assert [cycle() is None for cycle in cycles[:2]] == [True, True]  # the protocol holds the last
    finally:
        gc.enable()


async def test_nothing_is_sent_after_the_end_of_an_answer():
    sent = []

    async def send(message):
        sent.append(message)

    responder = Responder(send, "a-request")
    await responder.whole(200, b"application/json", b"{}")
    await responder.error(STOPPING)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert responder.status == 200
