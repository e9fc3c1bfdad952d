"""Carry one request to its instance and the answer back, byte for byte.

Streams are passed on event by event; answers of an instance are parsed in `answers` alone. When the tenant did not ask for
usage, we request it from vLLM and withhold it. An engine that dies below its API server counts as a lost instance, whether
vLLM reports it by a status or inside a stream, and so does a server that gives no answer.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import aiohttp
import msgspec
from yarl import URL

from controlplane.dispatch.port import CUT, DEAD, ERROR, SILENT, Placed
from controlplane.gateway.admission.forms import with_field
from controlplane.gateway.admission.keys import TIERS
from controlplane.gateway.admission.validation import SPEECH, Call, Kind
from controlplane.gateway.errors import JSON_TYPE, STANDING_BY, ApiError
from controlplane.gateway.serving.http import Responder
from controlplane.gateway.serving.open_requests import Interrupt, OpenRequests, Ticket
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.adapters import Adapters, AdapterUnavailable
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection, Connections, NotHttp, Origin, Pieces
from controlplane.gateway.upstream.prewarming import Prefixes
from controlplane.gateway.upstream.streams import KeptStream, Stream
from controlplane.gateway.upstream.tokenizing import TokenBlocks
from scheduling.queueing.ordering import BY_CLASS, engine_priority

ENGINE_ERROR = 500
"""Status of an answer of which the engine had begun the work; with any other than 200 it has not."""
MAX_SERVERS = 10_000
BYTES_TYPE = b"application/octet-stream"
"""vLLM's vectors with `encoding_format: "bytes"`, which the header `metadata` describes, or `"bytes_only"`."""


class Server:
    """One start of an instance's server."""

    __slots__ = ("heads", "origin")

    def __init__(self, address: str) -> None:
        url = URL(address)
        self.origin = Origin(url)
        path, name = url.raw_path.rstrip("/").encode(), self.origin.name
        self.heads = {
            kind: b"POST %b%b HTTP/1.1\r\nHost: %b\r\nContent-Type: " % (path, kind.path.encode(), name)
            for kind in Kind
        }


def _head(ticket: Ticket, placed: Placed, begin: bytes, body_bytes: int) -> bytes:
    key = f"Authorization: Bearer {placed.api_key}\r\n" if placed.api_key else ""
    if key.count("\n") > 1 or key.count("\r") > 1:
        raise ValueError("an API key of an instance has line ends in it")
    traced = "".join(f"{name}: {value}\r\n" for name, value in ticket.trace_context)
    ours = f"X-Request-Id: {ticket.asked.request_id}\r\nContent-Length: {body_bytes}\r\n"
    return begin + ticket.call.content_type + f"\r\n{key}{traced}{ours}\r\n".encode()


