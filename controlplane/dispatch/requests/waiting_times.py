"""What waiting requests are expected to wait, and what they then waited: the RWT estimator over the live queues."""

from dataclasses import dataclass

import numpy as np

from controlplane.dispatch.kernels import ahead, ahead_in_queue
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from scheduling.queueing.correction import Correction
from scheduling.queueing.waiting_time import (
    EXPECTED_COLUMNS,
    History,
    Lengths,
    Throughput,
    Wait,
    waiting_time,
)

REFRESH_S = 1.0  # how long the throughput of an endpoint counts as known
PACE_STALE_S = 60.0
UNMEASURED_VARIANCE = 1.0  # relative, of a pace that nobody has compared with waits
MOST_ERROR = 0.2  # of the mean output ahead, in shares of it, with which throughput can be learned from a wait
ENOUGH_BATCHES = 2.0  # of waits of a class, after which it is corrected by itself


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was said of a request when it began to wait."""

    endpoint: Endpoint
    position: int  # in its queue; 1: the next to be given out
    wait: Wait | None = None  # None while nothing is known of the pace there
    uncorrected_s: float | None = None  # mean by the profile alone, once lengths are known
    says_throughput: bool = False  # the queue was long enough for its wait to say how fast the endpoint is
    batch: float = 1.0


@dataclass(slots=True)
class _Pace:
    """How fast an endpoint works, read at *read_s*."""

    read_s: float
    by_profile: Throughput
    recent_tokens_per_s: float | None  # by what it finished lately
    lengths: Lengths


class WaitingTimes:
    def __init__(self, topology: Topology, queue: WaitingQueue) -> None:
        self.topology = topology
        self.queue = queue
        self.history = History()
        self._expected = np.zeros((0, EXPECTED_COLUMNS))
        self._paces: dict[tuple[int, int], _Pace] = {}  # by endpoint and instance, -1 for all of its instances
        self._corrections: dict[tuple[int, str], Correction] = {}  # by endpoint and SLO class; "": of all

    def note(self, request: Request) -> None:
        """Reckon with the output of *request*, which waits from now on."""
        asked, slots = request.asked, self.queue.arrays.key.size
        if self._expected.shape[0] < slots:
            grown = np.zeros((slots, EXPECTED_COLUMNS))
            grown[: self._expected.shape[0]] = self._expected
            self._expected = grown
        mean, variance, error = self.history.expected((asked.model, asked.slo_class), float(request.predicted_tokens))
        if asked.max_tokens:
            mean = min(mean, float(asked.max_tokens * asked.sequences))
        self._expected[request.slot] = mean, variance, error

    def estimate(self, request: Request, now_s: float) -> Estimate:
        """Of *request*, which waits."""
        return self._estimate(request.endpoint, request.slot, request.asked.slo_class, now_s)

    def of_next(self, endpoint: Endpoint, now_s: float) -> Wait | None:
        """Of a request that would come last in the queue of *endpoint* now; nobody waits where nobody is ahead."""
        if not self.queue.count(endpoint):
            return Wait()
        return self._estimate(endpoint, -1, "", now_s).wait

    def of_all(self, endpoint: Endpoint, now_s: float, most: int) -> list[tuple[Request, Estimate]]:
        """The first *most* requests of *endpoint* in order, with what each is expected to wait from now on."""
        return [
            (request, self._estimate(endpoint, request.slot, request.asked.slo_class, now_s))
            for request in self.queue.first(endpoint, most)
        ]

    def placed(self, request: Request) -> None:
        """*request* is given to an instance: learn from what it waited, if this is the first time."""
        estimate, request.estimate = request.estimate, None
        if estimate is None or estimate.uncorrected_s is None or estimate.endpoint is not request.endpoint:
            return
        for name in ("", request.asked.slo_class):
            if not name and not estimate.says_throughput:
                continue
            correction = self._corrections.get((request.endpoint.index, name))
            if correction is None:
                correction = self._correction(request.endpoint, name)
            correction.learn(estimate.uncorrected_s, request.placed_s - request.asked.arrived_s, estimate.batch)

    def finished(self, request: Request, output_tokens: int) -> None:
        """*request* was answered with *output_tokens*."""
        if output_tokens:
            asked, kept = request.asked, request.kept_tokens
            for key in (asked.model, (asked.model, asked.slo_class)):
                self.history.learn(
                    key, asked.prompt_tokens - kept, output_tokens, float(request.predicted_tokens + kept)
                )

    def _estimate(self, endpoint: Endpoint, slot: int, slo_class: str, now_s: float) -> Estimate:
        arrays, replica = self.queue.arrays, self._pulling(endpoint, slot)
        if replica is None:
            requests, mean, variance, error = ahead(
                arrays.heap[endpoint.index], int(arrays.size[endpoint.index]), arrays.key, arrays.sequence,
                self._expected, slot,
            )  # fmt: skip
        else:
            moment_s = self.queue.now_s(now_s)
            requests, mean, variance, error = ahead_in_queue(arrays.groups, self._expected, slot, moment_s)
        position = round(requests) + 1
        pace = self._pace(endpoint, replica, now_s)
        if pace is None:
            return Estimate(endpoint, position)
        correction = self._corrections.get((endpoint.index, slo_class))
        if correction is None or correction.batches < ENOUGH_BATCHES:
            correction = self._correction(endpoint, "")
        if correction.known:
            throughput = pace.by_profile.corrected(correction.factor, correction.relative_variance)
            tokens_per_s, relative_variance = throughput.tokens_per_s, throughput.relative_variance
        elif pace.recent_tokens_per_s is not None:
            tokens_per_s, relative_variance = pace.recent_tokens_per_s, UNMEASURED_VARIANCE
        else:
            return Estimate(endpoint, position)
        lengths, batch = pace.lengths, pace.by_profile.batch
        running = endpoint.running_sequences if replica is None else int(self.topology.fleet.running[replica.slot])
        share = running / max(endpoint.running_sequences, 1)
        mean_s, variance_s2 = waiting_time(
            requests, mean, variance, error,
            lengths.in_flight(running, round(share * endpoint.running_output_tokens)),
            lengths.output_mean, lengths.output_variance, batch, tokens_per_s, relative_variance,
        )  # fmt: skip
        overtaken_s = correction.overtaken_s
        # Before lengths are known, a wait says nothing of throughput.
        known = requests > 0 and error <= MOST_ERROR * mean
        uncorrected_s = mean_s * tokens_per_s / pace.by_profile.tokens_per_s if known else None
        variance_s2 += overtaken_s * (overtaken_s + 2.0 * mean_s) * relative_variance
        return Estimate(
            endpoint, position, Wait(mean_s + overtaken_s, variance_s2), uncorrected_s, requests >= batch, batch
        )

    def _pulling(self, endpoint: Endpoint, slot: int) -> Replica | None:
        """The instance in whose virtual queue the group of *slot* stands; None where it is in none."""
        groups = self.queue.arrays.groups
        group = int(groups.members["group"][slot]) if slot >= 0 else -1
        queue = int(groups.groups["queue"][group]) if group >= 0 else -1
        if queue < 0:
            return None
        pulling = (self.topology.by_slot.get(at) for at in np.flatnonzero(groups.queue_of == queue).tolist())
        return next((replica for replica in pulling if replica and replica.endpoint is endpoint), None)

    def _pace(self, endpoint: Endpoint, replica: Replica | None, now_s: float) -> _Pace | None:
        """As `_read_pace` said it, not long ago."""
        key = endpoint.index, -1 if replica is None else replica.slot
        pace = self._paces.get(key)
        if pace is None or now_s - pace.read_s > REFRESH_S:
            pace = self._read_pace(endpoint, replica, now_s)
            if pace is not None:
                self._paces[key] = pace
        return pace

    def _read_pace(self, endpoint: Endpoint, replica: Replica | None, now_s: float) -> _Pace | None:
        """How fast what serves *endpoint* now works, or *replica* alone; None if nothing does."""
        fleet, lengths = self.topology.fleet, self.history.lengths(endpoint.model)
        serving = [one for one in self.topology.members(endpoint) if fleet.accepting[one.slot]]
        together: Throughput | None = None
        for one in [replica] if replica in serving else serving:
            alone = Throughput.of(
                one.spec.profile or endpoint.spec.profile,
                int(fleet.kv_capacity_tokens[one.slot]),
                int(fleet.max_num_seqs[one.slot]),
                lengths,
            )
            together = together.beside(alone) if together else alone
        if together is None:
            return None
        finished, recent = endpoint.finished_s, None
        if len(finished) >= 2 and now_s - finished[-1] <= PACE_STALE_S:
            recent = len(finished) * lengths.output_mean / max(now_s - finished[0], 1e-3)
            recent /= len(serving) if replica in serving else 1
        return _Pace(now_s, together, recent, lengths)

    def _correction(self, endpoint: Endpoint, slo_class: str) -> Correction:
        key = (endpoint.index, slo_class)
        correction = self._corrections.get(key)
        if correction is None:
            measured = any(replica.spec.profile for replica in self.topology.members(endpoint))
            guess = Correction.GUESS if measured else 0.0
            correction = self._corrections[key] = Correction(guess, overtaken=bool(slo_class))
        return correction
