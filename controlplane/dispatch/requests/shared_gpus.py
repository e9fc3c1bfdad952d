"""What a request waits for where its model shares GPUs with others: what they serve before, each change of model, and that
its own may lose the GPUs before it is given out."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.kernels import change_s, runs_ahead
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.dispatch.requests.paces import Ahead, Paces
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from scheduling.queueing.swapping.losing import lost
from scheduling.queueing.waits.waiting_in_queues import INSTANCE, LATEST, MOST_RUNS, REQUESTS, RUN_COLUMNS, TOKENS
from scheduling.queueing.waits.waiting_time import Wait
from scheduling.scaling.swapping import SWAPPING_SHARE, busy_spell_s, leaving

ARRIVALS = 64  # of a model, from which its demand is read


class _Demand:
    """Requests of an endpoint that came lately: when, and in what time each was due, infinity for any."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, float]] = deque()
        self._due, self._allowed_s = 0, 0.0
        """How many have a deadline, and the sum of what they are allowed."""

    def add(self, arrived_s: float, allowed_s: float) -> None:
        """One came."""
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
        """When the next one to come is due, on average; infinity where none has a deadline."""
        per_s = self.per_s(now_s) * self._due / max(len(self._came), 1)
        return now_s + 1.0 / per_s + self._allowed_s / self._due if per_s > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Stay:
    """When the model of a request has the GPUs, and who may take them from it."""

    replica: Replica
    row: list[float]
    """Of its own model, as `runs_ahead` has it."""
    takers: list[list[float]]
    """Of models whose groups stand behind, or will."""
    stays_s: list[float]
    """For how long it has the GPUs at the least, by taker."""


