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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.wire import QueueChange
from scheduling.control.reordering import Reordering
from scheduling.queueing.eviction import Eviction
from scheduling.queueing.reordering.rules import PROGRAMME, SEARCH
from scheduling.queueing.reordering.scheduler import Answer
from scheduling.queueing.served import attainment
from scheduling.queueing.snapshot import Snapshot

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
            sum(len(eviction.rows) for eviction in evictions),
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


class ReorderedQueues(Stage):
    """Has `control.reordering` act on the live queues, and keeps what pages and events read."""

    def __init__(self, fleet: LiveFleet, clock: Callable[[], float], ask: Ask | None = None) -> None:
        self.fleet, self.clock, self.ask = fleet, clock, ask
        self.control = Reordering(fleet)
        self.changes: deque[QueueChange] = deque(maxlen=KEPT)  # those, missing answers, and operators' actions
        self.fallbacks = 0  # missing answers
        self.evicted: deque[Evicted] = deque(maxlen=KEPT)  # not yet written as events
        self._asked_s: float | None = None

    def is_wanted(self) -> bool:
        return any(map(self.fleet.waiting_queue.grouped, self.fleet.endpoints))

    @property
    def pending_s(self) -> float | None:
        """Return how long an answer has been awaited; None when none is."""
        return None if self._asked_s is None else self.clock() - self._asked_s

    def short_instances(self, endpoint: Endpoint) -> int:
        """Return the number of instances missing for what waits for *endpoint* to be in time in any order."""
        return self.control.short_instances.get(endpoint.index, 0)

    def sweep(self) -> None:
        """Reorder the queues if a group will be late, and evict requests so that one is in time."""
        if self._asked_s is not None and self.clock() - self._asked_s > PATIENCE_S:
            self._answered(None, None, self._asked_s)
        if self._asked_s is None:
            self._reorder()
        evictions = self.control.evictions()
        for key in dict.fromkeys((eviction.instance, eviction.group) for eviction in evictions):
            mine = [eviction for eviction in evictions if (eviction.instance, eviction.group) == key]
            evicted = Evicted.of(mine, self.fleet.topology.by_slot[key[0]], self._class_of(key[1]))
            self.evicted.append(evicted)
            self.changes.append(QueueChange(time.time(), "the global scheduler", evicted.reason, evicted.what))
        self.control.evict(evictions)

    def _reorder(self) -> None:
        control, by, began_s = self.control, self.fleet.topology.tuned.REORDER_BY, time.perf_counter()
        # The programme would hold up all streams of this process: without a worker, use the search alone.
        control.by = SEARCH if by == PROGRAMME and self.ask is None else by
        seen = control.snapshot()
        if seen is None:
            return
        few = self.fleet.waiting_queue.group_count <= IN_PROCESS_GROUPS and control.by != PROGRAMME
        if self.ask is None or few:
            self._merge(seen, control.solve(seen), "in process", lambda: time.perf_counter() - began_s)
        else:
            asked_s = self._asked_s = self.clock()
            self.ask(seen, control.by, lambda answer: self._answered(seen, answer, asked_s))

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
        self._merge(seen, answer, "a worker", lambda: self.clock() - asked_s)

    def _merge(self, seen: Snapshot, answer: Answer, by: str, took_s: Callable[[], float]) -> None:
        lost = self.fleet.waiting_queue.lost(seen)
        if moved := self.control.merge(seen, answer):
            self.changes.append(_change(seen, answer, lost, moved, by, took_s()))

    def _class_of(self, number: int) -> str:
        """Return the SLO class of the group with that number; "" if there is none."""
        queue = self.fleet.waiting_queue
        groups = queue.arrays.groups.groups
        at = np.flatnonzero((groups["number"] == number) & (groups["endpoint"] >= 0))
        return queue.at(int(groups["first"][at[0]])).asked.slo_class if at.size else ""


def _change(seen: Snapshot, answer: Answer, lost: NDArray[np.bool_], moved: int, by: str, took_s: float) -> QueueChange:
    """Return the change; groups that are *lost* count as late."""
    before, after = answer.before, answer.after
    late_s = [float(late) for late in before.late_s if late > 0.0 and math.isfinite(late)]
    still = sum(1 for late in after.late_s if late > 0.0)
    why = (
        f"{_groups(len(late_s))} would be late, the worst by {max(late_s):,.0f} s" if late_s else "Groups would be late"
    )
    what = f"{moved} of {_groups(seen.numbers.size)} moved; {still or 'none'} late now"
    if answer.shortage.seconds > 0.0 and still:
        what += ", and only more instances help those"
    return QueueChange(
        time.time(),
        by,
        why,
        what,
        attainment(seen, before, lost),
        attainment(seen, after, lost),
        before.lateness_s,
        after.lateness_s,
        took_s * 1000,
    )


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"
