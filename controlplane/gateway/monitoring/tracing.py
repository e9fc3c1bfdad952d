"""OpenTelemetry traces: one for each request, made at its end from the times of its ledger entry.

Off unless the standard `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set; the SDK reads all other
`OTEL_*` variables. The only work before the end of a request is to choose its ids, which its instance is sent as the W3C
`traceparent`, so that vLLM's spans belong to it. A thread of the SDK exports spans; its queue drops some when it is full.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from controlplane import __version__
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.models import Outcome
from controlplane.gateway.serving.open_requests import OpenSpan, Ticket

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

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
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        name = {} if named else {"service.name": "pilothouse"}
        provider = TracerProvider(resource=Resource.create(name | {"service.version": __version__}))
        self._sampler, self._resource = provider.sampler, provider.resource
        self._scope = InstrumentationScope("controlplane.gateway", __version__)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())

    def stop(self) -> None:
        """Export what is left, for at most `STOP_S`: a collector that is away must not hold the process."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(STOP_S)

    def begin(self, headers: tuple[tuple[str, str], ...]) -> OpenSpan:
        """Return the span of a request with the W3C trace context *headers*, sampled or not as the environment says."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanKind

        given = dict(headers)
        trace_id, parent_id, sampled = _parsed(given.get("traceparent", ""))
        state = given.get("tracestate", "") if parent_id else ""
        parent = _context(trace_id, parent_id, sampled) if parent_id else None
        trace_id = trace_id or random.getrandbits(128) or 1
        chosen = self._sampler.should_sample(parent, trace_id, "request", SpanKind.SERVER, {})
        ids = random.getrandbits(64) or 1, random.getrandbits(64) or 1
        return OpenSpan(trace_id, *ids, parent_id, state, chosen.decision is Decision.RECORD_AND_SAMPLE)

    def end(self, ticket: Ticket) -> None:
        """Export the spans of *ticket*, which has ended. Never raises: its ledger row counts."""
        span = ticket.span
        if span is None or not span.sampled:
            return
        try:
            for each in self._spans(ticket, span):
                self._processor.on_end(each)
        except Exception:
            logger.exception("the trace of request %s could not be made", ticket.request_id)

    def _spans(self, ticket: Ticket, span: OpenSpan) -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        asked, flags = ticket.asked, TraceFlags(TraceFlags.SAMPLED)
        epoch_s = ticket.arrived_at - asked.arrived_s

        def at(clock_s: float) -> int:
            """Return epoch nanoseconds of a moment on the event loop's clock."""
            return int((epoch_s + clock_s) * 1e9)

        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            state = TraceState.from_header([span.state]) if span.state else None
            return SpanContext(span.trace_id, span_id, is_remote, flags, state)

        def made(
            name: str,
            span_id: int,
            begin_s: float,
            end_s: float,
            attributes: Attributes,
            *,
            parent: SpanContext | None,
            kind: SpanKind = SpanKind.INTERNAL,
            error: str = "",
            events: tuple[Event, ...] = (),
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context(span_id),
                parent,
                self._resource,
                attributes,
                events,
                kind=kind,
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=at(begin_s),
                end_time=at(max(begin_s, end_s)),
                instrumentation_scope=self._scope,
            )

        root = context(span.span_id)
        ended_s, queued_s = ticket.finished_s, span.queued_s or asked.arrived_s
        failed = ticket.outcome == Outcome.FAILED or ticket.status_code >= SERVER_ERROR
        error = (ticket.error_code or "failed") if failed else ""
        operation = OPERATIONS.get(ticket.call.kind, str(ticket.call.kind))
        yield made(
            f"{operation} {ticket.model}",
            span.span_id,
            asked.arrived_s,
            ended_s,
            _of_request(ticket, operation),
            parent=context(span.parent_id, is_remote=True) if span.parent_id else None,
            kind=SpanKind.SERVER,
            error=error,
        )
        if ticket.length is not None:
            predicted = _flat("prediction", ticket.length.explained())
            yield made("prediction", _new_id(), asked.arrived_s, queued_s, predicted, parent=root)
        if ticket.placement is not None:
            yield made("wait", _new_id(), queued_s, ticket.placed_s or ended_s, _of_wait(ticket), parent=root)
        for step in ticket.steps:
            waited_ms = step.get("waited_ms")
            if isinstance(waited_ms, int | float):
                chosen = {name: value for name, value in step.items() if name != "length"}
                placed_s = asked.arrived_s + waited_ms / 1000
                lost = str(step.get("lost", ""))
                yield made(
                    "placement", _new_id(), placed_s, placed_s, _flat("placement", chosen), parent=root, error=lost
                )
        if ticket.placed_s:
            first = ticket.first_token_s if ticket.first_token_heard else 0.0
            events = (Event("first token", timestamp=at(first)),) if first else ()
            yield made(
                "instance",
                span.instance_span_id,
                ticket.placed_s,
                ended_s,
                {"pilothouse.instance": ticket.instance, "pilothouse.region": ticket.region},
                parent=root,
                kind=SpanKind.CLIENT,
                error=error,
                events=events,
            )


def _of_request(ticket: Ticket, operation: str) -> Attributes:
    values: dict[str, object] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": ticket.asked.adapter or ticket.model,
        "gen_ai.usage.input_tokens": ticket.prompt_tokens,
        "gen_ai.usage.output_tokens": ticket.output_tokens,
        "http.response.status_code": ticket.status_code,
        "error.type": ticket.error_code,
        "pilothouse.tenant": ticket.asked.tenant,
    }
    columns = (
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
        *("application", "run", "unit", "attempts", "evictions", "streamed"),
        *("predicted_output_tokens", "queue_ms", "ttft_ms", "itl_ms"),
    )
    return _known(values | {f"pilothouse.{name}": getattr(ticket, name) for name in columns})


def _of_wait(ticket: Ticket) -> Attributes:
    columns = ("queue_position", "estimated_wait_s", "estimated_wait_p99_s")
    others = [step for step in ticket.steps if "waited_ms" not in step]
    return _known({f"pilothouse.{name}": getattr(ticket, name) for name in columns}) | _flat(
        "wait",
        {name: value for step in others for name, value in step.items() if name != "length"},
    )


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


def _new_id() -> int:
    return random.getrandbits(64) or 1


def _parsed(traceparent: str) -> tuple[int, int, bool]:
    """Return trace id, parent id and whether it is sampled, by W3C Trace Context; zeros for an invalid header."""
    version, _, rest = traceparent.partition("-")
    if not rest or version == "ff":
        return 0, 0, False
    trace_id, parent_id, trace_flags = (int(part, 16) for part in rest.split("-"))
    return (trace_id, parent_id, bool(trace_flags & 1)) if trace_id and parent_id else (0, 0, False)


def _context(trace_id: int, parent_id: int, sampled: bool) -> Any:
    """Return the OpenTelemetry context of a remote parent, for the sampler."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, parent_id, True, flags)))
