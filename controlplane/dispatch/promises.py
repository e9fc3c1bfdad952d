"""Promises of SLO classes: a request that will miss its own is admitted late, degraded or refused when it is queued."""

from dataclasses import replace as dataclass_replace
from operator import attrgetter

from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.holding import HeldRequests
from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.placement import Placement
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue, first_due_of
from controlplane.dispatch.waits import Waits
from scheduling.queueing.promises import ClassTerms, Verdict, decide
from scheduling.queueing.waits.waiting_time import Wait

TERMS = tuple(name for name in ClassTerms.__struct_fields__ if name in port.Asked.__struct_fields__)
terms_of = attrgetter(*TERMS)


class Promises(Stage):
    def __init__(
        self, core: Core, queue: WaitingQueue, placement: Placement, waits: Waits, holding: HeldRequests
    ) -> None:
        self.core, self.queue, self.placement, self.waits, self.holding = core, queue, placement, waits, holding

    def waiting(self, request: Request) -> bool:
        """Decide on its promise, and notify the gateway of its wait."""
        released = request.released_s is not None
        if request.attempts or not (released or self._is_admitted(request)):
            return True
        estimate = self.waits.estimated(request)
        if estimate is not None:
            if released:
                # Work that comes later goes first: its wait says nothing of other classes.
                request.estimate = dataclass_replace(estimate, says_throughput=False)
            wait = estimate.wait
            mean_s, p99_s = (wait.mean_s, wait.quantile_s()) if wait else (None, None)
            self.core.deliver(port.Waiting(request.asked.number, estimate.position, mean_s, p99_s))
        return False

    def _is_admitted(self, request: Request) -> bool:
        """Estimate the wait of *request*, which has just been queued, and decide on its promise; False if it is refused.

        It may be degraded, and an instance may have room for it then.
        """
        number, own = request.asked.number, request.asked.slo_class
        terms = ClassTerms(*terms_of(request.asked))
        verdict = decide(terms, request.asked.fallbacks, lambda terms: self._expected(request, terms))
        wait = verdict.wait
        if verdict.refused and wait is not None:
            self.core.drop(request, self._unreachable(request, verdict, wait))
            return False
        if request.estimate is not None and verdict.terms.slo_class != own:
            # It is overtaken by what comes later: its wait says nothing of other classes.
            request.estimate = dataclass_replace(request.estimate, says_throughput=False)
        if verdict.late_s or verdict.terms.slo_class != own:
            p99_s = wait.quantile_s() if wait else 0.0
            self.core.deliver(port.Admission(number, verdict.terms.slo_class, verdict.late_s, p99_s))
        return True

    def _expected(self, request: Request, terms: ClassTerms) -> tuple[Wait | None, float]:
        """Queue *request* on *terms*; return its estimated wait, and by how much it will miss its promise."""
        endpoint = request.endpoint
        if terms.slo_class != request.asked.slo_class:
            self.queue.take_out(request.slot)
            request.asked = replace(request.asked, **dict(zip(TERMS, terms_of(terms), strict=True)))
            request.estimate = None
            self.core.table.write(request)
            if self.holding.holds(request.asked):
                self.holding.hold(request)
                return None, 0.0
            self.queue.add(request, endpoint)
            self.placement.pump(endpoint)
            if request.slot < 0:
                return Wait(), 0.0
            self.waits.waiting(request)
        estimate = request.estimate = self.waits.of(request)
        calibration = self.waits.calibration(endpoint, terms.slo_class)
        return estimate.wait, calibration.late_s(estimate.wait, self._due_in_s(request), _prefill_s(request))

    def _due_in_s(self, request: Request) -> float:
        """Return seconds until the first token of *request* is due, infinity for never."""
        asked = request.asked
        profile, output = request.endpoint.spec.profile, request.predicted_tokens
        return first_due_of(profile, asked, asked.prompt_tokens, output) - (self.core.clock() - asked.arrived_s)

    def _unreachable(self, request: Request, verdict: Verdict, wait: Wait) -> port.Refused:
        factor = self.waits.calibration(request.endpoint, verdict.terms.slo_class).factor
        first_s = factor * wait.quantile_s() + _prefill_s(request)
        due_s = max(0.0, first_s - verdict.late_s)
        return port.Refused(
            request.asked.number,
            429,
            "deadline_unreachable",
            f"The first token is due in {due_s:.1f} s to keep the promise of the class {verdict.terms.slo_class!r}, and can "
            f"be promised in {first_s:.1f} s. Try again in {verdict.late_s:.0f} s, or in a class with more time.",
            retry_after_s=max(1.0, verdict.late_s),
            estimated_wait_s=wait.mean_s,
            region=request.endpoint.region,
            earliest_at=request.asked.arrived_at + self.core.clock() - request.asked.arrived_s + first_s,
        )


def _prefill_s(request: Request) -> float:
    return request.endpoint.spec.profile.service_time_s(request.asked.prompt_tokens, 1)
