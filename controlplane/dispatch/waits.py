"""Expected waits of queued requests: `scheduling.control.waits` hears of them, and callers and pages see them."""

from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request
from controlplane.dispatch.stages import Stage
from scheduling.control.waits import Waits
from scheduling.queueing.waits.starting import left_of_start_s

START_LIMIT = 2.0  # times its usual time after which a start is not waited for


class WaitEstimates(Stage):
    def __init__(self, fleet: LiveFleet) -> None:
        self.fleet, self.control = fleet, Waits(fleet)

    def waiting(self, request: Request) -> bool:
        self.control.begin(request.row, request.slot, again=request.attempts > 0)
        return False

    def placed(self, request: Request, replica: Replica) -> None:
        """What the queue manager held waits at an endpoint from its release. A wait after a failure teaches nothing."""
        if request.attempts - request.evictions > 1:
            self.control.forget(request.row)
            return
        since_s = request.asked.arrived_s if request.released_s is None else request.released_s
        self.control.placed(request.row, replica.slot, since_s, request.placed_s)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        self.control.forget(request.row)
        if output_tokens is not None and request.replica is not None:
            asked, kept = request.asked, request.kept_tokens
            endpoint, now_s = request.replica.endpoint.index, self.fleet.now_s
            prompt, predicted = asked.prompt_tokens - kept, float(request.predicted_tokens + kept)
            self.control.ended(endpoint, asked.slo_class, now_s, prompt, output_tokens, predicted)

    def start_left_s(self, endpoint: Endpoint) -> float | None:
        """Return seconds until an instance of *endpoint*, which none serves, should be ready, by the usual time of a start.

        None where one serves, none starts, or all starts have taken `START_LIMIT` times as long as usual.
        """
        if self.control.serving(endpoint.index):
            return None
        wall_s, left_s = self.fleet.wall_clock(), list[float]()
        for spec in (one.spec for one in self.fleet.topology.members(endpoint)):
            passed_s = max(0.0, wall_s - spec.start_began_at)
            if spec.start_s is not None and passed_s < START_LIMIT * spec.start_s:
                left_s.append(left_of_start_s(spec.start_s, passed_s))
        return min(left_s, default=None)
