"""Traces of requests: what a real OTLP receiver is sent, and the context that vLLM gets."""

import asyncio
import gzip
import json
import time

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from controlplane.gateway.monitoring import tracing
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP and parses its protobuf."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(content_type="application/x-protobuf")

    def spans(self) -> dict[str, Span]:
        """Return the spans of all traces by name; a name that occurs twice keeps the last."""
        return {span.name: span for span in self.all()}

    def all(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


def attributes(of) -> dict:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
async def collector(monkeypatch):
    one = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", one.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield one
    await runner.cleanup()


@pytest.fixture
async def traced(collector, served):
    """A gateway that exports traces to `collector`."""
    yield served
    assert served.gateway.records.tracing is not None


async def spans_of(collector: Collector, count: int) -> dict[str, Span]:
    async with asyncio.timeout(10):
        while len(collector.all()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return collector.spans()


async def test_a_request_is_one_trace_with_its_decision_and_its_own_times(collector, traced):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "X-Application": "atlas"}
    before = time.time()
    answer = await traced.chat(headers=headers, stream=True)
    await answer.read()
    after = time.time()
    spans = await spans_of(collector, 5)
    assert set(spans) == {"chat m", "prediction", "wait", "placement", "instance"}
    root = spans["chat m"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
    assert (root.kind, spans["instance"].kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert before * 1e9 <= root.start_time_unix_nano <= spans["wait"].start_time_unix_nano
    assert spans["wait"].end_time_unix_nano == spans["instance"].start_time_unix_nano
    assert spans["instance"].end_time_unix_nano == root.end_time_unix_nano <= after * 1e9
    (first,) = spans["instance"].events
    assert first.name == "first token"

    row = await traced.new_row()
    ledger = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "http.response.status_code": 200,
        "pilothouse.tenant": row.tenant.name,
        "pilothouse.slo_class": row.slo_class,
        "pilothouse.outcome": "done",
        "pilothouse.instance": "m-0",
    }
    assert attributes(root).items() >= ledger.items()
    took_ms = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6
    assert took_ms == pytest.approx(row.e2e_ms, abs=0.01)
    decided = attributes(spans["placement"])
    assert decided["pilothouse.placement.instance"] == "m-0"
    assert decided["pilothouse.placement.policy"] == row.trace[0]["policy"]
    assert decided["pilothouse.placement.chosen_because"]
    assert json.loads(decided["pilothouse.placement.seen"])[0]["instance"] == "m-0"
    assert attributes(spans["prediction"])["pilothouse.prediction.tokens"] == row.predicted_output_tokens
    assert "hello" not in str(collector.requests)  # no prompt
    (resource,) = {str(attributes(each.resource_spans[0].resource)["service.name"]) for each in collector.requests}
    assert resource == "pilothouse"

    sent = traced.backends[0].headers[-1]
    assert sent["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert sent["tracestate"] == "vendor=1"


async def test_without_a_context_it_begins_a_trace_and_an_unsampled_one_is_only_passed_on(collector, traced):
    await (await traced.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})).read()
    await (await traced.chat(headers={"traceparent": f"00-{'0' * 32}-{PARENT}-01"})).read()
    spans = await spans_of(collector, 5)
    first, second = (headers["traceparent"] for headers in traced.backends[0].headers[-2:])
    assert first.startswith(f"00-{TRACE}-")
    assert first.endswith("-00")
    parent, _, flags = second.rpartition("-")
    assert parent == f"00-{spans['chat m'].trace_id.hex()}-{spans['chat m'].span_id.hex()}"
    assert int(flags, 16) & 1
    assert not spans["chat m"].parent_span_id
    assert {span.trace_id for span in collector.all()} == {spans["chat m"].trace_id}


async def test_a_failure_is_an_error_and_a_refusal_of_the_tenants_own_is_none(collector, traced):
    traced.backends[0].script.status = 500
    await (await traced.chat()).read()
    spans = await spans_of(collector, 4)
    assert spans["chat m"].status.code == Status.STATUS_CODE_ERROR
    assert attributes(spans["chat m"])["error.type"] == (await traced.new_row()).error_code
    assert any(span.name == "placement" and span.status.code == Status.STATUS_CODE_ERROR for span in collector.all())
    assert (await traced.chat(model=None)).status == 400  # before there is a ticket


async def test_a_collector_that_is_away_costs_no_request_and_does_not_hold_the_end(served, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    served.gateway.records.tracing = tracing.start()
    assert (await served.chat()).status == 200
    await served.new_row()
    began = time.monotonic()
    await asyncio.to_thread(served.gateway.records.tracing.stop)
    assert time.monotonic() - began < tracing.STOP_S + 1


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_only_the_standard_variables_switch_it_on(environment, on):
    assert tracing.wanted(environment) is on


def test_off_it_is_nothing(monkeypatch):
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing.start() is None
    assert Gateway(ScalingLoop).records.tracing is None


def test_without_the_extra_it_says_so_and_serves(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    assert tracing.start() is None
    assert "install the extra pilothouse[otel]" in caplog.text
