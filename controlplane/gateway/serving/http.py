"""Reading a request: its body within bounds, and the headers that name things."""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

from msgspec import Struct

from controlplane.background import spawn
from controlplane.gateway.errors import ApiError, invalid, too_large
from controlplane.listening import Direct, direct_of

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,80}")
NAME = re.compile(rb"[A-Za-z0-9._:/-]{1,80}")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")
DISCARD_BYTES = 2**26


class HttpRequest(Struct, eq=False):
    """One request from ASGI."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    receive: Any
    request_id: str
    """The client's own id where it sent a usable one."""
    direct: Direct | None = None

    @classmethod
    def of(cls, scope: dict[str, Any], receive: Any) -> Self:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        # Distinct, not secret: avoids a system call and a UUID object, 3 us per request.
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
        direct = direct_of(scope)
        return cls(scope["method"], scope["path"], headers, receive, request_id, direct)

    @property
    def authorization(self) -> bytes | None:
        """The key as a bearer token; Anthropic's SDKs send it as `x-api-key`."""
        key = self.headers.get(b"x-api-key")
        return self.headers.get(b"authorization") or (b"Bearer " + key if key else None)

    def require(self, *methods: str) -> None:
        """Raise ApiError 405 for any other method; where GET is allowed, HEAD is too."""
        if self.method not in methods and not (self.method == "HEAD" and "GET" in methods):
            allowed = ", ".join((*methods, "HEAD") if "GET" in methods else methods)
            raise ApiError(
                405,
                f"{self.path} takes {' or '.join(methods)}, not {self.method}.",
                code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )

    def trace_context(self) -> tuple[tuple[str, str], ...]:
        """Return the caller's position in a distributed trace by W3C Trace Context; empty for anything else."""
        parent, state = (self.headers.get(name, b"") for name in (b"traceparent", b"tracestate"))
        if not TRACEPARENT.fullmatch(parent):
            return ()
        given = (("traceparent", parent.decode()),)
        return (*given, ("tracestate", state.decode())) if TRACESTATE.fullmatch(state) else given

    def name(self, header: bytes) -> str:
        """Return the value of a *header* that names something (class, region, application), "" without it.

        Raises ApiError 400 if it cannot be a name.
        """
        value = self.headers.get(header)
        if not value:
            return ""
        if not NAME.fullmatch(value):
            title = header.decode().title().replace("Slo", "SLO")
            raise invalid(f"The header {title} must be 1 to 80 letters, digits or . _ : / -", title)
        return value.decode()

    def number(self, header: bytes, of: str = "seconds") -> float | None:
        """Return the number in a *header*, None without it. Raises ApiError 400 if it is not above 0."""
        if not (value := self.headers.get(header)):
            return None
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            title = header.decode().title()
            raise invalid(f"The header {title} must be a number of {of} above 0", title)
        return number

    async def body(self, most_bytes: int) -> bytes:
        """Read the body. Raises ApiError 413 when it is larger than *most_bytes*, 415 when it is compressed.

        The excess is read and discarded, up to `DISCARD_BYTES`: a client that is still sending when the connection closes
        sees a reset instead of our answer.
        """
        encoding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            shown = encoding[:40].decode("ascii", "replace")
            message = f"Bodies are taken as they are, not with Content-Encoding {shown}: send the JSON uncompressed."
            raise ApiError(415, message, code="unsupported_encoding", param="Content-Encoding")
        announced = int(self.headers.get(b"content-length", b"0"))
        if self.direct is not None and announced <= most_bytes:
            whole = await self.direct.body(most_bytes)
            if whole is not None:
                return whole
        chunks: list[bytes] = []
        size = 0
        while announced <= DISCARD_BYTES:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client went away.", code="client_disconnected")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= most_bytes and announced <= most_bytes:
                chunks.append(chunk)
                if not message.get("more_body"):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
            elif size > DISCARD_BYTES or not message.get("more_body"):
                break
        raise too_large(f"The request body is larger than {most_bytes} bytes.", ((b"connection", b"close"),))

    def on_disconnect(self, left: Callable[[], object]) -> Callable[[], object]:
        """Have *left* called when the client disconnects; the returned callable cancels this."""
        if self.direct is not None:
            self.direct.watch(left)
            return partial(self.direct.watch, None)
        return spawn(self._disconnected(left), "watch client").cancel

    async def _disconnected(self, left: Callable[[], object]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        left()


Send = Callable[[dict[str, Any]], Awaitable[None]]

SSE_TYPE = b"text/event-stream; charset=utf-8"
PING = b": ping\n\n"
"""A comment line, which every stream client skips, so that proxies do not cut a silent connection."""
PING_S = 10.0
"""Longest silence of a stream."""


class Responder:
    """The answer to one request: status once, then bytes. Knows whether anything has been sent yet."""

    def __init__(self, send: Send, request_id: str, direct: Direct | None = None) -> None:
        self._send = send
        self._direct = direct
        self.held: list[bytes] = []
        """Chunks that `write_now` could not write, left to `drain`."""
        self.last = b""
        """The end of a stream that is known to be complete: `finish` writes it in one piece with the answer's end."""
        self._request_id = request_id.encode()
        self.started = self.ended = False
        self.stream = False  # its tenant asked for one
        self.status = 0
        self.sequence_number: int | None = None
        """Number of the next event of a stream of the Responses API; None for any other answer."""
        self.anthropic = False
        """Whether errors have the shape of Anthropic's API."""
        self._looked_s = asyncio.get_running_loop().time()
        self._spoke = True  # something was written since then
        self.completed: Callable[[Any], object] = lambda usage: None
        """Called before the last bytes of an answer are written, perhaps more than once."""
        self.more_headers: Callable[[], list[tuple[bytes, bytes]]] = list
        """Called when the head of an answer other than an error is written."""

    @property
    def ping_in_s(self) -> float:
        """Time to the next `ping_if_silent`: twice in `PING_S`."""
        return max(0.0, self._looked_s + PING_S / 2 - asyncio.get_running_loop().time())

    async def ping_if_silent(self) -> None:
        """Write a comment line to a stream if a look is due and nothing was written since the last one."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._looked_s + PING_S / 2:
            return
        self._looked_s, spoke, self._spoke = now_s, self._spoke, False
        if self.stream and not spoke:
            if not self.started:
                await self.start(200, SSE_TYPE, stream=True)
            await self.write(PING)

    async def start(self, status: int, content_type: bytes, *, stream: bool = False) -> None:
        headers = self._headers(content_type, stream=stream)
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _headers(self, content_type: bytes, *, stream: bool) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", content_type), (b"x-request-id", self._request_id), *self.more_headers()]
        if stream:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return headers

    async def write(self, chunk: bytes) -> None:
        self._spoke = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def write_now(self, chunk: bytes) -> bool:
        """Write *chunk* of a stream without waiting, or hold it; return False if it is held, and `drain` must come before
        the next."""
        self._spoke = True
        direct = self._direct
        if direct is not None and not self.held:
            if self.started:
                if direct.write(chunk):
                    return True
            elif direct.begin(200, self._headers(SSE_TYPE, stream=True), chunk):
                self.started, self.status = True, 200
                return True
        self.held.append(chunk)
        return False

    async def drain(self) -> None:
        """Write the held chunks, once the client has read enough."""
        held, self.held = self.held, []
        await self.write(b"".join(held))

    async def finish(self, body: bytes = b"") -> None:
        self.ended, direct = True, self._direct
        body, self.last = self.last + body, b""
        if not self.started:
            if direct is not None and direct.begin(200, self._headers(SSE_TYPE, stream=True), body, last=True):
                self.started, self.status = True, 200
                return
            await self.start(200, SSE_TYPE, stream=True)
        if direct is None or not direct.finish(body):
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, content_type: bytes, body: bytes) -> None:
        await self._whole(status, [(b"content-type", content_type), *self.more_headers()], body)

    async def error(self, error: ApiError) -> None:
        """Send an error as a status and a body, or as an event if the stream has begun; nothing after the answer's end."""
        if self.ended:
            return
        if self.started or self.last:
            await self.finish(error.event(self.sequence_number, anthropic=self.anthropic))
            return
        await self._whole(error.status, error.headers(), error.body(anthropic=self.anthropic))

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers += ((b"content-length", b"%d" % len(body)), (b"x-request-id", self._request_id))
        self.started, self.ended, self.status = True, True, status
        if self._direct is None or not self._direct.answer(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
