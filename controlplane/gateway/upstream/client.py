"""Carrying one request to its instance and the answer back, byte for byte.

Streams are passed on as they come; a copy is looked at for the first token, the pace and the usage. When the tenant did not
ask for usage, we ask vLLM for it and keep that one closing event to ourselves. An engine that dies below its API server is
an instance lost, whether vLLM says so by a status or inside a stream.
"""

import asyncio
import io
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from yarl import URL

from controlplane.dispatch.port import DEAD, SILENT, Placed
from controlplane.gateway.admission.validation import Call
from controlplane.gateway.errors import JSON_TYPE, ApiError
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.serving.ticket import Interrupt, Ticket
from controlplane.gateway.upstream.error_messages import message_of
from scheduling.queueing.ordering import FCFS, PRIORITY, engine_priority

Send = Callable[[dict[str, Any]], Awaitable[None]]

SSE_TYPE = b"text/event-stream; charset=utf-8"
PING_S = 15.0
MOST_SERVERS = 10_000
PING = b": ping\n\n"
USAGE_MARK = b'"usage":{'
NO_CHOICES_MARK = b'"choices":[]'
PRIORITY_BAND = 1000  # vLLM priorities of one SLO class; a tenant may step its own requests back within the band
MOST_BACK = 499
BY_CLASS = frozenset({FCFS, PRIORITY})
LARGE_BODY_BYTES = 2**20  # aiohttp sends larger ones in pieces, so that the loop is not held up
ERROR_MARK = b'data: {"error":'
DONE_MARK = b"data: [DONE]"  # the last event of a stream
ENGINE_DEAD = b"EngineCore encountered an issue"  # vLLM's EngineDeadError: its API server answers a few seconds longer
FINISH_MARK = b'"finish_reason":"'
FINGERPRINT = re.compile(rb'"system_fingerprint":"(?:[^"\\]|\\.)*"')
BUSY_STATUSES = frozenset({401, 500, 502, 503, 504})
"""Of the instance: another may do better. 401 is about our own token, never about the tenant's."""


class InstanceLost(Exception):
    """The instance failed before it sent a byte of the answer: the request may go to another.

    *found*: what the dispatcher is to know of the instance (`controlplane.dispatch.port`).
    """

    def __init__(self, reason: str, found: str = "") -> None:
        super().__init__(reason)
        self.found = found


class Interrupted(ApiError):
    """The instance failed after the first byte. *found*: as above."""

    def __init__(self, found: str) -> None:
        super().__init__(
            502,
            "The instance that served this request failed before the answer was complete.",
            type="server_error",
            code="upstream_interrupted",
            retry_after_s=1,
        )
        self.found = found


class Server:
    """What is kept of an instance's server, by its address."""

    __slots__ = ("chat_url", "completions_url", "fingerprint")

    def __init__(self, url: str) -> None:
        self.chat_url = URL(f"{url}/v1/chat/completions")
        self.completions_url = URL(f"{url}/v1/completions")
        self.fingerprint = b""
        """`Withheld.fingerprint`."""


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
    """vLLM's priority by the *ordering* (`scheduling.queueing.ordering.ORDERINGS`) of the endpoint. *turn_s*: see `Placed`.

    By arrival or priority the SLO class decides, and a tenant's own `priority` only steps a request back within its class.
    Otherwise it is the turn that the request had with us, and stepped back by n it counts as having come n seconds later.
    """
    back = min(max(asked, 0), MOST_BACK) if isinstance(asked, int) else 0
    if ordering in BY_CLASS:
        return class_priority * PRIORITY_BAND + back
    return engine_priority(ordering, class_priority, turn_s + back)


def _headers(ticket: Ticket, placed: Placed) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Request-Id": ticket.asked.request_id}
    if placed.api_key:
        headers["Authorization"] = f"Bearer {placed.api_key}"
    return headers


