"""Event loop and HTTP protocol of the web process: uvicorn's, made cheaper under load.

`uvicorn --loop controlplane.listening:create_loop --http controlplane.listening:HttpProtocol`

The loop: libuv accepts one connection per listening socket and iteration. With a thousand streams an iteration takes ten
milliseconds and more, so of a thousand clients that connect at once the last waited more than ten seconds for its first byte
to be read, and so did `/healthz` requests behind them. Here the same socket is listened to several times over, and each
iteration accepts as many.

HTTP: the head of an answer is sent with the first bytes of its body, in one system call instead of two. Streams can be
written from a callback (`Direct`), where an ASGI message would need a task. A callback reports that the client disconnected,
where ASGI needs a task that waits for the message. A complete body is read, and a complete answer written, in one call each:
uvicorn checks every header for illegal characters, 20 us an answer.

A head that does not end is refused: the parser joins its pieces, and each takes longer than the one before it, so that 50 MB
of one header, which needs no key, kept the process from everything else for half a minute.

A planned stop loses nothing (`Drain`): every request that reaches the process is answered, and a connection is closed
between two of them. Sockets that others listen to as well are left to these; a relay has one in `SHARED`, beside its own.

Memory: glibc returns large blocks to the system as they are freed, and the system clears each page of the next one, more
than a microsecond a page. A body of 300 kB is allocated several times, so that this took as long as all other work on it.
"""

import asyncio
import ctypes
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import uvloop
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from controlplane.background import spawn

ACCEPTED_PER_ITERATION = 64
SHARED = "PH_SHARED_SOCKET"
"""Environment variable with the number of an inherited socket, on which every server of the process listens too."""
IDLE_S = 5
"""Time in which the next request of an idle connection may still come, and load balancers learn that a process drains: as
long as most clients' pools keep a connection."""
LOOK_S = 0.1


Headers = Sequence[tuple[bytes, bytes]]

END = b"0\r\n\r\n"
DIRECT = "pilothouse.direct"
"""ASGI extension that offers a `Direct`, as `answer`."""


