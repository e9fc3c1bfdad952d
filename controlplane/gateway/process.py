"""The gateway: tenants' OpenAI-compatible data path as a plain ASGI application, and what it keeps running beside it.

A request is authenticated, checked, predicted, queued, placed, carried, and written to the ledger; everything that it needs
is in memory. `start` and `stop` are called by the server's lifespan.
"""

import asyncio
import contextlib
import gc
import logging
import math
import re
import time
import uuid
from pathlib import Path
from typing import Any

import orjson
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.floor import floor
from controlplane.dispatch.floor.floor import Floor
from controlplane.dispatch.lease import RENEW_S, Lease
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Placed, Submit
from controlplane.gateway.admission.keys import Grant, Keys
from controlplane.gateway.admission.limits import Limits
from controlplane.gateway.admission.pace import Pace
from controlplane.gateway.admission.validation import Call, parse
from controlplane.gateway.errors import JSON_TYPE, ApiError, invalid, unavailable, unknown_model
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.lengths.service import LengthService
from controlplane.gateway.monitoring.parts import Parts
from controlplane.gateway.monitoring.summary import Publisher, Sources
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.serving.prefixes import leading_hashes
from controlplane.gateway.serving.ticket import Course, Interrupt, Ticket, TicketState
from controlplane.gateway.upstream.client import (
    PING,
    PING_S,
    SSE_TYPE,
    InstanceLost,
    Interrupted,
    RefusedByInstance,
    Responder,
    Upstream,
    Usage,
    payload,
    upstream_priority,
)
from controlplane.jobs import monitor
from controlplane.jobs.record import Job, Jobs
from forecasting.lengths import LengthPrior, OutputQuery
from scheduling.dispatch import warm_up
from scheduling.queueing.ordering import ORDERINGS

logger = logging.getLogger(__name__)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,80}")
NAME = re.compile(rb"[A-Za-z0-9._:/-]{1,80}")
DISCARD_BYTES = 2**26
COLLECT_AFTER = (50_000, 20, 50)  # allocations; a thousand streams hold so much that collecting often stalls the loop
COUNT_S = 0.1  # how often the arrays learn how far streams have come
SWEEP_S = 1.0
NOTE_USE_S = 30.0
STOPPING = unavailable("This server is stopping; try again.", code="stopping", retry_after_s=1)
# Which one serves is in /readyz: a tenant need not know the machines.
STANDING_BY = unavailable("This process is standing by; another serves.", code="standing_by", retry_after_s=1)


