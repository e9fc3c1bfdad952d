"""A gateway process of ours whose requests come by gRPC, and a stand-in for Envoy that speaks ext_proc to it."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.conftest import ServedGateway

grpc = pytest.importorskip("grpc", reason="needs pilothouse[picker]")
pytest.importorskip("envoy.service.ext_proc.v3", reason="needs pilothouse[picker]")

from envoy.data.accesslog.v3 import accesslog_pb2  # noqa: E402
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode  # noqa: E402
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc  # noqa: E402

from controlplane.picker import server  # noqa: E402, F401
from controlplane.picker.exchange import CHUNK_BYTES, DESTINATION, ID, value_of  # noqa: E402, F401
from controlplane.picker.server import Picker  # noqa: E402

FULL, BUFFERED, NONE = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def headers(message: Any, values: dict[str, str]) -> None:
    for key, value in values.items():
        message.headers.headers.add(key=key, raw_value=value.encode())


@dataclass
class Answer:
    """What the picker has answered to one request."""

    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    pieces: list[int] = field(default_factory=list)
    destinations: list[str] = field(default_factory=list)
    status: int = 0
    ended: bool = False

    def take(self, message: Any) -> None:
        if message.HasField("dynamic_metadata"):
            fields = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
            self.destinations.append(fields[DESTINATION].string_value)
        kind = message.WhichOneof("response")
        if kind == "immediate_response":
            self._set(message.immediate_response.headers)
            self.status, self.body = message.immediate_response.status.code, message.immediate_response.body
            self.ended = True
        elif kind in ("request_headers", "request_body", "response_headers", "response_body"):
            common = getattr(message, kind).response
            self._set(common.header_mutation)
            change = common.body_mutation
            piece = change.streamed_response.body or change.body
            self.body += piece
            if kind.endswith("body"):
                self.pieces.append(len(piece))
                self.ended = change.streamed_response.end_of_stream or bool(change.body)

    def _set(self, mutation: Any) -> None:
        self.headers |= {one.header.key: value_of(one.header).decode() for one in mutation.set_headers}
        self.removed += mutation.remove_headers

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class Call:
    """One `Process` stream."""

    def __init__(self, stream: Any, request_mode: int, response_mode: int) -> None:
        self.stream, self.modes = stream, (request_mode, response_mode)

    async def ask(
        self, body: dict[str, Any] | None = BODY, *, pieces: int = 1, subset: str | None = None, **given: str
    ) -> None:
        """Send a request, its body in so many *pieces*."""
        message = ext_proc.ProcessingRequest()
        usual = {":method": "GET" if body is None else "POST", ":path": "/v1/chat/completions"}
        headers(message.request_headers, usual | {"content-type": "application/json"} | given)
        message.request_headers.end_of_stream = body is None
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = self.modes
        if subset is not None:
            hint = {f"{DESTINATION}-subset": subset}
            message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
        await self.stream.write(message)
        raw = b"" if body is None else json.dumps(body).encode()
        size = -(-len(raw) // pieces)
        for at in range(0, len(raw), size or 1):
            piece = ext_proc.HttpBody(body=raw[at : at + size], end_of_stream=at + size >= len(raw))
            await self.stream.write(ext_proc.ProcessingRequest(request_body=piece))

    async def answer(self) -> Answer:
        """Return the answer, once it has an end."""
        answer = Answer()
        while not answer.ended:
            message = await self.stream.read()
            assert message is not grpc.aio.EOF, answer
            answer.take(message)
        return answer


@dataclass
class Asking:
    """The picker's process, and a channel to it."""

    served: ServedGateway
    picker: Picker
    channel: Any

    def call(self, request_mode: int = FULL, response_mode: int = NONE) -> Call:
        stub = external_processor_pb2_grpc.ExternalProcessorStub(self.channel)
        return Call(stub.Process(), request_mode, response_mode)

    async def ask(self, body: dict[str, Any] | None = BODY, *, request_mode: int = FULL, **given: Any) -> Answer:
        """Return the answer to a request with the tenant's key."""
        call = self.call(request_mode)
        await call.ask(body, **({"authorization": f"Bearer {self.served.secret}"} | given))
        return await call.answer()

    async def log(self, of: Answer, *, status: int = 200, details: str = "via_upstream", **values: Any) -> None:
        """Have the access log report the end of the request that was answered with *of*."""
        entry = accesslog_pb2.HTTPAccessLogEntry()
        entry.request.request_headers[ID] = of.headers[ID]
        entry.response.response_code.value, entry.response.response_code_details = status, details
        common = entry.common_properties
        common.intermediate_log_entry = values.get("open", False)
        common.duration.FromMilliseconds(values.get("took_ms", 300))
        common.response_flags.downstream_connection_termination = values.get("left", False)
        if usage := values.get("usage"):
            common.metadata.filter_metadata["usage"].update(usage)
        if first_ms := values.get("first_ms"):
            common.custom_tags["first_token_us"] = str(first_ms * 1000)
        message = als_pb2.StreamAccessLogsMessage()
        message.http_logs.log_entry.append(entry)
        call = als_pb2_grpc.AccessLogServiceStub(self.channel).StreamAccessLogs()
        await call.write(message)
        await call.done_writing()
        await call


@pytest_asyncio.fixture
async def asking(served: ServedGateway) -> AsyncIterator[Asking]:
    picker = Picker(served.gateway)
    port = await picker.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Asking(served, picker, channel)
        await picker.stop(0.0)
