"""The answer to one request, as ASGI messages."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from controlplane.gateway.errors import ApiError
from controlplane.listening import Direct

Send = Callable[[dict[str, Any]], Awaitable[None]]

SSE_TYPE = b"text/event-stream; charset=utf-8"
PING = b": ping\n\n"
"""A comment line, which every client of a stream skips: what cuts off silent connections lets it live."""
PING_S = 10.0
"""A stream is never silent for longer."""


class Responder:
    """The answer to one request: status once, then bytes. Knows whether anything has been sent yet."""

    def __init__(self, send: Send, request_id: str, direct: Direct | None = None) -> None:
        self._send = send
        self._direct = direct
        self.held: list[bytes] = []
        """What `write_now` could not write: `drain` does."""
        self._request_id = request_id.encode()
        self.started = self.ended = False
        self.stream = False  # its tenant asked for one
        self.status = 0
        self.sequence_number: int | None = None
        """Of the next event of a stream of the Responses API; None of any other answer."""
        self._looked_s = asyncio.get_running_loop().time()
        self._spoke = True  # something was written since then
        self.more_headers: Callable[[], list[tuple[bytes, bytes]]] = list
        """Asked when the head of an answer other than an error is written."""

    @property
    def look_in_s(self) -> float:
        """When to `look` next: twice in `PING_S`."""
        return max(0.0, self._looked_s + PING_S / 2 - asyncio.get_running_loop().time())

    async def look(self) -> None:
        """Write a comment line to a stream if it is time for a look, and nothing was written since the last one."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._looked_s + PING_S / 2:
            return
        self._looked_s, spoke, self._spoke = now_s, self._spoke, False
        if self.stream and not spoke:
            if not self.started:
                await self.start(200, SSE_TYPE, stream=True)
            await self.write(PING)

    async def start(self, status: int, content_type: bytes, *, stream: bool = False) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", self._request_id), *self.more_headers()]
        if stream:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        self._spoke = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def write_now(self, chunk: bytes) -> bool:
        """Write without waiting, or hold *chunk*; False if it is held, and `drain` comes before the next."""
        self._spoke = True
        if self._direct is not None and self.started and not self.held and self._direct.write(chunk):
            return True
        self.held.append(chunk)
        return False

    def write_chunk(self, chunk: bytes) -> bool:
        """Whether *chunk*, as `Direct.write_chunk` takes it, was written; nothing is held."""
        self._spoke = True
        return self._direct is not None and self.started and not self.held and self._direct.write_chunk(chunk)

    async def drain(self) -> None:
        """Write what is held, once the client has read enough."""
        held, self.held = self.held, []
        await self.write(b"".join(held))

    async def finish(self, body: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, content_type: bytes, body: bytes) -> None:
        await self._whole(status, [(b"content-type", content_type), *self.more_headers()], body)

    async def error(self, error: ApiError) -> None:
        """An error as a status and a body, or as an event if the stream has begun; nothing after the answer's end."""
        if self.ended:
            return
        if self.started:
            await self.finish(error.event(self.sequence_number))
            return
        await self._whole(error.status, error.headers(), error.body())

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers += ((b"content-length", b"%d" % len(body)), (b"x-request-id", self._request_id))
        self.started, self.ended, self.status = True, True, status
        if self._direct is None or not self._direct.answer(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
