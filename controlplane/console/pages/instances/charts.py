"""Charts of one instance, and the timeline of its states."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import (
    AMOUNT,
    COUNT,
    MILLISECONDS,
    NO_SAMPLES,
    NO_TRAFFIC,
    SHARE,
    STYLES,
    Chart,
    Series,
    change,
    last,
)
from controlplane.console.formats import count, milliseconds, percent, quantity
from controlplane.console.live import history
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.events.models import Event
from controlplane.fleet.models import Instance

FILLED = {"fill": "tozeroy", "fillcolor": "var(--s1-soft)"}
NOTHING = "Nothing was reported in this range."


def instance_load(samples: list[Sample], name: str, max_num_seqs: int) -> Chart:
    running, waiting = history.load_of_instance(samples, name)
    now, sentence = last(running), "Load: nothing was reported in this range."
    if now is not None:
        of = f"{count(now)} of {count(max_num_seqs)} requests running"
        sentence = f"Load: {of}, {count(last(waiting))} waiting{change(running)}."
    return Chart(
        key="load",
        title="Running and waiting",
        caption=f"Requests inside the instance; it runs {count(max_num_seqs)} at most",
        sentence=sentence,
        x=history.times(samples),
        up=COUNT,
        series=[
            Series("running", running, width=2, heading="Running (requests)", more=FILLED),
            Series("waiting inside vLLM", waiting, STYLES[1], heading="Waiting (requests)"),
        ],
        empty="" if now is not None else NOTHING if samples else NO_SAMPLES,
    )


def instance_kv(samples: list[Sample], name: str) -> Chart:
    values = history.kv_by_instance(samples, [name])[name]
    now = last(values)
    in_use = "nothing was reported in this range" if now is None else f"{percent(now)} in use{change(values)}"
    return Chart(
        key="kv",
        title="KV cache",
        caption="Share of the KV cache in use",
        sentence=f"KV cache: {in_use}.",
        x=history.times(samples),
        up=SHARE.but(range=[0, 1.02], hoverformat=".1%"),
        series=[Series("KV cache", values, width=2, listed=False, more=FILLED)],
        empty="" if now is not None else NOTHING if samples else NO_SAMPLES,
    )


def instance_latency(samples: list[Sample], key: str, title: str, values: list[float | None]) -> Chart:
    """*values* are in ms, p95 of the last minute."""
    now = last(values)
    statement = "no traffic in this range" if now is None else f"p95 is {milliseconds(now)}{change(values)}"
    return Chart(
        key=key,
        title=title,
        caption="p95 of the last minute",
        sentence=f"{title}: {statement}.",
        x=history.times(samples),
        up=MILLISECONDS,
        series=[Series("p95", values, width=2, listed=False, more=FILLED)],
        empty="" if now is not None else NO_TRAFFIC if samples else NO_SAMPLES,
    )


def instance_throughput(samples: list[Sample], values: list[float | None]) -> Chart:
    now = last(values)
    statement = NOTHING if now is None else f"{quantity(now)} output tokens a second{change(values)}."
    return Chart(
        key="throughput",
        title="Throughput",
        caption="Output tokens per second",
        sentence=f"Throughput: {statement}",
        x=history.times(samples),
        up=AMOUNT.but(unit="tok/s", hoverformat=",.1f"),
        series=[Series("output", values, width=2, listed=False, more=FILLED, heading="Output (tok/s)")],
        empty="" if now is not None else NOTHING if samples else NO_SAMPLES,
    )


def instance_charts(state: LiveState, minutes: str, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, int(minutes))
        ttft_ms, itl_ms, output = history.pace_of_instance(samples, row.name)
        return [
            instance_load(samples, row.name, row.max_num_seqs),
            instance_kv(samples, row.name),
            instance_latency(samples, "ttft", "Time to first token", ttft_ms),
            instance_latency(samples, "itl", "Time between tokens", itl_ms),
            instance_throughput(samples, output),
        ]

    return once(("instance", row.pk, row.name, minutes, history.newest_s(state.history)), build)


SPAN = timedelta(hours=6)
WIDTH = 1000.0  # of the drawing
MOVES_READ = 500


@dataclass(frozen=True, slots=True)
class Segment:
    state: str
    since: datetime
    until: datetime
    reason: str
    x: float
    width: float

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()


def timeline(instance: Instance, now: datetime | None = None) -> list[Segment]:
    """Segments of the last SPAN up to *now*, oldest first, without gaps; from the instance's creation if that is later."""
    now = now or timezone.now()
    moves = list(
        Event.objects.filter(
            subject_type="instance", subject_id=str(instance.pk), kind="instance.moved", at__lte=now
        ).order_by("-pk")[:MOVES_READ]
    )[::-1]
    start = max(now - SPAN, min(instance.created_at, now))
    # Before its first known move, an instance was in the state that the move left.
    state = moves[0].before.get("state", "") if moves else str(instance.state)
    points: list[tuple[datetime, str, str]] = [(start, state, "")]
    for move in moves:
        state = move.after.get("state", "")
        if move.at <= start:
            points[0] = (start, state, move.reason)
        else:
            points.append((move.at, state, move.reason))
    ends = [at for at, _, _ in points[1:]] + [now]
    whole = max((now - start).total_seconds(), 1e-9)
    segments = []
    for (at, state, reason), end in zip(points, ends, strict=True):
        x = (at - start).total_seconds() / whole * WIDTH
        width = (end - at).total_seconds() / whole * WIDTH
        segments.append(Segment(state, at, end, reason, round(x, 2), round(width, 2)))
    return segments
