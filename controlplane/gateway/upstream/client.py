"""Carrying one request to its instance and the answer back, byte for byte.

Streams are passed on as they come; a copy is looked at for the first token, the pace and the usage. When the tenant did not
ask for usage, we ask vLLM for it and keep that one closing event to ourselves. An engine that dies below its API server is
an instance lost, whether vLLM says so by a status or inside a stream.
"""

import asyncio
from functools import partial

import aiohttp
from yarl import URL

from controlplane.dispatch.port import DEAD, SILENT, Placed
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import JSON_TYPE
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.serving.responder import Responder
from controlplane.gateway.serving.ticket import Interrupt, Ticket
from controlplane.gateway.upstream.connections import Connection, Connections, Origin
from controlplane.gateway.upstream.error_messages import message_of
from controlplane.gateway.upstream.failures import (
    BUSY_STATUSES,
    ENGINE_DEAD,
    EngineFailed,
    Evicted,
    InstanceLost,
    Interrupted,
    RefusedByInstance,
)
from controlplane.gateway.upstream.kept_stream import KeptStream
from controlplane.gateway.upstream.passage import Stream
from controlplane.gateway.upstream.stream import Usage

MOST_SERVERS = 10_000


class Server:
    """What is kept of one start of an instance's server."""

    __slots__ = ("fingerprint", "heads", "origin")

    def __init__(self, address: str) -> None:
        url = URL(address)
        self.origin = Origin(url)
        path, name = url.raw_path.rstrip("/").encode(), self.origin.name
        self.heads = {
            kind: b"POST %b/v1/%b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
            % (path, kind.encode(), name)
            for kind in Kind
        }
        self.fingerprint = b""
        """`Withheld.fingerprint`."""


def _head(ticket: Ticket, placed: Placed, begin: bytes, body_bytes: int) -> bytes:
    key = f"Authorization: Bearer {placed.api_key}\r\n" if placed.api_key else ""
    if key.count("\n") > 1 or key.count("\r") > 1:
        raise ValueError("an API key of an instance has line ends in it")
    traced = "".join(f"{name}: {value}\r\n" for name, value in ticket.trace_context)
    ours = f"X-Request-Id: {ticket.asked.request_id}\r\nContent-Length: {body_bytes}\r\n"
    return begin + f"{key}{traced}{ours}\r\n".encode()


class Upstream:
    """The connections to instances."""

    def __init__(self, requests: OpenRequests, *, connect_s: float, silence_s: float) -> None:
        self.requests = requests
        self.silence_s = silence_s
        self.connections = Connections(connect_s)
        self._servers: dict[tuple[str, float, str], Server] = {}  # by instance, start and address
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def stop(self) -> None:
        self.connections.close()
        if self._session:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For heartbeats."""
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

    async def carry(self, ticket: Ticket, placed: Placed, body: bytes, responder: Responder) -> Usage:
        """Send *body* to where *ticket* was placed and the answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; Interrupted if it failed later;
        RefusedByInstance if it refused; Evicted if the ticket is.
        """
        usage, server = Usage(), self._server(placed)
        streamed, kept = ticket.call.stream, ticket.kept
        kind = Kind.COMPLETION if kept is not None and kept.opened else ticket.call.kind
        head = _head(ticket, placed, server.heads[kind], len(body))
        connection: Connection | None = None
        try:
            connection = await self.connections.get(server.origin)
            if ticket.evicting:
                raise Evicted
            ticket.leave_instance = partial(connection.stop, Evicted())
            ticket.connection = connection
            # The heartbeat watches an instance that is silent before a whole answer.
            await connection.ask(head, body, self.silence_s if streamed else None)
            if connection.status != 200:
                await self._refused(ticket, placed, connection, responder)
            elif streamed:
                self.requests.headers_came(ticket)
                began = self.requests.began
                stream = (
                    KeptStream(ticket, kept, responder, usage, server.fingerprint, began)
                    if kept is not None
                    else Stream(ticket, responder, usage, server.fingerprint, began)
                )
                await stream.carry(connection)
                server.fingerprint = stream.fingerprint
            else:
                answer = await connection.body()
                usage.read(answer)
                self.requests.began(ticket)
                await responder.whole(200, JSON_TYPE[1], answer)
        except EngineFailed as failure:
            raise _lost(ticket, placed, failure.reason, DEAD if failure.dead else SILENT) from failure
        except OSError as error:  # TimeoutError and ConnectionError too
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
        finally:
            ticket.leave_instance = ticket.connection = None
            if connection is not None:
                self.connections.put_back(connection)
        return usage

    async def _refused(self, ticket: Ticket, placed: Placed, response: Connection, responder: Responder) -> None:
        answer = await response.body()
        if ENGINE_DEAD in answer:
            raise EngineFailed(f"answered {response.status}: its engine died", dead=True)
        message = message_of(answer, ticket.call.body)
        if response.status in BUSY_STATUSES:
            raise InstanceLost(f"{placed.instance}: answered {response.status}{message and f': {message}'}")
        if responder.started:
            await responder.finish(b"data: " + answer.replace(b"\n", b" ") + b"\n\n")
        else:
            await responder.whole(response.status, response.content_type or JSON_TYPE[1], answer)
        # vLLM's own word on a bad request is the tenant's answer; the exception only ends the request here.
        raise RefusedByInstance(response.status, message)


def _lost(ticket: Ticket, placed: Placed, reason: str, failure: str = SILENT) -> Exception:
    """What a failure of its instance means for *ticket*: another try before the first byte or if it is kept, or an error."""
    ticket.interrupted = None
    reason = f"{placed.instance}: {reason}"
    if not ticket.course.first_token_s or (ticket.kept is not None and ticket.kept.can_go_on):
        return InstanceLost(reason, failure)
    ticket.course.trace[-1]["lost"] = reason
    return Interrupted(failure)
