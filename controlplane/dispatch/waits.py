"""Expected waits of queued requests: the RWT estimator over the live queues, corrected by measured waits."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.kernels import ahead, ahead_in_queue, change_s, runs_ahead
from controlplane.dispatch.live_fleet.topology import Endpoint, Estimate, Replica, Request, Topology
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.stages import COMING_LIMIT_S
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.queueing.promises import Calibration
from scheduling.queueing.swapping.losing import lost
from scheduling.queueing.waits.correction import Blend, Correction
from scheduling.queueing.waits.starting import NOT_KNOWN, SPREAD, Coming, left_of_start_s, sooner, until_produced
from scheduling.queueing.waits.waiting_in_queues import INSTANCE, LATEST, MOST_RUNS, REQUESTS, RUN_COLUMNS, TOKENS
from scheduling.queueing.waits.waiting_time import EXPECTED_COLUMNS, History, Lengths, Throughput, Wait, waiting_time
from scheduling.scaling.swapping import SWAPPING_SHARE, busy_spell_s, leaving

REFRESH_S = 1.0  # lifetime of a pace and of the list of starting instances
PACE_STALE_S = 60.0
RETURNS_S = 3.0
"""Time until heartbeats find an unreachable instance again, as measured on a busy machine."""
UNMEASURED_VARIANCE = 1.0  # relative, of a pace not yet compared with waits
ENOUGH_BATCHES = 2.0  # of waits of a class, after which it has a separate correction
MOST_ERROR = 0.2  # relative error of the predicted output ahead, above which a wait does not teach throughput
START_LIMIT = 2.0  # times its usual time after which a start is not waited for
ARRIVALS = 64  # requests of a model from which its arrival rate is computed


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
        self._blends: dict[tuple[int, str], Blend] = {}
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

    def blend(self, endpoint: Endpoint, slo_class: str) -> Blend:
        """Return the weight of the whole endpoint, rather than of one queue, in the waits of a class."""
        return self._blends.setdefault((endpoint.index, slo_class), Blend())

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
        """Return seconds until *one*, which starts, rests, is busy or unreachable, takes requests; None otherwise."""
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


class Arrivals:
    """Recent requests of an endpoint: arrival, and the time each was allowed, infinity without a deadline."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, float]] = deque()
        self._due, self._allowed_s = 0, 0.0  # requests with a deadline, and the sum of their allowed times

    def add(self, arrived_s: float, allowed_s: float) -> None:
        self._came.append((arrived_s, allowed_s))
        self._count(allowed_s, 1)
        if len(self._came) > ARRIVALS:
            self._count(self._came.popleft()[1], -1)

    def _count(self, allowed_s: float, sign: int) -> None:
        if allowed_s < math.inf:
            self._due += sign
            self._allowed_s += sign * allowed_s

    def per_s(self, now_s: float) -> float:
        count = len(self._came)
        return (count - 1) / max(now_s - self._came[0][0], 1e-3) if count > 1 else 0.0

    def next_due_s(self, now_s: float) -> float:
        """Return when the next request to come is due on average; infinity where none has a deadline."""
        per_s = self.per_s(now_s) * self._due / max(len(self._came), 1)
        return now_s + 1.0 / per_s + self._allowed_s / self._due if per_s > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Stay:
    """A model's stay on shared GPUs, and the models that may take the GPUs from it.

    Rows are those of `runs_ahead`.
    """

    replica: Replica
    row: list[float]
    takers: list[list[float]]
    stays_s: list[float]
    """Shortest stay, by taker."""


