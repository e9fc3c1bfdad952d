"""OpenTelemetry traces: one for each request, made at its end from the times of its ledger entry.

Off unless the standard `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set; the SDK reads all other
`OTEL_*` variables. The only work before the end of a request is to begin its span, whose ids its instance is sent as the W3C
`traceparent`, so that vLLM's spans belong to it. A thread of the SDK exports spans; its queue drops some when it is full.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from controlplane import __version__
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.explanation import explained
from controlplane.gateway.ledger.entry import reader
from controlplane.gateway.models import Outcome
from controlplane.gateway.progress import Progress

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanKind

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
STOP_S = 2.0
"""Time for the last spans at the end of the process."""
OPERATIONS = {
    **dict.fromkeys((Kind.CHAT, Kind.RESPONSE, Kind.MESSAGE), "chat"),
    Kind.COMPLETION: "text_completion",
    Kind.EMBEDDING: "embeddings",
}
"""`gen_ai.operation.name` of OpenTelemetry's conventions; of other calls it is the last part of their path."""
SERVER_ERROR = 500
OF_REQUEST = (
    *(
        "request_id",
        "slo_class",
        "asked_class",
        "asked_model",
        "slo_met",
        "outcome",
        "region",
        "own_region",
        "instance",
    ),
    *("application", "run", "unit", "attempts", "evictions", "streamed", "predicted_output_tokens"),
    *("queue_ms", "ttft_ms", "itl_ms"),
)
OF_WAIT = ("queue_position", "estimated_wait_s", "estimated_wait_p99_s")
"""Columns of the ledger that are attributes of a request, and of its wait."""
Attributes = dict[str, str | bool | int | float]


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether *environment* asks for traces."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return (
        not off and environment.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and any(map(environment.get, ENDPOINTS))
    )


def start() -> Tracing | None:
    """Return the exporter that the environment asks for; None if it asks for none or the extra is missing."""
    if not wanted(os.environ):
        return None
    try:
        return Tracing()
    except ImportError:
        logger.warning("traces are not exported: install the extra pilothouse[otel]")
    except ValueError as error:
        logger.warning("traces are not exported: an OTEL_ variable is wrong: %s", error)
    return None


class Tracing:
    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        name = {} if named else {"service.name": "pilothouse"}
        resource = Resource.create(name | {"service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("controlplane.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def stop(self) -> None:
        """Export what is left, for at most `STOP_S`: a collector that is away must not hold the process."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(STOP_S)

    def begin(
        self, headers: tuple[tuple[str, str], ...], arrived_at: float
    ) -> tuple[Span, tuple[tuple[str, str], ...]]:
        """Return the span of a request with the W3C trace context *headers*, and the context for its instance.

        It is sampled or not as the environment says.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._propagator.extract(dict(headers))
        span = self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=int(arrived_at * 1e9))
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return span, tuple(carrier.items())

    def end(self, progress: Progress) -> None:
        """Export the spans of *progress*, which has ended. Never raises: its ledger row counts."""
        if progress.span is None or not progress.span.is_recording():
            return
        try:
            self._end(progress, progress.span)
        except Exception:
            logger.exception("the trace of request %s could not be made", progress.asked.request_id)

    def _end(self, progress: Progress, root: Span) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        asked, inside = progress.asked, set_span_in_context(root)
        epoch_s = asked.arrived_at - asked.arrived_s

        def at(clock_s: float) -> int:
            """Return epoch nanoseconds of a moment on the event loop's clock."""
            return int((epoch_s + clock_s) * 1e9)

        def add(
            name: str,
            begin_s: float,
            end_s: float,
            attributes: Attributes,
            *,
            kind: SpanKind = SpanKind.INTERNAL,
            error: str = "",
            first_token_s: float = 0.0,
        ) -> None:
            span = self._tracer.start_span(name, inside, kind, attributes, start_time=at(begin_s))
            if first_token_s:
                span.add_event("first token", timestamp=at(first_token_s))
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(at(max(begin_s, end_s)))

        ended_s, queued_s = progress.finished_s, progress.queued_s or asked.arrived_s
        failed = progress.outcome == Outcome.FAILED or progress.status_code >= SERVER_ERROR
        error = (progress.error_code or "failed") if failed else ""
        if progress.length is not None:
            add("prediction", asked.arrived_s, queued_s, _flat("prediction", progress.length.explained()))
        if progress.placement is not None:
            add("wait", queued_s, progress.placed_s or ended_s, _of_wait(progress))
        for step in progress.steps:
            waited_ms = step.get("waited_ms")
            if isinstance(waited_ms, int | float):
                chosen = {name: value for name, value in explained(step, asked).items() if name != "length"}
                placed_s = asked.arrived_s + waited_ms / 1000
                add("placement", placed_s, placed_s, _flat("placement", chosen), error=str(step.get("lost", "")))
        if progress.placed_s:
            where: Attributes = {"pilothouse.instance": progress.instance, "pilothouse.region": progress.region}
            first_s = progress.first_token_s if progress.first_token_heard else 0.0
            add("instance", progress.placed_s, ended_s, where, kind=SpanKind.CLIENT, error=error, first_token_s=first_s)
        operation = OPERATIONS.get(progress.call.kind, str(progress.call.kind))
        root.update_name(f"{operation} {asked.model}")
        root.set_attributes(_of_request(progress, operation))
        if error:
            root.set_status(Status(StatusCode.ERROR, error))
        root.end(at(max(asked.arrived_s, ended_s)))


def _of_request(progress: Progress, operation: str) -> Attributes:
    values: dict[str, object] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": progress.asked.adapter or progress.asked.model,
        "gen_ai.usage.input_tokens": progress.prompt_tokens,
        "gen_ai.usage.output_tokens": progress.output_tokens,
        "http.response.status_code": progress.status_code,
        "error.type": progress.error_code,
        "pilothouse.tenant": progress.asked.tenant,
    }
    return _known(values | _columns(progress, OF_REQUEST))


def _of_wait(progress: Progress) -> Attributes:
    others = [step for step in progress.steps if "waited_ms" not in step]
    return _known(_columns(progress, OF_WAIT)) | _flat(
        "wait",
        {name: value for step in others for name, value in step.items() if name != "length"},
    )


def _columns(progress: Progress, columns: tuple[str, ...]) -> dict[str, object]:
    return {f"pilothouse.{name}": value for name, value in zip(columns, reader(*columns)(progress), strict=True)}


def _flat(group: str, values: Mapping[str, object]) -> Attributes:
    """Return *values* as attributes named after *group*; lists and objects as JSON."""
    return _known(
        {
            f"pilothouse.{group}.{name}": json.dumps(value) if isinstance(value, list | dict | tuple) else value
            for name, value in values.items()
        }
    )


def _known(values: Mapping[str, object]) -> Attributes:
    """Leave out values that are empty."""
    return {
        name: value for name, value in values.items() if isinstance(value, str | bool | int | float) and value != ""
    }
