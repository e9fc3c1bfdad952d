"""Promises of SLO classes: a request that will miss its own is admitted late, degraded or refused when it is queued.

The rule is `scheduling.queueing.promises`; here it gets estimates of a fleet.
"""

import math
from functools import partial

from scheduling.compiled import uncompiled
from scheduling.control.fleet import Fleet
from scheduling.control.waits import Waits
from scheduling.queueing.ordering import first_due_s
from scheduling.queueing.promises import ClassTerms, Verdict, decide
from scheduling.queueing.waits.waiting_time import Wait


class AdmissionControl:
    def __init__(self, fleet: Fleet, waits: Waits) -> None:
        self.fleet, self.waits = fleet, waits

    def judge(self, row: int) -> Verdict:
        """Decide on the request of *row*, which has just been queued, and queue it on the terms of the verdict.

        An instance may have room for it then. One that is refused still waits.
        """
        terms, chain = self.fleet.terms(row)
        verdict = decide(terms, chain, partial(self.expected, row))
        if verdict.terms.slo_class != terms.slo_class:
            self.waits.mark_overtaken(row)
        return verdict

    def first_s(self, row: int, verdict: Verdict) -> float:
        """Return the seconds from now in which the first token of *row*, which waits, can be promised."""
        if verdict.wait is None:
            return math.inf
        slot = self.fleet.slot(row)
        endpoint = int(self.fleet.waiting.endpoint[slot])
        return self.waits.quantile_s(row, verdict.wait) + self._prefill_s(endpoint, slot)

    def expected(self, row: int, terms: ClassTerms) -> tuple[Wait | None, float]:
        """Queue *row* on *terms*; return its estimated wait, and by how much it will miss its promise."""
        fleet = self.fleet
        if terms.slo_class != fleet.slo_class(row):
            self.waits.forget(row)
            fleet.queue_on(row, terms)
            if (slot := fleet.slot(row)) >= 0:
                self.waits.begin(row, slot, again=True)
        estimate = self.waits.estimated(row)
        if estimate is None:  # an instance took it, or the queue manager holds it
            return Wait(), 0.0
        waiting, slot = fleet.waiting, fleet.slot(row)
        profile = fleet.endpoints[estimate.endpoint].profile
        decode_s = profile.decode_time_s(int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot]))
        due_s = math.inf if terms.due_s is None else terms.due_s
        due_s = due_s if terms.end_s is None else uncompiled(first_due_s)(due_s, terms.end_s, decode_s)
        left_s = due_s - (fleet.now_s - float(fleet.requests.arrival_s[row]))
        calibration = self.waits.calibration(estimate.endpoint, terms.slo_class)
        return estimate.wait, calibration.late_s(estimate.wait, left_s, self._prefill_s(estimate.endpoint, slot))

    def _prefill_s(self, endpoint: int, slot: int) -> float:
        profile = self.fleet.endpoints[endpoint].profile
        return float(profile.service_time_s(int(self.fleet.waiting.prompt_tokens[slot]), 1))
