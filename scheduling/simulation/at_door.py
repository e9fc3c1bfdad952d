"""Promises at the door of a simulated fleet: the rule of the live dispatcher, on an estimate of the same equations.

Lengths and the pace are learned from the simulated requests that have ended, as live; what QLM's virtual queues and shared
GPUs add to a live estimate (`controlplane.dispatch.waits`) is left out.
"""

from math import inf
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import uncompiled
from scheduling.fleet.arrays import at_once
from scheduling.queueing.ordering import first_due_s, hold_s
from scheduling.queueing.promises import Calibration, ClassTerms, decide, fallbacks
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.starting import SPREAD, Coming, sooner, until_produced
from scheduling.queueing.waits.waiting_time import (
    ERROR,
    EXPECTED_COLUMNS,
    MEAN,
    VARIANCE,
    History,
    Lengths,
    Throughput,
    Wait,
    ahead,
    waiting_time,
)
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.loop import change
from scheduling.simulation.cluster.state_changes import WITHDRAW
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import sequences_in_use
from scheduling.simulation.holding import Holding
from scheduling.simulation.workload.requests import HELD, Requests

REFRESH_S: Final = 1.0
"""Lifetime of a pace, as live."""
MOST_ERROR: Final = 0.2
"""Relative error of the predicted output ahead, above which a wait does not teach throughput."""
ENOUGH_BATCHES: Final = 2.0
"""Batches of waits of a class after which it has a separate correction, as live."""
ALL: Final = -1
COMING: Final = (State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING)
CHANGED: Final = ("priority", "deadline_s", "end_s", "hold_s", "judged", "held", "slo_class")
"""Columns of requests that change at the door."""


def with_own_columns(requests: Requests) -> Requests:
    """Return *requests* with separate copies of the columns that change at the door."""
    return requests._replace(**{name: np.array(getattr(requests, name)) for name in CHANGED})


class Queued(Protocol):
    """The simulation, as far as the door needs it."""

    cluster: Cluster
    requests: Requests
    holding: Holding | None

    @property
    def world(self) -> World: ...
    @property
    def now_s(self) -> float: ...
    @property
    def states(self) -> NDArray[np.int8]: ...
    @property
    def arrived(self) -> int: ...
    def control(self, endpoint: int = -1, request: int = -1) -> int: ...


