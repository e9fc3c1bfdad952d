"""Carry one request to its instance and the answer back, byte for byte.

Streams are passed on event by event; answers of an instance are parsed in `answers` alone. When the tenant did not ask for
usage, we request it from vLLM and withhold it. An engine that dies below its API server counts as a lost instance, whether
vLLM reports it by a status or inside a stream, and so does a server that gives no answer.
"""

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache, partial

import aiohttp
from yarl import URL

from controlplane.dispatch.port import CUT, DEAD, ERROR, SILENT, Placed
from controlplane.gateway.admission.validation import SPEECH, Kind
from controlplane.gateway.errors import JSON_TYPE, STANDING_BY, ApiError
from controlplane.gateway.progress import Interrupt, Progress, RequestState
from controlplane.gateway.serving.http import Responder
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.adapters import Adapters, AdapterUnavailable
from controlplane.gateway.upstream.bodies import body_for
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection, Connections, NotHttp, Origin
from controlplane.gateway.upstream.continuation import Kept
from controlplane.gateway.upstream.prewarming import Prefixes
from controlplane.gateway.upstream.streams import KeptStream, Stream
from controlplane.gateway.upstream.tokenizing import TokenBlocks

ENGINE_ERROR = 500
"""Status of an answer of which the engine had begun the work; with any other than 200 it has not."""
MAX_SERVERS = 10_000
BYTES_TYPE = b"application/octet-stream"
"""vLLM's vectors with `encoding_format: "bytes"`, which the header `metadata` describes, or `"bytes_only"`."""


def head_of(progress: Progress, placed: Placed, origin: Origin, kind: Kind, body_bytes: int) -> bytes:
    """Return the head of *progress* for its instance at *origin*, with its end."""
    key = f"Authorization: Bearer {placed.api_key}\r\n" if placed.api_key else ""
    if key.count("\n") > 1 or key.count("\r") > 1:
        raise ValueError("an API key of an instance has line ends in it")
    traced = "".join(f"{name}: {value}\r\n" for name, value in progress.trace_context)
    ours = f"{key}{traced}X-Request-Id: {progress.asked.request_id}\r\nContent-Length: {body_bytes}\r\n\r\n"
    begin = origin.path, kind.path.encode(), origin.name, progress.call.content_type
    return b"POST %b%b HTTP/1.1\r\nHost: %b\r\nContent-Type: %b\r\n" % begin + ours.encode()


