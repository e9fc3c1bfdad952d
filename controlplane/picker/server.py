"""The endpoint picker: a gRPC server that a gateway asks which instance each request goes to.

It speaks Envoy's ext_proc as proposal 004 of the Gateway API Inference Extension does. Requests are checked, limited, queued
and placed as those of HTTP are, and have ledger rows. The gateway carries their bytes. An answer that it passes through here
is read as any other (`gateway.upstream.client`); of the rest its access log reports status, times and usage.
"""

import asyncio
import dataclasses
import logging
import signal
import socket
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import structs

from controlplane.background import spawn
from controlplane.dispatch.lease import BATCHES
from controlplane.dispatch.port import CUT, ERROR, NOT_ALLOWED, SILENT, Placed
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import STANDING_BY
from controlplane.gateway.process import Gateway
from controlplane.gateway.progress import Interrupt, Progress
from controlplane.gateway.serving.application import Application
from controlplane.gateway.serving.http import PING_S, HttpRequest, Responder
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.adapters import AdapterUnavailable
from controlplane.gateway.upstream.bodies import body_for
from controlplane.gateway.upstream.client import Upstream, head_of
from controlplane.gateway.upstream.connections import Connection, Connections, Origin
from controlplane.picker.exchange import ID, Exchange, current
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.usage.run_terms import RunTermsReader

USAGE, FIRST_TOKEN = "usage", "first_token_us"
"""Of the access log: namespace of the metadata with the fields of an answer's `usage`, and the custom tag with the time from
the arrival of a request to the first byte of its answer's body."""
LOG_SILENCE_S = 60.0
"""A request that the access log has not named for this long is given up: its gateway has ended, or logs nothing here."""


class GatewayResponder(Responder):
    """An answer through the gateway, which can send nothing before the instance does."""

    @property
    def ping_in_s(self) -> float:
        return super().ping_in_s if self.started else PING_S

    async def ping_if_silent(self) -> None:
        if self.started:
            await super().ping_if_silent()


class ByGateway(Connections):
    """Gives each request the connection that its gateway makes."""

    async def get(self, origin: Origin) -> Connection:
        return current.get().connect()


class Picked(Upstream):
    """Instances as gateways reach them, with the adapters of *upstream*, that of the process."""

    def __init__(self, upstream: Upstream) -> None:
        connect_s = upstream.connections.connect_s
        super().__init__(upstream.requests, connect_s=connect_s, silence_s=upstream.silence_s)
        self.adapters, self.owns, self.connections = upstream.adapters, upstream.owns, ByGateway(connect_s)
        self.entries: dict[str, asyncio.Queue[Any]] = {}
        """Of the access log, by the id of the exchange of an open request."""

    async def carry(self, progress: Progress, placed: Placed, responder: Responder) -> answers.Usage:
        """As `Upstream.carry`. What fails once the gateway has the instance is Interrupted: it asks only once."""
        exchange, origin = current.get(), self._origin(placed.instance, placed.ready_at, placed.url)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise answers.InstanceLost(f"no address of {origin.host}: {error}", SILENT) from error
        host = found[0][4][0]
        exchange.address = f"[{host}]:{origin.port}" if found[0][0] == socket.AF_INET6 else f"{host!s}:{origin.port}"
        if exchange.subset is not None and exchange.address not in exchange.subset:
            raise answers.InstanceLost("its gateway does not allow this instance", NOT_ALLOWED)
        try:
            if exchange.carries_answers:
                return await super().carry(progress, structs.replace(placed, keep_tokens=False), responder)
            return await self._carry_by_log(progress, placed, exchange, origin, responder)
        except answers.InstanceLost as lost:
            if not exchange.sent:
                raise
            progress.steps[-1]["lost"] = str(lost)
            raise answers.Interrupted(lost.failure, str(lost), code="upstream_failed") from lost
        except AdapterUnavailable as error:
            progress.adapter_failed = True
            progress.steps[-1]["lost"] = f"{placed.instance}: {error.message}"
            raise

    async def _carry_by_log(
        self, progress: Progress, placed: Placed, exchange: Exchange, origin: Origin, responder: Responder
    ) -> answers.Usage:
        """Send the request, and wait for its last entry in the access log."""
        if placed.adapter:
            await self.adapters.ready(placed)
        if not self.owns():
            raise STANDING_BY
        call, clock = progress.call, self.requests.clock
        if call.stream and call.kind in (Kind.CHAT, Kind.COMPLETION):  # in each event: the client may leave at any time
            options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            call = structs.replace(call, body=call.body | options, include_usage=True, renamed=True)
        body, usage, took_none = body_for(call, placed, None), answers.Usage(), False
        entries = self.entries[exchange.id] = asyncio.Queue()
        try:
            exchange.writelines((head_of(progress, placed, origin, call.kind, sum(map(len, body))), *body))
            is_open = True
            while is_open:
                entry = await _next(progress, entries)
                common, is_open = entry.common_properties, entry.common_properties.intermediate_log_entry
                if USAGE in common.metadata.filter_metadata:
                    fields = common.metadata.filter_metadata[USAGE].fields
                    counts = {name: int(value.number_value) for name, value in fields.items()}
                    usage.update(counts | {"prompt_tokens_details": counts})
                    progress.output_tokens = usage.output_tokens or 0
                first_us = common.custom_tags.get(FIRST_TOKEN, "")
                if first_us.isdigit() and progress.asked.streamed:
                    took_s, has_begun = common.duration.ToNanoseconds() / 1e9, bool(progress.first_token_s)
                    progress.first_token_s = min(clock(), clock() - took_s + int(first_us) / 1e6)
                    if not has_begun:
                        self.requests.began(progress)
            responder.status = status = entry.response.response_code.value
            took_none = status not in (0, 200, 500) and not usage.output_tokens
            if common.response_flags.downstream_connection_termination or common.response_flags.downstream_remote_reset:
                progress.interrupted = Interrupt.DISCONNECT
                raise asyncio.CancelledError
            details = entry.response.response_code_details
            reason = f"{placed.instance}: answered with {status}, {details}"
            if details != "via_upstream":  # of the gateway, or broken off
                raise answers.InstanceLost(reason, CUT if common.HasField("time_to_first_upstream_rx_byte") else SILENT)
            if status in answers.BUSY_STATUSES:
                raise answers.InstanceLost(reason, ERROR)
            if status != 200:
                raise answers.RefusedByInstance(status)
        finally:
            del self.entries[exchange.id]
            progress.output_tokens = usage.output_tokens or 0
            if call.kind.computes and not took_none:
                progress.note_work(clock(), usage)
        if not progress.asked.streamed:
            self.requests.answered_whole(progress, None if call.kind.generates else clock() - placed.placed_s)
        elif not progress.first_token_s:
            self.requests.began(progress)
            progress.first_token_heard = False
        return usage


