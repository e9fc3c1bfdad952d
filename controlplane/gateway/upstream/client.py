"""Carrying one request to its instance and the answer back, byte for byte.

Streams are passed on as they come; a copy is looked at for the first token, the pace and the usage. When the tenant did not
ask for usage, we ask vLLM for it and keep that one closing event to ourselves. An engine that dies below its API server is
an instance lost, whether vLLM says so by a status or inside a stream.
"""

import asyncio
import io

import aiohttp
from yarl import URL

from controlplane.dispatch.port import DEAD, SILENT, Placed
from controlplane.gateway.errors import JSON_TYPE
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.serving.responder import SSE_TYPE, Responder
from controlplane.gateway.serving.ticket import Interrupt, Ticket
from controlplane.gateway.upstream.error_messages import message_of
from controlplane.gateway.upstream.failures import (
    BUSY_STATUSES,
    ENGINE_DEAD,
    ERROR_MARK,
    EngineFailed,
    InstanceLost,
    Interrupted,
    RefusedByInstance,
    engine_failure,
)
from controlplane.gateway.upstream.stream import DONE_MARK, USAGE_MARK, Usage, Withheld, split_events

MOST_SERVERS = 10_000
LARGE_BODY_BYTES = 2**20  # aiohttp sends larger ones in pieces, so that the loop is not held up


class Server:
    """What is kept of one start of an instance's server."""

    __slots__ = ("chat_url", "completions_url", "fingerprint")

    def __init__(self, url: str) -> None:
        self.chat_url = URL(f"{url}/v1/chat/completions")
        self.completions_url = URL(f"{url}/v1/completions")
        self.fingerprint = b""
        """`Withheld.fingerprint`."""


def _headers(ticket: Ticket, placed: Placed) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Request-Id": ticket.asked.request_id}
    if placed.api_key:
        headers["Authorization"] = f"Bearer {placed.api_key}"
    return headers


class Upstream:
    """The connections to instances."""

    def __init__(self, requests: OpenRequests, *, connect_s: float, silence_s: float) -> None:
        self.requests = requests
        self._servers: dict[tuple[str, float, str], Server] = {}  # by instance, start and address
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

    def _server(self, placed: Placed) -> Server:
        key = (placed.instance, placed.ready_at, placed.url)  # an address may pass to another server
        server = self._servers.get(key)
        if server is None:
            if len(self._servers) >= MOST_SERVERS:  # instances come and go: do not remember without end
                self._servers.clear()
            server = self._servers[key] = Server(placed.url)
        return server

    async def carry(self, ticket: Ticket, placed: Placed, body: bytes, responder: Responder, *, chat: bool) -> Usage:
        """Send *body* to where *ticket* was placed and the answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; Interrupted if it failed later;
        RefusedByInstance if it refused.
        """
        usage, server = Usage(), self._server(placed)
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
        # vLLM's own word on a bad request is the tenant's answer; the exception only ends the request here.
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


def _lost(ticket: Ticket, placed: Placed, reason: str, failure: str = SILENT) -> Exception:
    """What an instance's failure means for *ticket*: another try before the first byte, an error after it."""
    ticket.interrupted = None
    reason = f"{placed.instance}: {reason}"
    if not ticket.course.first_token_s:
        return InstanceLost(reason, failure)
    ticket.course.trace[-1]["lost"] = reason
    return Interrupted(failure)
