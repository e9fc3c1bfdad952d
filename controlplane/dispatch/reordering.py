"""The global scheduler on the live queues, run every second: few groups in this process, many by a Celery worker.

On arrival, groups are placed where they are served first (earliest due first, earliest completion), so a solver that is
late, dead or unsuccessful leaves a sound order. Its answer is merged into the queues as they are by then.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.placement import Placement
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue, first_due_of
from controlplane.dispatch.wire import QueueChange
from scheduling.fleet.profile import Profile
from scheduling.queueing.eviction import Eviction, wanted
from scheduling.queueing.global_scheduler import GlobalScheduler, Reordered, solve
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.queueing.reordering.rules import PROGRAMME, SEARCH
from scheduling.queueing.reordering.scheduler import Answer
from scheduling.queueing.running import Running, running_of
from scheduling.queueing.served import attainment
from scheduling.queueing.snapshot import Snapshot, snapshot

logger = logging.getLogger(__name__)

IN_PROCESS_GROUPS: Final = 64
"""Most groups solved in this process: a larger problem would hold up streams for longer than a token takes."""
PATIENCE_S: Final = 10.0
"""Longest wait for a worker's answer."""
KEPT: Final = 50

Ask = Callable[[Snapshot, str, Callable[[Answer | None], None]], None]
"""Has a snapshot solved elsewhere, by the search or the programme. The callback gets the answer or None, on the loop."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Requests evicted from an instance so that a group is in time."""

    model: str
    region: str
    instance: str
    group: int
    """The group that gains; -1 for requests that the instance already has, beyond those it runs at once."""
    slo_class: str
    requests: int
    """Number of requests that gain."""
    evicted_requests: int
    gain_s: float
    """Lateness saved over the requests of the group, summed."""
    cost_s: float
    """Prefill of the recomputed tokens, charged to the group."""
    lost_tokens: int

    @classmethod
    def of(cls, evictions: Sequence[Eviction], replica: Replica, slo_class: str) -> "Evicted":
        """Summarize *evictions*, which are those for one group."""
        endpoint = replica.endpoint
        return cls(
            endpoint.model,
            endpoint.region,
            replica.name,
            evictions[0].group,
            slo_class,
            len(evictions),
            sum(len(eviction.numbers) for eviction in evictions),
            round(sum(eviction.gain_s for eviction in evictions), 3),
            round(sum(eviction.cost_s for eviction in evictions), 4),
            sum(eviction.lost_tokens for eviction in evictions),
        )

    @property
    def reason(self) -> str:
        of_group = f"{self.slo_class or 'requests'} of group {self.group}" if self.group >= 0 else "given ahead"
        return f"{self.requests} {of_group} would be late behind what runs on {self.instance}"

    @property
    def what(self) -> str:
        return (
            f"{self.evicted_requests} evicted: {self.gain_s:,.1f} s of lateness less, for {self.lost_tokens:,} tokens "
            f"({self.cost_s:.2f} s) computed again"
        )


