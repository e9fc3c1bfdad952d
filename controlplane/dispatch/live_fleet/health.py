"""Measurements of an instance: signs of life, progress, outcomes of its requests, and its dispatch round trip.

The rules are in docs/operate/health.md. `Topology` decides whose breaker may open.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from controlplane.dispatch.kernels import note_round_trip
from controlplane.events.models import Severity
from scheduling.fleet.arrays import FleetArrays
from scheduling.routing.requests_ahead import WEIGHT
from workers.vllm.metrics import VllmMetrics

OUTCOMES: Final = 20
"""Number of recent request outcomes by which an instance is judged."""
OUTCOMES_S: Final = 60.0
"""Age beyond which an outcome no longer counts."""
FEWEST_FAILURES: Final = 3
FAILING_SHARE: Final = 0.25
OPEN_S: Final = 5.0
"""Time for which the breaker opens first; each further time is twice as long."""
MAX_OPEN_S: Final = 300.0
FORGIVEN_S: Final = 600.0
"""Time without an opening after which the next one counts as a first."""
TRIED_AGAIN_S: Final = 60.0
"""Idle time after which a wedged instance is tried with one request."""
MAX_BUSY_S: Final = 60.0
"""Cap on an instance's `Retry-After`."""


class Breaker(Enum):
    CLOSED = "closed"  # takes requests
    OPEN = "open"  # takes none
    HALF_OPEN = "half-open"  # takes one request, whose outcome decides


@dataclass(frozen=True, slots=True)
class Notice:
    """An unwritten event about an instance or a model."""

    kind: str
    name: str
    reason: str
    severity: Severity = Severity.WARNING
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Health:
    """Health of one instance. Moments are on the gateway's clock."""

    heard_s: float = -math.inf
    """Last sign of life: an answered heartbeat, headers, a token, an answer."""
    unanswered_s: float = math.inf
    """Start of the first heartbeat since then; infinity before it."""
    checked_s: float = -math.inf
    """Last check of `/health` for the want of an answer."""
    served_s: float = -math.inf
    """Last token or complete answer."""
    slow: bool = False  # silent, but too briefly to fail
    breaker: Breaker = Breaker.CLOSED
    reason: str = ""
    """Why its breaker is not closed or it is slow; empty if neither."""
    until_s: float = 0.0  # for which its breaker is open
    busy: bool = False  # it asked for a pause: no fault
    openings: int = 0  # in a row
    answered: int = 0
    """Requests answered since its server became ready."""
    failures: int = 0
    """Requests that it failed since then, whether another instance served them or not."""
    _outcomes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=OUTCOMES))
    _progress: tuple[float, ...] = ()
    _progress_s: float = math.inf
    _wedged_s: float | None = None  # start of the stall; None while there is none

    def heard(self, now_s: float, *, served: bool = False) -> None:
        self.heard_s, self.unanswered_s = now_s, math.inf
        if served:
            self.served_s = now_s

    def still_s(self, metrics: VllmMetrics, now_s: float) -> float:
        """Return how long work has run without an iteration or a token; 0 where nothing runs."""
        progress = (metrics.iterations_total, metrics.generation_tokens_total, metrics.prompt_tokens_total)
        if progress != self._progress or (not metrics.running and self._wedged_s is None):
            self._progress, self._progress_s, self._wedged_s = progress, now_s, None
        return now_s - max(self._progress_s, self.served_s)

    def wedge(self, now_s: float) -> None:
        """Mark it as wedged: it has work and makes no progress."""
        self._wedged_s = now_s

    def progresses(self, metrics: VllmMetrics, now_s: float) -> bool:
        """Whether it made progress after it was wedged, or was idle long enough to be tried."""
        return self._wedged_s is None or (not metrics.running and now_s - self._wedged_s >= TRIED_AGAIN_S)

    # Outcomes of requests

    def succeeded(self, now_s: float) -> bool:
        """Record a complete answer. True if it serves again as a result."""
        self._outcomes.append((now_s, True))
        if self.breaker is not Breaker.HALF_OPEN:
            return False
        self._close()
        return True

    def failed(self, now_s: float) -> bool:
        """Record a request that another instance served, or one broken off. True if its breaker should open."""
        self._outcomes.append((now_s, False))
        if self.breaker is Breaker.HALF_OPEN:
            return True
        recent = [ok for at_s, ok in self._outcomes if now_s - at_s <= OUTCOMES_S]
        failures = recent.count(False)
        return (
            self.breaker is Breaker.CLOSED and failures >= FEWEST_FAILURES and failures >= FAILING_SHARE * len(recent)
        )

    def open(self, why: str, now_s: float) -> float:
        """Open the breaker, and return for how many seconds."""
        self.openings = 1 if now_s - self.until_s > FORGIVEN_S else self.openings + 1
        open_s = min(MAX_OPEN_S, OPEN_S * 2.0 ** (self.openings - 1))
        failures = sum(not ok for at_s, ok in self._outcomes if now_s - at_s <= OUTCOMES_S)
        of = sum(now_s - at_s <= OUTCOMES_S for at_s, _ in self._outcomes)
        self.reason = (
            f"circuit open for {open_s:g} s: it failed {failures} of its last {of} requests, the last one: {why}"
        )
        self.breaker, self.until_s, self.busy = Breaker.OPEN, now_s + open_s, False
        return open_s

    def pause(self, why: str, now_s: float, wait_s: float) -> None:
        """Take nothing for *wait_s*, as it asked."""
        if self.breaker is Breaker.CLOSED:
            wait_s = min(max(wait_s, 0.1), MAX_BUSY_S)
            self.breaker, self.until_s, self.busy = Breaker.OPEN, now_s + wait_s, True
            self.reason = f"is busy for {wait_s:g} s: {why}"

    def end_opening(self, *, alone: bool) -> bool:
        """Half-open the breaker for one trial request. One that was only busy, or is *alone*, takes everything immediately.

        True if it failed requests, and takes all again without proof.
        """
        if self.busy or alone:
            unproved = not self.busy
            self._close()
            return unproved
        self.half_open("after failures")
        return False

    def _close(self) -> None:
        self.breaker, self.reason, self.busy = Breaker.CLOSED, "", False
        self._outcomes.clear()

    def half_open(self, why: str) -> None:
        """Take one request, whose outcome decides."""
        self.breaker, self.reason = Breaker.HALF_OPEN, f"is tried with one request {why}"

    def takes(self, running: int) -> bool:
        """Whether it takes another request while *running* ones run."""
        return self.breaker is Breaker.CLOSED or (self.breaker is Breaker.HALF_OPEN and not running)


