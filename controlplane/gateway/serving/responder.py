"""The answer to one request, as ASGI messages."""

from collections.abc import Awaitable, Callable
from typing import Any

from controlplane.gateway.errors import ApiError
from controlplane.listening import Direct

Send = Callable[[dict[str, Any]], Awaitable[None]]

SSE_TYPE = b"text/event-stream; charset=utf-8"


class Responder:
    """The answer to one request: status once, then bytes. Knows whether anything has been sent yet."""

    def __init__(self, send: Send, request_id: str, direct: Direct | None = None) -> None:
        self._send = send
        self._direct = direct
        self.held: list[bytes] = []
        """What `write_now` could not write: `drain` does."""
        self._request_id = request_id.encode()
        self.started = self.ended = False
        self.status = 0
        self.more_headers: Callable[[], list[tuple[bytes, bytes]]] = list
        """Asked when the head of an answer other than an error is written."""

    async def start(self, status: int, content_type: bytes, *, stream: bool = False) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", self._request_id), *self.more_headers()]
        if stream:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def write_now(self, chunk: bytes) -> bool:
        """Write without waiting, or hold *chunk*; False if it is held, and `drain` comes before the next."""
        if self._direct is not None and self.started and not self.held and self._direct.write(chunk):
            return True
        self.held.append(chunk)
        return False

    def write_chunk(self, chunk: bytes) -> bool:
        """Whether *chunk*, as `Direct.write_chunk` takes it, was written; nothing is held."""
        return self._direct is not None and self.started and not self.held and self._direct.write_chunk(chunk)

    async def drain(self) -> None:
        """Write what is held, once the client has read enough."""
        held, self.held = self.held, []
        await self.write(b"".join(held))

    async def finish(self, body: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        await self._whole(status, [(b"content-type", content_type), *headers, *self.more_headers()], body)

    async def error(self, error: ApiError) -> None:
        """An error as a status and a body, or as an event if the stream has begun; nothing after the answer's end."""
        if self.ended:
            return
        if self.started:
            await self.finish(error.event())
            return
        await self._whole(error.status, error.headers(), error.body())

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers += ((b"content-length", b"%d" % len(body)), (b"x-request-id", self._request_id))
        self.started, self.ended, self.status = True, True, status
        if self._direct is None or not self._direct.answer(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
