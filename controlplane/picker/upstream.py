"""Instances as a gateway reaches them: it carries the bytes to the instance that we choose.

An answer that the gateway passes through this process is carried as any other (`gateway.upstream.client`), over a connection
that is the gateway's stream. Of any other answer its access log reports status, first token and usage.
"""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from controlplane.dispatch.port import CUT, ERROR, NOT_ALLOWED, SILENT, Placed
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.progress import Interrupt, Progress
from controlplane.gateway.serving.http import PING_S, Responder
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.adapters import AdapterUnavailable
from controlplane.gateway.upstream.bodies import body_for
from controlplane.gateway.upstream.client import Upstream, head_of
from controlplane.gateway.upstream.connections import Connection, Connections, Origin
from controlplane.picker.exchange import ID, Exchange, current

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


@dataclass(eq=False)
class Logged:
    """What the access log has reported of a request so far; *end* resolves to its last entry."""

    progress: Progress
    end: asyncio.Future[Any]
    heard_s: float
    usage: answers.Usage = field(default_factory=answers.Usage)


class Picked(Upstream):
    """Has the adapters and ownership of *upstream*, that of the process."""

    def __init__(self, upstream: Upstream) -> None:
        connect_s = upstream.connections.connect_s
        super().__init__(upstream.requests, connect_s=connect_s, silence_s=upstream.silence_s)
        self.adapters, self.owns, self.connections = upstream.adapters, upstream.owns, ByGateway(connect_s)
        self._logged: dict[str, Logged] = {}

    async def carry(self, progress: Progress, placed: Placed, responder: Responder) -> answers.Usage:
        """As `Upstream.carry`. What fails once the gateway has the instance is Interrupted: it asks only once."""
        exchange, origin = current.get(), self._origin(placed.instance, placed.ready_at, placed.url)
        exchange.address = await _address(origin)
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
        call, clock = progress.call, self.requests.clock
        if call.stream and call.kind in (Kind.CHAT, Kind.COMPLETION):  # in each event: the client may leave at any time
            options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            call = structs.replace(call, body=call.body | options, include_usage=True, renamed=True)
        body = body_for(call, placed, None)
        logged = Logged(progress, asyncio.get_running_loop().create_future(), clock())
        usage, self._logged[exchange.id] = logged.usage, logged
        took_none = False
        try:
            exchange.writelines((head_of(progress, placed, origin, call.kind, sum(map(len, body))), *body))
            entry = await self._ended(logged)
            common, status = entry.common_properties, entry.response.response_code.value
            responder.status = status
            took_none = status not in (0, 200, 500) and not usage.output_tokens
            if common.response_flags.downstream_connection_termination or common.response_flags.downstream_remote_reset:
                progress.interrupted = Interrupt.DISCONNECT
                raise asyncio.CancelledError
            reason = f"answered with {status}: {entry.response.response_code_details}"
            if entry.response.response_code_details != "via_upstream":  # of the gateway, or broken off
                failure = CUT if common.HasField("time_to_first_upstream_rx_byte") else SILENT
                raise answers.InstanceLost(f"{placed.instance}: {reason}", failure)
            if status in answers.BUSY_STATUSES:
                raise answers.InstanceLost(f"{placed.instance}: {reason}", ERROR)
            if status != 200:
                raise answers.RefusedByInstance(status)
        finally:
            del self._logged[exchange.id]
            progress.output_tokens = usage.output_tokens or 0
            if call.kind.computes and not took_none:
                progress.note_work(clock(), usage)
        if not progress.asked.streamed:
            self.requests.answered_whole(progress, None if call.kind.generates else clock() - placed.placed_s)
        elif not progress.first_token_s:
            self.requests.began(progress)
            progress.first_token_heard = False
        return usage

    async def _ended(self, logged: Logged) -> Any:
        """Return the last entry of a request: nothing else ends what its gateway has."""
        progress = logged.progress
        while not logged.end.done():
            try:
                await asyncio.wait({logged.end}, timeout=LOG_SILENCE_S)
            except asyncio.CancelledError:
                why = progress.interrupted
                if progress.task is None or why is None or why is Interrupt.DISCONNECT:  # before the gateway had it
                    raise
                progress.task.uncancel()
                progress.interrupted = None
                if why is Interrupt.INSTANCE_LOST:
                    raise answers.InstanceLost(why.value) from None
                # A key that ended, a run that was stopped: the bytes pass nevertheless, and are paid.
            if not logged.end.done() and self.requests.clock() - logged.heard_s >= LOG_SILENCE_S:
                raise answers.InstanceLost(f"the access log of its gateway has not named it for {LOG_SILENCE_S:g} s")
        return logged.end.result()

    def log(self, entry: Any) -> None:
        """Take in an *entry* of the gateway's access log, an `HTTPAccessLogEntry`."""
        logged = self._logged.get(entry.request.request_headers.get(ID, ""))
        if logged is None:
            return
        progress, common, logged.heard_s = logged.progress, entry.common_properties, self.requests.clock()
        if USAGE in common.metadata.filter_metadata:
            fields = common.metadata.filter_metadata[USAGE].fields
            counts = {name: int(value.number_value) for name, value in fields.items()}
            logged.usage.update(counts | {"prompt_tokens_details": counts})
            progress.output_tokens = logged.usage.output_tokens or 0
        first_us = common.custom_tags.get(FIRST_TOKEN, "")
        if first_us.isdigit() and progress.asked.streamed and not progress.first_token_s:
            arrived_s = logged.heard_s - common.duration.ToNanoseconds() / 1e9
            progress.first_token_s = arrived_s + int(first_us) / 1e6
            self.requests.began(progress)
        if not common.intermediate_log_entry and not logged.end.done():
            logged.end.set_result(entry)


async def _address(origin: Origin) -> str:
    """Return the address and port of *origin*. Raises InstanceLost where its name is not known."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise answers.InstanceLost(f"no address of {origin.host}: {error}", SILENT) from error
    host, port = str(found[0][4][0]), found[0][4][1]
    return f"[{host}]:{port}" if found[0][0] == socket.AF_INET6 else f"{host}:{port}"