class Upstream:
    """The connections to instances."""

    def __init__(self, requests: OpenRequests, *, connect_s: float, silence_s: float) -> None:
        self.requests = requests
        self.silence_s = silence_s
        self.connections = Connections(connect_s)
        self.adapters = Adapters(lambda: self.session)
        self.prefixes = Prefixes(lambda: self.session, requests.send)
        self.tokens = TokenBlocks(lambda: self.session, time.monotonic)
        # Of a start of an instance: its address may pass to another server.
        self._origin = lru_cache(MAX_SERVERS)(lambda instance, ready_at, url: Origin(URL(url)))
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

    async def carry(self, progress: Progress, placed: Placed, responder: Responder) -> answers.Usage:
        """Send *progress* to its instance and the answer to *responder*.

        Raises InstanceLost if the instance failed before a byte of its answer came; Interrupted if it failed later;
        RefusedByInstance if it refused; Evicted if the progress is evicted.
        """
        usage, origin = answers.Usage(), self._origin(placed.instance, placed.ready_at, placed.url)
        if placed.keep_tokens and progress.asked.evictable and progress.kept is None:
            progress.kept = Kept()
        streamed, kept = progress.asked.streamed, progress.kept
        kind = Kind.COMPLETION if kept is not None and kept.opened else progress.call.kind
        body = body_for(progress.call, placed, kept)
        head = head_of(progress, placed, origin, kind, sum(map(len, body)))
        connection: Connection | None = None
        was_sent = took_none = False
        try:
            if placed.adapter:
                await self.adapters.ready(placed)
            while connection is None:
                connection = await self.connections.get(origin)
                if progress.evicting:
                    raise answers.Evicted
                progress.leave_instance = partial(connection.stop, answers.Evicted())
                progress.connection = connection
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
                await self._refused(progress, placed, connection)
            elif not progress.call.kind.generates:
                await self._without_output(progress, connection, responder, usage)
            elif streamed:
                await self._streamed(progress, placed, connection, responder, usage)
            else:
                answer = await _whole(connection)
                said = answers.whole(answer, kind)
                usage.update(answers.sound_usage(said, progress.asked.prompt_tokens) if kind in SPEECH else said.usage)
                if usage.output_tokens is None:
                    usage.output_tokens = answers.estimated_tokens(answer)
                self.requests.answered_whole(progress, said.first_token_s)
                responder.completed(usage)
                await responder.whole(200, JSON_TYPE[1], answer)
        except AdapterUnavailable as error:
            progress.adapter_failed = True
            progress.steps[-1]["lost"] = f"{placed.instance}: {error.message}"
            raise
        except answers.Refusal as refusal:  # vLLM's refusal of a bad request is the tenant's answer
            await responder.error(refusal)
            raise answers.RefusedByInstance(refusal.status, refusal.code) from None
        except answers.EngineFailed as failure:
            if failure.dead:
                raise _lost(progress, placed, failure.reason, DEAD) from failure
            raise _lost(progress, placed, f"answered with {failure.reason}", ERROR, failure.reason) from failure
        except OSError as error:  # TimeoutError and ConnectionError too
            if isinstance(error, TimeoutError) and connection is not None and not progress.first_token_s:
                progress.steps[-1]["lost"] = f"{placed.instance}: {error}"
                raise ApiError(  # elsewhere it would take as long
                    504,
                    "The instance that was given this request sent no token for too long.",
                    code="first_token_late",
                ) from None
            reason = f"{type(error).__name__}: {error}"
            raise _lost(progress, placed, reason, _failure_of(error, was_sent=was_sent)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if progress.interrupted in (Interrupt.RECLAIMED, Interrupt.STOPPED):
                if task is not None:
                    task.uncancel()
                stopped = progress.interrupted is Interrupt.STOPPED
                progress.steps[-1]["stopped" if stopped else "reclaimed"] = {"tokens_seen": progress.output_tokens}
                raise (answers.run_stopped() if stopped else answers.reclaimed()) from None
            if progress.interrupted is Interrupt.INSTANCE_LOST:
                if task is not None:
                    task.uncancel()
                raise _lost(progress, placed, Interrupt.INSTANCE_LOST.value, "") from None
            raise
        finally:
            progress.leave_instance = progress.connection = None
            if was_sent and not took_none and progress.call.kind.computes and progress.state is not RequestState.DONE:
                complete = connection is not None and connection.complete
                ended_s = connection.heard_s if connection is not None and complete else self.requests.clock()
                progress.note_work(ended_s, usage)
            if connection is not None:
                self.connections.put_back(connection)
        return usage

    async def _streamed(
        self, progress: Progress, placed: Placed, connection: Connection, responder: Responder, usage: answers.Usage
    ) -> None:
        if connection.content_type and not connection.is_event_stream:
            raise answers.EngineFailed(f"{answers.describe_payload(await _whole(connection))} and no stream")
        self.requests.headers_received(progress)

        def began(progress: Progress) -> None:
            connection.listen(self.silence_s)
            self.requests.began(progress)

        make = Stream if progress.kept is None else KeptStream
        stream = make(progress, responder, usage, began)
        await stream.carry(connection, progress.placed_s + placed.first_token_s)

    async def _without_output(
        self, progress: Progress, connection: Connection, responder: Responder, usage: answers.Usage
    ) -> None:
        """Pass on an answer as it comes, JSON or bytes. Its time is that of the first token."""
        answer = await _whole(connection)
        is_json = connection.content_type.lower().startswith(JSON_TYPE[1])
        if is_json or (not connection.metadata and connection.content_type != BYTES_TYPE):
            usage.update(answers.usage_of(answer))
        else:
            usage.update(answers.usage_in(connection.metadata))
        self.requests.answered_whole(progress, self.requests.clock() - progress.placed_s)
        responder.completed(usage)
        if is_json:
            await responder.whole(200, JSON_TYPE[1], answer)
            return
        before, metadata = responder.more_headers, connection.metadata
        responder.more_headers = lambda: [*before(), (b"metadata", metadata)] if metadata else before()
        await responder.whole(200, connection.content_type, answer)

    async def _refused(self, progress: Progress, placed: Placed, connection: Connection) -> None:
        """Raise the exception that an answer with a status other than 200 means."""
        status, answer = connection.status, await _whole(connection)
        if answers.ENGINE_DEAD in answer:
            raise answers.EngineFailed(f"answered {status}: its engine died", dead=True)
        reason = f"{placed.instance}: answered {status}"
        if status == 429 or (status == 503 and connection.retry_after):
            raise answers.InstanceLost(reason, busy=status, wait_s=_seconds(connection.retry_after))
        if status == 404 and placed.adapter:  # its server has lost it
            self.adapters.forget(placed)
            raise answers.InstanceLost(reason, ERROR)
        of_another_call = status == 403 and not progress.call.kind.generates  # as rendering without --enable-scale-out
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


def _lost(progress: Progress, placed: Placed, reason: str, failure: str, came: str = "") -> Exception:
    """Return the exception for a failed instance: a retry while *progress* can start over or be resumed, else an error."""
    progress.interrupted = None
    reason = f"{placed.instance}: {reason}"
    if not progress.has_shown or (progress.kept is not None and progress.kept.resumable):
        return answers.InstanceLost(reason, failure, came)
    progress.steps[-1]["lost"] = reason
    return answers.Interrupted(failure, reason, code="upstream_interrupted")
