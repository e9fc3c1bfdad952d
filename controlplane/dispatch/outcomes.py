"""What requests show of the health of their instances: signs of life, answers, failures (docs/operate/health.md)."""

from collections.abc import Callable, Sequence

from controlplane.dispatch import port
from controlplane.dispatch.kernels import note_end
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.topology import Replica, Request, Topology
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue


class Outcomes(Stage):
    """*died* is called when the engine of an instance died under its requests."""

    def __init__(
        self, topology: Topology, queue: WaitingQueue, clock: Callable[[], float], died: Callable[[Replica], None]
    ) -> None:
        self.topology, self.queue, self.clock, self.died = topology, queue, clock, died
        self.swept_s = clock()

    def progress(self, tokens: Sequence[tuple[Request, int]]) -> None:
        now_s = self.clock()
        for request, _ in tokens:
            if request.replica is not None:
                request.replica.health.heard(now_s, served=True)

    def headers(self, request: Request, took_s: float) -> None:
        """The headers of the answer to *request* arrived *took_s* after its placement."""
        if request.replica is not None:
            now_s = self.clock()
            request.replica.health.heard(now_s)
            request.replica.round_trip.headers_came(self.topology.fleet, request.replica.slot, took_s, now_s)

    def placed(self, request: Request, replica: Replica) -> None:
        if replica.health.breaker is not Breaker.CLOSED:  # it takes one at a time
            self.topology.settle(replica)

    def failed(self, request: Request, replica: Replica, left: port.Left) -> None:
        if not left.failure:
            return
        topology, now_s = self.topology, self.clock()
        request.failed_at.append(replica)
        if left.failure == port.NOT_ALLOWED:
            return
        replica.health.failures += left.failure != port.BUSY
        if left.failure in (port.SILENT, port.CUT):
            replica.reachable = False  # until its next heartbeat
            topology.doubt(replica)
        elif left.failure == port.DEAD and not replica.lost:
            replica.lost = "its engine died"
            self.died(replica)
        if left.failure == port.BUSY:
            topology.pause(replica, left.reason, now_s, left.wait_s)
        elif left.failure == port.ERROR and left.again:  # of the instance or of the request: another instance decides
            request.unproved.append((replica, left.reason))
        else:
            topology.request_failed(replica, left.reason, now_s)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        replica, now_s = request.replica, self.clock()
        if output_tokens is None or replica is None:
            return
        self.topology.request_succeeded(replica, now_s)
        for failed, why in request.unproved:
            self.topology.request_failed(failed, why, now_s)
        replica.request_ended_s = now_s
        replica.round_trip.request_ended(now_s - request.placed_s)
        note_end(self.topology.fleet, replica.slot, self.queue.clock())

    def sweep(self) -> None:
        """Half-open the circuit breakers whose time is over."""
        self.swept_s = self.clock()
        self.topology.half_open_circuits(self.swept_s)
