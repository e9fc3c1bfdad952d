"""How long it takes to replace a request that ends at an instance: until we hear of the end, and the next one is there.

That cannot be seen from one side. But a request is held by an instance, as we see it, for that long beyond what the
engine itself spent on it: the way there, through vLLM's HTTP process into its engine, and the way of its last token back.
So the dispatch round trip is the mean of the one less the mean of the other, over the requests that ended in the last
seconds; vLLM says the time that requests queued and ran in its metrics. Where it does not, or others use the instance as
well, it is the time to the headers of a stream, which vLLM sends before it computes; of an instance without streams, that
of a heartbeat.
"""

import math
from collections import deque

from controlplane.dispatch.kernels import note_round_trip
from scheduling.fleet.arrays import FleetArrays
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from workers.vllm.metrics import VllmMetrics

WINDOW_S = 10.0
FEWEST = 8
"""Requests over which means are compared."""
OTHERS_SHARE = 0.1
"""Of the requests that an instance says have ended, what may have come from elsewhere or be still on its way."""


class RoundTrip:
    """The measurements of one instance. All times are seconds, moments those of the event loop's clock."""

    __slots__ = ("ended", "headers_at_s", "held_s", "metrics_at_s", "readings")

    def __init__(self) -> None:
        self.headers_at_s = self.metrics_at_s = -math.inf
        self.ended, self.held_s = 0, 0.0  # requests that the instance answered, and how long it had them
        self.readings: deque[tuple[float, int, float, float, float]] = deque()

    def request_ended(self, held_s: float) -> None:
        """The last byte of an answer came *held_s* after its request was given to the instance."""
        self.ended += 1
        self.held_s += held_s

    def headers_came(self, fleet: FleetArrays, slot: int, took_s: float, now_s: float) -> None:
        """A stream's headers came *took_s* after its request was given to the instance in *slot*."""
        self.headers_at_s = now_s
        if now_s - self.metrics_at_s > WINDOW_S:
            note_round_trip(fleet, slot, took_s)

    def heartbeat_came(self, fleet: FleetArrays, slot: int, took_s: float, metrics: VllmMetrics, now_s: float) -> None:
        """The instance in *slot* answered a heartbeat with *metrics*, in *took_s*."""
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
                fleet.round_trips[slot, ROUND_TRIP_S] = outside_s
        elif now_s - max(self.metrics_at_s, self.headers_at_s) > WINDOW_S:
            note_round_trip(fleet, slot, took_s)