class SharedGpus:
    def __init__(self, topology: Topology, queue: WaitingQueue, paces: Paces) -> None:
        self.topology, self.queue, self.paces = topology, queue, paces
        self._demand: dict[int, _Demand] = {}  # by endpoint
        self._runs = np.zeros((MOST_RUNS, RUN_COLUMNS))

    def came(self, request: Request) -> None:
        """*request* came, and waits."""
        asked, endpoint = request.asked, request.endpoint
        if endpoint.spec.shares_gpus and not request.attempts:
            demand = self._demand.setdefault(endpoint.index, _Demand())
            demand.add(asked.arrived_s, math.inf if asked.due_s is None else asked.due_s)

    def came_up_since(self, replica: Replica, arrived_s: float) -> bool:
        """Whether *replica* got its GPUs after *arrived_s*, on the clock: what came then waited for others too."""
        return self.paces.shares(replica) and bool(
            self.queue.arrays.groups.up_s[replica.slot] > self.queue.now_s(arrived_s)
        )

    def ahead(
        self, replica: Replica, slot: int, expected: NDArray[np.float64], now_s: float
    ) -> tuple[Ahead, Stay] | None:
        """What waits before *slot*, for *replica*, and its stay; None while nothing is known of the pace of a model that
        comes before its own."""
        topology, runs, moment_s = self.topology, self._runs, self.queue.now_s(now_s)
        count, behind, until_s, running, first = runs_ahead(
            topology.fleet, topology.arrays, self.queue.arrays, expected, slot, replica.slot, moment_s, runs
        )
        rows, takers = runs[:count].tolist(), runs[count : count + behind].tolist()
        for row in rows + takers:
            row[LATEST] = min(row[LATEST], self._next_due_s(row, now_s))
        if rows[0][INSTANCE] == replica.slot and self._stays_s(rows, 0, moment_s) > 0.0:
            rows, takers = rows[-1:], rows[1:-1] + takers  # its groups are put first
        others, others_requests = Wait(until_s), 0.0
        for at, row in enumerate(rows[:-1]):
            first = first or at > 0
            gone = self._until_gone(rows, at, running, others.mean_s, now_s, first=first)
            if gone is None:
                return None
            others, others_requests, running = others.then(gone), others_requests + row[REQUESTS], 0.0
        is_up = bool(topology.fleet.accepting[replica.slot]) and len(rows) == 1
        own = rows[-1]
        takers += [self._to_come(row, now_s) for row in rows[:-1] if row[INSTANCE] != replica.slot]
        stays_s = [self._stays_s([own, taker], 0 if is_up else 1, moment_s) for taker in takers]
        mean, variance, error = own[TOKENS:]
        return (
            Ahead(own[REQUESTS], mean, variance, error, others, others_requests, not is_up),
            Stay(replica, own, takers, stays_s),
        )

    def lost(self, stay: Stay, begins_s: float, own: Wait, now_s: float) -> Wait:
        """What a request waits longer than *own*, from when its model has the GPUs, in *begins_s*: where another one takes
        them before that is over, it waits for all that this one serves, and for two changes of model."""
        topology, arrays, moment_s = self.topology, self.queue.arrays.groups, self.queue.now_s(now_s)
        slot = stay.replica.slot
        best = Wait()
        for row, stays_s in zip(stay.takers, stay.stays_s, strict=True):
            taker = int(row[INSTANCE])
            running = self._batch(stay.replica, now_s)
            to_s = float(change_s(topology.fleet, arrays, slot, running, taker))
            slack_s = row[LATEST] - moment_s - begins_s - to_s
            keeps_s = max(0.0, stays_s, slack_s)
            if math.isinf(keeps_s):
                continue
            demand = self._demand.get(topology.by_slot[taker].endpoint.index)
            more = demand.per_s(now_s) * (begins_s + keeps_s + to_s) if demand else 0.0
            rows = [self._with_more(row, more, now_s), stay.row]
            gone = self._until_gone(rows, 0, 0.0, begins_s + keeps_s + to_s, now_s, first=True)
            if gone is None:
                continue
            again_s = self._stays_s([stay.row, row], 1, moment_s)
            longer = lost(own, keeps_s, again_s, Wait(to_s).then(gone))
            best = max(best, longer, key=lambda each: each.mean_s)
        return best

    def _to_come(self, row: list[float], now_s: float) -> list[float]:
        """The run of a model that is served before, as it is once that is over: of what comes meanwhile."""
        empty = [0.0] * RUN_COLUMNS
        empty[INSTANCE], empty[LATEST] = row[INSTANCE], self._next_due_s(row, now_s)
        return empty

    def _with_more(self, row: list[float], requests: float, now_s: float) -> list[float]:
        """The run *row* with so many *requests* that come until it begins."""
        endpoint = self.topology.by_slot[int(row[INSTANCE])].endpoint
        lengths, more = self.paces.history.lengths(endpoint.model), list(row)
        more[REQUESTS] += requests
        for at, each in enumerate((lengths.output_mean, lengths.output_variance, lengths.error)):
            more[TOKENS + at] += requests * each
        return more

    def _next_due_s(self, row: list[float], now_s: float) -> float:
        """When the next request to come for the model of *row* is due, on the clock of the queue."""
        demand = self._demand.get(self.topology.by_slot[int(row[INSTANCE])].endpoint.index)
        return self.queue.now_s(demand.next_due_s(now_s)) if demand else math.inf

    def _batch(self, replica: Replica, now_s: float) -> float:
        known = self.paces.known(replica.endpoint, replica, "", now_s)
        return known.pace.by_profile.batch if known else 0.0

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
        known = self.paces.known(replica.endpoint, replica, "", now_s)
        if known is None:
            return None
        pace, moment_s = known.pace, self.queue.now_s(now_s)
        mean, variance, error = row[TOKENS:]
        before_it = Ahead(row[REQUESTS], mean, variance, error, empty=not running)
        given = self.paces.until_given(before_it, replica.endpoint, replica, known) if row[REQUESTS] else Wait()
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
            per_s = len(finished) / max(now_s - finished[0], 1.0) if finished else 0.0
            busy_s = busy_spell_s(per_s, lasts_s, running)
        left = leaving(given_s, limit_s, busy_s)
        spread_s2 = left.runs * pace.by_profile.step_s**2 * pace.lengths.output_variance
        return Wait(left.mean_s + left.runs * drain_s + swap_s, given.variance_s2 + left.variance_s2 + spread_s2)
