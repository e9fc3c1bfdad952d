"""Expected waits of queued requests: the RWT estimator over the live queues, corrected by measured waits."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.kernels import ahead, ahead_in_queue
from controlplane.dispatch.live_fleet.topology import Endpoint, Estimate, Replica, Request, Topology
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.stages import COMING_LIMIT_S
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.queueing.promises import Calibration
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.starting import NOT_KNOWN, SPREAD, Coming, left_of_start_s, sooner, until_produced
from scheduling.queueing.waits.waiting_time import EXPECTED_COLUMNS, History, Lengths, Throughput, Wait, waiting_time

REFRESH_S = 1.0  # lifetime of a pace and of the list of starting instances
PACE_STALE_S = 60.0
RETURNS_S = 3.0
"""Time until heartbeats find an unreachable instance again, as measured on a busy machine."""
UNMEASURED_VARIANCE = 1.0  # relative, of a pace not yet compared with waits
ENOUGH_BATCHES = 2.0  # of waits of a class, after which it has a separate correction
MOST_ERROR = 0.2  # relative error of the predicted output ahead, above which a wait does not teach throughput
START_LIMIT = 2.0  # times its usual time after which a start is not waited for


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """Output tokens of the requests ahead, and the wait until their model has the GPUs."""

    requests: float
    mean: float
    variance: float
    error: float
    others: Wait = field(default_factory=Wait)
    others_requests: float = 0.0
    empty: bool = False
    """Nothing runs there by then: a whole batch starts at once."""


@dataclass(slots=True)
class Pace:
    """Throughput of an endpoint or of one instance, read at *read_s*."""

    read_s: float
    by_profile: Throughput
    recent_tokens_per_s: float | None  # from the requests finished lately
    lengths: Lengths
    by_memory: bool  # memory, not the number of sequences, limits the batch everywhere


@dataclass(frozen=True, slots=True)
class CorrectedPace:
    pace: Pace
    correction: Correction
    tokens_per_s: float
    relative_variance: float


class Paces:
    """Throughput by performance profiles, corrected by measured waits."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        history: History,
        clock: Callable[[], float],
    ) -> None:
        self.topology, self.queue, self.history = topology, queue, history
        self.clock, self.wall_clock = clock, time.time
        self._paces: dict[tuple[int, int], Pace] = {}  # by endpoint and instance, -1 for all of its instances
        self._corrections: dict[tuple[int, str], Correction] = {}  # by endpoint and SLO class, "" for all
        self._coming: dict[
            int, tuple[float, int, list[Coming]]
        ] = {}  # by endpoint: time of the read, instances that served

    def shares(self, replica: Replica) -> bool:
        """Whether *replica* shares one virtual queue with the other instances on its GPUs."""
        return bool(self.queue.arrays.groups.swap_s[replica.slot] < math.inf)

    def serving(self, endpoint: Endpoint) -> int:
        """Return the number of instances of *endpoint* that accept work."""
        return int(np.count_nonzero(self.topology.fleet.accepting[self._slots(endpoint)]))

    def coming(self, endpoint: Endpoint) -> list[Coming]:
        """Return the instances of *endpoint* that will soon serve, soonest first, without those that a swap brings up."""
        now_s, serving = self.clock(), self.serving(endpoint)
        read = self._coming.get(endpoint.index)
        if read is None or now_s - read[0] > REFRESH_S or serving != read[1]:
            read = self._coming[endpoint.index] = now_s, serving, self._read_coming(endpoint)
        return read[2]

    def learned(self, endpoint: Endpoint, slo_class: str) -> Correction:
        """Return the correction learned from waits of a class at *endpoint*; "" for all classes."""
        key = (endpoint.index, slo_class)
        correction = self._corrections.get(key)
        if correction is None:
            measured = any(replica.spec.profile for replica in self.topology.members(endpoint))
            guess = Correction.GUESS if measured else 0.0
            correction = self._corrections[key] = Correction(guess, overtaken=bool(slo_class))
        return correction

    def known(self, endpoint: Endpoint, replica: Replica | None, slo_class: str) -> CorrectedPace | None:
        """Return the pace of *endpoint*, or of *replica* alone; None while unknown."""
        pace = self._pace(endpoint, replica)
        if pace is None:
            return None
        correction = self._corrections.get((endpoint.index, slo_class))
        if correction is None or correction.batches < ENOUGH_BATCHES:
            correction = self.learned(endpoint, "")
        if correction.known:
            throughput = pace.by_profile.corrected(correction.factor, correction.relative_variance)
            return CorrectedPace(pace, correction, throughput.tokens_per_s, throughput.relative_variance)
        if pace.recent_tokens_per_s is not None:
            return CorrectedPace(pace, correction, pace.recent_tokens_per_s, UNMEASURED_VARIANCE)
        return None

    def weight(self, endpoint: Endpoint, prompt_tokens: int) -> float:
        """Return the weight of a request's output tokens by its prompt (`Lengths.weight`)."""
        pace = self._pace(endpoint, None)
        return pace.lengths.weight(float(prompt_tokens)) if pace is not None and pace.by_memory else 1.0

    def until_given(self, work: WorkAhead, endpoint: Endpoint, replica: Replica | None, known: CorrectedPace) -> Wait:
        """Return the wait until *work* is given out and one more request can be."""
        lengths, batch = known.pace.lengths, known.pace.by_profile.batch
        requests, tokens_per_s = work.requests, known.tokens_per_s
        if work.empty:  # a batch starts at once (equation 11), so only the work beyond it has to end
            share = max(0.0, requests + 1.0 - batch) / max(requests, 1.0)
            mean_s = share * work.mean / tokens_per_s
            variance = share * work.variance + (share * work.error) ** 2
            return Wait(mean_s, variance / tokens_per_s**2 + mean_s**2 * known.relative_variance)
        running = endpoint.running_sequences if replica is None else int(self.topology.fleet.running[replica.slot])
        share = running / max(endpoint.running_sequences, 1)
        return Wait(
            *waiting_time(
                requests, work.mean, work.variance, work.error,
                lengths.in_flight(running, round(share * endpoint.running_output_tokens)), float(running),
                lengths.output_mean, lengths.output_variance, batch, tokens_per_s, known.relative_variance,
            )
        )  # fmt: skip

    def _slots(self, endpoint: Endpoint) -> NDArray[np.int32]:
        arrays = self.topology.arrays
        return arrays.members[arrays.first[endpoint.index] : arrays.first[endpoint.index + 1]]

    def _read_coming(self, endpoint: Endpoint) -> list[Coming]:
        listed = list[Coming]()
        for one in map(self.topology.by_slot.get, self._slots(endpoint).tolist()):
            in_s = None if one is None or self.shares(one) else self._serves_in_s(one)
            known = None if in_s is None else self.known(endpoint, one, "")
            if one is not None and in_s is not None and known is not None:
                begins = max(0.0, known.pace.by_profile.batch - int(self.topology.fleet.running[one.slot]))
                spread = NOT_KNOWN if one.spec.start_s is None else SPREAD
                listed.append(Coming(in_s, known.tokens_per_s, begins * known.pace.lengths.output_mean, spread))
        return sorted(listed)

    def _serves_in_s(self, one: Replica) -> float | None:
        """Return seconds until *one*, which starts, is unreachable or paused, takes requests; None otherwise."""
        if one.spec.start_s is not None:
            passed_s = self.wall_clock() - one.spec.start_began_at
            return left_of_start_s(one.spec.start_s, max(0.0, passed_s)) if passed_s < COMING_LIMIT_S else None
        asleep = one.metrics is not None and one.metrics.sleeping
        is_well = one.spec.state == InstanceState.READY and not one.lost and not one.wedged and not asleep
        if not is_well or self.topology.fleet.accepting[one.slot] or not self.topology.serves(one.endpoint):
            return None
        return max(RETURNS_S, one.health.until_s - self.clock())

    def _pace(self, endpoint: Endpoint, replica: Replica | None) -> Pace | None:
        key, now_s = (endpoint.index, -1 if replica is None else replica.slot), self.clock()
        pace = self._paces.get(key)
        if pace is None or now_s - pace.read_s > REFRESH_S:
            pace = self._read_pace(endpoint, replica, now_s)
            if pace is not None:
                self._paces[key] = pace
        return pace

    def _read_pace(self, endpoint: Endpoint, replica: Replica | None, now_s: float) -> Pace | None:
        fleet, lengths = self.topology.fleet, self.history.lengths(endpoint.model)
        serving = [one for one in self.topology.members(endpoint) if fleet.accepting[one.slot]]
        together: Throughput | None = None
        by_memory = True
        alone_too = replica is not None and (
            self.shares(replica) or replica.spec.start_s is not None or replica.spec.state == InstanceState.READY
        )
        of_one = [replica] if replica is not None and (replica in serving or alone_too) else []
        for one in of_one or serving:
            alone = Throughput.of(
                one.spec.profile or endpoint.spec.profile,
                int(fleet.kv_capacity_tokens[one.slot]),
                self.topology.at_once(one),
                lengths,
            )
            together = together.beside(alone) if together else alone
            by_memory = by_memory and alone.batch < self.topology.at_once(one)
        if together is None:
            return None
        finished, recent = endpoint.finished_s, None
        if len(finished) >= 2 and now_s - finished[-1] <= PACE_STALE_S:
            recent = len(finished) * lengths.output_mean / max(now_s - finished[0], 1e-3)
            recent /= max(len(serving), 1) if of_one else 1
        return Pace(now_s, together, recent, lengths, by_memory)