class Usage:
    """Tokens of an answer, from its body or from the events of its stream."""

    __slots__ = ("output_tokens", "prompt_tokens", "whole")

    def __init__(self) -> None:
        self.whole = False  # a stream's last event was passed on
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


class Withheld:
    """A stream less its closing usage event (`"choices":[]` with usage), which the tenant did not ask for.

    With that event vLLM moves the fingerprint of the server there, from the events that end the choices. The last of those
    is held back until the fingerprint is known, a moment; so the tenant gets what the server would have sent without us.
    """

    __slots__ = ("_held", "_left", "fingerprint")

    def __init__(self, choices: int, fingerprint: bytes) -> None:
        self._left = choices
        self._held = b""
        self.fingerprint = fingerprint
        """As the server last sent it, a name and a value of JSON; empty while it is not known, or the server has none."""

    def take(self, events: bytes) -> bytes:
        """What of *events*, whole ones, the tenant gets now."""
        if not self._held and FINISH_MARK not in events and NO_CHOICES_MARK not in events:
            return events
        passed = []
        for event in events.split(b"\n\n"):
            if not event:
                continue
            if NO_CHOICES_MARK in event and USAGE_MARK in event:
                found = FINGERPRINT.search(event)
                self.fingerprint = found[0] if found else b""
                continue
            passed.append(self.rest())
            if FINISH_MARK in event:
                self._left -= 1
                if not self._left:
                    self._held = event
                    continue
            passed.append((self._stamped(event) if FINISH_MARK in event else event) + b"\n\n")
        return b"".join(passed)

    def rest(self) -> bytes:
        """What has been held back, for the tenant: the next event is here, or the stream ends."""
        held, self._held = self._held, b""
        return self._stamped(held) + b"\n\n" if held else b""

    def _stamped(self, event: bytes) -> bytes:
        if not self.fingerprint or FINGERPRINT.search(event) or not event.endswith(b"}"):
            return event
        return event[:-1] + b"," + self.fingerprint + b"}"


