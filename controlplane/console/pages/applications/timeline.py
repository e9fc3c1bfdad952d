"""A run on its time axis: its calls and reported units, the path that decided its duration, and what was lost on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from controlplane.applications.models import ApplicationRun, UnitReport
from controlplane.console.formats import clock, seconds
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.applications.demand_graph import Backend, ServiceRate, Step, step_service_s
from scheduling.applications.recording import NO_UNIT, TOGETHER_S

PARTS: Final = ("queue", "prefill", "decode", "container", "dnn", "tool", "client")
AXIS: Final = 1000.0
LEAST_LOST_S: Final = 0.05
LOSSES: Final = 5
RANKS_HIGH: Final = 90.0
STEPS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400)


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


@dataclass(frozen=True)
class Piece:
    """A part of a bar, on an axis of `AXIS` units."""

    part: str
    x: float
    width: float
    seconds: float


def pieces(span: Span, duration_s: float) -> list[Piece]:
    """Return the parts of the bar of *span*, each visible."""
    scale, at_s, drawn = AXIS / max(duration_s, 1e-3), span.began_s, []
    for part, took_s in span.parts.items():
        if took_s > 0:
            drawn.append(Piece(part, round(at_s * scale, 1), round(max(1.5, took_s * scale), 1), took_s))
        at_s += took_s
    return drawn


def where_time_went(path: Sequence[Span], duration_s: float) -> list[Piece]:
    """Return the parts of the critical path in sum; they and the client's time are the duration."""
    sums = dict.fromkeys(PARTS, 0.0)
    for span in path:
        for part, took_s in span.parts.items():
            sums[part] += took_s
    sums["client"] = max(0.0, duration_s - sum(sums.values()))
    whole_s, at, bar = max(sum(sums.values()), 1e-9), 0.0, []
    for part, took_s in sums.items():
        if took_s >= 0.001 * whole_s:
            bar.append(Piece(part, round(at, 1), round(AXIS * took_s / whole_s, 1), took_s))
            at += AXIS * took_s / whole_s
    return bar


@dataclass(frozen=True)
class Loss:
    """A wait on the critical path."""

    seconds: float
    span: Span
    why: str


def losses(path: Sequence[Span]) -> list[Loss]:
    """Return the longest waits of the critical path."""
    waits = [
        Loss(span.parts["queue"], span, _why(span.call))
        for span in path
        if span.call is not None and span.parts["queue"] >= LEAST_LOST_S
    ]
    return sorted(waits, key=lambda loss: -loss.seconds)[:LOSSES]


def _why(call: LedgerRow) -> str:
    place = f"Number {call.queue_position} in its queue when it came" if call.queue_position else "No instance had room"
    standing = standing_in(call)
    return f"{place}, rank {standing['rank_s']:.1f} s" if standing else place


def standing_in(call: LedgerRow) -> dict[str, Any]:
    """Return where the run stood when *call* was placed, by its decision trace; empty without a rank."""
    steps = [step["run"] for step in call.trace or () if isinstance(step, dict) and isinstance(step.get("run"), dict)]
    return steps[-1] if steps else {}


@dataclass(frozen=True)
class Expectation:
    """What the run was expected to need still when a call was placed, in seconds of service, and what it needed."""

    span: Span
    rank_s: float
    expected_s: float
    worst_s: float
    actual_s: float

    @property
    def error_s(self) -> float:
        return self.actual_s - self.expected_s


def expectations(spans: Sequence[Span], units: dict[str, Backend], rates: dict[str, ServiceRate]) -> list[Expectation]:
    """Return one for each call that was placed by rank. What calls of unknown units needed is not counted."""
    total_s = 0.0
    for span in spans:
        if span.unit not in units or span.is_open or (span.call is not None and span.call.outcome != Outcome.DONE):
            continue
        step = Step(span.unit, duration_s=span.duration_s)
        if span.call is not None:
            step = Step(span.unit, -1, span.call.prompt_tokens, span.call.output_tokens)
        total_s += step_service_s(step, units[span.unit], rates[span.unit])
    rows = []
    for span in spans:
        if span.call is not None and (standing := standing_in(span.call)):
            actual_s = max(0.0, total_s - standing["attained_s"])
            rows.append(Expectation(span, standing["rank_s"], standing["remaining_s"], standing["worst_s"], actual_s))
    return rows


def rank_line(rows: Sequence[Expectation], duration_s: float) -> str:
    """Return the path of the rank over time on an axis of `AXIS` by 100: steps, from each call to the next."""
    if not rows:
        return ""
    scale, top = AXIS / max(duration_s, 1e-3), max(row.rank_s for row in rows) or 1.0
    points = [(row.span.began_s * scale, 95 - RANKS_HIGH * row.rank_s / top) for row in rows]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for _, (x, y) in pairwise(points):
        path += f"H{x:.1f}V{y:.1f}"
    return f"{path}H{AXIS:.0f}"


def ticks(duration_s: float) -> list[tuple[float, str]]:
    """Return places in percent and labels of round times on the axis of a run, at most nine of them."""
    step_s = next((step_s for step_s in STEPS_S if duration_s <= 8 * step_s), max(duration_s, 1.0))
    marks = [number * step_s for number in range(int(duration_s / step_s) + 1)]
    form = seconds if step_s < 1 else clock
    return [(round(100 * at_s / max(duration_s, 1e-3), 2), form(at_s)) for at_s in marks]


def verdict(run: ApplicationRun, waited_s: float, slack_s: float | None) -> tuple[str, str]:
    """Return (level, sentence): how the run ended, or whether it will be in time. *slack_s*: of its expected end."""
    waits = f" {seconds(waited_s)} of it were waits on its critical path." if waited_s >= LEAST_LOST_S else ""
    state = run.state
    if state == "running":
        if slack_s is None:
            return "", f"Runs, {run.calls} call{'s' * (run.calls != 1)} so far."
        if slack_s < 0:
            return "late", f"Will be late: {seconds(-slack_s)} after its deadline, as expected."
        return "fine", f"In time so far: {seconds(slack_s)} more than it is expected to need."
    if state in ("abandoned", "failed", "cancelled", "stopped"):
        return (
            "late" if state == "failed" else "risk",
            f"{state.capitalize()} after {seconds(run.duration_s)}.{waits}",
        )
    late_s = run.late_s
    if late_s is None:
        return "", f"Ended after {seconds(run.duration_s)}; it had no deadline.{waits}"
    if late_s > 0:
        return "late", f"Late by {seconds(late_s)}, after {seconds(run.duration_s)}.{waits}"
    return "fine", f"In time, {seconds(-late_s)} before its deadline, after {seconds(run.duration_s)}.{waits}"
