"""What waiting requests are expected to wait, and what they then waited: the RWT estimator over the live queues."""

import math
from dataclasses import dataclass, field

import numpy as np

from controlplane.dispatch.kernels import ahead, ahead_in_queue, change_s, runs_ahead
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from scheduling.queueing.correction import Correction
from scheduling.queueing.waiting_in_queues import INSTANCE, LATEST, MOST_RUNS, REQUESTS, RUN_COLUMNS, TOKENS
from scheduling.queueing.waiting_time import (
    EXPECTED_COLUMNS,
    History,
    Lengths,
    Throughput,
    Wait,
    waiting_time,
)
from scheduling.scaling.swapping import SWAPPING_SHARE, busy_spell_s, leaving

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


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What waits before a request for the model of the request, and what goes before all of that."""

    requests: float
    mean: float
    variance: float
    error: float
    others: Wait = field(default_factory=Wait)
    """Until the model is up."""
    others_requests: float = 0.0
    empty: bool = False
    """Nothing runs there by then: a whole batch begins at once."""


def _of_run(row: list[float], others: Wait | None = None, others_requests: float = 0.0, *, empty: bool) -> _Ahead:
    """Of a run of one model, as `runs_ahead` has it, behind *others*."""
    mean, variance, error = row[TOKENS:]
    return _Ahead(row[REQUESTS], mean, variance, error, others or Wait(), others_requests, empty)


@dataclass(frozen=True, slots=True)
class _Known:
    """A pace as what was waited corrects it."""

    pace: "_Pace"
    correction: Correction
    tokens_per_s: float
    relative_variance: float


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
        self._runs = np.zeros((MOST_RUNS, RUN_COLUMNS))

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
        if not self.queue.count(endpoint) and self._up(endpoint):
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
        replica = self._pulling(endpoint, slot)
        ahead = self._ahead(endpoint, replica, slot, now_s)
        position = round(ahead.requests + ahead.others_requests) + 1 if ahead else self.queue.count(endpoint) + 1
        known = self._known(endpoint, replica, slo_class, now_s)
        if known is None or ahead is None:
            return Estimate(endpoint, position)
        pace, correction, tokens_per_s = known.pace, known.correction, known.tokens_per_s
        own = self._until_given(ahead, endpoint, replica, known)
        mean_s, variance_s2 = own.mean_s, own.variance_s2
        overtaken_s = correction.overtaken_s
        # Before lengths are known, a wait says nothing of throughput; nor does one for other models.
        is_known = ahead.requests > 0 and ahead.error <= MOST_ERROR * ahead.mean and not ahead.empty
        uncorrected_s = mean_s * tokens_per_s / pace.by_profile.tokens_per_s if is_known else None
        variance_s2 += overtaken_s * (overtaken_s + 2.0 * mean_s) * known.relative_variance
        batch = pace.by_profile.batch
        return Estimate(
            endpoint, position, ahead.others.then(Wait(mean_s + overtaken_s, variance_s2)), uncorrected_s,
            ahead.requests >= batch, batch,
        )  # fmt: skip

    def _ahead(self, endpoint: Endpoint, replica: Replica | None, slot: int, now_s: float) -> _Ahead | None:
        """What waits before *slot*, -1 for a request that would come last; None while nothing is known of the pace of a
        model that comes before its own."""
        arrays, moment_s = self.queue.arrays, self.queue.now_s(now_s)
        if replica is None:
            return _Ahead(
                *ahead(
                    arrays.heap[endpoint.index], int(arrays.size[endpoint.index]), arrays.key, arrays.sequence,
                    self._expected, slot,
                )
            )  # fmt: skip
        if not self._shares(replica):
            return _Ahead(*ahead_in_queue(arrays.groups, self._expected, slot, moment_s))
        topology, runs = self.topology, self._runs
        count, until_s, running, first = runs_ahead(
            topology.fleet, topology.arrays, self.queue.arrays, self._expected, slot, replica.slot, moment_s, runs
        )
        rows = runs[:count].tolist()
        if rows[0][INSTANCE] == replica.slot and self._stays_s(rows, 0, moment_s) > 0.0:
            rows = rows[-1:]  # its groups are put first
        others, others_requests = Wait(until_s), 0.0
        for at, row in enumerate(rows[:-1]):
            first = first or at > 0
            gone = self._until_gone(rows, at, running, others.mean_s, now_s, first=first)
            if gone is None:
                return None
            others, others_requests, running = others.then(gone), others_requests + row[REQUESTS], 0.0
        empty = not topology.fleet.accepting[replica.slot] or len(rows) > 1
        return _of_run(rows[-1], others, others_requests, empty=empty)

    def _stays_s(self, rows: list[list[float]], at: int, moment_s: float) -> float:
        """How long who is busy with the run *at* has the GPUs at the least, from *moment_s* or from when it comes up."""
        fleet, arrays, here = self.topology.fleet, self.queue.arrays.groups, int(rows[at][INSTANCE])
        to = next((int(row[INSTANCE]) for row in rows[at + 1 :] if row[INSTANCE] != here), here)
        was_up_s = 0.0 if at or not fleet.accepting[here] else moment_s - float(arrays.up_s[here])
        return float(arrays.sleep_s[here] + arrays.swap_s[to]) / SWAPPING_SHARE - was_up_s

    def _until_gone(
        self, rows: list[list[float]], at: int, running: float, begins_s: float, now_s: float, *, first: bool
    ) -> Wait | None:
        """From when the model of the run *at* is up, in *begins_s*, until the next one is: what waits for it is given out,
        it stays as long as it may (`scaling.swapping`), drains and sleeps, and the other comes up. *first*: its groups
        stand before those of the next."""
        topology, arrays, (row, after) = self.topology, self.queue.arrays.groups, rows[at : at + 2]
        replica, target = topology.by_slot[int(row[INSTANCE])], int(after[INSTANCE])
        known = self._known(replica.endpoint, replica, "", now_s)
        if known is None:
            return None
        pace, moment_s = known.pace, self.queue.now_s(now_s)
        before_it = _of_run(row, empty=not running)
        given = self._until_given(before_it, replica.endpoint, replica, known) if row[REQUESTS] else Wait()
        running = min(pace.by_profile.batch, running + row[REQUESTS])
        swap_s = float(arrays.sleep_s[replica.slot] + arrays.swap_s[target])
        drain_s = float(change_s(topology.fleet, arrays, replica.slot, running, target)) - swap_s
        least_s = self._stays_s(rows, at, moment_s)
        slack_s = after[LATEST] - moment_s - begins_s - drain_s - swap_s
        # What would make the next one late behind it stands before only until swaps may be made again.
        given_s = max(0.0, min(given.mean_s, max(least_s, slack_s) if first else least_s))
        behind = not first and (row[REQUESTS] > 0.0 or rows[-1][INSTANCE] == row[INSTANCE])
        limit_s = least_s if behind else max(least_s, slack_s - swap_s / SWAPPING_SHARE)
        busy_s = 0.0
        if running:
            finished, lasts_s = replica.endpoint.finished_s, pace.lengths.output_mean * pace.by_profile.step_s
            busy_s = busy_spell_s(len(finished) / max(now_s - finished[0], 1.0) if finished else 0.0, lasts_s)
        left = leaving(given_s, limit_s, busy_s)
        spread_s2 = left.runs * pace.by_profile.step_s**2 * pace.lengths.output_variance
        return Wait(left.mean_s + left.runs * drain_s + swap_s, given.variance_s2 + left.variance_s2 + spread_s2)

    def _until_given(self, ahead: _Ahead, endpoint: Endpoint, replica: Replica | None, known: _Known) -> Wait:
        """Until what waits ahead is given out, and one more can be."""
        lengths, batch = known.pace.lengths, known.pace.by_profile.batch
        requests, tokens_per_s = ahead.requests, known.tokens_per_s
        if ahead.empty:  # a batch begins at once (equation 11), so what is ahead beyond it has to end
            share = max(0.0, requests + 1.0 - batch) / max(requests, 1.0)
            mean_s = share * ahead.mean / tokens_per_s
            variance = share * ahead.variance + (share * ahead.error) ** 2
            return Wait(mean_s, variance / tokens_per_s**2 + mean_s**2 * known.relative_variance)
        running = endpoint.running_sequences if replica is None else int(self.topology.fleet.running[replica.slot])
        share = running / max(endpoint.running_sequences, 1)
        return Wait(
            *waiting_time(
                requests, ahead.mean, ahead.variance, ahead.error,
                lengths.in_flight(running, round(share * endpoint.running_output_tokens)),
                lengths.output_mean, lengths.output_variance, batch, tokens_per_s, known.relative_variance,
            )
        )  # fmt: skip

    def _known(self, endpoint: Endpoint, replica: Replica | None, slo_class: str, now_s: float) -> _Known | None:
        """How fast *endpoint* works, or *replica* alone; None while nothing is known of it."""
        pace = self._pace(endpoint, replica, now_s)
        if pace is None:
            return None
        correction = self._corrections.get((endpoint.index, slo_class))
        if correction is None or correction.batches < ENOUGH_BATCHES:
            correction = self._correction(endpoint, "")
        if correction.known:
            throughput = pace.by_profile.corrected(correction.factor, correction.relative_variance)
            return _Known(pace, correction, throughput.tokens_per_s, throughput.relative_variance)
        if pace.recent_tokens_per_s is not None:
            return _Known(pace, correction, pace.recent_tokens_per_s, UNMEASURED_VARIANCE)
        return None

    def _shares(self, replica: Replica) -> bool:
        """Whether *replica* has one virtual queue with the others on its GPUs."""
        swap_s = self.queue.arrays.groups.swap_s
        return replica.slot < swap_s.size and bool(swap_s[replica.slot] < math.inf)

    def _up(self, endpoint: Endpoint) -> bool:
        """Whether an instance of *endpoint* takes requests, or none would come up by a swap."""
        members = self.topology.members(endpoint)
        return any(self.topology.fleet.accepting[one.slot] for one in members) or not any(map(self._shares, members))

    def _pulling(self, endpoint: Endpoint, slot: int) -> Replica | None:
        """The instance of *endpoint* that pulls from the virtual queue in which the group of *slot* stands; None where it is
        in none. Of a request to come (-1) that would wait for a swap, the one that comes up."""
        groups = self.queue.arrays.groups
        if slot < 0 and not self._up(endpoint):
            return next(filter(self._shares, self.topology.members(endpoint)))
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
        of_one = [replica] if replica is not None and (replica in serving or self._shares(replica)) else []
        for one in of_one or serving:
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
            recent /= max(len(serving), 1) if of_one else 1
        return _Pace(now_s, together, recent, lengths)

    def _correction(self, endpoint: Endpoint, slo_class: str) -> Correction:
        key = (endpoint.index, slo_class)
        correction = self._corrections.get(key)
        if correction is None:
            measured = any(replica.spec.profile for replica in self.topology.members(endpoint))
            guess = Correction.GUESS if measured else 0.0
            correction = self._corrections[key] = Correction(guess, overtaken=bool(slo_class))
        return correction
