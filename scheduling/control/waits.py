"""Expected waits of queued requests: the RWT estimator over the queues of a fleet, corrected by measured waits."""

import math
from collections import defaultdict
from collections.abc import Iterable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from scheduling.compiled import direct, uncompiled
from scheduling.control.fleet import Fleet
from scheduling.fleet.arrays import at_once
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import LearnedWaits, WaitState
from scheduling.queueing.promises import P99, Calibration
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.starting import Coming, sooner, until_produced
from scheduling.queueing.waits.waiting_in_queues import ahead_in_queue
from scheduling.queueing.waits.waiting_time import (
    EXPECTED_COLUMNS,
    Estimate,
    History,
    Lengths,
    Moments,
    Throughput,
    Wait,
    ahead,
    waiting_time,
)

ALL: Final = ""
"""In place of an SLO class: all of them."""
LAST: Final = -1
"""In place of a slot of the waiting set: a request that would join the queue last."""
TOGETHER: Final = -1
"""In place of an instance: all that serve an endpoint."""
REFRESH_S: Final = 1.0
"""Lifetime of a pace and of the list of starting instances."""
PACE_STALE_S: Final = 60.0
RATE_WINDOW: Final = 64
"""Finished requests from which the pace of an endpoint is computed."""
UNMEASURED_VARIANCE: Final = 1.0
"""Relative, of a pace that was not yet compared with waits."""
ENOUGH_BATCHES: Final = 2.0
"""Of waits of a class, after which it has a separate correction."""
MAX_ERROR: Final = 0.2
"""Relative error of the predicted output ahead, above which a wait does not teach throughput."""


class WorkAhead(NamedTuple):
    """Requests ahead and their output tokens; then those of other models on the same GPUs, and the wait for these.

    With such a wait nothing runs there by then: a whole batch starts at once.
    """

    requests: float
    mean: float
    variance: float
    error: float
    others_s: float = 0.0
    others_s2: float = 0.0
    others: float = 0.0


class Pace(NamedTuple):
    """Throughput of an endpoint or of one instance, read at *read_s*."""

    read_s: float
    by_profile: Throughput
    recent_tokens_per_s: float | None
    """From the requests finished lately."""
    lengths: Lengths
    by_memory: bool
    """Memory, not the number of sequences, limits the batch everywhere."""


