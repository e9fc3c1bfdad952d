"""Models that serve requests of others: where those are not served, would have to wait too long, or failed them."""

from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.live_fleet.topology import Endpoint, Request
from controlplane.dispatch.placement import Placement
from controlplane.dispatch.stages import MAX_ATTEMPTS, Arrival, Retry, Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.dispatch.waits import Waits
from scheduling.routing.models import ModelRule, fallback_rule

WHY = {
    ModelRule.UNAVAILABLE: "no instance of that takes it now",
    ModelRule.WAIT: "it would have waited too long for that",
    ModelRule.FAILURE: "that failed it before its first token",
}


class Fallbacks(Stage):
    def __init__(self, core: Core, queue: WaitingQueue, placement: Placement, waits: Waits) -> None:
        self.core, self.queue, self.placement, self.waits = core, queue, placement, waits

    def is_wanted(self) -> bool:
        return any(model.fallback for model in self.core.topology.models.values())

    def admit(self, arrival: Arrival) -> None:
        asked, endpoint = arrival.asked, arrival.endpoint
        if not asked.fallback or arrival.on_spot or arrival.hold:
            return
        full = endpoint is not None and endpoint.spec.policy.is_full(self.queue.count(endpoint))
        if (fallback := self._choose(asked, full=full)) is not None:
            arrival.asked, arrival.endpoint = self._served_by(asked, *fallback), fallback[0]
            arrival.endpoint.count_demand(arrival.asked, self.core.clock())

    def waiting(self, request: Request) -> bool:
        return self.serves_late(request)

    def serves_late(self, request: Request, waited_s: float = 0.0) -> bool:
        """Whether the fallback of its model serves *request*, which waits: it is queued there then.

        By its estimated wait, or because it has waited so long, or nothing serves its model any longer.
        """
        asked = request.asked
        if not asked.fallback or request.has_begun or request.released_s is not None or request.endpoint.is_spot:
            return False
        estimate = self.waits.estimated(request) if asked.fallback_wait_s is not None else None
        expected_s = estimate.wait.mean_s if estimate is not None and estimate.wait is not None else 0.0
        fallback = self._choose(asked, max(waited_s, expected_s))
        if fallback is not None:
            self._queue(request, *fallback)
        return fallback is not None

    def again(self, request: Request, retry: Retry) -> None:
        asked = request.asked
        if not asked.fallback or not retry.failed or request.has_begun:
            return
        if retry.elsewhere and retry.failed < MAX_ATTEMPTS:
            return
        endpoint = self._endpoint(asked)
        if endpoint is not None:
            self._queue(request, endpoint, ModelRule.FAILURE)

    def _endpoint(self, asked: port.Asked) -> Endpoint | None:
        """Return the endpoint of the fallback of *asked* that serves now and has room in its queue; None without."""
        core = self.core
        endpoint = self.placement.serving(core.topology.candidates(asked.fallback, asked.region))
        full = endpoint is not None and endpoint.spec.policy.is_full(self.queue.count(endpoint))
        return None if full else endpoint

    def _choose(
        self, asked: port.Asked, wait_s: float = 0.0, *, full: bool = False
    ) -> tuple[Endpoint, ModelRule] | None:
        """Return the endpoint of the fallback of *asked* and the rule by which that serves it; None while it does not.

        *wait_s*: what it waits for its own model; *full*: whether the queue there is.
        """
        core, endpoint = self.core, self._endpoint(asked)
        if endpoint is None:
            return None
        wait = self.waits.of_next(endpoint)
        rule = fallback_rule(
            serves=not full and self.placement.serving(core.candidates(asked)) is not None,
            wait_s=wait_s,
            most_wait_s=asked.fallback_wait_s,
            there_s=wait.mean_s if wait is not None else 0.0,  # no request waits there yet, or its pace is not known
        )
        return None if rule is None else (endpoint, rule)

    def _served_by(self, asked: port.Asked, endpoint: Endpoint, rule: ModelRule) -> port.Asked:
        """Notify the gateway that *endpoint* serves *asked* by *rule*; return it as a request of that model."""
        words = f"Served by {endpoint.model}, the fallback of {asked.model}: {WHY[rule]}."
        asked = replace(
            asked,
            model=endpoint.model,
            fallback="",
            prefix_hashes=(),
            token_blocks=b"",
            asked_model=asked.asked_model or asked.model,
            model_rule=rule.value,
        )
        possible = self.core.possible(asked)
        self.core.deliver(port.FellBack(asked.number, endpoint.model, endpoint.region, possible, rule.value, words))
        return asked

    def _queue(self, request: Request, endpoint: Endpoint, rule: ModelRule) -> None:
        """Queue *request*, which waits or has left its instance, at *endpoint* for the fallback of its model."""
        core = self.core
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        request.asked = self._served_by(request.asked, endpoint, rule)
        request.predicted_tokens, request.estimate = core.possible(request.asked), None
        request.failed_before, request.failed_at = request.attempts - request.evictions, []
        request.output_tokens, request.evicting_s = 0, None
        core.table.write(request)
        self.queue.add(request, endpoint)
        self.placement.pump(endpoint)
        if request.slot >= 0:
            self.waits.waiting(request)