class Door:
    """Decides on arriving requests that wait and whose class does not simply admit them (`Requests.judged`)."""

    def __init__(self, simulation: Queued) -> None:
        self.simulation, cluster = simulation, simulation.cluster
        self.classes = list(cluster.classes)
        known = {terms.slo_class: terms for terms in self.classes}
        self.chains = [fallbacks(terms, known) for terms in self.classes]
        self.numbers = {terms.slo_class: number for number, terms in enumerate(self.classes)}
        self.history = History()
        count = simulation.requests.count
        self.asked_class = np.full(count, -1, np.int16)
        """Class that a degraded request asked for, by request; -1: not degraded."""
        self.refused = np.zeros(count, bool)
        self.late = np.zeros(count, bool)
        """Requests admitted in their own class although its promise was unreachable."""
        self._released_s: dict[int, float] = {}
        """When the queue manager released a request that waits: it began to wait at an endpoint then."""
        self._learned = np.zeros(count, bool)
        self._oldest = 0
        self._read_s = -inf
        self._paces: dict[int, tuple[Throughput | None, list[Coming]]] = {}
        self._corrections: dict[tuple[int, int], Correction] = {}  # by endpoint and SLO class, ALL for all
        self._calibrations: dict[tuple[int, int], Calibration] = {}  # by endpoint and SLO class
        self._waits: dict[int, tuple[int, float]] = {}  # by request: endpoint, estimated 99th percentile
        self._estimates: dict[int, tuple[int, float, float, bool]] = {}
        """By request: endpoint, uncorrected wait, batch, whether its wait teaches throughput."""
        self._expected = np.zeros((0, EXPECTED_COLUMNS))
        self._noted = np.zeros(0, np.int64)  # sequence number of the request that a row of it is of

    def judge(self, request: int) -> None:
        """Decide on *request*, which has just been queued."""
        arrivals = self.simulation.world.arrivals
        arrivals.judged[request] = 0
        if self.simulation.now_s - self._read_s >= REFRESH_S:
            self._learn()
        number = int(self.simulation.requests.slo_class[request])
        verdict = decide(self.classes[number], self.chains[number], lambda terms: self._queued_on(request, terms))
        if verdict.refused:
            self.refused[request] = True
            change(self.simulation.world, WITHDRAW, self._slot(request), 1)
        else:
            self.late[request] = verdict.late_s > 0.0 and self.asked_class[request] < 0

    def released(self, request: int) -> None:
        """Estimate the wait of *request*, which the queue manager has just released, as live; nothing is decided."""
        slot = self._slot(request)
        if slot < 0:  # an instance took it
            return
        if self.simulation.now_s - self._read_s >= REFRESH_S:
            self._learn()
        endpoint = int(self.simulation.world.waiting.endpoint[slot])
        self._released_s[request] = self.simulation.now_s
        if (wait := self._estimate(request, endpoint, slot)) is not None:
            self._waits[request] = endpoint, wait.quantile_s()

    def counters(self) -> dict[str, int]:
        return {
            "degraded": int(np.count_nonzero((self.asked_class >= 0) & ~self.refused)),
            "refused_at_door": int(np.count_nonzero(self.refused)),
            "admitted_late": int(np.count_nonzero(self.late)),
        }

    def _slot(self, request: int) -> int:
        """Return the slot in which *request* waits; -1 if it does not."""
        world = self.simulation.world
        slots = np.flatnonzero((world.held == request) & (world.waiting.position >= 0))
        return int(slots[0]) if slots.size else -1

    def _queued_on(self, request: int, terms: ClassTerms) -> tuple[Wait | None, float]:
        """Queue *request* on *terms*; return its estimated wait, and by how much it will miss its promise."""
        simulation, number = self.simulation, self.numbers[terms.slo_class]
        was = int(simulation.requests.slo_class[request])
        if was != number:
            self._degrade(request, was, number, terms)
            if simulation.requests.held[request] & HELD:  # the queue manager has it
                return None, 0.0
        slot = self._slot(request)
        if slot < 0:  # an instance took it
            return Wait(), 0.0
        world, cluster = simulation.world, simulation.cluster
        endpoint, prompt = int(world.waiting.endpoint[slot]), int(world.waiting.prompt_tokens[slot])
        wait = self._estimate(request, endpoint, slot)
        profile = cluster.reference_profile(cluster.endpoints[endpoint % len(cluster.endpoints)])
        decode_s = profile.decode_time_s(prompt, int(world.waiting.output_tokens[slot]))
        ttft_s = inf if terms.due_s is None else terms.due_s
        due_s = ttft_s if terms.end_s is None else uncompiled(first_due_s)(ttft_s, terms.end_s, decode_s)
        passed_s = simulation.now_s - float(world.arrivals.arrival_s[request])
        if wait is not None:
            self._waits[request] = endpoint, wait.quantile_s()
        calibration = self._calibration(endpoint, number)
        return wait, calibration.late_s(wait, due_s - passed_s, profile.service_time_s(prompt, 1))

    def _degrade(self, request: int, was: int, number: int, terms: ClassTerms) -> None:
        simulation, slot = self.simulation, self._slot(request)
        if self.asked_class[request] < 0:
            self.asked_class[request] = was
        simulation.requests.slo_class[request] = number
        arrivals, holding = simulation.world.arrivals, simulation.holding
        simulation.requests.priority[request] = arrivals.priority[request] = terms.priority
        arrivals.deadline_s[request] = inf if terms.due_s is None else terms.due_s
        arrivals.end_s[request] = inf if terms.end_s is None else terms.end_s
        deadline_s = inf if terms.deadline_s is None else terms.deadline_s
        arrivals.hold_s[request] = hold_s(deadline_s, simulation.cluster.max_hold_s)
        self._waits.pop(request, None)  # its wait says nothing of the estimate in the class that it left
        self._estimates.pop(request, None)
        endpoint = int(simulation.world.waiting.endpoint[slot])
        change(simulation.world, WITHDRAW, slot, 0)
        if holding is not None:
            arrivals.held[request] = holding.held_as(request, terms)
        if holding is not None and arrivals.held[request] & HELD:
            holding.hold(request, endpoint)
        else:
            simulation.control(endpoint, request)

    # The estimate

    def _learn(self) -> None:
        """Learn from the requests that ended since the last look, and forget paces."""
        simulation = self.simulation
        outcomes, requests, came = simulation.world.outcomes, simulation.requests, int(simulation.arrived)
        state = outcomes["state"][self._oldest : came]
        done = (state == Outcome.DONE) & ~self._learned[self._oldest : came]
        fresh = self._oldest + np.flatnonzero(done)
        for request in fresh[np.argsort(outcomes["e2e_s"][fresh] + requests.arrival_s[fresh])].tolist():
            self.history.learn(
                int(requests.model[request]), int(requests.prompt_tokens[request]),
                int(requests.output_tokens[request]), float(requests.predicted_tokens[request]),
            )  # fmt: skip
            released_s = self._released_s.pop(request, None)
            held_s = 0.0 if released_s is None else released_s - float(requests.arrival_s[request])
            waited_s = float(outcomes["queue_s"][request]) - held_s
            if (given := self._waits.pop(request, None)) is not None:
                self._calibration(given[0], int(requests.slo_class[request])).learn(given[1], waited_s)
            if (estimate := self._estimates.pop(request, None)) is not None:
                endpoint, uncorrected_s, batch, says_throughput = estimate
                # What was degraded, or held, is overtaken by what comes later: its wait says nothing of other classes.
                says_throughput = says_throughput and self.asked_class[request] < 0 and released_s is None
                for slo_class in (ALL, int(requests.slo_class[request])):
                    if slo_class != ALL or says_throughput:
                        self._correction(endpoint, slo_class).learn(uncorrected_s, waited_s, batch)
        self._learned[fresh] = True
        still = np.flatnonzero(state <= Outcome.RUNNING)
        self._oldest += int(still[0]) if still.size else state.size
        self._read_s = simulation.now_s
        self._paces.clear()

    def _correction(self, endpoint: int, slo_class: int) -> Correction:
        """Return what waits of a class at *endpoint* teach."""
        return self._corrections.setdefault((endpoint, slo_class), Correction(overtaken=slo_class != ALL))

    def _calibration(self, endpoint: int, slo_class: int) -> Calibration:
        return self._calibrations.setdefault((endpoint, slo_class), Calibration())

    def _lengths(self, endpoint: int) -> Lengths:
        return self.history.lengths(int(self.simulation.world.policies["model"][endpoint]))

    def _pace(self, endpoint: int) -> tuple[Throughput | None, list[Coming]]:
        """Return the throughput of the instances of *endpoint* that take work, and those that soon will."""
        known = self._paces.get(endpoint)
        if known is None:
            simulation, lengths = self.simulation, self._lengths(endpoint)
            world, together, coming = simulation.world, None, []
            for slot in np.flatnonzero(world.fleet.endpoint == endpoint).tolist():
                spec = simulation.cluster.instances[slot]
                alone = Throughput.of(
                    spec.engine.profile,
                    int(world.fleet.kv_capacity_tokens[slot]),
                    uncompiled(at_once)(world.fleet, slot),
                    lengths,
                )
                if world.fleet.accepting[slot]:
                    together = together.beside(alone) if together else alone
                elif (in_s := self._serves_in_s(slot)) is not None:
                    coming.append(Coming(in_s, alone.tokens_per_s, alone.batch * lengths.output_mean, SPREAD))
            known = self._paces[endpoint] = together, sorted(coming)
        return known

    def _serves_in_s(self, instance: int) -> float | None:
        """Return seconds until *instance*, which starts, serves; None if it does not start."""
        simulation, state = self.simulation, State(self.simulation.states[instance])
        if state not in COMING:
            return None
        times = simulation.world.events.time_s
        left_s = float(times[times.size // 2 + simulation.states.size + instance]) - simulation.now_s
        loading_s = float(simulation.world.lives.instances["loading_s"][instance]) if state == State.STARTING else 0.0
        return max(0.0, left_s) + loading_s if left_s < inf else None

    def _estimate(self, request: int, endpoint: int, slot: int) -> Wait | None:
        """Return the wait of *request*, which waits in *slot*; None while nothing serves there or soon will."""
        throughput, coming = self._pace(endpoint)
        requests, mean, variance, error = self._ahead(endpoint, slot)
        if throughput is None:
            return until_produced(Wait(mean, variance + error**2), 0.0, coming) if coming else None
        lengths = self._lengths(endpoint)
        correction = self._correction(endpoint, int(self.simulation.requests.slo_class[request]))
        if correction.batches < ENOUGH_BATCHES:
            correction = self._correction(endpoint, ALL)
        pace = throughput.corrected(correction.factor, correction.relative_variance)
        running, produced = self._running(endpoint)
        own = Wait(
            *waiting_time(
                requests, mean, variance, error, lengths.in_flight(running, produced), float(running),
                lengths.output_mean, lengths.output_variance, pace.batch, pace.tokens_per_s, pace.relative_variance,
            )
        )  # fmt: skip
        if requests > 0 and error <= MOST_ERROR * mean:
            uncorrected_s = own.mean_s * pace.tokens_per_s / throughput.tokens_per_s
            self._estimates[request] = endpoint, uncorrected_s, pace.batch, requests >= pace.batch
        overtaken_s = correction.overtaken_s
        spread_s2 = overtaken_s * (overtaken_s + 2.0 * own.mean_s) * pace.relative_variance
        own = own.then(Wait(overtaken_s, spread_s2))
        return sooner(own, pace.tokens_per_s, coming) if coming else own

    def _running(self, endpoint: int) -> tuple[int, int]:
        """Return the sequences that run at *endpoint*, and the output tokens that they have so far."""
        world = self.simulation.world
        mine = sequences_in_use(world.engines)
        mine = mine[world.fleet.endpoint[world.engines.sequences["instance"][mine]] == endpoint]
        return int(mine.size), int(world.engines.sequences["produced_tokens"][mine].sum())

    def _ahead(self, endpoint: int, slot: int) -> tuple[float, float, float, float]:
        """Return `waiting_time.ahead` of *slot*."""
        waiting = self.simulation.world.waiting
        if self._noted.size < waiting.key.size:
            more = waiting.key.size - self._noted.size
            self._expected = np.concatenate([self._expected, np.zeros((more, EXPECTED_COLUMNS))])
            self._noted = np.concatenate([self._noted, np.full(more, -1, np.int64)])
        size = int(waiting.size[endpoint])
        heap: NDArray[np.int32] = waiting.heap[endpoint]
        slots = heap[:size]
        for each in slots[self._noted[slots] != waiting.sequence[slots]].tolist():
            self._note(endpoint, each)
        return ahead(heap, size, waiting.key, waiting.sequence, self._expected, slot)

    def _note(self, endpoint: int, slot: int) -> None:
        """Note the expected output of the request that waits in *slot*."""
        world, lengths = self.simulation.world, self._lengths(endpoint)
        model, predicted = int(world.policies["model"][endpoint]), float(world.waiting.output_tokens[slot])
        row = self._expected[slot]
        row[MEAN], row[VARIANCE], row[ERROR] = self.history.expected(model, predicted)
        throughput, _ = self._pace(endpoint)
        serving = np.flatnonzero((world.fleet.endpoint == endpoint) & (world.fleet.accepting != 0)).tolist()
        seqs = sum(uncompiled(at_once)(world.fleet, each) for each in serving)
        if throughput is not None and throughput.batch < seqs:
            weight = lengths.weight(float(world.waiting.prompt_tokens[slot]))
            row *= weight, weight * weight, weight
        self._noted[slot] = world.waiting.sequence[slot]
