"""A planned stop: what reached the process is answered, and no request meets a reset."""

import asyncio
import signal
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn

from controlplane import listening
from controlplane.asgi import on_stop
from controlplane.listening import SHARED, Drain, HttpProtocol, create_loop
from tests.gateway.conftest import until

REQUEST = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENCE_S = 20.0


class Application:
    """Answers `/` with its name at once; other paths when `release` is set, `/stream` beginning at once."""

    def __init__(self, name: bytes = b"first") -> None:
        self.name, self.drain, self.release = name, Drain(), asyncio.Event()
        self.asked = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            scope["state"][Drain.STATE] = self.drain
            for answer in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{answer}.complete"})
            return
        self.asked += 1
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] == "/stream":
            await send(start)
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        if scope["path"] != "/":
            await self.release.wait()
        if scope["path"] != "/stream":
            await send(start)
        await send({"type": "http.response.body", "body": self.name})


@asynccontextmanager
async def serving(application, sock=None):
    """Serve on *sock*, as inherited, or on a socket of its own; return the address."""
    options = {"http": HttpProtocol, "lifespan": "on", "log_level": "error", "access_log": False, "ws": "none"}
    config = uvicorn.Config(application, port=0, timeout_graceful_shutdown=1, **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve(sockets=[sock] if sock else None))
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        await task


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address):
        return cls(*await asyncio.open_connection(*address))

    def send(self, path=b""):
        self.writer.write(REQUEST % path)

    async def head(self):
        return (await self.reader.readuntil(b"\r\n\r\n")).lower()

    async def answer(self):
        """Return the head and the body of the next answer."""
        head = await self.head()
        return head, (await self.reader.readuntil(b"0\r\n\r\n"))

    async def closes(self):
        """Whether the connection is ended by the server, in order and with nothing more."""
        assert await self.reader.read() == b""
        self.writer.close()


CLOSE = b"connection: close\r\n"


def drained(test):
    """Run the coroutine function *test* on the loop of the web process."""

    def run(monkeypatch):
        async def limited():
            async with asyncio.timeout(PATIENCE_S):
                await test(monkeypatch)

        with asyncio.Runner(loop_factory=create_loop) as runner:
            runner.run(limited())

    run.__name__ = test.__name__
    return run


@drained
async def test_an_idle_connection_has_its_next_request_answered_and_is_closed_with_it(monkeypatch):
    application = Application()
    async with serving(application) as address:
        client = await Client.connect(address)
        client.send()
        head, _ = await client.answer()
        assert CLOSE not in head
        drain = asyncio.create_task(application.drain.run(PATIENCE_S))
        await asyncio.sleep(0.05)
        client.send()
        head, body = await client.answer()
        assert CLOSE in head
        assert b"first" in body
        await client.closes()
        drain.cancel()


@drained
async def test_open_requests_are_answered_and_streams_carried_to_their_end(monkeypatch):
    monkeypatch.setattr(listening, "IDLE_S", 0.3)
    application = Application()
    async with serving(application) as address:
        waiting, streaming = await Client.connect(address), await Client.connect(address)
        waiting.send(b"wait")
        streaming.send(b"stream")
        assert CLOSE not in await streaming.head()
        await until(lambda: application.asked == 2)
        drain = asyncio.create_task(application.drain.run(PATIENCE_S))
        await asyncio.sleep(1.0)
        assert not drain.done()
        application.release.set()
        head, body = await waiting.answer()
        assert CLOSE in head
        assert b"first" in body
        assert (await streaming.reader.readuntil(b"0\r\n\r\n")).endswith(b"first\r\n0\r\n\r\n")
        streaming.send()  # its head did not say that the connection ends
        head, _ = await streaming.answer()
        assert CLOSE in head
        for client in (waiting, streaming):
            await client.closes()
        await drain


@drained
async def test_what_does_not_end_in_time_ends_the_drain(monkeypatch):
    application = Application()
    async with serving(application) as address:
        client = await Client.connect(address)
        client.send(b"wait")
        await until(lambda: application.asked)
        await application.drain.run(0.3)
        application.release.set()
        await client.answer()
        client.writer.close()


