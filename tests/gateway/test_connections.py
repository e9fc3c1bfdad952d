"""Connections to instances, on the web process's loop and on asyncio's: each answer of a scripted server."""

import asyncio
import gc
import inspect
import socket
import weakref
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from controlplane.gateway.upstream.connections import AnswerCutOff, Connection, Connections, Origin
from controlplane.listening import create_loop

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def on_both_loops(test):
    def run(make_loop, **given):
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(asyncio.wait_for(test(**given), 20))

    names = ["make_loop", *inspect.signature(test).parameters]
    run.__name__ = test.__name__
    run.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    return pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, create_loop], ids=["asyncio", "uvloop"])(run)


class Server:
    def __init__(self, answer):
        self.answer = answer
        self.connections = 0
        self.closed = 0  # by the client

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while await reader.readexactly(len(HEAD) + 2):
                await self.answer(reader, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        finally:
            writer.close()


@asynccontextmanager
async def connected(answer, connect_s=5.0):
    """Yield (connections, origin, server) for a server that does *answer*, or sends its bytes."""
    if isinstance(answer, bytes):
        data = answer

        async def answer(reader, writer):
            writer.write(data)

    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    connections = Connections(connect_s)
    try:
        yield connections, Origin(URL(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")), server
    finally:
        connections.close()
        listening.close()


async def ask(connection, silence_s=None):
    connection.send(HEAD, (b"{}",), silence_s)
    while not connection.headers_received:
        connection.check()
        await connection.wait()


async def body_of(connections, origin):
    connection, pieces = await connections.get(origin), []
    try:
        await ask(connection)
        connection.pass_to(lambda piece: pieces.append(piece) is None)
        while not connection.complete:
            connection.check()
            await connection.wait()
        return connection.status, b"".join(pieces)
    finally:
        connections.put_back(connection)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@on_both_loops
async def test_a_connection_is_used_again_and_closed_when_idle(monkeypatch):
    monkeypatch.setattr("controlplane.gateway.upstream.connections.IDLE_S", 0.2)
    monkeypatch.setattr("controlplane.gateway.upstream.connections.MAX_HEAD_BYTES", 2 * len(WHOLE))  # of each answer

    async with connected(WHOLE) as (connections, origin, server):
        for _ in range(3):
            assert await body_of(connections, origin) == (200, b"hello")
        assert (server.connections, len(origin.idle)) == (1, 1)
        await until(lambda: server.closed)
        assert not origin.idle


@on_both_loops
async def test_every_way_to_end_an_answer():
    for answer, kept in (
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, True),
        (WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), False),
        (WHOLE + WHOLE, False),  # an unsolicited answer belongs to no request
    ):
        async with connected(answer) as (connections, origin, _):
            assert await body_of(connections, origin) == (200, b"hello")
            assert bool(origin.idle) is kept, answer

    async def until_it_closes(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        writer.close()

    async with connected(until_it_closes) as (connections, origin, _):
        assert await body_of(connections, origin) == (200, b"hello")
        assert not origin.idle


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200", WHOLE[:-1], CHUNKED + b"5\r\nhello\r\n", b"SSH-2.0-server\r\n"])
@on_both_loops
async def test_an_answer_that_is_cut_off(part):
    async def cut(reader, writer):
        writer.write(part)
        writer.close()

    async with connected(cut) as (connections, origin, _):
        with pytest.raises((AnswerCutOff, ConnectionResetError)):
            await body_of(connections, origin)
        assert not origin.idle


@on_both_loops
async def test_silence_ends_a_stream_but_not_while_the_consumer_pauses():
    async def stall(reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n")
        await asyncio.sleep(0.4)
        writer.write(b"1\r\nb\r\n")
        await reader.read()

    async with connected(stall) as (connections, origin, _):
        connection = await connections.get(origin)
        await ask(connection, 0.25)
        taken = []
        connection.pass_to(lambda piece: taken.append(piece) or len(taken) != 1)
        await connection.wait()
        assert taken == [b"a"]
        await asyncio.sleep(0.6)  # the client does not read for longer than the limit
        connection.check()
        connection.resume()
        began_s = asyncio.get_running_loop().time()
        await connection.wait()
        with pytest.raises(TimeoutError):
            connection.check()
        assert taken == [b"a", b"b"]
        assert asyncio.get_running_loop().time() - began_s > 0.2
        connections.put_back(connection)  # an incomplete answer is aborted
        await until(lambda: connection not in connections._origins)
        assert not origin.idle


@on_both_loops
async def test_nothing_is_read_while_nothing_is_taken():
    sent = 0

    async def flood(reader, writer):
        nonlocal sent
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 1

    async with connected(flood) as (connections, origin, _):
        connection = await connections.get(origin)
        await ask(connection)
        connection.pass_to(lambda piece: False)
        await asyncio.sleep(0.5)
        before = sent
        await asyncio.sleep(0.3)
        assert sent == before < 1000  # size of the socket buffers
        connections.put_back(connection)


@on_both_loops
async def test_what_the_taker_raises_is_the_answers_end():
    async with connected(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n") as (connections, origin, _):
        connection = await connections.get(origin)
        await ask(connection)

        def refuse(piece):
            raise ValueError(piece)

        connection.pass_to(refuse)
        await connection.wait()
        with pytest.raises(ValueError, match="hello"):
            connection.check()
        connections.put_back(connection)
        assert not origin.idle


@on_both_loops
async def test_connecting_fails_in_time():
    async with connected(WHOLE, connect_s=0.2) as (connections, origin, _):
        connection = await connections.get(origin)
        connection.close()
        await asyncio.sleep(0)
        with pytest.raises(AnswerCutOff):
            await ask(connection)
    with pytest.raises(OSError):  # nobody listens there now
        await connections.get(origin)
    with socket.socket() as full:  # nobody accepts, and no more than one may wait for it
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        origin = Origin(URL(f"http://127.0.0.1:{full.getsockname()[1]}"))
        connections = Connections(0.2)
        with pytest.raises(TimeoutError):
            await asyncio.gather(*(connections.get(origin) for _ in range(3)))
        connections.close()


async def test_each_request_has_its_own_silence():
    """One timer is kept for all of them."""

    class Silent(asyncio.Transport):
        def write(self, data):
            pass

        def is_closing(self):
            return False

    connection = Connection(lambda connection: None)
    connection.connection_made(Silent())
    connection.send(b"", (b"",), 0.02)
    connection.data_received(WHOLE)
    assert connection.complete
    connection.leave()
    connection.send(b"", (b"",), 10)
    await connection.wait(0.05)  # the first one's time has passed
    connection.check()
    assert not connection.complete
    connection.listen(0.06)
    await connection.wait()
    with pytest.raises(TimeoutError):
        connection.check()


@on_both_loops
async def test_a_connection_that_broke_leaves_nothing_to_the_garbage_collector():
    """Old garbage is collected rarely, and a broken connection would hold its request with it."""

    async def cut_off(reader, writer):
        writer.write(CHUNKED + b"5\r\nhel")
        writer.close()

    gc.disable()
    try:
        async with connected(cut_off) as (connections, origin, server):
            seen = weakref.ref(await connections.get(origin))
            connections.put_back(seen())
            with pytest.raises(AnswerCutOff):
                await body_of(connections, origin)
            await until(lambda: seen() is None)
            assert server.connections == 1
    finally:
        gc.enable()