class SharedGpus:
    """Waits where models share GPUs: for the models before, each swap, and the chance to lose the GPUs again."""

    def __init__(self, topology: Topology, queue: WaitingQueue, paces: Paces, clock: Callable[[], float]) -> None:
        self.topology, self.queue, self.paces, self.clock = topology, queue, paces, clock
        self._arrivals: dict[int, Arrivals] = {}  # by endpoint
        self._runs = np.zeros((MOST_RUNS, RUN_COLUMNS))

    def came(self, request: Request) -> None:
        asked, endpoint = request.asked, request.endpoint
        if endpoint.spec.shares_gpus and not request.attempts:
            arrivals = self._arrivals.setdefault(endpoint.index, Arrivals())
            arrivals.add(asked.arrived_s, math.inf if asked.due_s is None else asked.due_s)

    def came_up_since(self, replica: Replica, arrived_s: float) -> bool:
        """Whether *replica* got its GPUs after *arrived_s*: requests that came then waited for other models too."""
        return self.paces.shares(replica) and bool(
            self.queue.arrays.groups.up_s[replica.slot] > self.queue.since_start_s(arrived_s)
        )

    def ahead(self, replica: Replica, slot: int, expected: NDArray[np.float64]) -> tuple[WorkAhead, Stay] | None:
        """Return the work ahead of *slot* for *replica*, and its stay; None while an earlier pace is unknown."""
        topology, runs, moment_s = self.topology, self._runs, self.queue.moment_s
        count, behind, until_s, running, first = runs_ahead(
            topology.fleet, topology.arrays, self.queue.arrays, expected, slot, replica.slot, moment_s, runs
        )
        rows, takers = runs[:count].tolist(), runs[count : count + behind].tolist()
        for row in rows + takers:
            row[LATEST] = min(row[LATEST], self._next_due_s(row))
        if rows[0][INSTANCE] == replica.slot and self._stays_s(rows, 0, moment_s) > 0.0:
            rows, takers = rows[-1:], rows[1:-1] + takers  # its groups are put first
        others, others_requests = Wait(until_s), 0.0
        for at, row in enumerate(rows[:-1]):
            first = first or at > 0
            gone = self._until_gone(rows, at, running, others.mean_s, first=first)
            if gone is None:
                return None
            others, others_requests, running = others.then(gone), others_requests + row[REQUESTS], 0.0
        is_up = bool(topology.fleet.accepting[replica.slot]) and len(rows) == 1
        own = rows[-1]
        takers += [self._later_run(row) for row in rows[:-1] if row[INSTANCE] != replica.slot]
        stays_s = [self._stays_s([own, taker], 0 if is_up else 1, moment_s) for taker in takers]
        mean, variance, error = own[TOKENS:]
        return (
            WorkAhead(own[REQUESTS], mean, variance, error, others, others_requests, not is_up),
            Stay(replica, own, takers, stays_s),
        )

    def lost(self, stay: Stay, begins_s: float, own: Wait) -> Wait:
        """Return the wait added to *own* if another model takes the GPUs meanwhile: its whole run, and two swaps.

        The model of *own* has the GPUs in *begins_s*.
        """
        topology, arrays, moment_s, now_s = (
            self.topology, self.queue.arrays.groups, self.queue.moment_s, self.clock(),
        )  # fmt: skip
        slot = stay.replica.slot
        best = Wait()
        for row, stays_s in zip(stay.takers, stay.stays_s, strict=True):
            taker = int(row[INSTANCE])
            to_s = float(change_s(topology.fleet, arrays, slot, self._batch(stay.replica), taker))
            slack_s = row[LATEST] - moment_s - begins_s - to_s
            keeps_s = max(0.0, stays_s, slack_s)
            if math.isinf(keeps_s):
                continue
            arrivals = self._arrivals.get(topology.by_slot[taker].endpoint.index)
            more = arrivals.per_s(now_s) * (begins_s + keeps_s + to_s) if arrivals else 0.0
            rows = [self._with_more(row, more), stay.row]
            gone = self._until_gone(rows, 0, 0.0, begins_s + keeps_s + to_s, first=True)
            if gone is None:
                continue
            again_s = self._stays_s([stay.row, row], 1, moment_s)
            best = max(best, lost(own, keeps_s, again_s, Wait(to_s).then(gone)), key=lambda each: each.mean_s)
        return best

    def _later_run(self, row: list[float]) -> list[float]:
        """Return the next run, of requests still to come, of the model of *row*, which is served before."""
        empty = [0.0] * RUN_COLUMNS
        empty[INSTANCE], empty[LATEST] = row[INSTANCE], self._next_due_s(row)
        return empty

    def _with_more(self, row: list[float], requests: float) -> list[float]:
        """Return the run *row* with *requests* more that arrive until it begins."""
        endpoint = self.topology.by_slot[int(row[INSTANCE])].endpoint
        lengths, more = self.paces.history.lengths(endpoint.model), list(row)
        more[REQUESTS] += requests
        for at, each in enumerate((lengths.output_mean, lengths.output_variance, lengths.error)):
            more[TOKENS + at] += requests * each
        return more

    def _next_due_s(self, row: list[float]) -> float:
        """Return when the next request to come for the model of *row* is due, on the clock of the queue."""
        arrivals = self._arrivals.get(self.topology.by_slot[int(row[INSTANCE])].endpoint.index)
        return self.queue.since_start_s(arrivals.next_due_s(self.clock())) if arrivals else math.inf

    def _batch(self, replica: Replica) -> float:
        known = self.paces.known(replica.endpoint, replica, "")
        return known.pace.by_profile.batch if known else 0.0

    def _stays_s(self, rows: list[list[float]], at: int, moment_s: float) -> float:
        """Return the shortest time that the model of run *at* keeps the GPUs, from *moment_s* or from when it is up."""
        fleet, arrays, here = self.topology.fleet, self.queue.arrays.groups, int(rows[at][INSTANCE])
        to = next((int(row[INSTANCE]) for row in rows[at + 1 :] if row[INSTANCE] != here), here)
        was_up_s = 0.0 if at or not fleet.accepting[here] else moment_s - float(arrays.up_s[here])
        return float(arrays.sleep_s[here] + arrays.swap_s[to]) / SWAPPING_SHARE - was_up_s

    def _until_gone(
        self, rows: list[list[float]], at: int, running: float, begins_s: float, *, first: bool
    ) -> Wait | None:
        """Return the time from when the model of run *at* is up, in *begins_s*, until the next one is.

        Its requests are given out, it stays as long as it may (`scaling.swapping`), drains and sleeps, and the other comes
        up. *first*: its groups are before those of the next.
        """
        topology, arrays, (row, after) = self.topology, self.queue.arrays.groups, rows[at : at + 2]
        replica, target = topology.by_slot[int(row[INSTANCE])], int(after[INSTANCE])
        known = self.paces.known(replica.endpoint, replica, "")
        if known is None:
            return None
        pace, moment_s = known.pace, self.queue.moment_s
        mean, variance, error = row[TOKENS:]
        work = WorkAhead(row[REQUESTS], mean, variance, error, empty=not running)
        given = self.paces.until_given(work, replica.endpoint, replica, known) if row[REQUESTS] else Wait()
        running = min(pace.by_profile.batch, running + row[REQUESTS])
        swap_s = float(arrays.sleep_s[replica.slot] + arrays.swap_s[target])
        drain_s = float(change_s(topology.fleet, arrays, replica.slot, running, target)) - swap_s
        least_s = self._stays_s(rows, at, moment_s)
        slack_s = after[LATEST] - moment_s - begins_s - drain_s - swap_s
        # A run that would make the next one late precedes it only until swaps may be made again.
        given_s = max(0.0, min(given.mean_s, max(least_s, slack_s) if first else least_s))
        behind = not first and (row[REQUESTS] > 0.0 or rows[-1][INSTANCE] == row[INSTANCE])
        limit_s = least_s if behind else max(least_s, slack_s - swap_s / SWAPPING_SHARE)
        busy_s = 0.0
        if running:
            finished, lasts_s = replica.endpoint.finished_s, pace.lengths.output_mean * pace.by_profile.step_s
            per_s = len(finished) / max(self.clock() - finished[0], 1.0) if finished else 0.0
            busy_s = busy_spell_s(per_s, lasts_s, running)
        left = leaving(given_s, limit_s, busy_s)
        spread_s2 = left.runs * pace.by_profile.step_s**2 * pace.lengths.output_variance
        return Wait(left.mean_s + left.runs * drain_s + swap_s, given.variance_s2 + left.variance_s2 + spread_s2)