WINDOW_S = 10.0
FEWEST = 8
"""Fewest requests over which means are compared."""
OTHERS_SHARE = 0.1
"""Tolerated share of an instance's ended requests that came from elsewhere or are still in transit."""


class RoundTrip:
    """Round-trip measurements of one instance. All times are seconds, moments on the event loop's clock."""

    __slots__ = ("ended", "headers_at_s", "held_s", "metrics_at_s", "readings")

    def __init__(self) -> None:
        self.headers_at_s = self.metrics_at_s = -math.inf
        self.ended, self.held_s = 0, 0.0  # requests that the instance answered, and how long it held them
        self.readings: deque[tuple[float, int, float, float, float]] = deque()

    def request_ended(self, held_s: float) -> None:
        """Record the last byte of an answer, *held_s* after its request was given to the instance."""
        self.ended += 1
        self.held_s += held_s

    def headers_came(self, fleet: FleetArrays, slot: int, took_s: float, now_s: float) -> None:
        """Record a stream's headers, *took_s* after its request was given to the instance in *slot*."""
        self.headers_at_s = now_s
        if now_s - self.metrics_at_s > WINDOW_S:
            note_round_trip(fleet, slot, took_s, WEIGHT)

    def heartbeat_came(self, fleet: FleetArrays, slot: int, took_s: float, metrics: VllmMetrics, now_s: float) -> None:
        """Record a heartbeat that the instance in *slot* answered with *metrics* in *took_s*."""
        readings = self.readings
        if readings and metrics.served_total < readings[-1][3]:
            readings.clear()  # it was restarted
        readings.append((now_s, self.ended, self.held_s, metrics.served_total, metrics.inside_s_total))
        while readings[0][0] < now_s - WINDOW_S:
            readings.popleft()
        _, ended_before, held_before_s, served_before, inside_before_s = readings[0]
        ended, served = self.ended - ended_before, metrics.served_total - served_before
        if min(ended, served) >= FEWEST and abs(served - ended) <= OTHERS_SHARE * ended + 2:
            outside_s = (self.held_s - held_before_s) / ended - (metrics.inside_s_total - inside_before_s) / served
            if outside_s > 0.0:
                self.metrics_at_s = now_s
                note_round_trip(fleet, slot, outside_s, 1.0)
        elif now_s - max(self.metrics_at_s, self.headers_at_s) > WINDOW_S:
            note_round_trip(fleet, slot, took_s, WEIGHT)