class Waits:
    """Estimates the wait of queued requests and of the next one, and learns from the waits that follow."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.history = fleet, History()
        self.estimates: dict[int, Estimate] = {}
        """By row: the wait as first estimated, of requests that wait."""
        self.learned = defaultdict[int, LearnedWaits](LearnedWaits)
        """By endpoint."""
        self.counted = np.zeros(0, np.int64)
        """By slot: sequence number of the last request that was counted (`begin`)."""
        self._expected = np.zeros((0, EXPECTED_COLUMNS))
        """Output of each waiting request, by slot."""
        self._paces: dict[tuple[int, int], Pace] = {}  # by endpoint and instance
        self._coming: dict[int, tuple[float, int, list[Coming]]] = {}  # by endpoint: when read, instances that served
        self._ahead_in_queue = direct(ahead_in_queue)

    # Learning

    def begin(self, row: int, slot: int, *, again: bool = False) -> None:
        """Count the expected output of the request of *row*, which begins to wait in *slot*.

        *again*: on other terms, or after an instance had it; it is no new arrival then.
        """
        waiting = self.fleet.waiting
        self.make_room()
        self.counted[slot] = waiting.sequence[slot]
        endpoint, predicted = int(waiting.endpoint[slot]), float(waiting.output_tokens[slot])
        model = self.fleet.endpoints[endpoint].model
        mean, variance, error = self.history.expected((model, self.fleet.slo_class(row)), predicted)
        mean = min(mean, self.fleet.max_tokens(row))
        weight = self.weight(endpoint, int(waiting.prompt_tokens[slot]))
        self._expected[slot] = weight * mean, weight * weight * variance, weight * error
        if not again:
            at_s = float(self.fleet.requests.arrival_s[row])
            self.learned[endpoint].arrivals.add(at_s, float(waiting.key[slot]) - at_s, weight * mean)

    def make_room(self) -> None:
        more = self.fleet.waiting.key.size - self.counted.size
        if more > 0:
            self.counted = np.concatenate([self.counted, np.full(more, -1, np.int64)])
            self._expected = np.concatenate([self._expected, np.zeros((more, EXPECTED_COLUMNS))])

    def forget(self, row: int) -> None:
        """Forget the estimate of *row*, which waits no longer for what was estimated."""
        self.estimates.pop(row, None)

    def mark_overtaken(self, row: int) -> None:
        """Have the wait of *row* teach nothing of other classes: what arrives later goes first."""
        if (estimate := self.estimates.get(row)) is not None:
            self.estimates[row] = replace(estimate, says_throughput=False)

    def placed(self, row: int, instance: int, since_s: float, placed_s: float) -> None:
        """Learn from the wait of *row*, which *instance* got at *placed_s*; it waited at endpoints *since_s*."""
        estimate = self.estimates.pop(row, None)
        if estimate is None:
            return
        endpoint, slo_class = int(self.fleet.instances.endpoint[instance]), self.fleet.slo_class(row)
        waited_s = placed_s - since_s
        if estimate.wait is not None:
            self.calibration(estimate.endpoint, slo_class).learn(estimate.wait, waited_s)
        if estimate.uncorrected_s is None or estimate.endpoint != endpoint:
            return
        if self.shares(instance):
            if self.fleet.waiting.groups.up_s[instance] > since_s:
                return  # it waited for another model meanwhile
        elif self.serving(endpoint) != estimate.serving:
            return  # other instances serve by then
        for name in (ALL, slo_class):
            if name != ALL or estimate.says_throughput:
                self.correction(endpoint, name).learn(estimate.uncorrected_s, waited_s, estimate.batch)

    def ended(
        self, endpoint: int, slo_class: str, ended_s: float, prompt_tokens: int, output_tokens: int, predicted: float
    ) -> None:
        """Learn the length of a request of *slo_class* that an instance of *endpoint* has answered."""
        model = self.fleet.endpoints[endpoint].model
        for each in (ALL, slo_class) if output_tokens else ():
            self.history.learn((model, each), prompt_tokens, output_tokens, predicted)
        finished_s = self.learned[endpoint].finished_s
        finished_s.append(ended_s)
        del finished_s[:-RATE_WINDOW]

    def calibration(self, endpoint: int, slo_class: str) -> Calibration:
        """Return what waits of a class at *endpoint* teach about their estimates."""
        return self.learned[endpoint].calibrations.setdefault(slo_class, Calibration())

    def correction(self, endpoint: int, slo_class: str) -> Correction:
        """Return the correction learned from waits of a class at *endpoint*."""
        corrections = self.learned[endpoint].corrections
        if slo_class not in corrections:
            measured = self.fleet.instances.profile[self._members(endpoint), 4].any()
            guess = Correction.GUESS if measured else 0.0
            corrections[slo_class] = Correction(guess, overtaken=slo_class != ALL)
        return corrections[slo_class]

    # State of a fork

    def ended_state(self) -> list[tuple[str, str, Moments]]:
        """Return the lengths of ended requests.

        Paces are read again after it, so that this fleet and one that resumes its state estimate alike.
        """
        self._paces.clear()
        self._coming.clear()
        return [(*key, one) for key, one in self.history.moments.items()]

    def learned_state(self, endpoint: int) -> LearnedWaits:
        """Return what waits at *endpoint* have taught."""
        one, now_s = self.learned[endpoint], self.fleet.now_s
        finished_s, arrivals = [at_s - now_s for at_s in one.finished_s], one.arrivals.since(now_s)
        return structs.replace(one, finished_s=finished_s, arrivals=arrivals)

    def waiting_state(self, row: int) -> WaitState:
        """Return what is expected of *row*, which waits."""
        slot, estimate = self.fleet.slot(row), self.estimates.get(row)
        here = estimate is not None and estimate.endpoint == self.fleet.waiting.endpoint[slot]
        return WaitState(tuple(self._expected[slot].tolist()), estimate if here else None)

    def resume(
        self,
        ended: Iterable[tuple[str, str, Moments]],
        learned: Iterable[LearnedWaits],
        waiting: Iterable[tuple[int, WaitState]],
    ) -> None:
        """Continue with copies of these states at time 0; *learned* by endpoint, *waiting* by row."""
        self.history.moments = {(model, slo_class): copy(one) for model, slo_class, one in ended}
        self.learned |= dict(enumerate(deepcopy([*learned])))
        self._paces.clear()
        self._coming.clear()
        for row, each in waiting:
            slot = self.fleet.slot(row)
            self._expected[slot] = each.tokens
            if each.estimate is not None:
                self.estimates[row] = replace(each.estimate, endpoint=int(self.fleet.waiting.endpoint[slot]))

    # Estimates

    def estimated(self, row: int) -> Estimate | None:
        """Return the wait of *row* as it was first estimated; None if it waits no longer."""
        estimate = self.estimates.get(row)
        if self.fleet.slot(row) < 0:
            return None
        if estimate is None:
            estimate = self.estimates[row] = self.of(row)
        return estimate

    def of(self, row: int) -> Estimate:
        """Return the remaining wait of *row*, which is queued."""
        slot = self.fleet.slot(row)
        return self._estimate(int(self.fleet.waiting.endpoint[slot]), slot, self.fleet.slo_class(row))

    def quantile_s(self, row: int, wait: Wait, share: float = P99) -> float:
        """Return what *wait* of *row* will not exceed with a probability of *share*, as waits of its class did."""
        slot = self.fleet.slot(row)
        if slot < 0:  # an instance took it
            return 0.0
        endpoint = int(self.fleet.waiting.endpoint[slot])
        calibration = self.calibration(endpoint, self.fleet.slo_class(row))
        # Earlier waits say nothing of an instance that starts.
        return (Calibration() if self.coming(endpoint, self.serving(endpoint)) else calibration).quantile_s(wait, share)

    def of_next(self, endpoint: int) -> Wait | None:
        """Return the wait of a request that would join the queue of *endpoint* last; None while the pace is unknown."""
        if not self.fleet.waiting.size[endpoint] and self._up(endpoint):
            coming = [] if self.serving(endpoint) else self.coming(endpoint, 0)
            return self._of_first(endpoint, LAST, coming).wait if coming else Wait()
        return self._estimate(endpoint, LAST, ALL).wait

    def _estimate(self, endpoint: int, slot: int, slo_class: str) -> Estimate:
        instance, serving = self._pulling(endpoint, slot), self.serving(endpoint)
        coming = [] if instance != TOGETHER and self.shares(instance) else self.coming(endpoint, serving)
        if coming and not serving:
            return self._of_first(endpoint, slot, coming)
        known = self.known(endpoint, instance, slo_class)
        work = self._ahead_of(endpoint, instance, slot)
        position = round(work.requests + work.others) + 1
        if known is None:
            return Estimate(endpoint, position)
        pace, overtaken_s, throughput = known
        own = self._until_given(work, endpoint, instance, pace.lengths, throughput)
        corrected = throughput.tokens_per_s / pace.by_profile.tokens_per_s
        if slot != LAST and instance == TOGETHER:
            own = self._with_later_work(own, endpoint, slot, corrected, pace)
        # Before lengths are known, a wait does not teach throughput; nor does a wait for other models.
        is_known = work.requests > 0 and work.error <= MAX_ERROR * work.mean and not work.others_s
        uncorrected_s = own.mean_s * corrected if is_known else None
        spread_s2 = overtaken_s * (overtaken_s + 2.0 * own.mean_s) * throughput.relative_variance
        own = own.then(Wait(overtaken_s, spread_s2))
        # Groups in time keep their place (`reordering.scheduler`): only late ones gain new instances.
        moves = instance == TOGETHER or self.fleet.now_s + own.mean_s > float(self.fleet.waiting.key[slot])
        if coming and moves and (together := self.known(endpoint, TOGETHER, slo_class)) is not None:
            own = sooner(own, together[-1].tokens_per_s, coming)
        wait, batch = Wait(work.others_s, work.others_s2).then(own), throughput.batch
        return Estimate(endpoint, position, wait, uncorrected_s, work.requests >= batch, batch, serving)

    def _with_later_work(self, own: Wait, endpoint: int, slot: int, corrected: float, pace: Pace) -> Wait:
        """Return *own* with what will overtake *slot*, by the profile alone: what is learned is a factor on both."""
        now_s, alone_s = self.fleet.now_s, own.mean_s * corrected
        left_s, rate = float(self.fleet.waiting.key[slot]) - now_s, pace.by_profile.tokens_per_s
        times = self.learned[endpoint].arrivals.overtaken_s(alone_s, left_s, now_s, rate) / max(alone_s, 1e-9)
        return Wait(own.mean_s * times, own.variance_s2 * times * times)

    def _of_first(self, endpoint: int, slot: int, coming: list[Coming]) -> Estimate:
        """Return the wait of *slot* where no instance of *endpoint* serves yet."""
        before = self._ahead_of(endpoint, TOGETHER, slot)
        tokens = Wait(before.mean, before.variance + before.error**2)
        return Estimate(endpoint, round(before.requests) + 1, until_produced(tokens, 0.0, coming))

    def _until_given(
        self, work: WorkAhead, endpoint: int, instance: int, lengths: Lengths, throughput: Throughput
    ) -> Wait:
        """Return the wait until *work* is given out and one more request can be."""
        requests, tokens_per_s, batch = work.requests, throughput.tokens_per_s, throughput.batch
        if work.others_s:  # a batch starts at once (equation 11), so only the work beyond it has to end
            share = max(0.0, requests + 1.0 - batch) / max(requests, 1.0)
            mean_s = share * work.mean / tokens_per_s
            variance = share * work.variance + (share * work.error) ** 2
            return Wait(mean_s, variance / tokens_per_s**2 + mean_s**2 * throughput.relative_variance)
        sequences, output_tokens = self.fleet.running(endpoint)
        running = sequences if instance == TOGETHER else int(self.fleet.instances.running[instance])
        share = running / max(sequences, 1)
        return Wait(
            *waiting_time(
                requests, work.mean, work.variance, work.error,
                lengths.in_flight(running, round(share * output_tokens)), float(running),
                lengths.output_mean, lengths.output_variance, batch, tokens_per_s, throughput.relative_variance,
            )
        )  # fmt: skip

    def _ahead_of(self, endpoint: int, instance: int, slot: int) -> WorkAhead:
        """Return the work ahead of *slot*: in the virtual queue of *instance*, or all with an earlier queue key."""
        fleet, waiting = self.fleet, self.fleet.waiting
        self.make_room()
        if instance == TOGETHER:
            heap, size = waiting.heap[endpoint], int(waiting.size[endpoint])
            return WorkAhead(*ahead(heap, size, waiting.key, waiting.sequence, self._expected, slot))
        of = fleet.instances, fleet.members, waiting, self._expected
        return WorkAhead(*self._ahead_in_queue(*of, slot, instance, fleet.now_s))

    def _pulling(self, endpoint: int, slot: int) -> int:
        """Return the instance of *endpoint* whose virtual queue holds the group of *slot*; TOGETHER where it is in none, or
        that instance has its shared GPUs: the scheduler serves its model by key then, whatever is between its groups now.

        For the next request (LAST) that would wait for a swap, the instance that the swap brings up.
        """
        groups = self.fleet.waiting.groups
        if not groups.limit[endpoint]:
            return TOGETHER
        members = self._members(endpoint)
        if slot == LAST:
            return TOGETHER if self._up(endpoint) else next(each for each in members.tolist() if self.shares(each))
        group = int(groups.members["group"][slot])
        queue = int(groups.groups["queue"][group]) if group >= 0 else -1
        pulling = members[groups.queue_of[members] == queue]
        if queue < 0 or not pulling.size:
            return TOGETHER
        one = int(pulling[0])
        return TOGETHER if self.shares(one) and self.fleet.instances.accepting[one] else one

    # Instances and paces

    def _members(self, endpoint: int) -> NDArray[np.int32]:
        first = self.fleet.members.first
        return self.fleet.members.members[first[endpoint] : first[endpoint + 1]]

    def shares(self, instance: int) -> bool:
        """Whether *instance* shares one virtual queue with the other instances on its GPUs."""
        return bool(self.fleet.waiting.groups.swap_s[instance] < math.inf)

    def serving(self, endpoint: int) -> int:
        """Return the number of instances of *endpoint* that accept work."""
        return int(np.count_nonzero(self.fleet.instances.accepting[self._members(endpoint)]))

    def _up(self, endpoint: int) -> bool:
        """Whether an instance of *endpoint* takes requests, or none would come up by a swap."""
        return bool(self.serving(endpoint)) or not any(map(self.shares, self._members(endpoint).tolist()))

    def coming(self, endpoint: int, serving: int) -> list[Coming]:
        """Return the instances of *endpoint*, where *serving* serve, that will soon serve, soonest first, without those that
        a swap brings up.
        """
        now_s = self.fleet.now_s
        read = self._coming.get(endpoint)
        if read is None or now_s - read[0] > REFRESH_S or serving != read[1]:
            read = self._coming[endpoint] = now_s, serving, self._read_coming(endpoint)
        return read[2]

    def _read_coming(self, endpoint: int) -> list[Coming]:
        listed = list[Coming]()
        for instance in self._members(endpoint).tolist():
            begins = None if self.shares(instance) else self.fleet.serves_in(instance)
            known = None if begins is None else self.known(endpoint, instance, ALL)
            if begins is not None and known is not None:
                (in_s, spread), (pace, _, throughput) = begins, known
                requests = max(0.0, throughput.batch - int(self.fleet.instances.running[instance]))
                listed.append(Coming(in_s, throughput.tokens_per_s, requests * pace.lengths.output_mean, spread))
        return sorted(listed)

    def weight(self, endpoint: int, prompt_tokens: int) -> float:
        """Return the weight of a request's output tokens by its prompt (`Lengths.weight`)."""
        pace = self._pace(endpoint, TOGETHER)
        return pace.lengths.weight(float(prompt_tokens)) if pace is not None and pace.by_memory else 1.0

    def known(self, endpoint: int, instance: int, slo_class: str) -> tuple[Pace, float, Throughput] | None:
        """Return the pace of *instance* of *endpoint*, or of all, the wait for what overtakes, and the corrected throughput;
        None while unknown.
        """
        pace = self._pace(endpoint, instance)
        if pace is None:
            return None
        correction = self.learned[endpoint].corrections.get(slo_class)
        if correction is None or correction.batches < ENOUGH_BATCHES:
            correction = self.correction(endpoint, ALL)
        if correction.known:
            throughput = pace.by_profile.corrected(correction.factor, correction.relative_variance)
            return pace, correction.overtaken_s, throughput
        if pace.recent_tokens_per_s is not None:
            return pace, 0.0, Throughput(pace.by_profile.batch, pace.recent_tokens_per_s, UNMEASURED_VARIANCE)
        return None

    def _pace(self, endpoint: int, instance: int) -> Pace | None:
        pace, now_s = self._paces.get((endpoint, instance)), self.fleet.now_s
        if pace is None or now_s - pace.read_s > REFRESH_S:
            pace = self._read_pace(endpoint, instance, now_s)
            if pace is not None:
                self._paces[endpoint, instance] = pace
        return pace

    def _read_pace(self, endpoint: int, instance: int, now_s: float) -> Pace | None:
        fleet, of = self.fleet.instances, self.fleet.endpoints[endpoint]
        lengths, members = self.history.lengths((of.model, ALL)), self._members(endpoint)
        serving = members[fleet.accepting[members] != 0].tolist()
        together: Throughput | None = None
        by_memory = True
        for one in serving if instance == TOGETHER else [instance]:
            profile = Profile(*fleet.profile[one].tolist()) if fleet.profile[one, 4] else of.profile
            most = uncompiled(at_once)(fleet, one)
            alone = Throughput.of(profile, int(fleet.kv_capacity_tokens[one]), most, lengths)
            together = together.beside(alone) if together else alone
            by_memory = by_memory and alone.batch < most
        if together is None:
            return None
        finished, recent = self.learned[endpoint].finished_s, None
        if len(finished) >= 2 and now_s - finished[-1] <= PACE_STALE_S:
            recent = len(finished) * lengths.output_mean / max(now_s - finished[0], 1e-3)
            recent /= 1 if instance == TOGETHER else max(len(serving), 1)
        return Pace(now_s, together, recent, lengths, by_memory)
