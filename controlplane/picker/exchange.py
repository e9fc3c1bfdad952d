"""One request of a gateway that asks where to send it: its `Process` stream of Envoy's ext_proc, as ASGI messages.

The answer is an instance and the body for it, or a response of ours. Where the gateway passes the instance's answer
through here (`response_body_mode: FULL_DUPLEX_STREAMED`), its bytes are those of a `Connection`, and what the client gets is
sent in their place. Otherwise the access log reports its end.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from controlplane.gateway.errors import ApiError
from controlplane.gateway.upstream.connections import Connection

DESTINATION, NAMESPACE = "x-gateway-destination-endpoint", "envoy.lb"
SUBSET, SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
"""Of the endpoint picker protocol: proposal 004 of the Gateway API Inference Extension."""
ID = "x-pilothouse-request"
"""Header of a request on its way to an instance, by which the access log names it."""
CHUNK_BYTES = 62_000  # of a body in one message: Envoy's flow control stalls at 64 KiB
PASSED = ("content-type", "retry-after", "metadata")
FULL, BUFFERED, NONE = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE
MODES = "Bodies of requests must be FULL_DUPLEX_STREAMED or BUFFERED, those of answers FULL_DUPLEX_STREAMED or NONE."

Headers = Iterable[tuple[bytes, bytes]]
current: ContextVar["Exchange"] = ContextVar("exchange")
"""The exchange whose request this task answers."""


class Exchange:
    """The request as ASGI's *scope*, `receive` and `send`, and the transport of the connection to its instance."""

    def __init__(self) -> None:
        self.id = uuid4().hex
        self.scope: dict[str, Any] = {}
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()  # messages for the gateway, None at their end
        self.subset: frozenset[str] | None = None  # addresses that the gateway allows; None: all
        self.address = ""  # of the instance that gets the request
        self.sent = False  # the request went there
        self.carries_answers = False
        self.over = False  # the gateway has its answer, or needs nothing more of us
        self.cut = False  # the stream is to end in error
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.receive = self._incoming.get
        self._streamed = True  # the body comes in pieces, before its headers are answered
        self._has_trailers = False
        self._connection: Connection | None = None
        self._head: tuple[int, Headers] | None = None  # of the answer, until its first piece

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
                self._hear(head_of_answer(message.response_headers), ends=message.response_headers.end_of_stream)
            case "response_body":
                body = message.response_body.body
                self._hear(
                    b"%x\r\n%b\r\n" % (len(body), body) if body else b"", ends=message.response_body.end_of_stream
                )
            case "response_trailers":
                self._put(response_trailers=ext_proc.TrailersResponse())
                self._hear(b"", ends=True)

    def _begin(self, message: Any) -> None:
        given = [(one.key.encode(), value_of(one)) for one in message.request_headers.headers.headers]
        pseudo = {name.decode(): value.decode("latin-1") for name, value in given if name.startswith(b":")}
        path = unquote(pseudo[":path"].partition("?")[0])
        headers = [header for header in given if not header[0].startswith(b":")]
        self.scope = {"type": "http", "method": pseudo[":method"], "path": path, "headers": headers}
        hints = message.metadata_context.filter_metadata
        if SUBSET_NAMESPACE in hints and SUBSET in hints[SUBSET_NAMESPACE].fields:
            value = hints[SUBSET_NAMESPACE].fields[SUBSET]
            listed = ",".join([value.string_value, *(one.string_value for one in value.list_value.values)])
            self.subset = frozenset(map(str.strip, listed.split(",")))
        if message.request_headers.end_of_stream:
            self._receive(b"", more=False)
            return
        if message.HasField("protocol_config"):
            request, response = message.protocol_config.request_body_mode, message.protocol_config.response_body_mode
            self._streamed, self.carries_answers = request == FULL, response == FULL
            if request not in (FULL, BUFFERED) or response not in (FULL, NONE):
                error = ApiError(500, MODES, code="gateway_misconfigured")
                self._immediate(error.status, error.headers(), error.body())
                return
        if not self._streamed:
            self._put(request_headers=ext_proc.HeadersResponse())

    def _receive(self, body: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def _hear(self, data: bytes, *, ends: bool) -> None:
        if self._connection is not None:
            self._connection.data_received(data + b"0\r\n\r\n" * ends)

    def left(self) -> None:
        """The stream has ended. The client has left, unless the gateway has its instance and passes the rest elsewhere."""
        if self.carries_answers or not self.sent or self.outgoing.qsize() > 1:  # more than the end of messages
            self._incoming.put_nowait({"type": "http.disconnect"})

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
        headers |= {b":path": start.split(b" ")[1], DESTINATION.encode(): self.address.encode()}
        headers[ID.encode()] = self.id.encode()
        response = ext_proc.CommonResponse(header_mutation=mutation(headers.items()), clear_route_cache=True)
        tenants = {"authorization", "x-api-key"} - {name.decode() for name in headers}
        response.header_mutation.remove_headers.extend(sorted(tenants))
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
        """Return whether nothing more can be sent, as do the next ones, which leave all else to `close`."""
        return self.over

    abort = pause_reading = resume_reading = is_closing

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


def head_of_answer(answer: Any) -> bytes:
    """Return the head of an instance's answer in HTTP/1.1, as far as it is read."""
    headers = {one.key: value_of(one) for one in answer.headers.headers}
    lines = [b"HTTP/1.1 %b -" % headers[":status"], b"transfer-encoding: chunked"]
    lines += [b"%b: %b" % (name.encode(), headers[name]) for name in PASSED if name in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def mutation(headers: Headers) -> Any:
    """Return the change that sets *headers*."""
    replaces = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    values = [HeaderValue(key=name.decode(), raw_value=value) for name, value in headers]
    options = [HeaderValueOption(header=one, append_action=replaces) for one in values]
    return ext_proc.HeaderMutation(set_headers=options)
