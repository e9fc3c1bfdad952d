"""One request of a gateway that asks where to send it: its `Process` stream of Envoy's ext_proc, as ASGI messages.

The gateway sends the request; the answer is an instance with the body for it, or a response of ours (`immediate_response`).
Where the gateway passes the instance's answer through here too (`response_body_mode: FULL_DUPLEX_STREAMED`), its bytes are
those of a `Connection`, and what the client gets is sent in their place. Otherwise the access log reports its end.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from controlplane.background import spawn
from controlplane.gateway.errors import ApiError
from controlplane.gateway.upstream.connections import Connection

DESTINATION, NAMESPACE = "x-gateway-destination-endpoint", "envoy.lb"
SUBSET, SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
"""Of the endpoint picker protocol: proposal 004 of the Gateway API Inference Extension."""
ID = "x-pilothouse-request"
"""Header of a request on its way to an instance, by which the access log names it."""
CHUNK_BYTES = 62_000
"""Largest piece of a body in one message: Envoy's flow control stalls at 64 KiB."""
KEYS = (b"authorization", b"x-api-key")
PASSED = ("content-type", "retry-after", "metadata")
FULL, BUFFERED, NONE = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE
MODES = ApiError(
    500,
    "The gateway must pass bodies of requests as BUFFERED or FULL_DUPLEX_STREAMED, and those of answers as NONE or"
    " FULL_DUPLEX_STREAMED.",
    code="gateway_misconfigured",
)

Headers = Iterable[tuple[bytes, bytes]]
current: ContextVar["Exchange"] = ContextVar("exchange")
"""The exchange whose request this task answers."""


