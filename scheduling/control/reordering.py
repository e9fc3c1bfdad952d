"""The global scheduler (QLM section 7) over the virtual queues of a fleet: orders the groups, and evicts for their heads.

The rules are `scheduling.queueing`: `snapshot` reads the queues, `global_scheduler.solve` orders what was seen and may run
anywhere, `merge` applies the answer as far as it still fits, `eviction.wanted` chooses who leaves an instance.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from scheduling.control.fleet import Fleet
from scheduling.queueing.eviction import Eviction, wanted
from scheduling.queueing.global_scheduler import merge, short_instances, solve
from scheduling.queueing.groups import FREE_GROUPS, NEXT_NUMBER
from scheduling.queueing.reordering.rules import RULES, SEARCH
from scheduling.queueing.reordering.scheduler import Answer
from scheduling.queueing.snapshot import Snapshot, snapshot

EVERY_S: Final = 1.0
"""Period of `act`."""
LEAST_GAIN: Final = 0.01
"""Least relative gain of the objective for which groups are moved."""
AGAIN_S: Final = 5.0
"""Time after which the solver is called again though no group came or went."""


class Reordering:
    """Calls the solver when a group will be late, and not again until something has changed that could help.

    *moves* bounds the solver's work in the calling thread; the same moves give the same order on every machine. *by* is
    one of `reordering.rules.REORDERINGS`; the order of a rule, used instead of the search, applies whatever it gains.
    """

    def __init__(self, fleet: Fleet, by: str = SEARCH, moves: int = 20_000) -> None:
        self.fleet, self.by, self.moves = fleet, by, moves
        self.reordered = 0
        """Answers that moved groups."""
        self.short_instances: dict[int, int] = {}
        """By endpoint with misses: instances without which no order keeps the waiting requests in time."""
        self.tried: tuple[int, int] = (-1, -1)
        """Groups ever made, and free group indices, when the solver was last called."""
        self.tried_s = -math.inf

    def act(self) -> None:
        """Reorder the queues if a group will be late, and evict requests so that one is in time."""
        if (seen := self.snapshot()) is not None:
            self.merge(seen, self.solve(seen))
        self.evict(self.evictions())

    def snapshot(self) -> Snapshot | None:
        """Return the queues; None if no group waits, or the solver has seen what there is."""
        return self.read() if self._waiting().any() and self.wants() else None

    def read(self, *, pinned: bool = False) -> Snapshot | None:
        """Return the queues, with groups that are *pinned* if that is set; None if no group waits."""
        fleet = self.fleet
        running = fleet.running_requests()
        return snapshot(fleet.instances, fleet.members, fleet.waiting, fleet.now_s, running=running, pinned=pinned)

    def wants(self) -> bool:
        """Whether the queues may have changed since the last call of the solver, or that was long ago."""
        return self._known() != self.tried or self.fleet.now_s - self.tried_s >= AGAIN_S

    def solve(self, seen: Snapshot) -> Answer:
        """Return an answer to what was *seen*, found in this thread."""
        return solve(seen, moves=self.moves, by=self.by)

    def merge(self, seen: Snapshot, answer: Answer) -> int:
        """Merge *answer* into what was *seen*, and give out what has room then. Return the groups moved."""
        fleet, before = self.fleet, answer.before.objective
        spared = before - answer.after.objective
        gains = spared >= LEAST_GAIN * before or spared == 0.0 or self.by in RULES
        moved = merge(fleet.instances, fleet.members, fleet.waiting, seen, answer) if gains else 0
        self.short_instances = short_instances(seen.problem) if answer.after.objective > 0.0 else {}
        if before > 0.0 or self.by in RULES:
            self.tried, self.tried_s = self._known(), fleet.now_s
        if moved:
            self.reordered += 1
            for endpoint in np.flatnonzero(self._waiting()).tolist():
                fleet.pump(endpoint)
        return moved

    def evictions(self) -> list[Eviction]:
        """Return who should leave for groups at the head of a virtual queue that would be late."""
        fleet, waits = self.fleet, self._waiting()
        limit = np.zeros(waits.size, np.int64)
        for endpoint in np.flatnonzero(waits).tolist():
            limit[endpoint] = fleet.endpoints[endpoint].policy.eviction_limit
        if not limit.any():
            return []
        return wanted(fleet.instances, fleet.members, fleet.waiting, fleet.running_requests(), limit, fleet.now_s)

    def evict(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            for row in eviction.rows:
                self.fleet.evict(row)

    def _waiting(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return, by endpoint, whether it has groups and requests wait there."""
        waiting = self.fleet.waiting
        return (waiting.groups.limit > 0) & (waiting.size > 0)

    def _known(self) -> tuple[int, int]:
        counters = self.fleet.waiting.groups.counters
        return int(counters[NEXT_NUMBER]), int(counters[FREE_GROUPS])
