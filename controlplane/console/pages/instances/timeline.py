"""An instance's states over the last hours, from its events: segments of a bar."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.models import Instance

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
    # Before the first known move it was in the state which that move left.
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