class Reordering(Stage):
    """The global scheduler of the live queues, on the dispatcher's *clock*. *evict* has a request leave its instance."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        placement: Placement,
        clock: Callable[[], float],
        evict: Callable[[int], object],
        ask: Ask | None = None,
    ) -> None:
        self.topology = topology
        self.queue = queue
        self.placement = placement
        self.clock = clock
        self.evict, self.ask = evict, ask
        self.scheduler = GlobalScheduler()
        self.recent: deque[Reordered] = deque(maxlen=KEPT)
        self.changes: deque[QueueChange] = deque(maxlen=KEPT)  # those, missing answers, and operators' actions
        self.fallbacks = 0  # missing answers
        self.evicted: deque[Evicted] = deque(maxlen=KEPT)  # not yet written as events
        self._asked_s: float | None = None

    @property
    def pending_s(self) -> float | None:
        """Return how long an answer has been awaited; None when none is."""
        return None if self._asked_s is None else self.clock() - self._asked_s

    def short_instances(self, endpoint: Endpoint) -> int:
        """Return the number of instances missing for what waits for *endpoint* to be in time in any order."""
        return self.scheduler.short_instances.get(endpoint.index, 0)

    def sweep(self) -> None:
        """Reorder the queues if a group will be late, and evict requests so that one is in time."""
        self._reorder()
        for number in self._evict_for_heads():
            self.evict(number)

    def _reorder(self) -> None:
        if self._asked_s is not None and abs(self.clock() - self._asked_s) > PATIENCE_S:  # clocks may jump back
            self._answered(None, None, self._asked_s)
        if self._asked_s is not None or not any(map(self.queue.grouped, self.topology.endpoints)):
            return
        now_s, topology, arrays = self.queue.clock(), self.topology, self.queue.arrays
        if not self.scheduler.wants(arrays, now_s):
            return
        by = topology.tuned.REORDER_BY
        # The programme would hold up all streams of this process: without a worker, use the search alone.
        self.scheduler.by = SEARCH if by == PROGRAMME and self.ask is None else by
        few = self.queue.group_count <= IN_PROCESS_GROUPS and self.scheduler.by != PROGRAMME
        began_s = time.perf_counter()
        running = running_in(topology, self.queue)
        seen = snapshot(topology.fleet, topology.arrays, arrays, now_s, running=running)
        if seen is None:
            return
        if self.ask is None or few:
            answer = solve(seen, moves=self.scheduler.moves, by=self.scheduler.by)
            reordered = self.scheduler.take(topology.fleet, topology.arrays, arrays, seen, answer, now_s)
            self._note(seen, reordered, "in process", time.perf_counter() - began_s)
        else:
            asked_s = self._asked_s = self.clock()
            self.ask(seen, self.scheduler.by, lambda answer: self._answered(seen, answer, asked_s))

    def _answered(self, seen: Snapshot | None, answer: Answer | None, asked_s: float) -> None:
        if asked_s != self._asked_s:
            return  # after PATIENCE_S
        self._asked_s = None
        if seen is None or answer is None:
            self.fallbacks += 1
            logger.warning("queues: no answer from the global scheduler; groups stay by due time")
            self.changes.append(
                QueueChange(time.time(), "a worker", "No worker answered", "EDF: groups stay in order of due time")
            )
            return
        topology, now_s = self.topology, self.queue.clock()
        reordered = self.scheduler.take(topology.fleet, topology.arrays, self.queue.arrays, seen, answer, now_s)
        self._note(seen, reordered, "a worker", self.clock() - asked_s)

    def _evict_for_heads(self) -> list[int]:
        """Return requests that leave their instances for groups at the head of a virtual queue that would be late."""
        topology, queue = self.topology, self.queue
        limit = np.zeros(queue.arrays.size.size, np.int64)
        for endpoint in topology.endpoints:
            if queue.grouped(endpoint) and queue.count(endpoint):
                limit[endpoint.index] = endpoint.spec.policy.eviction_limit
        if not limit.any():
            return []
        running = running_in(topology, queue)
        evictions = wanted(topology.fleet, topology.arrays, queue.arrays, running, limit, queue.clock())
        for key in dict.fromkeys((eviction.instance, eviction.group) for eviction in evictions):
            mine = [eviction for eviction in evictions if (eviction.instance, eviction.group) == key]
            evicted = Evicted.of(mine, topology.by_slot[key[0]], self._class_of(key[1]))
            self.evicted.append(evicted)
            self.changes.append(QueueChange(time.time(), "the global scheduler", evicted.reason, evicted.what))
        return [number for eviction in evictions for number in eviction.numbers]

    def _class_of(self, number: int) -> str:
        """Return the SLO class of the group with that number; "" if there is none."""
        groups = self.queue.arrays.groups.groups
        at = np.flatnonzero((groups["number"] == number) & (groups["endpoint"] >= 0))
        return self.queue.at(int(groups["first"][at[0]])).asked.slo_class if at.size else ""

    def _note(self, seen: Snapshot, reordered: Reordered, by: str, took_s: float) -> None:
        if not reordered.moved:
            return
        self.recent.append(reordered)
        lost, answer = self.queue.lost(seen), reordered.answer
        ratios = attainment(seen, answer.before, lost), attainment(seen, answer.after, lost)
        self.changes.append(_change(reordered, ratios, by, took_s))
        for endpoint in self.topology.endpoints:
            if self.queue.grouped(endpoint) and self.queue.count(endpoint):
                self.placement.pump(endpoint)


def _change(reordered: Reordered, ratios: tuple[float, float], by: str, took_s: float) -> QueueChange:
    """Return the change, with *ratios* of requests in time before and after."""
    before, after = reordered.answer.before, reordered.answer.after
    late_s = [float(late) for late in before.late_s if late > 0.0 and math.isfinite(late)]
    still = sum(1 for late in after.late_s if late > 0.0)
    why = (
        f"{_groups(len(late_s))} would be late, the worst by {max(late_s):,.0f} s" if late_s else "Groups would be late"
    )
    what = f"{reordered.moved} of {_groups(reordered.groups)} moved; {still or 'none'} late now"
    if reordered.answer.shortage.seconds > 0.0 and still:
        what += ", and only more instances help those"
    return QueueChange(
        time.time(),
        by,
        why,
        what,
        *ratios,
        before.lateness_s,
        after.lateness_s,
        took_s * 1000,
    )


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"


LEAVING_S: Final = 5.0
"""Time after which a request to be evicted is assumed to stay: it had begun to emit what cannot be continued."""


def running_in(topology: Topology, queue: WaitingQueue) -> Running:
    """Return the requests running on instances of endpoints with request groups, as the global scheduler sees them."""
    clock_s = queue.clock()
    return running_of(
        _row(request, replica.slot, replica.endpoint.spec.profile, queue, clock_s)
        for replica in topology.replicas.values()
        if queue.grouped(replica.endpoint)
        for request in replica.requests
    )


def _row(request: Request, slot: int, profile: Profile, queue: WaitingQueue, clock_s: float) -> tuple[Any, ...]:
    """Return the fields of `Running`. The output of an answer that is not streamed is unknown, so it stays."""
    asked, arrival_s = request.asked, request.asked.arrived_s
    resumable = asked.evictable or not request.output_tokens
    output = request.expected_tokens - request.expected_prompt
    due_s = first_due_of(profile, asked, request.expected_prompt, output)
    return (
        asked.number,
        slot,
        arrival_s + (due_s if due_s < math.inf else NO_DEADLINE_S),
        asked.allowed_s,
        asked.priority,
        asked.prompt_tokens,
        request.output_tokens,
        request.expected_tokens,
        request.evictions,
        resumable and asked.streamed and asked.sequences == 1,
        request.evicting_s is not None and clock_s - request.evicting_s < LEAVING_S,
    )