class Waits:
    """Estimates the wait of queued requests and of the next one to come, and learns from the waits that follow."""

    def __init__(self, topology: Topology, queue: WaitingQueue, clock: Callable[[], float]) -> None:
        self.topology, self.queue = topology, queue
        self.history = History()
        self._expected = np.zeros((0, EXPECTED_COLUMNS))  # output of each waiting request, by slot
        self.paces = Paces(topology, queue, self.history, clock)
        self._shared = SharedGpus(topology, queue, self.paces, clock)
        self._calibrations: dict[tuple[int, str], Calibration] = {}

    def calibration(self, endpoint: Endpoint, slo_class: str) -> Calibration:
        """Return what waits of a class at *endpoint* teach about their estimated 99th percentiles."""
        return self._calibrations.setdefault((endpoint.index, slo_class), Calibration())

    def note(self, request: Request, *, came: bool = True) -> None:
        """Count the expected output of *request*, which begins to wait; *came*: it has just arrived."""
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
        if came:
            self._shared.came(request)

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
        if self._shared.came_up_since(replica, since_s):
            return  # it waited for another model meanwhile
        if not self.paces.shares(replica) and self.paces.serving(request.endpoint) != estimate.serving:
            return  # other instances serve by then
        if estimate.of_pool_s is not None:
            blend = self.paces.blend(request.endpoint, request.asked.slo_class)
            blend.learn(estimate.of_own_s, estimate.of_pool_s, waited_s, estimate.batch)
        for name in ("", request.asked.slo_class):
            if name or estimate.says_throughput:
                self.paces.learned(request.endpoint, name).learn(estimate.uncorrected_s, waited_s, estimate.batch)

    def finished(self, request: Request, output_tokens: int) -> None:
        """Learn the length of *request*, answered with *output_tokens*."""
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
        work, stay = self._ahead(endpoint, replica, slot)
        position = round(work.requests + work.others_requests) + 1 if work else self.queue.count(endpoint) + 1
        if known is None or work is None:
            return Estimate(endpoint, position)
        pace, correction = known.pace, known.correction
        own = self.paces.until_given(work, endpoint, replica, known)
        of_own_s, pool = own.mean_s, self._of_pool(endpoint, replica, slot, slo_class)
        if pool is not None:
            own = own.or_else(pool, self.paces.blend(endpoint, slo_class).share)
        overtaken_s = correction.overtaken_s
        # Before lengths are known, a wait does not teach throughput; nor does a wait for other models.
        is_known = work.requests > 0 and work.error <= MOST_ERROR * work.mean and not work.empty
        uncorrected_s = own.mean_s * known.tokens_per_s / pace.by_profile.tokens_per_s if is_known else None
        spread_s2 = overtaken_s * (overtaken_s + 2.0 * own.mean_s) * known.relative_variance
        own = own.then(Wait(overtaken_s, spread_s2))
        # Groups in time keep their place (`reordering.scheduler`): only late ones gain new instances.
        moves = replica is None or self.queue.moment_s + own.mean_s > float(self.queue.arrays.key[slot])
        if coming and moves and (together := self.paces.known(endpoint, None, slo_class)) is not None:
            own = sooner(own, together.tokens_per_s, coming)
        wait, batch = work.others.then(own), pace.by_profile.batch
        if stay is not None:
            wait = wait.then(self._shared.lost(stay, work.others.mean_s, own))
        return Estimate(
            endpoint, position, wait, uncorrected_s, work.requests >= batch, batch,
            of_own_s + overtaken_s, None if pool is None else pool.mean_s + overtaken_s, serving,
        )  # fmt: skip

    def _of_first(self, endpoint: Endpoint, slot: int, coming: list[Coming]) -> Estimate:
        """Return the wait of *slot* where no instance of *endpoint* serves yet."""
        before = self._before(endpoint, slot)
        tokens = Wait(before.mean, before.variance + before.error**2)
        return Estimate(endpoint, round(before.requests) + 1, until_produced(tokens, 0.0, coming))

    def _of_pool(self, endpoint: Endpoint, replica: Replica | None, slot: int, slo_class: str) -> Wait | None:
        """Return the wait of *slot* if all instances of *endpoint* serve the earliest deadlines; None for a single one.

        Groups change queues, and idle instances take the earliest deadline.
        """
        if replica is None or self.paces.shares(replica) or self.paces.serving(endpoint) < 2:
            return None
        known = self.paces.known(endpoint, None, slo_class)
        if known is None:
            return None
        return self.paces.until_given(self._before(endpoint, slot), endpoint, None, known)

    def _ahead(self, endpoint: Endpoint, replica: Replica | None, slot: int) -> tuple[WorkAhead | None, Stay | None]:
        """Return the work before *slot*, -1 for a request that would come last, and its stay where GPUs are shared."""
        if replica is None:
            return self._before(endpoint, slot), None
        if not self.paces.shares(replica):
            queue = self.queue
            return WorkAhead(*ahead_in_queue(queue.arrays.groups, self._expected, slot, queue.moment_s)), None
        return self._shared.ahead(replica, slot, self._expected) or (None, None)

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