async def _next(progress: Progress, entries: asyncio.Queue[Any]) -> Any:
    """Return the next entry of a request that its gateway has: nothing else ends it."""
    while True:
        try:
            async with asyncio.timeout(LOG_SILENCE_S):
                return await entries.get()
        except TimeoutError:
            raise answers.InstanceLost(f"the access log does not name it for {LOG_SILENCE_S:g} s") from None
        except asyncio.CancelledError:
            why = progress.interrupted
            if progress.task is None or why is None or why is Interrupt.DISCONNECT:  # before the gateway had it
                raise
            progress.task.uncancel()
            progress.interrupted = None
            if why is Interrupt.INSTANCE_LOST:
                raise answers.InstanceLost(why.value) from None
            # A key that ended, a run that was stopped: the bytes pass nevertheless, and are paid.


class Picker(ext_proc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer, health_pb2_grpc.HealthServicer):
    """The gRPC services around the requests of *gateway*, a process of ours that has started."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.upstream = Picked(gateway.upstream)
        self.application = Application(dataclasses.replace(gateway.http.completions, upstream=self.upstream))
        self.server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2**28)])
        ext_proc.add_ExternalProcessorServicer_to_server(self, self.server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self.server)

    async def start(self, address: str) -> int:
        """Listen at *address*; return the port."""
        port = self.server.add_insecure_port(address)
        await self.server.start()
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Accept no more requests, and wait at most *grace_s* for open ones: the access log reports their ends."""
        self.application.stopping = True
        self.gateway.step_down()
        end_s = self.gateway.clock() + grace_s
        while self.application.active and self.gateway.clock() < end_s:  # noqa: ASYNC110 (of any request)
            await asyncio.sleep(0.05)
        await self.server.stop(1.0)

    async def Process(self, messages: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer one HTTP request. A stream that the gateway cancels is of a client that left."""
        exchange = Exchange()
        reading = spawn(self._read(messages, exchange), "read from gateway")
        try:
            while (message := await exchange.outgoing.get()) is not None:
                yield message
            if exchange.cut:
                await context.abort(grpc.StatusCode.ABORTED, "the answer was given up")
        finally:
            reading.cancel()
            exchange.left()

    async def _read(self, messages: AsyncIterable[Any], exchange: Exchange) -> None:
        try:
            async for message in messages:
                exchange.take(message)
                if message.HasField("request_headers") and not exchange.over:
                    spawn(self._answer(exchange), "answer gateway")
        finally:  # without an answer the gateway would go on with an address of the client's
            exchange.close()

    async def _answer(self, exchange: Exchange) -> None:
        current.set(exchange)
        request = HttpRequest.of(exchange.scope, exchange.receive)
        try:
            await self.application.answer(request, GatewayResponder(exchange.send, request.request_id))
        finally:
            exchange.close()

    async def StreamAccessLogs(self, messages: AsyncIterable[Any], context: Any) -> Any:  # noqa: N802
        async for message in messages:
            for entry in message.http_logs.log_entry:
                if (entries := self.upstream.entries.get(entry.request.request_headers.get(ID, ""))) is not None:
                    entries.put_nowait(entry)
        return als_pb2.StreamAccessLogsResponse()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        serves = self.gateway.ready and not self.application.stopping and self.gateway.serves()
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if serves else states.NOT_SERVING)


async def serve(address: str, part: str, grace_s: float) -> None:
    """Run a process of *part* that answers gateways at *address* until it is to stop; open requests have *grace_s* then."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    gateway = Gateway(ScalingLoop, part)
    if gateway.dispatching is not None:
        gateway.dispatching.allowances.runs.load = RunTermsReader()
    gateway.lease.wants = {role: wait_s for role, wait_s in gateway.lease.wants.items() if role != BATCHES}
    await gateway.start()
    try:
        picker = Picker(gateway)
        await picker.start(address)
        logging.getLogger(__name__).info("picker: listens at %s", address)
        await stopped.wait()
        await picker.stop(grace_s)
    finally:
        await gateway.stop()