class Upstream:
    """The connections to instances."""

    def __init__(self, requests: OpenRequests, *, connect_s: float, silence_s: float) -> None:
        self.requests = requests
        self._servers: dict[str, Server] = {}
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

    def _server(self, url: str) -> Server:
        server = self._servers.get(url)
        if server is None:
            if len(self._servers) >= MOST_SERVERS:  # instances come and go: do not remember without end
                self._servers.clear()
            server = self._servers[url] = Server(url)
        return server

    async def carry(self, ticket: Ticket, placed: Placed, body: bytes, responder: Responder, *, chat: bool) -> Usage:
        """Send *body* to where *ticket* was placed and the answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; Interrupted if it failed later;
        RefusedByInstance if it refused.
        """
        usage, server = Usage(), self._server(placed.url)
        try:
            async with self.session.post(
                server.chat_url if chat else server.completions_url,
                data=body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body),
                headers=_headers(ticket, placed),
                timeout=self._stream_timeout if ticket.call.stream else self._plain_timeout,
                allow_redirects=False,
            ) as response:
                if ticket.call.stream and response.status == 200:
                    self.requests.headers_came(ticket)
                if response.status != 200:
                    await self._refused(ticket, placed, response, responder)
                elif ticket.call.stream:
                    await self._stream(ticket, server, response, responder, usage, chat=chat)
                else:
                    answer = await response.read()
                    usage.read(answer)
                    self.requests.began(ticket)
                    await responder.whole(200, JSON_TYPE[1], answer)
        except EngineFailed as failure:
            raise _lost(ticket, placed, failure.reason, DEAD if failure.dead else SILENT) from failure
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _lost(ticket, placed, f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if ticket.interrupted is Interrupt.DISCONNECT and usage.whole:  # it left because it has everything
                if task is not None:
                    task.uncancel()
                return usage
            if ticket.interrupted is Interrupt.INSTANCE_LOST:
                if task is not None:
                    task.uncancel()
                raise _lost(ticket, placed, Interrupt.INSTANCE_LOST.value) from None
            raise
        return usage

    async def _refused(
        self, ticket: Ticket, placed: Placed, response: aiohttp.ClientResponse, responder: Responder
    ) -> None:
        answer = await response.read()
        if ENGINE_DEAD in answer:
            raise EngineFailed(f"answered {response.status}: its engine died", dead=True)
        message = message_of(answer, ticket.call.body)
        if response.status in BUSY_STATUSES:
            raise InstanceLost(f"{placed.instance}: answered {response.status}{message and f': {message}'}")
        if responder.started:
            await responder.finish(b"data: " + answer.replace(b"\n", b" ") + b"\n\n")
        else:
            await responder.whole(
                response.status, response.headers.get("Content-Type", "").encode() or JSON_TYPE[1], answer
            )
        # vLLM's own word on a bad request is the tenant's answer; the exception only closes our books.
        raise RefusedByInstance(response.status, message)

    async def _stream(
        self,
        ticket: Ticket,
        server: Server,
        response: aiohttp.ClientResponse,
        responder: Responder,
        usage: Usage,
        *,
        chat: bool,
    ) -> None:
        course = ticket.course
        withheld = None if ticket.call.include_usage else Withheld(ticket.call.sequences, server.fingerprint)
        read = response.content.readany
        unfinished = b""
        while True:
            chunk = await read()
            if not chunk:
                break
            if unfinished or not chunk.endswith(b"\n\n"):
                chunk, unfinished = split_events(unfinished + chunk)
                if not chunk:
                    continue
            failure = engine_failure(chunk) if ERROR_MARK in chunk else None
            if failure is not None:
                chunk = chunk[: chunk.index(ERROR_MARK)]
                if not (course.first_token_s and chunk):
                    raise failure
            if not course.first_token_s:
                self.requests.began(ticket)
                if chat:
                    course.output_tokens -= ticket.call.sequences  # each choice begins with an event for its role alone
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
            course.output_tokens += chunk.count(b"data: ")
            if USAGE_MARK in chunk:
                usage.read_events(chunk)
            if withheld is not None:
                chunk = withheld.take(chunk)
            if chunk:
                usage.whole = usage.whole or DONE_MARK in chunk
                await responder.write(chunk)
            if failure is not None:
                raise failure
        if not course.first_token_s:
            raise aiohttp.ClientPayloadError("the stream ended before it began")
        if withheld is not None:
            server.fingerprint = withheld.fingerprint
            unfinished = withheld.rest() + unfinished
        await responder.finish(unfinished)


def _lost(ticket: Ticket, placed: Placed, reason: str, found: str = SILENT) -> Exception:
    """What an instance's failure means for *ticket*: another try before the first byte, an error after it."""
    ticket.interrupted = None
    reason = f"{placed.instance}: {reason}"
    if not ticket.course.first_token_s:
        return InstanceLost(reason, found)
    ticket.course.trace[-1]["lost"] = reason
    return Interrupted(found)


def engine_failure(events: bytes) -> "EngineFailed | None":
    """What an error inside a stream says about the instance; None if the request itself was at fault."""
    event = events[events.index(ERROR_MARK) :].partition(b"\n\n")[0]
    if ENGINE_DEAD in event:
        return EngineFailed("its engine died", dead=True)
    try:
        code = orjson.loads(event.removeprefix(b"data: "))["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return EngineFailed(f"its stream ended with error {code}") if isinstance(code, int) and code >= 500 else None


class EngineFailed(Exception):
    """The engine below an API server failed the request; *dead*: it will answer no other one either."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.dead = reason, dead


class RefusedByInstance(Exception):
    """The instance refused the request for good, and its own answer has been passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"refused with {status}")
        self.code, self.status, self.message = "refused_by_instance", status, message
