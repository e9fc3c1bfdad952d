"""A run drawn on its time axis: its calls and reported units, where the time went, and what was lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.applications.models import ApplicationRun
from controlplane.applications.spans import Span, standing_in
from controlplane.console.formats import clock, seconds
from controlplane.gateway.models import LedgerRow

PARTS: Final = ("queue", "prefill", "decode", "container", "dnn", "tool", "client")
AXIS: Final = 1000.0
MIN_LOST_S: Final = 0.05
LOSSES: Final = 5
STEPS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400)


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
        if span.call is not None and span.parts["queue"] >= MIN_LOST_S
    ]
    return sorted(waits, key=lambda loss: -loss.seconds)[:LOSSES]


def _why(call: LedgerRow) -> str:
    place = f"Number {call.queue_position} in its queue when it came" if call.queue_position else "No instance had room"
    standing = standing_in(call)
    return f"{place}, rank {standing['rank_s']:.1f} s" if standing else place


def ticks(duration_s: float) -> list[tuple[float, str]]:
    """Return places in percent and labels of round times on the axis of a run, at most nine of them."""
    step_s = next((step_s for step_s in STEPS_S if duration_s <= 8 * step_s), max(duration_s, 1.0))
    marks = [number * step_s for number in range(int(duration_s / step_s) + 1)]
    form = seconds if step_s < 1 else clock
    return [(round(100 * at_s / max(duration_s, 1e-3), 2), form(at_s)) for at_s in marks]


def verdict(run: ApplicationRun, waited_s: float, slack_s: float | None) -> tuple[str, str]:
    """Return (level, sentence): how the run ended, or whether it will be in time. *slack_s*: of its expected end."""
    waits = f" {seconds(waited_s)} of it were waits on its critical path." if waited_s >= MIN_LOST_S else ""
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