class HeadWithBody:
    """Transport of one answer until its body begins: holds back the head and writes it with the first piece."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # "100 Continue"
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            self.begun().write(self._head + data)

    def begun(self) -> asyncio.Transport:
        """Return the underlying transport, for the code that writes head and body together."""
        self._cycle.transport = self._transport
        return self._transport

    def close(self) -> None:
        if self._head:
            self.begun().write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Direct:
    """Non-waiting reads of a request and writes of its answer, without ASGI messages; calls back when the client
    disconnects. Each call may find that it would have to wait, or that uvicorn has more to do: then use ASGI's messages."""

    __slots__ = ("_cycle", "_left", "_most_bytes", "_rest", "_whole")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._left: Callable[[], object] | None = None
        self._whole: asyncio.Future[None] | None = None  # while the rest of a body is awaited
        self._rest: list[bytes] = []
        self._most_bytes = 0

    async def body(self, most_bytes: int) -> bytes | None:
        """Return the request's body once it is complete, read without pauses and joined once.

        None if it is larger than *most_bytes*, or the client disconnects: then an ASGI message has what came.
        """
        cycle = self._cycle
        if cycle.disconnected or cycle.waiting_for_100_continue or len(cycle.body) > most_bytes:
            return None
        cycle.flow.resume_reading()
        self._most_bytes = most_bytes - len(cycle.body)
        if cycle.more_body:
            self._whole = asyncio.get_running_loop().create_future()
            try:
                await self._whole
            finally:
                self._whole = None
        rest, self._rest = self._rest, []
        if cycle.more_body or self._most_bytes < 0:
            for piece in rest:
                cycle.body += piece
            return None
        cycle.message_event.clear()
        body, cycle.body = b"".join((cycle.body, *rest)), bytearray()
        return body

    def add(self, piece: bytes) -> bool:
        """Add the next *piece* of a body; False if it is not awaited here, or too large."""
        if self._whole is None or self._whole.done():
            return False
        self._rest.append(piece)
        self._most_bytes -= len(piece)
        if self._most_bytes < 0:
            self.stop_reading()
        return True

    def stop_reading(self) -> None:
        """Record that no more of a body comes, or more than was allowed."""
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """Return whether the whole answer was written. *headers* hold its length and no line ends."""
        head = self._head(status, headers)
        if not head:
            return False
        head += (b"\r\n", body)
        self._cycle.response_started = True
        self._transport().write(b"".join(head))
        self._complete()
        return True

    def begin(self, status: int, headers: Headers, body: bytes, *, last: bool = False) -> bool:
        """Return whether the head of an answer of unknown length was written, with the first piece of its *body*: the *last*
        one too, or others follow.
        """
        head = self._head(status, headers)
        if not head:
            return False
        head.append(b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
        if last:
            head.append(END)
        self._cycle.response_started = self._cycle.chunked_encoding = True
        self._transport().write(b"".join(head))
        if last:
            self._complete()
        return True

    def finish(self, body: bytes) -> bool:
        """Return whether the last piece of a *body* of unknown length was written, which may be empty."""
        chunk = b"%x\r\n%b\r\n%b" % (len(body), body, END) if body else END
        if not self._cycle.keep_alive or not self._write(chunk):
            return False
        self._complete()
        return True

    def _complete(self) -> None:
        self._cycle.response_complete = True
        self._cycle.message_event.set()
        self._cycle.on_response()

    def _head(self, status: int, headers: Headers) -> list[bytes]:
        """Return the head of an answer but for its last line; empty if ASGI messages have to write it."""
        cycle = self._cycle
        if (
            cycle.response_started
            or cycle.disconnected
            or cycle.flow.write_paused
            or cycle.waiting_for_100_continue
            or cycle.access_log
            or not cycle.keep_alive
            or cycle.scope["method"] == "HEAD"
        ):
            return []
        head = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            if name == b"connection":
                return []
            head += (name, b": ", value, b"\r\n")
        return head

    def _transport(self) -> asyncio.Transport:
        """Return the transport, for head and body together."""
        transport: Any = self._cycle.transport
        return transport.begun() if isinstance(transport, HeadWithBody) else transport

    def watch(self, left: Callable[[], object] | None) -> None:
        """Call *left* when the client disconnects before the answer is complete, at once if it has; None clears it."""
        self._left = left
        if self._cycle.disconnected:
            self.notify()

    def notify(self) -> None:
        """Report that the client disconnected."""
        left, self._left = self._left, None
        if left is not None:
            left()

    def leave_scope(self) -> None:
        """Drop the reference from the scope once the answer is complete. Kept, it would be a reference cycle of a dozen
        objects per request, which only the garbage collector frees: 20 ms in which nothing else runs, several times a
        second."""
        self._cycle.scope["extensions"] = {}

    def write(self, data: bytes) -> bool:
        """Return whether *data* was written. False while the client does not read: an ASGI message waits for that."""
        return self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def _write(self, chunk: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        cycle.transport.write(chunk)
        return True


def direct_of(scope: dict[str, Any]) -> Direct | None:
    """Return the non-waiting writer for the request of *scope*; None under another server."""
    extension = (scope.get("extensions") or {}).get(DIRECT)
    return extension["answer"] if extension else None


MAX_HEAD_BYTES = 2**18
"""Of a request's line and headers, and of what follows a body in chunks; what comes with their beginning is not counted."""
TOO_LONG = b"The request's line and headers are longer than %d bytes." % MAX_HEAD_BYTES


class Drain:
    """A planned stop of a server, found by its connections in the state of its lifespan."""

    STATE = "pilothouse.drain"

    def __init__(self) -> None:
        self.began = False
        self.connections: set[Any] = set()  # uvicorn's own

    async def run(self, within_s: float) -> None:
        """Return once no connection is left, or after *within_s*.

        A connection is closed after the next answer, which says so, or when it has been idle for `IDLE_S`. Sockets that
        others listen to are left at once; connections to the process's own are accepted for `IDLE_S` more.
        """
        loop = asyncio.get_running_loop()
        began_s, self.began = loop.time(), True
        for connection in list(self.connections):
            if isinstance(connection, HttpProtocol):
                connection.drain()
            else:
                connection.shutdown()  # a page's websocket: it connects again, elsewhere
        servers = loop.servers if isinstance(loop, Loop) else []
        for each in servers:
            each.leave_shared()
        while (passed_s := loop.time() - began_s) < within_s:
            if passed_s >= IDLE_S:
                for each in servers:
                    each.leave_own()
            if not any(each.listening for each in servers) and not any(
                isinstance(connection, HttpProtocol) for connection in self.connections
            ):
                return
            await asyncio.sleep(LOOK_S)


class HttpProtocol(HttpToolsProtocol):
    _drain: Drain | None = None
    _direct: Direct | None = None  # of the current answer
    _has_read = False  # a head or a part of a body, with the last piece that came
    _unread_bytes = 0  # since then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        drain = self._drain = self.app_state.get(Drain.STATE)
        if drain is not None:
            drain.connections = self.connections
            if drain.began:
                self.drain()

    def drain(self) -> None:
        """Close the connection after its next answer, or once it is idle: the current answer may have begun without saying
        so."""
        self.timeout_keep_alive = IDLE_S
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(IDLE_S, self.timeout_keep_alive_handler)
        elif not cycle.response_started:
            cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection, unless its next request is there: closed before that is read, it would be reset."""
        if not self.transport.is_closing():
            unread = select.poll()
            unread.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
            if unread.poll(0):
                self.timeout_keep_alive_task = self.loop.call_later(LOOK_S, self.timeout_keep_alive_handler)
            else:
                self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._has_read = False
        super().data_received(data)
        self._unread_bytes = 0 if self._has_read else self._unread_bytes + len(data)
        if self._unread_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                self.transport.write(STATUS_LINE[431] + head % len(TOO_LONG) + TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._has_read = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_read = True
        super().on_headers_complete()
        if self._drain is not None and self._drain.began and self.cycle is not None:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["method"] != "HEAD":  # no body follows that the head could be sent with
            cycle.transport = cast(asyncio.Transport, HeadWithBody(cycle))
        direct = self._direct = Direct(cycle)
        cycle.scope["extensions"] = {DIRECT: {"answer": direct}}
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._has_read = True
        direct = self._direct
        if direct is None or not direct.add(body):
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._direct is not None:
            self._direct.stop_reading()

    def on_response_complete(self) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.leave_scope()
        super().on_response_complete()  # begins the next answer

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.leave_scope()
            direct.stop_reading()
            direct.notify()


class Servers:
    """Several servers of one protocol, closed together, some on *shared* sockets: others listen to these, too."""

    def __init__(self, own: Sequence[asyncio.Server], shared: Sequence[asyncio.Server], factory: Any) -> None:
        self._own, self._shared, self._factory = list(own), list(shared), factory
        self._all = [*own, *shared]

    @property
    def sockets(self) -> Any:
        return self._all[0].sockets

    @property
    def listening(self) -> bool:
        return bool(self._own or self._shared)

    def leave_shared(self) -> None:
        """Leave the accept queues of shared sockets to others."""
        for server in self._shared:
            server.close()
        self._shared = []

    def leave_own(self) -> None:
        """Accept what is in the accept queues of the own sockets, and close them: the system resets what is left there."""
        loop = asyncio.get_running_loop()
        for listener in self._own[0].sockets if self._own else ():
            with socket.socket(fileno=os.dup(listener.fileno())) as queue, suppress(OSError):  # none is left
                while True:
                    connection, _ = queue.accept()
                    spawn(self._serve(loop, connection), "accept connection")
        for server in self._own:
            server.close()
        self._own = []

    async def _serve(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        await loop.connect_accepted_socket(self._factory, connection)

    def close(self) -> None:
        for server in self._all:
            server.close()

    async def wait_closed(self) -> None:
        for server in self._all:
            await server.wait_closed()


class Loop(uvloop.Loop):
    def __init__(self) -> None:
        super().__init__()
        self.servers: list[Servers] = []

    async def create_server(self, protocol_factory: Any, *arguments: Any, **options: Any) -> Any:
        """Create a server like uvloop's that accepts up to `ACCEPTED_PER_ITERATION` connections per socket and iteration."""
        first = cast(asyncio.Server, await super().create_server(protocol_factory, *arguments, **options))
        also = {name: options[name] for name in ("ssl", "backlog") if name in options}

        async def listen(sockets: Sequence[socket.socket], times: int) -> list[asyncio.Server]:
            servers = []
            for listener in sockets:
                for _ in range(times):
                    again = socket.socket(fileno=os.dup(listener.fileno()))
                    servers.append(await uvloop.Loop.create_server(self, protocol_factory, sock=again, **also))
            return cast(list[asyncio.Server], servers)  # uvloop's own class has the same methods

        own = [first, *await listen(list(first.sockets), ACCEPTED_PER_ITERATION - 1)]
        shared: list[asyncio.Server] = []
        if options.get("sock") is not None:
            own, shared = shared, own
        if number := os.environ.get(SHARED):
            with socket.socket(fileno=os.dup(int(number))) as inherited:
                shared += await listen([inherited], ACCEPTED_PER_ITERATION)
        self.servers.append(Servers(own, shared, protocol_factory))
        return self.servers[-1]


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 2**26
"""Free memory that is kept, at most: a few hundred bodies of agents."""
MAX_HEAP_BYTES = 2**25
"""Largest block that is taken from it, as large as glibc allows."""


def keep_freed_memory() -> bool:
    """Keep freed memory for the next requests; return whether the C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    return mallopt is not None and all(
        [mallopt(M_TRIM_THRESHOLD, KEPT_BYTES), mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BYTES)]
    )


def create_loop() -> asyncio.AbstractEventLoop:
    keep_freed_memory()
    return Loop()