class Exchange:
    """The request as ASGI's *scope*, `receive` and `send`; `outgoing` has messages for the gateway, None at their end.

    It is the transport of the connection to the instance, too: what is written there goes to the gateway.
    """

    def __init__(self) -> None:
        self.id = uuid4().hex
        self.scope: dict[str, Any] = {}
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.subset: frozenset[str] | None = None
        """Addresses that the gateway allows; None: all."""
        self.address = ""
        """Of the instance that gets the request."""
        self.carries_answers = False
        self.sent = False
        """The request went to an instance."""
        self.over = False
        """The gateway has its answer, or needs nothing more of us."""
        self.cut = False
        """The stream is to end in error."""
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._streamed = True  # the body comes in pieces, before its headers are answered
        self._has_trailers = False
        self._connection: Connection | None = None
        self._head: tuple[int, Headers] | None = None  # of the answer, until its first piece

    # From the gateway

    async def read(
        self, messages: AsyncIterable[Any], answer: Callable[["Exchange"], Coroutine[Any, Any, None]]
    ) -> None:
        """Take *messages* to their end; *answer* is the work that answers the request, once its headers are known."""
        async for message in messages:
            self.take(message)
            if message.HasField("request_headers") and not self.over:
                spawn(answer(self), "answer gateway")
        if not self.over:
            self.outgoing.put_nowait(None)

    def take(self, message: Any) -> None:
        """Act on the next message of the gateway, a `ProcessingRequest`."""
        match message.WhichOneof("request"):
            case "request_headers":
                self._begin(message)
            case "request_body":
                self._receive(message.request_body.body, more=not message.request_body.end_of_stream)
            case "request_trailers":
                self._has_trailers = True
                self._receive(b"", more=False)
            case "response_headers":
                self._answered(message.response_headers)
            case "response_body":
                self._pass(message.response_body.body, ends=message.response_body.end_of_stream)
            case "response_trailers":
                self._put(response_trailers=ext_proc.TrailersResponse())
                self._pass(b"", ends=True)

    def _begin(self, message: Any) -> None:
        headers = [(one.key.encode(), value_of(one)) for one in message.request_headers.headers.headers]
        pseudo = dict(headers)
        path, _, query = pseudo.get(b":path", b"/").partition(b"?")
        method, path = (text.decode("latin-1") for text in (pseudo.get(b":method", b"GET"), path))
        headers = [header for header in headers if not header[0].startswith(b":")]
        self.scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "query_string": query,
            "headers": headers,
        }
        hint = message.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
        if hint is not None and SUBSET in hint.fields:
            listed = [
                hint.fields[SUBSET].string_value,
                *(one.string_value for one in hint.fields[SUBSET].list_value.values),
            ]
            self.subset = frozenset(address.strip() for text in listed for address in text.split(","))
        if message.request_headers.end_of_stream:
            self._receive(b"", more=False)
            return
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._streamed = modes.request_body_mode == FULL
            self.carries_answers = modes.response_body_mode == FULL
            if modes.request_body_mode not in (FULL, BUFFERED) or modes.response_body_mode not in (FULL, NONE):
                self._immediate(MODES.status, MODES.headers(), MODES.body())
                return
        if not self._streamed:
            self._put(request_headers=ext_proc.HeadersResponse())

    def _receive(self, body: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def receive(self) -> dict[str, Any]:
        return await self._incoming.get()

    def left(self) -> None:
        """The stream has ended. The client has left, unless the gateway has its instance and passes the rest elsewhere."""
        if self.carries_answers or not self.sent or self.outgoing.qsize() > 1:  # more than the end of messages
            self._incoming.put_nowait({"type": "http.disconnect"})

    def _answered(self, answer: Any) -> None:
        """Give the head of an instance's answer to the connection."""
        if self._connection is None:
            self._put(response_headers=ext_proc.HeadersResponse())
            return
        headers = {one.key: value_of(one) for one in answer.headers.headers}
        lines = [b"HTTP/1.1 %b -" % headers[":status"], b"transfer-encoding: chunked"]
        lines += [b"%b: %b" % (name.encode(), headers[name]) for name in PASSED if name in headers]
        self._connection.data_received(b"\r\n".join(lines) + b"\r\n\r\n")
        if answer.end_of_stream:
            self._pass(b"", ends=True)

    def _pass(self, piece: bytes, *, ends: bool) -> None:
        if self._connection is not None:
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            self._connection.data_received(chunk + b"0\r\n\r\n" * ends)

    # To the instance: an asyncio transport, as far as a `Connection` uses one

    def connect(self) -> Connection:
        """Return a connection to the instance by way of the gateway."""
        self._connection = Connection(lambda connection: None)
        self._connection.connection_made(self)  # type: ignore[arg-type]
        return self._connection

    def write(self, data: bytes) -> None:
        self.writelines(data.partition(b"\r\n\r\n")[::2])

    def writelines(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send a request of HTTP/1.1, its head and the pieces of its body, to the instance at `address`."""
        self.sent, body = True, b"".join(pieces[1:])
        start, *lines = bytes(pieces[0]).strip().split(b"\r\n")
        headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
        del headers[b"host"]
        headers[b":path"] = start.split(b" ")[1]
        headers |= {DESTINATION.encode(): self.address.encode(), ID.encode(): self.id.encode()}
        response = ext_proc.CommonResponse(header_mutation=mutation(headers.items()), clear_route_cache=True)
        response.header_mutation.remove_headers.extend(
            name.decode() for name in KEYS if name not in headers
        )  # the tenant's
        if self._streamed:
            self._put(request_headers=ext_proc.HeadersResponse(response=response), destination=self.address)
            self._put_body("request_body", body, ends=not self._has_trailers)
        else:
            response.body_mutation.body = body
            self._put(request_body=ext_proc.BodyResponse(response=response), destination=self.address)
        if self._has_trailers:
            self._put(request_trailers=ext_proc.TrailersResponse())
        if not self.carries_answers:
            self._finish()

    def is_closing(self) -> bool:
        return self.over

    def abort(self) -> None:
        """Do nothing, as the next two: `close` cuts off what has no end, and bytes are taken as they come."""

    pause_reading = resume_reading = abort

    # To the client

    async def send(self, message: dict[str, Any]) -> None:
        """Send an ASGI message of the answer; ignored where the instance's goes to the client without us."""
        if self.over:
            return
        if message["type"] == "http.response.start":
            self._head = (message["status"], message["headers"])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._head is not None:
            (status, headers), self._head = self._head, None
            if status != 200 or self._connection is None or not self._connection.headers_received:
                self._immediate(status, headers, body)
                return
            head = ext_proc.CommonResponse(header_mutation=mutation(headers))
            self._put(response_headers=ext_proc.HeadersResponse(response=head))
        self._put_body("response_body", body, ends=not more)
        self.over = not more

    def close(self) -> None:
        """Have the stream end: in error, which ends the client's answer, if that was not complete."""
        if not self.over:
            self.cut = True
            self._finish()

    def _immediate(self, status: int, headers: Headers, body: bytes) -> None:
        answer = ext_proc.ImmediateResponse(headers=mutation(headers), body=body)
        answer.status.code = status
        self._put(immediate_response=answer)
        self._finish()

    def _finish(self) -> None:
        self.over = True
        self.outgoing.put_nowait(None)

    def _put(self, *, destination: str = "", **response: Any) -> None:
        message = ext_proc.ProcessingResponse(**response)
        if destination:
            message.dynamic_metadata.update({NAMESPACE: {DESTINATION: destination}})
        self.outgoing.put_nowait(message)

    def _put_body(self, kind: str, body: bytes, *, ends: bool) -> None:
        for at in range(0, max(1, len(body)), CHUNK_BYTES):
            end = at + CHUNK_BYTES
            piece = ext_proc.StreamedBodyResponse(body=body[at:end], end_of_stream=ends and end >= len(body))
            change = ext_proc.BodyMutation(streamed_response=piece)
            self._put(**{kind: ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=change))})


def value_of(header: Any) -> bytes:
    return bytes(header.raw_value or header.value.encode())


def mutation(headers: Headers) -> Any:
    """Return the change that sets *headers*."""
    replaces = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    options = [
        HeaderValueOption(header=HeaderValue(key=name.decode(), raw_value=value), append_action=replaces)
        for name, value in headers
    ]
    return ext_proc.HeaderMutation(set_headers=options)
