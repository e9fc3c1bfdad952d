"""The endpoint picker: a gRPC server that a gateway asks which instance each request goes to.

It speaks Envoy's ext_proc as proposal 004 of the Gateway API Inference Extension does, answers gRPC health checks, and reads
the gateway's access log. Requests are checked, limited, predicted, queued and placed as those of HTTP are, and each gets a
ledger row.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.background import spawn
from controlplane.gateway.process import Gateway
from controlplane.gateway.serving.application import Application
from controlplane.gateway.serving.http import HttpRequest
from controlplane.picker.exchange import Exchange, current
from controlplane.picker.upstream import GatewayResponder, Picked
from controlplane.planning.execution.loop import ScalingLoop

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
MAX_MESSAGE_BYTES = 2**28
STOP_S = 1.0

logger = logging.getLogger(__name__)


class Picker(
    external_processor_pb2_grpc.ExternalProcessorServicer,
    als_pb2_grpc.AccessLogServiceServicer,
    health_pb2_grpc.HealthServicer,
):
    """The gRPC services around the requests of *gateway*, a process of ours that has started."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.upstream = Picked(gateway.upstream)
        completions = dataclasses.replace(gateway.http.completions, upstream=self.upstream)
        self.application = Application(completions)
        self.server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, self.server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self.server)

    async def start(self, address: str) -> int:
        """Listen at *address*; return the port."""
        port = self.server.add_insecure_port(address)
        await self.server.start()
        logger.info("picker: listens at %s", address)
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Accept no more requests, and wait at most *grace_s* for open ones: the access log reports their ends."""
        self.application.stopping = True
        self.gateway.step_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.application.active:  # noqa: ASYNC110 (of any request)
                    await asyncio.sleep(0.05)
        await self.server.stop(STOP_S)

    # Services

    async def Process(self, messages: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer one HTTP request. A stream that the gateway cancels is of a client that left."""
        exchange = Exchange()
        reading = spawn(exchange.read(messages, self._answer), "read from gateway")
        try:
            while (message := await exchange.outgoing.get()) is not None:
                yield message
            if exchange.cut:
                await context.abort(grpc.StatusCode.ABORTED, "the answer was given up")
        finally:
            reading.cancel()
            exchange.left()

    async def _answer(self, exchange: Exchange) -> None:
        current.set(exchange)
        request = HttpRequest.of(exchange.scope, exchange.receive)
        responder = GatewayResponder(exchange.send, request.request_id)
        try:
            await self.application.answer(request, responder)
        finally:
            exchange.close()

    async def StreamAccessLogs(self, messages: AsyncIterable[Any], context: Any) -> Any:  # noqa: N802
        async for message in messages:
            for entry in message.http_logs.log_entry:
                self.upstream.log(entry)
        return als_pb2.StreamAccessLogsResponse()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service}")
        gateway = self.gateway
        serves = gateway.ready and not self.application.stopping and gateway.owns()
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if serves else states.NOT_SERVING)


async def serve(address: str, grace_s: float) -> None:
    """Run a process that answers gateways at *address* until it is to stop; then open requests have *grace_s*."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    gateway = Gateway(ScalingLoop)
    await gateway.start()
    try:
        picker = Picker(gateway)
        await picker.start(address)
        await stopped.wait()
        await picker.stop(grace_s)
    finally:
        await gateway.stop()
