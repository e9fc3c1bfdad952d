"""Carrying one request to its instance and the answer back, byte for byte.

Streams are passed on as they come; a copy is looked at for the first token, the pace and the usage. When the tenant did not
ask for usage, we ask vLLM for it and keep that one closing event to ourselves.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson

from controlplane.gateway.dispatcher import Dispatcher
from controlplane.gateway.errors import JSON_TYPE, ApiError
from controlplane.gateway.ticket import Interrupt, Ticket
from controlplane.gateway.topology import Replica
from controlplane.gateway.validation import Call
from scheduling.turns import FCFS, PRIORITY, engine_priority

Send = Callable[[dict[str, Any]], Awaitable[None]]

SSE_TYPE = b"text/event-stream; charset=utf-8"
PING_S = 15.0
PING = b": ping\n\n"
USAGE_MARK = b'"usage":{'
NO_CHOICES_MARK = b'"choices":[]'
PRIORITY_BAND = 1000  # vLLM priorities of one SLO class; a tenant may step its own requests back within the band
MOST_BACK = 499
BY_CLASS = frozenset({FCFS, PRIORITY})
LARGE_BODY_BYTES = 2**20  # aiohttp sends larger ones in pieces, so that the loop is not held up
BUSY_STATUSES = frozenset({500, 502, 503, 504})  # of the instance: another may do better


class InstanceLost(Exception):
    """The instance failed before it sent a byte of the answer: the request may go to another."""


class Responder:
    """The answer to one request: status once, then bytes. Knows whether anything has been sent yet."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.started = False
        self.status = 0

    async def start(self, status: int, content_type: bytes, *, stream: bool = False) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", self._request_id)]
        if stream:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, content_type: bytes, body: bytes) -> None:
        headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._request_id),
        ]
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        """An error as a status and a body, or as an event if the stream has begun."""
        if self.started:
            await self.finish(error.event())
            return
        body = error.body()
        headers = [*error.headers(), (b"content-length", b"%d" % len(body)), (b"x-request-id", self._request_id)]
        self.started, self.status = True, error.status
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def payload(call: Call, raw: bytes, priority: int) -> bytes:
    """The body for the instance: the tenant's bytes, with our priority, and asking for usage at the end of a stream.

    Fields are spliced in front where the tenant's body lacks them, so that everything else stays exactly as it was sent.
    """
    body = call.body
    ask_usage = call.stream and not call.include_usage
    if "priority" in body or (ask_usage and "stream_options" in body):
        changed = body | {"priority": priority}
        if ask_usage:
            changed["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        return orjson.dumps(changed)
    front = b'{"priority":%d,' % priority
    if ask_usage:
        front += b'"stream_options":{"include_usage":true},'
    return front + raw.lstrip()[1:]


def upstream_priority(ordering: int, class_priority: int, asked: object, turn_s: float) -> int:
    """vLLM's priority by the *ordering* (`scheduling.turns.ORDERINGS`) of the endpoint. *turn_s*: see `Ticket`.

    By arrival or priority the SLO class decides, and a tenant's own `priority` only steps a request back within its class.
    Otherwise it is the turn that the request had with us, and stepped back by n it counts as having come n seconds later.
    """
    back = min(max(asked, 0), MOST_BACK) if isinstance(asked, int) else 0
    if ordering in BY_CLASS:
        return class_priority * PRIORITY_BAND + back
    return engine_priority(ordering, class_priority, turn_s + back)


class Usage:
    """Tokens of an answer, from its body or from the events of its stream."""

    __slots__ = ("output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def read(self, body: bytes) -> None:
        """Take the usage out of a JSON body; leaves things as they are if there is none."""
        try:
            usage = orjson.loads(body).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            return
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)

    def read_events(self, events: bytes) -> None:
        """Take the last usage out of server-sent events."""
        at = events.rfind(USAGE_MARK)
        if at >= 0:
            start = events.rfind(b"data: ", 0, at) + 6
            end = events.find(b"\n\n", at)
            self.read(events[start : end if end >= 0 else None])


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of an unfinished one)."""
    if data.endswith(b"\n\n"):
        return data, b""
    cut = data.rfind(b"\n\n") + 2
    return (data[:cut], data[cut:]) if cut > 1 else (b"", data)


def without_usage_event(events: bytes) -> bytes:
    """*events* less the closing usage event (`"choices":[]` with usage), which the tenant did not ask for."""
    if NO_CHOICES_MARK not in events:
        return events
    return b"".join(
        event + b"\n\n"
        for event in events.split(b"\n\n")
        if event and not (NO_CHOICES_MARK in event and USAGE_MARK in event)
    )


class Upstream:
    """The connections to instances."""

    def __init__(self, dispatcher: Dispatcher, *, connect_s: float, silence_s: float) -> None:
        self.dispatcher = dispatcher
        self._plain_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)  # the heartbeat watches it
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def stop(self) -> None:
        if self._session:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() comes first"
        return self._session

    async def carry(self, ticket: Ticket, replica: Replica, body: bytes, responder: Responder, *, chat: bool) -> Usage:
        """Send *body* to *replica* and its answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; ApiError if it failed later or refused.
        """
        usage = Usage()
        try:
            async with self.session.post(
                replica.chat_url if chat else replica.completions_url,
                data=body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body),
                headers={"Content-Type": "application/json", "X-Request-Id": ticket.request_id},
                timeout=self._stream_timeout if ticket.call.stream else self._plain_timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    await self._refused(ticket, replica, response, responder)
                elif ticket.call.stream:
                    await self._stream(ticket, replica, response, responder, usage, chat=chat)
                else:
                    answer = await response.read()
                    usage.read(answer)
                    self.dispatcher.began(ticket)
                    await responder.whole(200, JSON_TYPE[1], answer)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise self._lost(ticket, replica, f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            if ticket.interrupted is Interrupt.INSTANCE_LOST:
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                raise self._lost(ticket, replica, Interrupt.INSTANCE_LOST.value) from None
            raise
        return usage

    def _lost(self, ticket: Ticket, replica: Replica, reason: str) -> Exception:
        """What an instance's failure means for *ticket*: another try before the first byte, an error after it."""
        ticket.interrupted = None
        replica.reachable = False  # until its next heartbeat
        self.dispatcher.topology.settle(replica)
        if not ticket.first_token_s:
            return InstanceLost(f"{replica.name}: {reason}")
        return ApiError(
            502,
            "The instance that served this request failed before the answer was complete.",
            type="server_error",
            code="upstream_interrupted",
            retry_after_s=1,
        )

    async def _refused(
        self, ticket: Ticket, replica: Replica, response: aiohttp.ClientResponse, responder: Responder
    ) -> None:
        answer = await response.read()
        if response.status in BUSY_STATUSES:
            raise InstanceLost(f"{replica.name}: answered {response.status}")
        if responder.started:
            await responder.finish(b"data: " + answer.replace(b"\n", b" ") + b"\n\n")
        else:
            await responder.whole(
                response.status, response.headers.get("Content-Type", "").encode() or JSON_TYPE[1], answer
            )
        # vLLM's own word on a bad request is the tenant's answer; the exception only closes our books.
        raise Refused(response.status)

    async def _stream(
        self,
        ticket: Ticket,
        replica: Replica,
        response: aiohttp.ClientResponse,
        responder: Responder,
        usage: Usage,
        *,
        chat: bool,
    ) -> None:
        withhold_usage = not ticket.call.include_usage
        read = response.content.readany
        unfinished = b""
        while True:
            chunk = await read()
            if not chunk:
                break
            if not ticket.first_token_s:
                self.dispatcher.began(ticket)
                if chat:
                    ticket.output_tokens -= ticket.call.sequences  # each choice begins with an event for its role alone
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
            if unfinished or not chunk.endswith(b"\n\n"):
                chunk, unfinished = split_events(unfinished + chunk)
                if not chunk:
                    continue
            tokens = chunk.count(b"data: ")
            ticket.output_tokens += tokens
            replica.produced_tokens += tokens
            if USAGE_MARK in chunk:
                usage.read_events(chunk)
                if withhold_usage:
                    chunk = without_usage_event(chunk)
            if chunk:
                await responder.write(chunk)
        if not ticket.first_token_s:
            raise aiohttp.ClientPayloadError("the stream ended before it began")
        await responder.finish(unfinished)


class Refused(Exception):
    """The instance refused the request for good, and its own answer has been passed on."""

    def __init__(self, status: int) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
