"""Promises of SLO classes: `scheduling.control.admission` decides on them, and callers hear of it, and of their waits."""

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waits import WaitEstimates
from scheduling.control.admission import AdmissionControl
from scheduling.queueing.promises import Verdict
from scheduling.queueing.waits.waiting_time import Wait


class Promises(Stage):
    def __init__(self, core: Core, waits: WaitEstimates) -> None:
        self.core, self.waits = core, waits.control
        self.control = AdmissionControl(waits.fleet, waits.control)

    def waiting(self, request: Request) -> bool:
        """Decide on its promise, and notify the gateway of its wait."""
        released = request.released_s is not None
        if request.attempts or not (released or request.again or self._is_admitted(request)):
            return True
        estimate = self.waits.estimated(request.row)
        if estimate is not None:
            if released:
                self.waits.mark_overtaken(request.row)
            wait = estimate.wait
            mean_s, p99_s = (wait.mean_s, self.waits.quantile_s(request.row, wait)) if wait else (None, None)
            self.core.deliver(port.Waiting(request.asked.number, estimate.position, mean_s, p99_s))
        return False

    def _is_admitted(self, request: Request) -> bool:
        """Decide on the promise of *request*, which has just been queued; return False if it is refused."""
        number, own = request.asked.number, request.asked.slo_class
        verdict = self.control.judge(request.row)
        wait, slo_class = verdict.wait, verdict.terms.slo_class
        if verdict.refused and wait is not None:
            self.core.drop(request, self._unreachable(request, verdict, wait))
            return False
        if verdict.late_s or slo_class != own:
            p99_s = self.waits.quantile_s(request.row, wait) if wait else 0.0
            self.core.deliver(port.Admission(number, slo_class, verdict.late_s, p99_s))
        return True

    def _unreachable(self, request: Request, verdict: Verdict, wait: Wait) -> port.Refused:
        first_s = self.control.first_s(request.row, verdict)
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
