"""Promises at the door of a simulated fleet: the rule of the live dispatcher, on an estimate of the same equations."""

from math import inf
from typing import Final

import numpy as np

from scheduling.compiled import uncompiled
from scheduling.queueing.held import HELD
from scheduling.queueing.ordering import first_due_s, hold_s
from scheduling.queueing.promises import ClassTerms, decide, fallbacks
from scheduling.queueing.waits.waiting_time import Wait
from scheduling.simulation.cluster.loop import change
from scheduling.simulation.cluster.state_changes import WITHDRAW
from scheduling.simulation.waits import SimulatedWaits

CHANGED: Final = ("priority", "deadline_s", "end_s", "hold_s", "judged", "held", "slo_class")
"""Columns of requests that change at the door."""


class Door:
    """Admission control: admit, degrade or refuse a queued request whose SLO class checks its promise."""

    def __init__(self, waits: SimulatedWaits) -> None:
        self.waits, self.simulation = waits, waits.simulation
        self.classes = list(self.simulation.cluster.classes)
        known = {terms.slo_class: terms for terms in self.classes}
        self.chains = [fallbacks(terms, known) for terms in self.classes]
        self.numbers = {terms.slo_class: number for number, terms in enumerate(self.classes)}
        count = self.simulation.requests.count
        self.asked_class = np.full(count, -1, np.int16)
        """Class that a degraded request asked for, by request; -1: not degraded."""
        self.refused = np.zeros(count, bool)
        self.late = np.zeros(count, bool)
        """Requests admitted in their own class although its promise was unreachable."""

    def judge(self, request: int) -> None:
        """Decide on *request*, which has just been queued."""
        self.simulation.world.arrivals.judged[request] = 0
        number = int(self.simulation.requests.slo_class[request])
        verdict = decide(self.classes[number], self.chains[number], lambda terms: self._queued_on(request, terms))
        if verdict.refused:
            self.refused[request] = True
            change(self.simulation.world, WITHDRAW, self.waits.slot(request), 1)
        else:
            self.late[request] = verdict.late_s > 0.0 and self.asked_class[request] < 0

    def counters(self) -> dict[str, int]:
        return {
            "degraded": int(np.count_nonzero((self.asked_class >= 0) & ~self.refused)),
            "refused_at_door": int(np.count_nonzero(self.refused)),
            "admitted_late": int(np.count_nonzero(self.late)),
        }

    def _queued_on(self, request: int, terms: ClassTerms) -> tuple[Wait | None, float]:
        """Queue *request* on *terms*; return its estimated wait, and by how much it will miss its promise."""
        simulation, number = self.simulation, self.numbers[terms.slo_class]
        was = int(simulation.requests.slo_class[request])
        if was != number:
            self._degrade(request, was, number, terms)
            if simulation.requests.held[request] & HELD:  # the queue manager has it
                return None, 0.0
        slot = self.waits.slot(request)
        if slot < 0:  # an instance took it
            return Wait(), 0.0
        world, cluster = simulation.world, simulation.cluster
        endpoint, prompt = int(world.waiting.endpoint[slot]), int(world.waiting.prompt_tokens[slot])
        wait = self.waits.of(request, slot)
        profile = cluster.reference_profile(cluster.endpoints[endpoint % len(cluster.endpoints)])
        decode_s = profile.decode_time_s(prompt, int(world.waiting.output_tokens[slot]))
        ttft_s = inf if terms.due_s is None else terms.due_s
        due_s = ttft_s if terms.end_s is None else uncompiled(first_due_s)(ttft_s, terms.end_s, decode_s)
        passed_s = simulation.now_s - float(world.arrivals.arrival_s[request])
        calibration = self.waits.calibration(endpoint, number)
        return wait, calibration.late_s(wait, due_s - passed_s, profile.service_time_s(prompt, 1))

    def _degrade(self, request: int, was: int, number: int, terms: ClassTerms) -> None:
        simulation, slot = self.simulation, self.waits.slot(request)
        if self.asked_class[request] < 0:
            self.asked_class[request] = was
        self.waits.overtaken.add(request)
        simulation.requests.slo_class[request] = number
        arrivals, holding = simulation.world.arrivals, simulation.holding
        simulation.requests.priority[request] = arrivals.priority[request] = terms.priority
        arrivals.deadline_s[request] = inf if terms.due_s is None else terms.due_s
        arrivals.end_s[request] = inf if terms.end_s is None else terms.end_s
        deadline_s = inf if terms.deadline_s is None else terms.deadline_s
        arrivals.hold_s[request] = hold_s(deadline_s, simulation.cluster.max_hold_s)
        self.waits.forget(request)  # its wait says nothing of the estimate in the class that it left
        endpoint = int(simulation.world.waiting.endpoint[slot])
        change(simulation.world, WITHDRAW, slot, 0)
        if holding is not None:
            arrivals.held[request] = holding.held_as(request, terms)
        if holding is not None and arrivals.held[request] & HELD:
            holding.hold(request, endpoint)
        else:
            simulation.control(endpoint, request)