class Upstream:
    """The connections to instances."""

    def __init__(self, requests: OpenRequests, *, connect_s: float, silence_s: float) -> None:
        self.requests = requests
        self.silence_s = silence_s
        self.connections = Connections(connect_s)
        self.adapters = Adapters(lambda: self.session)
        self.prefixes = Prefixes(lambda: self.session, requests.prefix_warmed)
        self.tokens = TokenBlocks(lambda: self.session, time.monotonic)
        self._servers: dict[tuple[str, float, str], Server] = {}  # by instance, start and address
        self._session: aiohttp.ClientSession | None = None
        self.owns: Callable[[], bool] = lambda: True

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def stop(self) -> None:
        self.connections.close()
        await self.adapters.stop()
        await self.prefixes.stop()
        if self._session:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the session used by heartbeats."""
        assert self._session is not None, "start() comes first"
        return self._session

    def _server(self, placed: Placed) -> Server:
        key = (placed.instance, placed.ready_at, placed.url)  # an address may pass to another server
        server = self._servers.get(key)
        if server is None:
            if len(self._servers) >= MAX_SERVERS:  # instances come and go: bound the cache
                self._servers.clear()
            server = self._servers[key] = Server(placed.url)
        return server

    async def carry(self, ticket: Ticket, placed: Placed, body: Pieces, responder: Responder) -> answers.Usage:
        """Send *body* to the instance of *ticket* and the answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; Interrupted if it failed later;
        RefusedByInstance if it refused; Evicted if the ticket is evicted.
        """
        usage, server = answers.Usage(), self._server(placed)
        streamed, kept = ticket.asked.streamed, ticket.kept
        kind = Kind.COMPLETION if kept is not None and kept.opened else ticket.call.kind
        head = _head(ticket, placed, server.heads[kind], sum(map(len, body)))
        connection: Connection | None = None
        was_sent = took_none = False
        try:
            if placed.adapter:
                await self.adapters.ready(placed)
            while connection is None:
                connection = await self.connections.get(server.origin)
                if ticket.evicting:
                    raise answers.Evicted
                ticket.leave_instance = partial(connection.stop, answers.Evicted())
                ticket.connection = connection
                was_sent = True
                try:
                    if not self.owns():  # frozen since it was placed, or its connection took long
                        raise STANDING_BY
                    # The heartbeat watches an instance that is silent before a whole answer.
                    connection.send(head, body, placed.first_token_s if streamed else None)
                    while not connection.headers_received:
                        connection.check()
                        await connection.wait(responder.ping_in_s if streamed else None)
                        if streamed:
                            await responder.ping_if_silent()
                except AnswerCutOff:
                    if not connection.was_stale:
                        raise
                    self.connections.put_back(connection)
                    connection = None
            if connection.status != 200:
                took_none = connection.status != ENGINE_ERROR
                await self._refused(ticket, placed, connection)
            elif not ticket.call.kind.generates:
                await self._without_output(ticket, connection, responder, usage)
            elif streamed:
                await self._streamed(ticket, placed, connection, responder, usage)
            else:
                answer = await _whole(connection)
                said = answers.whole(answer, kind)
                usage.update(answers.sound_usage(said, ticket.prompt_tokens) if kind in SPEECH else said.usage)
                if usage.output_tokens is None:
                    usage.output_tokens = answers.estimated_tokens(answer)
                self.requests.answered_whole(ticket, said.first_token_s)
                await responder.whole(200, JSON_TYPE[1], answer)
        except AdapterUnavailable as error:
            ticket.adapter_failed = True
            ticket.steps[-1]["lost"] = f"{placed.instance}: {error.message}"
            raise
        except answers.Refusal as refusal:  # vLLM's refusal of a bad request is the tenant's answer
            await responder.error(refusal)
            raise answers.RefusedByInstance(refusal.status, refusal.code) from None
        except answers.EngineFailed as failure:
            if failure.dead:
                raise _lost(ticket, placed, failure.reason, DEAD) from failure
            raise _lost(ticket, placed, f"answered with {failure.reason}", ERROR, failure.reason) from failure
        except OSError as error:  # TimeoutError and ConnectionError too
            if isinstance(error, TimeoutError) and connection is not None and not ticket.first_token_s:
                ticket.steps[-1]["lost"] = f"{placed.instance}: {error}"
                raise ApiError(  # elsewhere it would take as long
                    504,
                    "The instance that was given this request sent no token for too long.",
                    type="server_error",
                    code="first_token_late",
                ) from None
            reason = f"{type(error).__name__}: {error}"
            raise _lost(ticket, placed, reason, _failure_of(error, was_sent=was_sent)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if ticket.interrupted is Interrupt.DISCONNECT and usage.whole:  # it left because it has everything
                if task is not None:
                    task.uncancel()
                return usage
            if ticket.interrupted in (Interrupt.RECLAIMED, Interrupt.STOPPED):
                if task is not None:
                    task.uncancel()
                stopped = ticket.interrupted is Interrupt.STOPPED
                ticket.steps[-1]["stopped" if stopped else "reclaimed"] = {"tokens_seen": ticket.output_tokens}
                raise (answers.RunStopped() if stopped else answers.Reclaimed()) from None
            if ticket.interrupted is Interrupt.INSTANCE_LOST:
                if task is not None:
                    task.uncancel()
                raise _lost(ticket, placed, Interrupt.INSTANCE_LOST.value, "") from None
            raise
        finally:
            ticket.leave_instance = ticket.connection = None
            if was_sent and not took_none and ticket.call.kind.computes:
                complete = connection is not None and connection.complete
                ticket.note_work(connection.heard_s if connection is not None and complete else self.requests.clock())
            if usage.prompt_tokens is not None:
                ticket.prompt_tokens = usage.prompt_tokens
            if connection is not None:
                self.connections.put_back(connection)
        return usage

    async def _streamed(
        self, ticket: Ticket, placed: Placed, connection: Connection, responder: Responder, usage: answers.Usage
    ) -> None:
        if connection.content_type and not connection.is_event_stream:
            raise answers.EngineFailed(f"{answers.describe_payload(await _whole(connection))} and no stream")
        self.requests.headers_received(ticket)

        def began(ticket: Ticket) -> None:
            connection.listen(self.silence_s)
            self.requests.began(ticket)

        make = Stream if ticket.kept is None else KeptStream
        stream = make(ticket, responder, usage, began)
        await stream.carry(connection, ticket.placed_s + placed.first_token_s)

    async def _without_output(
        self, ticket: Ticket, connection: Connection, responder: Responder, usage: answers.Usage
    ) -> None:
        """Pass on an answer as it comes, JSON or bytes. Its time is that of the first token."""
        answer = await _whole(connection)
        is_json = connection.content_type.lower().startswith(JSON_TYPE[1])
        if is_json or (not connection.metadata and connection.content_type != BYTES_TYPE):
            usage.update(answers.usage_of(answer))
        else:
            usage.update(answers.usage_in(connection.metadata))
        self.requests.answered_whole(ticket, self.requests.clock() - ticket.placed_s)
        if is_json:
            await responder.whole(200, JSON_TYPE[1], answer)
            return
        before, metadata = responder.more_headers, connection.metadata
        responder.more_headers = lambda: [*before(), (b"metadata", metadata)] if metadata else before()
        await responder.whole(200, connection.content_type, answer)

    async def _refused(self, ticket: Ticket, placed: Placed, connection: Connection) -> None:
        """Raise the exception that an answer with a status other than 200 means."""
        status, answer = connection.status, await _whole(connection)
        if answers.ENGINE_DEAD in answer:
            raise answers.EngineFailed(f"answered {status}: its engine died", dead=True)
        reason = f"{placed.instance}: answered {status}"
        if status == 429 or (status == 503 and connection.retry_after):
            raise answers.InstanceBusy(reason, status, _seconds(connection.retry_after))
        if status == 404 and placed.adapter:  # its server has lost it
            self.adapters.forget(placed)
            raise answers.InstanceLost(reason, ERROR)
        of_another_call = status == 403 and not ticket.call.kind.generates  # as rendering without --enable-scale-out
        error = answers.refusal(404 if of_another_call else status, answer)
        if status == 404 and error is not None and error.param == "model":  # it was started again with another model
            raise answers.InstanceLost(reason, ERROR)
        if error is not None:
            raise error
        if status in answers.BUSY_STATUSES:
            raise answers.InstanceLost(reason, ERROR)
        raise answers.EngineFailed(f"status {status} and {answers.describe_payload(answer)}")


async def _whole(connection: Connection) -> bytes:
    """Return the whole answer of *connection*. Raises EngineFailed if it is too long."""
    pieces: list[bytes] = []
    size = 0

    def take(piece: bytes) -> bool:
        nonlocal size
        size += len(piece)
        if size > answers.MAX_ANSWER_BYTES:
            raise answers.EngineFailed(f"more than {answers.MAX_ANSWER_BYTES} bytes")
        pieces.append(piece)
        return True

    connection.pass_to(take)
    while not connection.complete:
        connection.check()
        await connection.wait()
    connection.check()
    return b"".join(pieces)


def _failure_of(error: OSError, *, was_sent: bool) -> str:
    """Return `Left.failure` for *error*: only a connection that breaks during a request suggests that its server died."""
    if isinstance(error, NotHttp):
        return ERROR
    return CUT if was_sent and isinstance(error, ConnectionError) else SILENT


def _seconds(retry_after: bytes) -> float:
    """Return the seconds of a Retry-After header; 1 for a date, or nothing."""
    return float(retry_after) if retry_after.isdigit() and len(retry_after) < 7 else 1.0


def _lost(ticket: Ticket, placed: Placed, reason: str, failure: str, came: str = "") -> Exception:
    """Return the exception for a failed instance: a retry while *ticket* can start over or be resumed, else an error."""
    ticket.interrupted = None
    reason = f"{placed.instance}: {reason}"
    if not ticket.has_shown or (ticket.kept is not None and ticket.kept.resumable):
        return answers.InstanceLost(reason, failure, came)
    ticket.steps[-1]["lost"] = reason
    return answers.Interrupted(failure, reason)


PRIORITY_BAND = 1000  # vLLM priorities per SLO class; a tenant may demote its own requests within the band
MAX_BACK = 499


def payload(call: Call, raw: bytes, priority: int, *, streamed: bool, token_ids: bool = False) -> Pieces:
    """Return the body for the instance in pieces: the tenant's, with our priority, and with usage requested for a stream.

    *streamed*: whether we want a stream, even where the tenant does not. *token_ids* requests the ids of prompt and output,
    where the body does not.

    Fields are spliced in front where the tenant's body lacks them, so that everything else stays exactly as it was sent, and
    is not copied. A `request_id` of a response is left out: vLLM stores the response by it, over one of another tenant.
    """
    body = call.body
    if not call.kind.computes:  # an engine that has no part in it
        return (raw,)
    ask_usage = streamed and not call.include_usage
    if call.kind in SPEECH:  # it reads no priority
        if not ask_usage:
            return (raw,)
        for name, value in (("stream_include_usage", "true"), ("stream_continuous_usage_stats", "false")):
            raw = with_field(raw, call.content_type, name, value)
        return (raw,)
    ask_stream = streamed and not call.stream
    ours = body.get("service_tier") not in TIERS
    named = call.kind is Kind.RESPONSE and "request_id" in body
    if (
        ours
        or named
        or "priority" in body
        or (ask_usage and "stream_options" in body)
        or (ask_stream and ("stream" in body or "stream_options" in body))
    ):
        changed = body | {"priority": priority}
        if ask_stream:
            changed["stream"] = True
        if ours:
            changed["service_tier"] = "auto"
        if named:
            del changed["request_id"]
        if token_ids:
            changed["return_token_ids"] = True
        if ask_usage:
            # vLLM ignores `continuous_usage_stats` alone: together with our request every event would have a usage.
            options = body["stream_options"] if isinstance(body.get("stream_options"), dict) else {}
            changed["stream_options"] = {"include_usage": True} | {
                name: value
                for name, value in options.items()
                if name not in ("include_usage", "continuous_usage_stats")
            }
        return (msgspec.json.encode(changed),)
    front = b'{"priority":%d,' % priority
    if token_ids:
        front += b'"return_token_ids":true,'
    if ask_stream:
        front += b'"stream":true,'
    if ask_usage:
        front += b'"stream_options":{"include_usage":true},'
    return front, memoryview(raw)[raw.index(b"{") + 1 :]


def upstream_priority(ordering: int, class_priority: int, asked: int, queue_key_s: float) -> int:
    """Return vLLM's priority by the endpoint's *ordering* (an index of `ordering.ORDERINGS`). *queue_key_s*: see `Placed`.

    By arrival or priority the SLO class decides, and a tenant's own `priority` only demotes a request within its class.
    Otherwise it is the request's queue key; a demotion by n counts as an arrival n seconds later.
    """
    back = min(max(asked, 0), MAX_BACK)
    if ordering in BY_CLASS:
        return class_priority * PRIORITY_BAND + back
    return engine_priority(ordering, class_priority, queue_key_s + back)