class Waits(Stage):
    """Estimates the wait of queued requests and of the next one to come, and learns from the waits that follow."""

    def __init__(self, topology: Topology, queue: WaitingQueue, clock: Callable[[], float]) -> None:
        self.topology, self.queue = topology, queue
        self.history = History()
        self._expected = np.zeros((0, EXPECTED_COLUMNS))  # output of each waiting request, by slot
        self.paces = Paces(topology, queue, self.history, clock)
        self._calibrations: dict[tuple[int, str], Calibration] = {}

    def calibration(self, endpoint: Endpoint, slo_class: str) -> Calibration:
        """Return what waits of a class at *endpoint* teach about their estimated 99th percentiles."""
        return self._calibrations.setdefault((endpoint.index, slo_class), Calibration())

    def waiting(self, request: Request) -> bool:
        """Count the expected output of *request*, which begins to wait."""
        asked, slots = request.asked, self.queue.arrays.key.size
        if self._expected.shape[0] < slots:
            grown = np.zeros((slots, EXPECTED_COLUMNS))
            grown[: self._expected.shape[0]] = self._expected
            self._expected = grown
        mean, variance, error = self.history.expected((asked.model, asked.slo_class), float(request.predicted_tokens))
        if asked.max_tokens:
            mean = min(mean, float(asked.max_tokens * asked.sequences))
        weight = self.paces.weight(request.endpoint, asked.prompt_tokens)
        self._expected[request.slot] = weight * mean, weight * weight * variance, weight * error
        return False

    def estimated(self, request: Request) -> Estimate | None:
        """Return the wait of *request* as it was first estimated; None if it waits no longer."""
        if request.slot >= 0 and request.estimate is None:
            request.estimate = self.of(request)
        return request.estimate if request.slot >= 0 else None

    def of(self, request: Request) -> Estimate:
        """Return the remaining wait of *request*, which is queued."""
        return self._estimate(request.endpoint, request.slot, request.asked.slo_class)

    def of_next(self, endpoint: Endpoint) -> Wait | None:
        """Return the wait of a request that would join the queue of *endpoint* last; None while the pace is unknown."""
        if not self.queue.count(endpoint) and self._up(endpoint):
            comes = not self.paces.serving(endpoint) and self.paces.coming(endpoint)
            return self._of_first(endpoint, -1, comes).wait if comes else Wait()
        return self._estimate(endpoint, -1, "").wait

    def start_left_s(self, endpoint: Endpoint) -> float | None:
        """Return seconds until an instance of *endpoint*, which none serves, should be ready, by the usual time of a start.

        None where one serves, none starts, or all starts have taken `START_LIMIT` times as long as usual.
        """
        if self.paces.serving(endpoint):
            return None
        wall_s, left_s = self.paces.wall_clock(), list[float]()
        for spec in (one.spec for one in self.topology.members(endpoint)):
            passed_s = max(0.0, wall_s - spec.start_began_at)
            if spec.start_s is not None and passed_s < START_LIMIT * spec.start_s:
                left_s.append(left_of_start_s(spec.start_s, passed_s))
        return min(left_s, default=None)

    def placed(self, request: Request, replica: Replica) -> None:
        """Learn from the wait of *request*, which *replica* gets, unless it waited before.

        What the queue manager held waits at an endpoint from its release.
        """
        estimate, request.estimate = request.estimate, None
        since_s = request.asked.arrived_s if request.released_s is None else request.released_s
        waited_s = request.placed_s - since_s
        if estimate is not None and estimate.wait is not None:
            self.calibration(estimate.endpoint, request.asked.slo_class).learn(estimate.wait.quantile_s(), waited_s)
        if estimate is None or estimate.uncorrected_s is None or estimate.endpoint is not request.endpoint:
            return
        if self.paces.shares(replica):
            if self.queue.arrays.groups.up_s[replica.slot] > since_s:
                return  # it waited for another model meanwhile
        elif self.paces.serving(request.endpoint) != estimate.serving:
            return  # other instances serve by then
        for name in ("", request.asked.slo_class):
            if name or estimate.says_throughput:
                self.paces.learned(request.endpoint, name).learn(estimate.uncorrected_s, waited_s, estimate.batch)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        """Learn the length of *request* if it was answered."""
        if output_tokens:
            asked, kept = request.asked, request.kept_tokens
            for key in (asked.model, (asked.model, asked.slo_class)):
                self.history.learn(
                    key, asked.prompt_tokens - kept, output_tokens, float(request.predicted_tokens + kept)
                )

    def _estimate(self, endpoint: Endpoint, slot: int, slo_class: str) -> Estimate:
        replica, serving = self._pulling(endpoint, slot), self.paces.serving(endpoint)
        shares = replica is not None and self.paces.shares(replica)
        coming = [] if shares else self.paces.coming(endpoint)
        if coming and not serving:
            return self._of_first(endpoint, slot, coming)
        known = self.paces.known(endpoint, replica, slo_class)
        work = self._ahead(endpoint, replica, slot)
        position = round(work.requests + work.others_requests) + 1
        if known is None:
            return Estimate(endpoint, position)
        pace, correction = known.pace, known.correction
        own = self.paces.until_given(work, endpoint, replica, known)
        overtaken_s = correction.overtaken_s
        # Before lengths are known, a wait does not teach throughput; nor does a wait for other models.
        is_known = work.requests > 0 and work.error <= MOST_ERROR * work.mean and not work.empty
        uncorrected_s = own.mean_s * known.tokens_per_s / pace.by_profile.tokens_per_s if is_known else None
        spread_s2 = overtaken_s * (overtaken_s + 2.0 * own.mean_s) * known.relative_variance
        own = own.then(Wait(overtaken_s, spread_s2))
        # Groups in time keep their place (`reordering.scheduler`): only late ones gain new instances.
        moves = replica is None or self.queue.clock() + own.mean_s > float(self.queue.arrays.key[slot])
        if coming and moves and (together := self.paces.known(endpoint, None, slo_class)) is not None:
            own = sooner(own, together.tokens_per_s, coming)
        wait, batch = work.others.then(own), pace.by_profile.batch
        return Estimate(endpoint, position, wait, uncorrected_s, work.requests >= batch, batch, serving)

    def _of_first(self, endpoint: Endpoint, slot: int, coming: list[Coming]) -> Estimate:
        """Return the wait of *slot* where no instance of *endpoint* serves yet."""
        before = self._before(endpoint, slot)
        tokens = Wait(before.mean, before.variance + before.error**2)
        return Estimate(endpoint, round(before.requests) + 1, until_produced(tokens, 0.0, coming))

    def _ahead(self, endpoint: Endpoint, replica: Replica | None, slot: int) -> WorkAhead:
        """Return the work before *slot*, -1 for a request that would come last."""
        if replica is None:
            return self._before(endpoint, slot)
        topology, queue = self.topology, self.queue
        requests, mean, variance, error, others_s, others_s2, others = ahead_in_queue(
            topology.fleet, topology.arrays, queue.arrays, self._expected, slot, replica.slot, queue.clock()
        )
        return WorkAhead(requests, mean, variance, error, Wait(others_s, others_s2), others, empty=others_s > 0.0)

    def _before(self, endpoint: Endpoint, slot: int) -> WorkAhead:
        """Return everything queued for *endpoint* with an earlier queue key than *slot*, in any virtual queue."""
        arrays = self.queue.arrays
        heap, size = arrays.heap[endpoint.index], self.queue.count(endpoint)
        return WorkAhead(*ahead(heap, size, arrays.key, arrays.sequence, self._expected, slot))

    def _up(self, endpoint: Endpoint) -> bool:
        """Whether an instance of *endpoint* takes requests, or none would come up by a swap."""
        members = self.topology.members(endpoint)
        return any(self.topology.fleet.accepting[one.slot] for one in members) or not any(
            map(self.paces.shares, members)
        )

    def _pulling(self, endpoint: Endpoint, slot: int) -> Replica | None:
        """Return the instance of *endpoint* whose virtual queue holds the group of *slot*; None where it is in none.

        For a request to come (-1) that would wait for a swap, the instance that the swap brings up.
        """
        groups = self.queue.arrays.groups
        if slot < 0 and not self._up(endpoint):
            return next(filter(self.paces.shares, self.topology.members(endpoint)))
        group = int(groups.members["group"][slot]) if slot >= 0 else -1
        queue = int(groups.groups["queue"][group]) if group >= 0 else -1
        if queue < 0:
            return None
        pulling = (self.topology.by_slot.get(at) for at in np.flatnonzero(groups.queue_of == queue).tolist())
        return next((replica for replica in pulling if replica and replica.endpoint is endpoint), None)
