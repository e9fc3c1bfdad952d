"""The global scheduler on the live queues, run every second: few groups on the event loop, many in a thread.

On arrival, groups are placed where they are served first (earliest due first, earliest completion), so a solver that is
late or unsuccessful leaves a sound order. Its answer is merged into the queues as they are by then.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.background import spawn
from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.wire import QueueChange
from scheduling.control.reordering import Reordering
from scheduling.queueing.eviction import Eviction
from scheduling.queueing.global_scheduler import solve
from scheduling.queueing.reordering.scheduler import Answer
from scheduling.queueing.served import attainment
from scheduling.queueing.snapshot import Snapshot

AT_ONCE_GROUPS: Final = 64
"""Most groups solved on the event loop: a larger problem would hold up streams for longer than a token takes."""
SEARCH_S: Final = 1.0
"""Time of the search in a thread. `python -m tests.bench queue` prints how late timers of the event loop are meanwhile."""
KEPT: Final = 50

Solver = Callable[[Snapshot, Callable[[Answer | None], None]], None]
"""Has a snapshot solved elsewhere than on the event loop, where the callback gets the answer; None if it failed."""


def in_thread(seen: Snapshot, answered: Callable[[Answer | None], None]) -> None:
    """Search in a thread: kernels release the interpreter lock."""

    async def search() -> None:
        answer = None
        try:
            answer = await asyncio.to_thread(solve, seen, SEARCH_S)
        finally:
            answered(answer)

    spawn(search(), "reorder queues")


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

    def __init__(self, fleet: LiveFleet, clock: Callable[[], float], background: Solver | None = None) -> None:
        self.fleet, self.clock, self.background = fleet, clock, background
        self.control = Reordering(fleet)
        self.changes: deque[QueueChange] = deque(maxlen=KEPT)  # those and operators' actions
        self.evicted: deque[Evicted] = deque(maxlen=KEPT)  # not yet written as events
        self._asked = False  # and not answered

    def is_wanted(self) -> bool:
        return any(map(self.fleet.waiting_queue.grouped, self.fleet.endpoints))

    def short_instances(self, endpoint: Endpoint) -> int:
        """Return the number of instances missing for what waits for *endpoint* to be in time in any order."""
        return self.control.short_instances.get(endpoint.index, 0)

    def sweep(self) -> None:
        """Reorder the queues if a group will be late, and evict requests so that one is in time."""
        if not self._asked:
            self._reorder()
        evictions = self.control.evictions()
        for key in dict.fromkeys((eviction.instance, eviction.group) for eviction in evictions):
            mine = [eviction for eviction in evictions if (eviction.instance, eviction.group) == key]
            evicted = Evicted.of(mine, self.fleet.topology.by_slot[key[0]], self._class_of(key[1]))
            self.evicted.append(evicted)
            self.changes.append(QueueChange(time.time(), "the global scheduler", evicted.reason, evicted.what))
        self.control.evict(evictions)

    def _reorder(self) -> None:
        began_s, seen = time.perf_counter(), self.control.snapshot()
        if seen is None:
            return
        if self.background is None or self.fleet.waiting_queue.group_count <= AT_ONCE_GROUPS:
            self._merge(seen, self.control.solve(seen), began_s)
        else:
            self._asked = True
            self.background(seen, lambda answer: self._answered(seen, answer, began_s))

    def _answered(self, seen: Snapshot, answer: Answer | None, began_s: float) -> None:
        self._asked = False
        if answer is not None:
            self._merge(seen, answer, began_s)

    def _merge(self, seen: Snapshot, answer: Answer, began_s: float) -> None:
        lost = self.fleet.waiting_queue.lost(seen)
        if moved := self.control.merge(seen, answer):
            self.changes.append(_change(seen, answer, lost, moved, time.perf_counter() - began_s))

    def _class_of(self, number: int) -> str:
        """Return the SLO class of the group with that number; "" if there is none."""
        queue = self.fleet.waiting_queue
        groups = queue.arrays.groups.groups
        at = np.flatnonzero((groups["number"] == number) & (groups["endpoint"] >= 0))
        return queue.at(int(groups["first"][at[0]])).asked.slo_class if at.size else ""


def _change(seen: Snapshot, answer: Answer, lost: NDArray[np.bool_], moved: int, took_s: float) -> QueueChange:
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
        "the global scheduler",
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
