"""How fast endpoints and instances work on what waits, as performance profiles say and as what was waited corrects it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.stages import COMING_LIMIT_S
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.queueing.waits.correction import Blend, Correction
from scheduling.queueing.waits.starting import NOT_KNOWN, SPREAD, Coming, left_of_start_s
from scheduling.queueing.waits.waiting_time import History, Lengths, Throughput, Wait, waiting_time

REFRESH_S = 1.0  # how long the throughput of an endpoint counts as known
PACE_STALE_S = 60.0
RETURNS_S = 3.0
"""Until heartbeats have found an instance that was out of reach, as it was seen on a busy machine."""
UNMEASURED_VARIANCE = 1.0  # relative, of a pace that nobody has compared with waits
ENOUGH_BATCHES = 2.0  # of waits of a class, after which it is corrected by itself


@dataclass(frozen=True, slots=True)
class Ahead:
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


@dataclass(frozen=True, slots=True)
class Known:
    """A pace as what was waited corrects it."""

    pace: "Pace"
    correction: Correction
    tokens_per_s: float
    relative_variance: float


@dataclass(slots=True)
class Pace:
    """How fast an endpoint works, read at *read_s*."""

    read_s: float
    by_profile: Throughput
    recent_tokens_per_s: float | None  # by what it finished lately
    lengths: Lengths
    by_memory: bool  # whether memory limits the batch everywhere, and not the number of sequences


class Paces:
    """*history* knows how long requests are."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        history: History,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.wall_clock = wall_clock
        self.topology, self.queue, self.history = topology, queue, history
        self._paces: dict[tuple[int, int], Pace] = {}  # by endpoint and instance, -1 for all of its instances
        self._corrections: dict[tuple[int, str], Correction] = {}  # by endpoint and SLO class; "": of all
        # By endpoint: when read, how many served then, and those on their way.
        self._coming: dict[int, tuple[float, int, list[Coming]]] = {}
        self._blends: dict[tuple[int, str], Blend] = {}

    def shares(self, replica: Replica) -> bool:
        """Whether *replica* has one virtual queue with the others on its GPUs."""
        swap_s = self.queue.arrays.groups.swap_s
        return replica.slot < swap_s.size and bool(swap_s[replica.slot] < math.inf)

    def serving(self, endpoint: Endpoint) -> int:
        """Instances of *endpoint* that accept work."""
        return int(np.count_nonzero(self.topology.fleet.accepting[self._slots(endpoint)]))

    def _slots(self, endpoint: Endpoint) -> NDArray[np.int32]:
        """Of the instances of *endpoint*, as of the last reading of the rows."""
        arrays = self.topology.arrays
        return arrays.members[arrays.first[endpoint.index] : arrays.first[endpoint.index + 1]]

    def coming(self, endpoint: Endpoint, now_s: float) -> list[Coming]:
        """Instances of *endpoint* that are on their way, soonest first, as `_read_coming` said not long ago."""
        read = self._coming.get(endpoint.index)
        serving = self.serving(endpoint)
        if read is None or now_s - read[0] > REFRESH_S or serving != read[1]:
            read = self._coming[endpoint.index] = now_s, serving, self._read_coming(endpoint, now_s)
        return read[2]

    def _read_coming(self, endpoint: Endpoint, now_s: float) -> list[Coming]:
        """Those that a swap brings up are left out."""
        listed = list[Coming]()
        for one in map(self.topology.by_slot.get, self._slots(endpoint).tolist()):
            in_s = None if one is None or self.shares(one) else self._takes_in_s(one, now_s)
            known = None if in_s is None else self.known(endpoint, one, "", now_s)
            if one is not None and in_s is not None and known is not None:
                begins = max(0.0, known.pace.by_profile.batch - int(self.topology.fleet.running[one.slot]))
                spread = NOT_KNOWN if one.spec.start_s is None else SPREAD
                listed.append(Coming(in_s, known.tokens_per_s, begins * known.pace.lengths.output_mean, spread))
        return sorted(listed)

    def _takes_in_s(self, one: Replica, now_s: float) -> float | None:
        """Seconds until *one* takes requests, if it does not now and soon will: it starts, or is ready and rests, is busy or
        out of reach for a moment."""
        if one.spec.start_s is not None:
            passed_s = self.wall_clock() - one.spec.start_began_at
            return left_of_start_s(one.spec.start_s, max(0.0, passed_s)) if passed_s < COMING_LIMIT_S else None
        asleep = one.metrics is not None and one.metrics.sleeping
        is_well = one.spec.state == InstanceState.READY and not one.lost and not one.wedged and not asleep
        if not is_well or self.topology.fleet.accepting[one.slot] or not self.topology.serves(one.endpoint):
            return None
        return max(RETURNS_S, one.health.until_s - now_s)

    def blend(self, endpoint: Endpoint, slo_class: str) -> Blend:
        """How far waits of a class at *endpoint* are those of all its instances, rather than of one queue."""
        return self._blends.setdefault((endpoint.index, slo_class), Blend())

    def until_given(self, ahead: Ahead, endpoint: Endpoint, replica: Replica | None, known: Known) -> Wait:
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
                lengths.in_flight(running, round(share * endpoint.running_output_tokens)), float(running),
                lengths.output_mean, lengths.output_variance, batch, tokens_per_s, known.relative_variance,
            )
        )  # fmt: skip

    def known(self, endpoint: Endpoint, replica: Replica | None, slo_class: str, now_s: float) -> Known | None:
        """How fast *endpoint* works, or *replica* alone; None while nothing is known of it."""
        pace = self._pace(endpoint, replica, now_s)
        if pace is None:
            return None
        correction = self._corrections.get((endpoint.index, slo_class))
        if correction is None or correction.batches < ENOUGH_BATCHES:
            correction = self.learned(endpoint, "")
        if correction.known:
            throughput = pace.by_profile.corrected(correction.factor, correction.relative_variance)
            return Known(pace, correction, throughput.tokens_per_s, throughput.relative_variance)
        if pace.recent_tokens_per_s is not None:
            return Known(pace, correction, pace.recent_tokens_per_s, UNMEASURED_VARIANCE)
        return None

    def _pace(self, endpoint: Endpoint, replica: Replica | None, now_s: float) -> Pace | None:
        """As `_read_pace` said it, not long ago."""
        key = endpoint.index, -1 if replica is None else replica.slot
        pace = self._paces.get(key)
        if pace is None or now_s - pace.read_s > REFRESH_S:
            pace = self._read_pace(endpoint, replica, now_s)
            if pace is not None:
                self._paces[key] = pace
        return pace

    def _read_pace(self, endpoint: Endpoint, replica: Replica | None, now_s: float) -> Pace | None:
        """How fast what serves *endpoint* now works, or *replica* alone, on its way or not; None if nothing does."""
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
                int(fleet.max_num_seqs[one.slot]),
                lengths,
            )
            together = together.beside(alone) if together else alone
            by_memory = by_memory and alone.batch < fleet.max_num_seqs[one.slot]
        if together is None:
            return None
        finished, recent = endpoint.finished_s, None
        if len(finished) >= 2 and now_s - finished[-1] <= PACE_STALE_S:
            recent = len(finished) * lengths.output_mean / max(now_s - finished[0], 1e-3)
            recent /= max(len(serving), 1) if of_one else 1
        return Pace(now_s, together, recent, lengths, by_memory)

    def weight(self, endpoint: Endpoint, prompt_tokens: int, now_s: float) -> float:
        """How many times the tokens of a request with such a prompt count among those that wait (`Lengths.weight`)."""
        pace = self._pace(endpoint, None, now_s)
        return pace.lengths.weight(float(prompt_tokens)) if pace is not None and pace.by_memory else 1.0

    def learned(self, endpoint: Endpoint, slo_class: str) -> Correction:
        """What waits of a class at *endpoint* have taught; "" for all of it."""
        key = (endpoint.index, slo_class)
        correction = self._corrections.get(key)
        if correction is None:
            measured = any(replica.spec.profile for replica in self.topology.members(endpoint))
            guess = Correction.GUESS if measured else 0.0
            correction = self._corrections[key] = Correction(guess, overtaken=bool(slo_class))
        return correction
