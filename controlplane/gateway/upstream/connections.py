"""HTTP/1.1 connections to instances, kept open between requests: only the part of a client that the data path needs.

A general client costs a request some 70 us of processor time and a token of a stream about 8 us (a timer reset at each read,
a buffer, a future and a task woken through a dozen coroutines). Here a stream's bytes go from the socket's callback to their
consumer in one call, and silence is watched by one timer that checks when bytes last came.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from typing import cast

import httptools
from yarl import URL

IDLE_S = 30.0
"""Idle time after which a connection is closed."""
MAX_HEAD_BYTES = 2**20
"""Limit on the headers of an answer, larger than one read of a socket."""
JOINED_BYTES = 2**16  # larger bodies are not joined with their heads, which would copy them

Pieces = Sequence[bytes | memoryview]
"""A body, in parts."""
Take = Callable[[bytes], bool]
"""Takes a piece of a body as it comes; False if `Connection.wait` is to return before the next one."""


STALE_S = 1.0
"""A reused connection that ends this soon after a request was written, without a byte, had already been closed."""


class AnswerCutOff(ConnectionError):
    """The connection ended, or sent invalid data, before the answer was complete."""


class NotHttp(AnswerCutOff):
    """The bytes are not HTTP."""


class Connection(asyncio.Protocol):
    """One connection: a request at a time, and its answer. Its callbacks run on the event loop, never in a task."""

    def __init__(self, closed: Callable[["Connection"], None]) -> None:
        self.status = 0
        self.content_type = b""
        self.retry_after = b""  # the header, as the next
        self.metadata = b""
        self.complete = True  # the answer has been received completely
        self.idle_since_s = 0.0
        self.heard_s = 0.0  # when bytes last came
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._take: Take | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.headers_received = False
        self._head_bytes = 0
        self._framed = False  # the answer has a length: otherwise it ends with the connection
        self._keep = True
        self._paused = False
        self._asked_s = 0.0
        self._requests = 0  # served so far
        self._silence_s = 0.0  # allowed; 0: any
        self._wake_s = math.inf  # when a wait ends that is for a time
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it fires

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self.complete and self._keep and self._transport is not None and not self._transport.is_closing()

    @property
    def was_stale(self) -> bool:
        """Whether it broke because the server had closed it while idle: the request never reached the server."""
        silent = not self.headers_received and self.heard_s <= self._asked_s
        return self._requests > 1 and silent and self._loop.time() - self._asked_s < STALE_S

    @property
    def is_event_stream(self) -> bool:
        return self.content_type.lower().startswith(b"text/event-stream")

    @property
    def failed(self) -> bool:
        """Whether no more of the answer comes, though it may be incomplete."""
        return self._error is not None

    # Request

    def send(self, head: bytes, body: Pieces, silence_s: float | None) -> None:
        """Send a request. Its answer fails with `TimeoutError` after *silence_s* without a byte."""
        transport = self._transport
        self._asked_s = self.heard_s = self._loop.time()
        self._requests += 1
        self.headers_received = False
        if transport is None or transport.is_closing():
            raise AnswerCutOff("the connection is closed")
        self.status, self.content_type, self.retry_after, self.complete = 0, b"", b"", False
        self.metadata = b""
        self._head_bytes = 0
        self._framed = False
        if silence_s:
            self.listen(silence_s)
        if len(body[-1]) < JOINED_BYTES:
            transport.write(b"".join((head, *body)))
        else:
            transport.writelines((head, *body))

    def listen(self, silence_s: float) -> None:
        """Allow *silence_s* without a byte from now on."""
        self._silence_s = silence_s
        self._look_at(self._loop.time() + silence_s)

    def pass_to(self, take: Take) -> None:
        """Give the body to *take* from now on, received bytes immediately. An exception from it ends the answer."""
        self._take = take
        self._give()

    async def wait(self, at_most_s: float | None = None) -> None:
        """Wait until headers came, the answer ended or failed, the consumer is full until `resume`, or for *at_most_s*."""
        if self.complete or self._error is not None or self._paused:
            return
        self._waiter = self._loop.create_future()
        if at_most_s is not None:
            self._wake_s = self._loop.time() + at_most_s
            self._look_at(self._wake_s)
        try:
            await self._waiter
        finally:
            self._waiter, self._wake_s = None, math.inf

    def check(self) -> None:
        """Raise the failure of the answer, if any."""
        if self._error is not None:
            raise self._error

    def resume(self) -> None:
        """Take bytes again."""
        if self._paused:
            self._paused, self.heard_s = False, self._loop.time()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def leave(self) -> None:
        """End the request. An incomplete answer is aborted: its instance sees a client that disconnected."""
        self._take = None
        self._pieces = []
        self._silence_s = 0.0
        if not self.usable or self._error is not None:
            self.close()
        else:
            self.resume()
        self._error = None  # raised, it refers to the frames of the request, and these to the connection

    def stop(self, error: Exception) -> None:
        """Take no more of an incomplete answer: its waiter gets *error*."""
        if not self.complete:
            self._fail(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class has the same methods

    def data_received(self, data: bytes) -> None:
        if self.complete:  # no request is open
            self._keep = False
            self.close()
            return
        self.heard_s = self._loop.time()
        if not self.headers_received:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(NotHttp(f"no answer within {MAX_HEAD_BYTES} bytes of headers"))
                self.close()
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(NotHttp(f"not HTTP: {error}"))
        if self._take is not None:
            self._give()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        del self._parser  # it refers to the connection
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_s = None, math.inf
        self._closed(self)
        if self.complete:
            return
        if self.headers_received and not self._framed and error is None:
            self.complete = True
            self._wake()
        else:
            self._fail(AnswerCutOff(str(error) if error else "the connection was closed before the answer's end"))

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value
        elif name == b"retry-after":
            self.retry_after = value
        elif name == b"metadata":
            self.metadata = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self.complete:  # a second answer to one request
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:  # not "100 Continue"
            self.headers_received = True
            self._wake()

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self.headers_received:
            return
        self._keep = not self.complete and self._framed and self._parser.should_keep_alive()
        self.complete = True
        if self._take is None:
            self._wake()  # else `_give` does, when the last piece was taken

    def _give(self) -> None:
        """Give the consumer what came since the last time."""
        pieces, take = self._pieces, self._take
        if pieces and take is not None and self._error is None:
            self._pieces = []
            try:
                more = take(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except Exception as error:
                self._fail(error)
                return
            if not more:
                self._pause()
        if self.complete:
            self._wake()

    def _pause(self) -> None:
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_at(self, when_s: float) -> None:
        """Have `_look` called at *when_s*, or before. The timer outlives the request: most end long before it fires."""
        if when_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s, self._timer = when_s, self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        """Fail after too long a silence, end a wait that was for a time, and look again when either may be due.

        While reading is paused, nothing can come.
        """
        self._timer, self._timer_s = None, math.inf
        now_s = self._loop.time()
        if now_s >= self._wake_s:
            self._wake()
        elif self._wake_s < math.inf:
            self._look_at(self._wake_s)
        if self._silence_s and not self.complete and self._error is None:
            if self._paused:
                self.heard_s = now_s
            silent_until_s = self.heard_s + self._silence_s
            if silent_until_s <= now_s:
                self._fail(TimeoutError(f"no byte for {self._silence_s:g} s"))
            else:
                self._look_at(silent_until_s)


class Origin:
    """Address of a server, and its idle connections."""

    __slots__ = ("host", "idle", "name", "path", "port", "tls")

    def __init__(self, url: URL) -> None:
        self.host, self.port = url.host or "", url.port or 0
        self.tls = url.scheme == "https"
        self.name = url.authority.rpartition("@")[2].encode()
        """Value of the header Host."""
        self.path = url.raw_path.rstrip("/").encode()
        """Before that of a call."""
        self.idle: list[Connection] = []


class Connections:
    """Connections to every instance."""

    def __init__(self, connect_s: float) -> None:
        self.connect_s = connect_s
        self._origins: dict[Connection, Origin] = {}  # of all open connections
        self._timer: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def get(self, origin: Origin) -> Connection:
        """Return a connection to *origin*: the last one used, or a new one. Raises OSError, including TimeoutError."""
        while origin.idle:
            connection = origin.idle.pop()
            if connection.usable:
                return connection
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._forget), origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
        except TimeoutError:
            raise TimeoutError(f"no connection within {self.connect_s:g} s") from None
        self._origins[connection] = origin
        return connection

    def put_back(self, connection: Connection) -> None:
        """Keep *connection* for the next request, if it is usable."""
        connection.leave()
        origin = self._origins.get(connection)
        if origin is None or not connection.usable:
            self._forget(connection)  # it may have been lost before it was known here
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        origin.idle.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._close_idle)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._origins):
            connection.close()

    def _forget(self, connection: Connection) -> None:
        origin = self._origins.pop(connection, None)
        if origin is not None and connection in origin.idle:
            origin.idle.remove(connection)

    def _close_idle(self) -> None:
        """Close connections idle for too long; check again while there is any."""
        loop = asyncio.get_running_loop()
        before_s = loop.time() - IDLE_S
        for origin in set(self._origins.values()):
            for connection in list(origin.idle):
                if connection.idle_since_s <= before_s:
                    connection.close()
        self._timer = loop.call_later(IDLE_S, self._close_idle) if self._origins else None
