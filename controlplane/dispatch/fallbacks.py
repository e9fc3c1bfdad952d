"""Models that serve requests of others: `scheduling.control.fallbacks` decides on them, and callers hear of it."""

from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.fleet import fallback_terms
from controlplane.dispatch.live_fleet.topology import Endpoint, Request
from controlplane.dispatch.stages import Arrival, Retry, Stage
from controlplane.dispatch.waits import WaitEstimates
from scheduling.control.fallbacks import Fallbacks
from scheduling.routing.models import ModelRule

WHY = {
    ModelRule.UNAVAILABLE: "no instance of that takes it now",
    ModelRule.WAIT: "it would have waited too long for that",
    ModelRule.FAILURE: "that failed it before its first token",
}


class ModelFallbacks(Stage):
    def __init__(self, core: Core, waits: WaitEstimates) -> None:
        self.core, self.fleet = core, waits.fleet
        self.control = Fallbacks(waits.fleet, waits.control)

    def is_wanted(self) -> bool:
        return any(model.fallback for model in self.core.topology.models.values())

    def admit(self, arrival: Arrival) -> None:
        asked, endpoint = arrival.asked, arrival.endpoint
        if not asked.fallback or arrival.on_spot or arrival.hold:
            return
        full = endpoint is not None and endpoint.policy.is_full(self.fleet.waiting_queue.count(endpoint))
        if (fallback := self.control.choose(fallback_terms(asked), full=full)) is not None:
            arrival.endpoint = self.fleet.endpoints[fallback[0]]
            arrival.asked = self._served_by(asked, arrival.endpoint, fallback[1])
            arrival.endpoint.count_demand(arrival.asked, self.core.clock())

    def waiting(self, request: Request) -> bool:
        return self.control.serve_late(request.row)

    def again(self, request: Request, retry: Retry) -> None:
        self.control.serve_failed(request.row, retry.failed, elsewhere=retry.elsewhere)

    def become(self, request: Request, endpoint: Endpoint, rule: ModelRule) -> None:
        """Make *request*, which waits nowhere, one that *endpoint* serves by *rule*."""
        request.asked = self._served_by(request.asked, endpoint, rule)
        request.predicted_tokens = self.core.possible(request.asked)
        request.failed_before, request.failed_at = request.attempts - request.evictions, []
        request.output_tokens, request.evicting_s = 0, None

    def _served_by(self, asked: port.Asked, endpoint: Endpoint, rule: ModelRule) -> port.Asked:
        """Notify the gateway that *endpoint* serves *asked* by *rule*; return it as a request of that model."""
        words = f"Served by {endpoint.model}, the fallback of {asked.model}: {WHY[rule]}."
        asked = replace(
            asked,
            model=endpoint.model,
            fallback="",
            prefix_hashes=(),
            system_blocks=0,
            token_blocks=b"",
            asked_model=asked.asked_model or asked.model,
            model_rule=rule.value,
        )
        possible = self.core.possible(asked)
        self.core.deliver(port.FellBack(asked.number, endpoint.model, endpoint.region, possible, rule.value, words))
        return asked
