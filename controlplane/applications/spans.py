"""Calls and reported units of a run over time, what decided its duration, and what it was expected to need still."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.applications.models import UnitReport
from controlplane.fleet.models import Deployment, PerformanceProfile
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.applications.demand_graph import Backend, ServiceRate, Step, step_service_s
from scheduling.applications.recording import NO_UNIT, TOGETHER_S
from scheduling.fleet.profile import USUAL

UNKNOWN_RATE = ServiceRate.of(USUAL)
"""Of models without a performance profile."""
NOT_SERVED = (True, "\uffff", 0)
"""Where no deployment has the GPUs of a profile; behind all that have."""


def rates_of(units: Mapping[str, Backend], region: str = "") -> dict[str, ServiceRate]:
    """Return the service rate of each unit: by the profile of its model where it serves *region*, or else where it serves
    first; and one second a second for other backends.
    """
    models = {backend.name for backend in units.values() if backend.kind == "llm"}
    serving: dict[tuple[int, int, int], tuple[bool, str, int]] = {}
    for row in Deployment.objects.filter(active=True, model__name__in=models).select_related("region"):
        place, key = (
            (row.region.name != region, row.region.name, row.pk),
            (row.model_id, row.gpu_type_id, row.tensor_parallel),
        )
        serving[key] = min(place, serving.get(key, place))
    profiles = PerformanceProfile.objects.filter(model__name__in=models).select_related("model").order_by("pk")
    rates: dict[str, ServiceRate] = {}
    for profile in sorted(
        profiles, key=lambda each: serving.get((each.model_id, each.gpu_type_id, each.tensor_parallel), NOT_SERVED)
    ):
        with suppress(ValueError):  # not a valid measurement
            rates.setdefault(profile.model.name, ServiceRate.of(profile.coefficients()))
    return {
        unit: rates.get(backend.name, UNKNOWN_RATE) if backend.kind == "llm" else ServiceRate()
        for unit, backend in units.items()
    }


@dataclass
class Span:
    """One call or reported unit. Times are seconds after the run began."""

    unit: str
    began_s: float
    ended_s: float
    parts: dict[str, float]
    """Seconds of each part, in order."""
    call: LedgerRow | None = None
    report: UnitReport | None = None
    critical: bool = False

    @property
    def is_open(self) -> bool:
        return self.report is not None and self.report.ended_at is None

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def outcome(self) -> str:
        if self.call is not None:
            return Outcome(self.call.outcome).label
        assert self.report is not None
        return "Runs, end not reported" if self.is_open else "Failed" if self.report.failed else "Done"

    def where(self, titles: Mapping[str, str]) -> str:
        """Return its model and region, or its backend; *titles* of regions by name."""
        if self.call is not None:
            return " ".join(filter(None, (self.call.model, titles.get(self.call.region, self.call.region))))
        assert self.report is not None
        return f"{self.report.kind} {self.report.backend}" if self.report.backend != self.unit else self.report.kind


def _parts_of(call: LedgerRow) -> dict[str, float]:
    e2e_ms = call.e2e_ms or 0.0
    first_ms = min(e2e_ms, call.ttft_ms if call.ttft_ms is not None else e2e_ms)
    queue_ms = min(call.queue_ms or 0.0, first_ms)
    return {
        "queue": queue_ms / 1000,
        "prefill": (first_ms - queue_ms) / 1000,
        "decode": (e2e_ms - first_ms) / 1000,
    }


def spans_of(
    calls: Sequence[LedgerRow], reports: Sequence[UnitReport], began_at: datetime, now: datetime
) -> list[Span]:
    """Return calls and units in the order in which they began; those that decided the duration are critical."""
    spans = []
    for call in calls:
        parts, began_s = _parts_of(call), (call.arrived_at - began_at).total_seconds()
        spans.append(Span(call.unit or NO_UNIT, began_s, began_s + sum(parts.values()), parts, call=call))
    for report in reports:
        began_s = (report.began_at - began_at).total_seconds()
        took_s = ((report.ended_at or now) - report.began_at).total_seconds()
        spans.append(Span(report.unit, began_s, began_s + took_s, {report.kind: took_s}, report=report))
    spans.sort(key=lambda span: (span.began_s, span.ended_s))
    for span in critical_path(spans):
        span.critical = True
    return spans


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that decided when the run ended, the first one first: each waited for what ended last before it."""
    path = [max(spans, key=lambda span: span.ended_s)] if spans else []
    while path:
        head = path[-1]
        before = [
            span
            for span in spans
            if span.ended_s <= head.began_s + TOGETHER_S and span is not head and span.began_s < head.began_s
        ]
        if not before:
            break
        path.append(max(before, key=lambda span: span.ended_s))
    return path[::-1]


def standing_in(call: LedgerRow) -> dict[str, Any]:
    """Return where the run stood when *call* was placed, by its decision trace; empty without a rank."""
    steps = [step["run"] for step in call.trace or () if isinstance(step, dict) and isinstance(step.get("run"), dict)]
    return steps[-1] if steps else {}


@dataclass(frozen=True)
class Expectation:
    """What the run was expected to need still when a call was placed, in seconds of service, and what it needed."""

    span: Span
    rank_s: float
    attained_s: float
    expected_s: float
    worst_s: float
    actual_s: float

    @property
    def error_s(self) -> float:
        return self.actual_s - self.expected_s


def service_of(spans: Sequence[Span], units: Mapping[str, Backend], rates: Mapping[str, ServiceRate]) -> float:
    """Return the service of *spans* that are done, in seconds. What calls of unknown units needed is not counted."""
    total_s = 0.0
    for span in spans:
        if span.unit not in units or span.is_open or (span.call is not None and span.call.outcome != Outcome.DONE):
            continue
        step = Step(span.unit, duration_s=span.duration_s)
        if span.call is not None:
            step = Step(span.unit, -1, span.call.prompt_tokens, span.call.output_tokens)
        total_s += step_service_s(step, units[span.unit], rates[span.unit])
    return total_s


def expectations(
    spans: Sequence[Span], units: Mapping[str, Backend], rates: Mapping[str, ServiceRate]
) -> list[Expectation]:
    """Return one for each call that was placed by rank."""
    total_s, rows = service_of(spans, units, rates), []
    for span in spans:
        if span.call is not None and (standing := standing_in(span.call)):
            attained_s = standing["attained_s"]
            actual_s = max(0.0, total_s - attained_s)
            rows.append(
                Expectation(
                    span, standing["rank_s"], attained_s, standing["remaining_s"], standing["worst_s"], actual_s
                )
            )
    return rows
