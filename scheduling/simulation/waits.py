"""Estimated waits in a simulated fleet: the live estimate's equations, on what the simulation knows.

Lengths and the pace are learned from the simulated requests that have ended, as live; what QLM's virtual queues and shared
GPUs add to a live estimate (`controlplane.dispatch.waits`) is left out.
"""

from math import inf
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import uncompiled
from scheduling.fleet.arrays import at_once
from scheduling.queueing.promises import Calibration
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
from scheduling.simulation.cluster.loop import CONTROL
from scheduling.simulation.cluster.world import Outcome, State, World
from scheduling.simulation.engine.state import sequences_in_use
from scheduling.simulation.workload.requests import Requests

REFRESH_S: Final = 1.0
"""Lifetime of a pace, as live."""
MOST_ERROR: Final = 0.2
"""Relative error of the predicted output ahead, above which a wait does not teach throughput."""
ENOUGH_BATCHES: Final = 2.0
"""Batches of waits of a class after which it has a separate correction, as live."""
ALL: Final = -1
COMING: Final = (State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING)
LAST: Final = -1
"""In place of a slot of the waiting set: a request that would join the queue last."""


class Queued(Protocol):
    """The simulation, as far as estimates need it."""

    cluster: Cluster
    requests: Requests
    holding: Any

    @property
    def world(self) -> World: ...
    @property
    def now_s(self) -> float: ...
    @property
    def states(self) -> NDArray[np.int8]: ...
    @property
    def arrived(self) -> int: ...
    def control(self, endpoint: int = -1, request: int = -1, source: int = CONTROL) -> int: ...


class SimulatedWaits:
    """Estimates waits, and learns from those that follow."""

    def __init__(self, simulation: Queued) -> None:
        self.simulation = simulation
        self.history = History()
        self.overtaken: set[int] = set()
        """Requests that what comes later goes before: their waits say nothing of other classes."""
        self._released_s: dict[int, float] = {}
        """When the queue manager released a request that waits: it began to wait at an endpoint then."""
        self._learned = np.zeros(simulation.requests.count, bool)
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

    def slot(self, request: int) -> int:
        """Return the slot in which *request* waits; -1 if it does not."""
        world = self.simulation.world
        slots = np.flatnonzero((world.held == request) & (world.waiting.position >= 0))
        return int(slots[0]) if slots.size else -1

    def of(self, request: int, slot: int) -> Wait | None:
        """Return the wait of *request*, which waits in *slot*; None while nothing serves there or soon will."""
        self._refresh()
        endpoint = int(self.simulation.world.waiting.endpoint[slot])
        wait = self._estimate(endpoint, int(self.simulation.requests.slo_class[request]), slot, request)
        if wait is not None:
            self._waits[request] = endpoint, wait.quantile_s()
        return wait

    def of_next(self, endpoint: int) -> Wait | None:
        """Return the wait of a request that would join the queue of *endpoint* last; None while that is unknown."""
        self._refresh()
        if not self.simulation.world.waiting.size[endpoint] and self._pace(endpoint)[0] is not None:
            return Wait()
        return self._estimate(endpoint, ALL, LAST)

    def released(self, request: int) -> None:
        """Estimate the wait of *request*, which the queue manager has just released, as live; nothing is decided."""
        slot = self.slot(request)
        if slot >= 0:  # else an instance took it
            self._released_s[request] = self.simulation.now_s
            self.of(request, slot)

    def forget(self, request: int) -> None:
        """Forget the estimate of *request*, which no longer waits for what it was estimated for."""
        self._waits.pop(request, None)
        self._estimates.pop(request, None)

    def _refresh(self) -> None:
        if self.simulation.now_s - self._read_s >= REFRESH_S:
            self._learn()

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
                self.calibration(given[0], int(requests.slo_class[request])).learn(given[1], waited_s)
            if (estimate := self._estimates.pop(request, None)) is not None:
                endpoint, uncorrected_s, batch, says_throughput = estimate
                # What was held is overtaken by what comes later too.
                says_throughput = says_throughput and request not in self.overtaken and released_s is None
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

    def calibration(self, endpoint: int, slo_class: int) -> Calibration:
        """Return what waits of a class at *endpoint* teach about their estimated 99th percentiles."""
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

    def _estimate(self, endpoint: int, slo_class: int, slot: int, request: int = -1) -> Wait | None:
        """Return the wait of *slot*, that of *request*, for *endpoint*; None while nothing serves there or soon will."""
        throughput, coming = self._pace(endpoint)
        requests, mean, variance, error = self._ahead(endpoint, slot)
        if throughput is None:
            return until_produced(Wait(mean, variance + error**2), 0.0, coming) if coming else None
        lengths = self._lengths(endpoint)
        correction = self._correction(endpoint, slo_class)
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
        if request >= 0 and requests > 0 and error <= MOST_ERROR * mean:
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
