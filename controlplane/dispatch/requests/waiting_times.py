"""What waiting requests are expected to wait, and what they then waited: the RWT estimator over the live queues."""

import numpy as np

from controlplane.dispatch.kernels import ahead, ahead_in_queue
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.requests.paces import Ahead, Paces
from controlplane.dispatch.requests.request import Estimate, Request
from controlplane.dispatch.requests.shared_gpus import SharedGpus, Stay
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from scheduling.queueing.waits.starting import Coming, sooner, until_produced
from scheduling.queueing.waits.waiting_time import EXPECTED_COLUMNS, History, Wait

MOST_ERROR = 0.2  # of the mean output ahead, in shares of it, with which throughput can be learned from a wait


class WaitingTimes:
    def __init__(self, topology: Topology, queue: WaitingQueue) -> None:
        self.topology = topology
        self.queue = queue
        self.history = History()
        self._expected = np.zeros((0, EXPECTED_COLUMNS))
        self.paces = Paces(topology, queue, self.history)
        self._shared = SharedGpus(topology, queue, self.paces)

    def note(self, request: Request, now_s: float) -> None:
        """Reckon with the output of *request*, which waits from now on."""
        asked, slots = request.asked, self.queue.arrays.key.size
        if self._expected.shape[0] < slots:
            grown = np.zeros((slots, EXPECTED_COLUMNS))
            grown[: self._expected.shape[0]] = self._expected
            self._expected = grown
        mean, variance, error = self.history.expected((asked.model, asked.slo_class), float(request.predicted_tokens))
        if asked.max_tokens:
            mean = min(mean, float(asked.max_tokens * asked.sequences))
        weight = self.paces.weight(request.endpoint, asked.prompt_tokens, now_s)
        self._expected[request.slot] = weight * mean, weight * weight * variance, weight * error
        self._shared.came(request)

    def estimate(self, request: Request, now_s: float) -> Estimate:
        """Of *request*, which waits."""
        return self._estimate(request.endpoint, request.slot, request.asked.slo_class, now_s)

    def of_next(self, endpoint: Endpoint, now_s: float) -> Wait | None:
        """Of a request that would come last in the queue of *endpoint* now; nobody waits where nobody is ahead."""
        if not self.queue.count(endpoint) and self._up(endpoint):
            comes = not self.paces.serving(endpoint) and self.paces.coming(endpoint, now_s)
            return self._of_first(endpoint, -1, comes).wait if comes else Wait()
        return self._estimate(endpoint, -1, "", now_s).wait

    def of_all(self, endpoint: Endpoint, now_s: float, most: int) -> list[tuple[Request, Estimate]]:
        """The first *most* requests of *endpoint* in order, with what each is expected to wait from now on."""
        return [
            (request, self._estimate(endpoint, request.slot, request.asked.slo_class, now_s))
            for request in self.queue.first(endpoint, most)
        ]

    def placed(self, request: Request, replica: Replica) -> None:
        """*request* is given to *replica*: learn from what it waited, if this is the first time."""
        estimate, request.estimate = request.estimate, None
        if estimate is None or estimate.uncorrected_s is None or estimate.endpoint is not request.endpoint:
            return
        if self._shared.came_up_since(replica, request.asked.arrived_s):
            return  # it waited for another model meanwhile
        if not self.paces.shares(replica) and self.paces.serving(request.endpoint) != estimate.serving:
            return  # others serve by now
        waited_s = request.placed_s - request.asked.arrived_s
        if estimate.of_pool_s is not None:
            blend = self.paces.blend(request.endpoint, request.asked.slo_class)
            blend.learn(estimate.of_own_s, estimate.of_pool_s, waited_s, estimate.batch)
        for name in ("", request.asked.slo_class):
            if name or estimate.says_throughput:
                self.paces.learned(request.endpoint, name).learn(estimate.uncorrected_s, waited_s, estimate.batch)

    def finished(self, request: Request, output_tokens: int) -> None:
        """*request* was answered with *output_tokens*."""
        if output_tokens:
            asked, kept = request.asked, request.kept_tokens
            for key in (asked.model, (asked.model, asked.slo_class)):
                self.history.learn(
                    key, asked.prompt_tokens - kept, output_tokens, float(request.predicted_tokens + kept)
                )

    def _estimate(self, endpoint: Endpoint, slot: int, slo_class: str, now_s: float) -> Estimate:
        replica, serving = self._pulling(endpoint, slot), self.paces.serving(endpoint)
        shares = replica is not None and self.paces.shares(replica)
        coming = [] if shares else self.paces.coming(endpoint, now_s)
        if coming and not serving:
            return self._of_first(endpoint, slot, coming)
        known = self.paces.known(endpoint, replica, slo_class, now_s)
        ahead, stay = self._ahead(endpoint, replica, slot, now_s)
        position = round(ahead.requests + ahead.others_requests) + 1 if ahead else self.queue.count(endpoint) + 1
        if known is None or ahead is None:
            return Estimate(endpoint, position)
        pace, correction = known.pace, known.correction
        own = self.paces.until_given(ahead, endpoint, replica, known)
        of_own_s, pool = own.mean_s, self._of_pool(endpoint, replica, slot, slo_class, now_s)
        if pool is not None:
            own = own.or_else(pool, self.paces.blend(endpoint, slo_class).share)
        overtaken_s = correction.overtaken_s
        # Before lengths are known, a wait says nothing of throughput; nor does one for other models.
        is_known = ahead.requests > 0 and ahead.error <= MOST_ERROR * ahead.mean and not ahead.empty
        uncorrected_s = own.mean_s * known.tokens_per_s / pace.by_profile.tokens_per_s if is_known else None
        spread_s2 = overtaken_s * (overtaken_s + 2.0 * own.mean_s) * known.relative_variance
        own = own.then(Wait(overtaken_s, spread_s2))
        # Groups that are in time where they stand stay there (`reordering.scheduler`): only others have more instances.
        moves = replica is None or self.queue.now_s(now_s) + own.mean_s > float(self.queue.arrays.key[slot])
        if coming and moves and (together := self.paces.known(endpoint, None, slo_class, now_s)) is not None:
            own = sooner(own, together.tokens_per_s, coming)
        wait, batch = ahead.others.then(own), pace.by_profile.batch
        if stay is not None:
            wait = wait.then(self._shared.lost(stay, ahead.others.mean_s, own, now_s))
        return Estimate(
            endpoint, position, wait, uncorrected_s, ahead.requests >= batch, batch,
            of_own_s + overtaken_s, None if pool is None else pool.mean_s + overtaken_s, serving,
        )  # fmt: skip

    def _of_first(self, endpoint: Endpoint, slot: int, coming: list[Coming]) -> Estimate:
        """Of *slot* where no instance of *endpoint* serves yet."""
        before = self._before(endpoint, slot)
        tokens = Wait(before.mean, before.variance + before.error**2)
        return Estimate(endpoint, round(before.requests) + 1, until_produced(tokens, 0.0, coming))

    def _of_pool(
        self, endpoint: Endpoint, replica: Replica | None, slot: int, slo_class: str, now_s: float
    ) -> Wait | None:
        """What *slot* waits if all instances of *endpoint* serve what is due there, whatever queue it stands in; None where
        *replica* is the only one. Groups change queues, and who has nothing of its own to do takes what is due first."""
        if replica is None or self.paces.shares(replica) or self.paces.serving(endpoint) < 2:
            return None
        known = self.paces.known(endpoint, None, slo_class, now_s)
        if known is None:
            return None
        return self.paces.until_given(self._before(endpoint, slot), endpoint, None, known)

    def _ahead(
        self, endpoint: Endpoint, replica: Replica | None, slot: int, now_s: float
    ) -> tuple[Ahead | None, Stay | None]:
        """What waits before *slot*, -1 for a request that would come last, and its stay where GPUs are shared; nothing while
        nothing is known of the pace of a model that comes before its own."""
        arrays, moment_s = self.queue.arrays, self.queue.now_s(now_s)
        if replica is None:
            return self._before(endpoint, slot), None
        if not self.paces.shares(replica):
            return Ahead(*ahead_in_queue(arrays.groups, self._expected, slot, moment_s)), None
        return self._shared.ahead(replica, slot, self._expected, now_s) or (None, None)

    def _before(self, endpoint: Endpoint, slot: int) -> Ahead:
        """What waits for *endpoint* with an earlier queue key than *slot*, whatever queue it stands in."""
        arrays = self.queue.arrays
        heap, size = arrays.heap[endpoint.index], self.queue.count(endpoint)
        return Ahead(*ahead(heap, size, arrays.key, arrays.sequence, self._expected, slot))

    def _up(self, endpoint: Endpoint) -> bool:
        """Whether an instance of *endpoint* takes requests, or none would come up by a swap."""
        members = self.topology.members(endpoint)
        return any(self.topology.fleet.accepting[one.slot] for one in members) or not any(
            map(self.paces.shares, members)
        )

    def _pulling(self, endpoint: Endpoint, slot: int) -> Replica | None:
        """The instance of *endpoint* that pulls from the virtual queue in which the group of *slot* stands; None where it is
        in none. Of a request to come (-1) that would wait for a swap, the one that comes up."""
        groups = self.queue.arrays.groups
        if slot < 0 and not self._up(endpoint):
            return next(filter(self.paces.shares, self.topology.members(endpoint)))
        group = int(groups.members["group"][slot]) if slot >= 0 else -1
        queue = int(groups.groups["queue"][group]) if group >= 0 else -1
        if queue < 0:
            return None
        pulling = (self.topology.by_slot.get(at) for at in np.flatnonzero(groups.queue_of == queue).tolist())
        return next((replica for replica in pulling if replica and replica.endpoint is endpoint), None)