class Gateway:
    """*rows* are what the reactive floor changes rows by."""

    def __init__(self, rows: floor.Rows) -> None:
        loop_clock = time.monotonic  # the clock of asyncio's event loop
        self.clock = loop_clock
        self.jobs = jobs = Jobs()
        self.topology = Topology()
        self.keys = Keys(settings.KEY_CACHE_S)
        self.limits = Limits()
        self.prior = LengthPrior()
        self.ledger = Ledger(settings.LEDGER_FLUSH_S, Path(settings.STATE_DIR))
        self.ledger.job = jobs.add("flush-ledger", settings.LEDGER_FLUSH_S, "database")
        self.requests = OpenRequests(loop_clock)
        self.dispatcher = Dispatcher(
            self.topology, loop_clock, max_hold_s=settings.MAX_HOLD_S, deliver=self.requests.take
        )
        self.requests.connect(self.dispatcher.take)
        self.upstream = Upstream(
            self.requests, connect_s=settings.UPSTREAM_CONNECT_S, silence_s=settings.UPSTREAM_SILENCE_S
        )
        self.lengths = LengthService(self.prior, jobs)
        self.records = Records(self.ledger, self.lengths, loop_clock)
        self.lease = Lease(settings.REDIS_URL)
        self.lease.job = jobs.add("renew-lease", RENEW_S, "redis")
        self.heartbeats = Heartbeats(
            self.topology,
            self.lease,
            session=lambda: self.upstream.session,
            refresh=self.refresh_now,
            clock=loop_clock,
        )
        self.heartbeats.job = jobs.add("heartbeats", settings.HEARTBEAT_S, "database")
        self.pace = Pace()
        self.inventory_job = jobs.add("read-inventory", settings.FLEET_REFRESH_S, "database")
        self.parts = Parts(self)
        self.monitor = monitor.Monitor(jobs, self.parts, self.owns)
        self.publisher = Publisher(
            Sources(
                self.topology,
                self.dispatcher,
                self.records.windows,
                loop_clock,
                owner=self.lease.owner,
                lengths=self.lengths.snapshot,
                system=self.monitor.report,
            ),
            job=jobs.add("publish-summary", settings.SUMMARY_S, "redis"),
            owns=self.owns,
            refresh=self.refresh_now,
        )
        self.floor = Floor(
            self.topology,
            rows,
            waiting=self.dispatcher.waiting_at,
            outlook=self.dispatcher.outlook,
            owns=self.owns,
            read_inventory=self.read_inventory,
            clock=loop_clock,
            job=jobs.add("floor", floor.TURN_S),
        )
        self.dispatcher.on_submit = self.floor.arrived
        self.active = 0  # requests between arrival and answer
        self.stopping = False
        self.ready = False
        self._refresh = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        await asyncio.to_thread(warm_up)
        await asyncio.to_thread(floor.warm_up)
        await self.upstream.start()
        await self.ledger.start()
        await self.lengths.start()
        await self.lease.start()
        await self.read_inventory()
        await self.keys.refresh()
        for work in (
            self._every(self.jobs.add("count-tokens", COUNT_S), self._count),
            self._every(self.jobs.add("sweep-queues", SWEEP_S), self._sweep),
            self._every(self.jobs.add("refresh-keys", settings.KEY_CACHE_S, "database"), self.keys.refresh),
            self._every(self.jobs.add("note-key-use", NOTE_USE_S, "database"), self.keys.note_use),
            self._every(self.monitor.job, self.monitor.look),
            self._every(self.parts.job, self.parts.probe),
            self._keep_inventory(),
            self.heartbeats.run(),
            self.publisher.run(),
            self.floor.run(),
        ):
            self._tasks.append(asyncio.create_task(work))
        # What is loaded by now stays: without this, each full collection walks half a million objects (100 ms).
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        self.ready = True
        monitor.current = self.monitor

    async def stop(self) -> None:
        """The server has let its streams finish (or cut them); write what is left and let go."""
        self.stopping = True
        if monitor.current is self.monitor:
            monitor.current = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ledger.stop()
        await self.lengths.stop()
        with contextlib.suppress(Exception):
            await self.keys.note_use()
        await self.floor.stop()
        await self.publisher.stop()
        await self.lease.stop()
        await self.upstream.stop()
        gc.unfreeze()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    async def _count(self) -> None:
        self.requests.report()
        if self.topology.changed.is_set():
            self.topology.changed.clear()
            self.dispatcher.pump_all()

    async def _sweep(self) -> None:
        self.dispatcher.sweep()

    def owns(self) -> bool:
        """Whether this process has the regions."""
        return self.lease.held

    def refresh_now(self) -> None:
        """Read the inventory again without waiting for the next turn."""
        self._refresh.set()

    async def _keep_inventory(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refresh.wait(), settings.FLEET_REFRESH_S)
            self._refresh.clear()
            with self.inventory_job:
                await self.read_inventory()

    async def read_inventory(self) -> None:
        """Let the live picture agree with the rows. Raises what the database raises; the picture stays as it was then."""
        self.topology.apply(await database_sync_to_async(inventory.read)())

    # Requests

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        responder = Responder(send, request_id)
        self.active += 1
        try:
            await self._route(scope, headers, receive, responder, request_id)
        except ApiError as error:
            self.records.count_error(error)
            await responder.error(error)
        except Exception:
            logger.exception("gateway: request %s failed", request_id)
            failure = ApiError(500, "Something failed on our side.", type="server_error", code="internal_error")
            self.records.count_error(failure)
            await responder.error(failure)
        finally:
            self.active -= 1

    async def _route(
        self, scope: dict[str, Any], headers: dict[bytes, bytes], receive: Any, responder: Responder, request_id: str
    ) -> None:
        if self.stopping:
            raise STOPPING
        path, method = scope["path"], scope["method"]
        if path in (CHAT, COMPLETIONS):
            _require(method, "POST", path)
            grant = await self.keys.check(headers.get(b"authorization"))
            if not self.lease.held:
                raise STANDING_BY
            turn = self.pace.enter()
            if turn is not None:
                await turn
            raw = await _body(headers, receive, settings.MAX_BODY_BYTES)
            await self._complete(grant, raw, headers, receive, responder, request_id, chat=path == CHAT)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            _require(method, "GET", path)
            await self.keys.check(headers.get(b"authorization"))
            await responder.whole(200, JSON_TYPE[1], self._models(path.removeprefix("/v1/models").strip("/")))
        elif path == "/v1/embeddings":
            await self.keys.check(headers.get(b"authorization"))
            raise ApiError(
                404,
                "Embeddings are not served here: Pilothouse schedules text generation. "
                "Use /v1/chat/completions or /v1/completions.",
                code="unsupported_endpoint",
            )
        else:
            raise ApiError(404, f"There is no {method} {path} here.", code="unknown_url")

    def _models(self, name: str) -> bytes:
        def card(model: inventory.ModelSpec) -> dict[str, object]:
            return {
                "id": model.name,
                "object": "model",
                "created": model.created_at,
                "owned_by": "pilothouse",
                "max_model_len": model.context_tokens,
            }

        served = {endpoint.model for endpoint in self.topology.endpoints}
        models = {key: model for key, model in sorted(self.topology.models.items()) if key in served}
        if not name:
            return orjson.dumps({"object": "list", "data": [card(model) for model in models.values()]})
        if name not in models:
            raise unknown_model(name)
        return orjson.dumps(card(models[name]))

    async def _complete(
        self,
        grant: Grant,
        raw: bytes,
        headers: dict[bytes, bytes],
        receive: Any,
        responder: Responder,
        request_id: str,
        *,
        chat: bool,
    ) -> None:
        call = parse(raw, chat=chat, max_depth=settings.MAX_JSON_DEPTH)
        if call.model not in self.topology.models:
            raise unknown_model(call.model)
        terms = grant.choose(_text(headers, b"x-slo-class"), call.body.get("service_tier"), self.keys.known_classes)
        ticket = await self._ticket(grant, terms, call, headers, request_id)
        predicted = ticket.asked.prompt_tokens + int(ticket.asked.predicted_tokens)
        self.records.arrived(call.model)
        try:
            self.limits.enter(
                grant.tenant_id,
                ticket.asked.arrived_s,
                max_concurrent=grant.max_concurrent_requests,
                tokens_per_minute=grant.tokens_per_minute,
                tokens=predicted,
            )
        except ApiError as error:
            ticket.course.fail(error)
            ticket.course.move(TicketState.REJECTED)
            self.records.close(ticket, error.status)
            raise
        watcher = asyncio.create_task(_watch(receive, ticket))
        try:
            await self._serve(ticket, raw, responder, chat=chat)
        finally:
            watcher.cancel()
            self.requests.leave(ticket)
            self.limits.leave(
                grant.tenant_id,
                tokens_per_minute=grant.tokens_per_minute,
                predicted=predicted,
                used=self.records.close(ticket, responder.status),
            )

    async def _ticket(
        self, grant: Grant, terms: Any, call: Call, headers: dict[bytes, bytes], request_id: str
    ) -> Ticket:
        query = OutputQuery(
            model=call.model,
            tenant=grant.tenant,
            slo_class=terms.name,
            max_tokens=call.max_tokens,
            min_tokens=call.min_tokens,
            ignore_eos=call.ignore_eos,
            sequences=call.sequences,
        )
        prompt_tokens = call.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = self.prior.prompt_tokens(call.model, call.prompt_characters)
        arrived_at, arrived_s = time.time(), self.clock()
        length = await self.lengths.predict(call, grant.tenant, query, prompt_tokens)
        hashes: list[int] = []
        block_tokens = 0
        if call.model in self.topology.by_prefix:
            hashes, block_tokens = leading_hashes(call, prompt_tokens)
        asked = Submit(
            number=self.requests.next_number(),
            request_id=request_id,
            model=call.model,
            region=_text(headers, b"x-region") or "",
            tenant_id=grant.tenant_id,
            priority=terms.priority,
            due_s=terms.due_s if math.isfinite(terms.due_s) else None,
            arrived_at=arrived_at,
            arrived_s=arrived_s,
            prompt_tokens=prompt_tokens,
            predicted_tokens=length.tokens,
            max_tokens=call.max_tokens,
            sequences=call.sequences,
            streamed=call.stream,
            prefix_hashes=tuple(hashes),
            block_tokens=block_tokens,
        )
        return Ticket(
            asked=asked,
            grant=grant,
            terms=terms,
            call=call,
            query=query,
            course=Course(prompt_tokens, length.tokens),
            length=length,
            application=_text(headers, b"x-application") or "",
            run=_text(headers, b"x-run") or "",
            unit=_text(headers, b"x-unit") or "",
            task=asyncio.current_task(),
        )

    async def _serve(self, ticket: Ticket, raw: bytes, responder: Responder, *, chat: bool) -> None:
        """Queue, place and carry *ticket*, on another instance when one is lost, and bring it to its end."""
        course, asked = ticket.course, ticket.call.body.get("priority")
        try:
            self.requests.submit(ticket)
            while True:
                placed = await self._placement(ticket, responder)
                ordering = ORDERINGS[placed.ordering]
                priority = upstream_priority(ordering, ticket.terms.priority, asked, placed.turn_s)
                body = payload(ticket.call, raw, priority)
                try:
                    usage = await self.upstream.carry(ticket, placed, body, responder, chat=chat)
                    break
                except InstanceLost as lost:
                    self.requests.place_again(ticket, str(lost), lost.found)
            self._settle_usage(ticket, usage)
            course.move(TicketState.DONE)
        except RefusedByInstance as refused:
            course.fail(refused)
            course.move(TicketState.FAILED)
        except ApiError as error:
            if isinstance(error, Interrupted):
                self.requests.leave(ticket, error.found)
            course.fail(error)
            course.move(TicketState.REJECTED if course.state <= TicketState.WAITING else TicketState.FAILED)
            raise
        except asyncio.CancelledError:
            # Not raised again: the request ends here, and the server would log each one as a failure of the application.
            if ticket.task is not None:
                ticket.task.uncancel()
            if ticket.interrupted is Interrupt.DISCONNECT:
                course.error_code = "client_disconnected"
                course.move(TicketState.CANCELLED)
            else:  # the server is stopping and has waited long enough
                course.fail(STOPPING)
                course.move(TicketState.FAILED)
                with contextlib.suppress(Exception):
                    await responder.error(STOPPING)
        except Exception:
            course.error_code, course.status = "internal_error", 500
            course.move(TicketState.FAILED)
            raise

    async def _placement(self, ticket: Ticket, responder: Responder) -> Placed:
        """Wait for an instance; a waiting stream is kept alive with comment lines, which every SSE client skips."""
        placement = ticket.placement
        assert placement is not None
        if not ticket.call.stream or placement.done():
            return await placement
        while True:
            done, _ = await asyncio.wait({placement}, timeout=PING_S)
            if done:
                return placement.result()
            if not responder.started:
                await responder.start(200, SSE_TYPE, stream=True)
            await responder.write(PING)

    def _settle_usage(self, ticket: Ticket, usage: Usage) -> None:
        if usage.output_tokens is not None:
            ticket.course.output_tokens = usage.output_tokens
        self.requests.finished(ticket)
        if usage.prompt_tokens is not None:
            ticket.course.prompt_tokens = usage.prompt_tokens