@drained
async def test_idle_connections_are_closed_after_a_moment_in_order(monkeypatch):
    monkeypatch.setattr(listening, "IDLE_S", 0.3)
    application = Application()
    async with serving(application) as address:
        used, unused = [await Client.connect(address) for _ in range(2)]
        used.send()
        await used.answer()
        clock = asyncio.get_running_loop().time  # in milliseconds, and of timers: a busy loop's is behind
        began_s = clock()
        drain = asyncio.create_task(application.drain.run(PATIENCE_S))
        await used.closes()
        assert clock() - began_s >= 0.299
        await unused.closes()
        await drain
        assert application.asked == 1


@drained
async def test_a_request_that_has_arrived_unread_is_answered(monkeypatch):
    """Timers of a busy process run late, and before it reads."""
    application = Application()
    async with serving(application) as address:
        with socket.create_connection(address) as client:
            await until(lambda: application.drain.connections)
            drain = asyncio.create_task(application.drain.run(PATIENCE_S))
            await asyncio.sleep(0.05)
            (connection,) = application.drain.connections
            client.sendall(REQUEST % b"")
            connection.timeout_keep_alive_handler()
            client.settimeout(PATIENCE_S)
            answer = b""
            while piece := await asyncio.to_thread(client.recv, 1000):
                answer += piece
        assert CLOSE in answer
        drain.cancel()


@drained
async def test_connections_in_the_accept_queue_of_an_own_socket_are_served(monkeypatch):
    application = Application()
    async with serving(application) as address:
        drain = asyncio.create_task(application.drain.run(PATIENCE_S))
        await asyncio.sleep(0.05)
        clients = [socket.create_connection(address) for _ in range(50)]  # the loop accepts none meanwhile
        for client in clients:
            client.sendall(REQUEST % b"")
        (servers,) = asyncio.get_running_loop().servers
        servers.leave_own()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        for client in clients:
            client.settimeout(PATIENCE_S)
            assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")
            client.close()
        await drain


@pytest.mark.parametrize("own", ["none", "bound", "inherited"])
def test_a_shared_socket_is_left_to_others_at_once(monkeypatch, own):
    @drained
    async def run(monkeypatch):
        first, second = Application(), Application(b"second")
        with socket.create_server(("127.0.0.1", 0)) as sock, socket.create_server(("127.0.0.1", 0)) as private:
            address = sock.getsockname()
            if own != "none":
                monkeypatch.setenv(SHARED, str(sock.fileno()))
            inherited = {"none": sock, "bound": None, "inherited": private}[own]
            async with serving(first, inherited and inherited.dup()) as private_address:
                for each in {address, private_address}:
                    client = await Client.connect(each)
                    client.send()
                    assert b"first" in (await client.answer())[1]
                    client.writer.close()
                await first.drain.run(0.0)
                waiting = [await Client.connect(address) for _ in range(20)]
                for client in waiting:
                    client.send()
                await asyncio.sleep(0.1)
                assert first.asked == len({address, private_address})
                if own == "bound":
                    client = await Client.connect(private_address)
                    client.send()
                    assert b"first" in (await client.answer())[1]
                    client.writer.close()
                monkeypatch.delenv(SHARED, raising=False)
                async with serving(second, sock.dup()):
                    for client in waiting:
                        assert b"second" in (await client.answer())[1]
                        client.writer.close()

    run(monkeypatch)


async def test_sigterm_reaches_the_server_after_the_drain_and_a_second_one_at_once(monkeypatch):
    heard, stepped, ends = [], [], asyncio.Event()

    class Slow(Drain):
        async def run(self, within_s):
            await ends.wait()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: heard.append(number))
        on_stop(lambda: stepped.append(None), Slow())
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(stepped), heard) == (1, [])
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert heard[1:] == [signal.SIGINT]
        ends.set()
        await until(lambda: len(heard) == 3)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