async def _watch(receive: Any, ticket: Ticket) -> None:
    """Interrupt *ticket* when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.interrupt(Interrupt.DISCONNECT)


def _require(method: str, wanted: str, path: str) -> None:
    if method != wanted:
        raise ApiError(
            405,
            f"{path} takes {wanted}, not {method}.",
            code="method_not_allowed",
            headers=((b"allow", wanted.encode()),),
        )


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    """A header that names something (class, region, application). Raises ApiError 400 if it cannot be a name."""
    value = headers.get(name)
    if not value:
        return None
    if not NAME.fullmatch(value):
        title = name.decode().title().replace("Slo", "SLO")
        raise invalid(f"The header {title} must be 1 to 80 letters, digits or . _ : / -", title)
    return value.decode()


async def _body(headers: dict[bytes, bytes], receive: Any, most: int) -> bytes:
    """The request body. Raises ApiError 413 when it is larger than *most* bytes.

    What is too much is read and thrown away, up to `DISCARD_BYTES`: a client that is still sending when the connection
    closes sees a reset instead of our answer.
    """
    chunks: list[bytes] = []
    size = 0
    announced = int(headers.get(b"content-length", b"0"))
    while announced <= DISCARD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "The client went away.", code="client_disconnected")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= most and announced <= most:
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        elif size > DISCARD_BYTES or not message.get("more_body"):
            break
    raise ApiError(
        413,
        f"The request body is larger than {most} bytes.",
        code="request_too_large",
        headers=((b"connection", b"close"),),
    )
