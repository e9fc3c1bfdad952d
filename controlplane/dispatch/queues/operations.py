"""Operators' actions on a waiting request group: pin, bump, hold, evict and undo, each with its price.

The price is the change of predicted starts and attainment: the action is applied to the arrays, the queues are read again,
and it is undone, all within one call on the event loop.
"""

import time
from collections import Counter
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from pydantic.dataclasses import dataclass

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.port import Submit
from controlplane.dispatch.queues.view import UNDO_S, Row, group_rows, see
from controlplane.dispatch.wire import PublishedRow, QueueChange
from controlplane.fleet.lifecycle.states import ActionError
from scheduling.queueing.groups import NONE, put_before, unqueue
from scheduling.queueing.reordering.evaluate import Score
from scheduling.queueing.served import worth

LONGEST_HOLD_S: Final = 3600.0
LATER_S: Final = 0.5
"""Delay below which a group is not listed as starting later."""
SHOWN_LATER: Final = 3
Z_P90: Final = 1.2816
"""0.9 quantile of the standard normal."""
SHOWN_MEMBERS: Final = 5_000
"""Members of a group whose tenants are counted."""


class GroupAction(StrEnum):
    PIN = "pin"
    """Keep its place in its virtual queue, whatever the global scheduler decides."""
    UNPIN = "unpin"
    BUMP = "bump"
    """Put it first after the running requests, pinned there."""
    HOLD = "hold"
    """Do not give it out before a given moment; groups behind it are served first."""
    RELEASE = "release"
    """End a hold."""
    EVICT = "evict"
    """Take its running requests off their instances, and put it last in its queue. Cannot be undone."""
    UNDO = "undo"
    """Undo an action of the last 30 s."""


DONE: Final = {
    GroupAction.PIN: "pinned",
    GroupAction.UNPIN: "unpinned",
    GroupAction.BUMP: "bumped",
    GroupAction.HOLD: "held",
    GroupAction.RELEASE: "released",
    GroupAction.EVICT: "evicted",
    GroupAction.UNDO: "restored",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Position and marks of a group."""

    queue: int
    place: int  # from 0
    pinned: int
    hold_until_s: float


@dataclass(frozen=True, config=PublishedRow.model_config)
class Worth:
    """Predicted outcome of the queues."""

    attainment_ratio: float
    lateness_s: float
    """Mean per request."""
    late: int
    """Late groups."""
    start_s: float | None
    """Start of the group, from now."""


@dataclass(frozen=True)
class LaterGroup:
    """Group that starts later by an action on another one."""

    number: int
    count: int
    slo_class: str
    model: str
    later_s: float


@dataclass(frozen=True, config=PublishedRow.model_config)
class Price:
    """Price of an action on a group: before, after, and the groups that start later."""

    before: Worth
    after: Worth
    later: list[LaterGroup]
    """Groups that lose the most."""
    later_groups: int
    evicted: int
    """Requests that leave their instances."""


class QueueOperations:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._undo: dict[int, tuple[float, Standing]] = {}  # by number: deadline of the undo, and the state before

    def detail(self, number: int) -> dict[str, Any]:
        """Return the group's row, its requests' instances and arrivals, and the price of each possible action."""
        at = self._find(number)
        row, rows, _ = self._read(number)
        queue, slot = self.dispatcher.queue, int(self._groups["first"][at])
        first, members = queue.at(slot), list[Submit]()
        while slot >= 0 and len(members) < SHOWN_MEMBERS:
            members.append(queue.at(slot).asked)
            slot = int(queue.arrays.groups.members["following"][slot])
        tenants = Counter(asked.tenant_id for asked in members)
        wait = self.dispatcher.waits.of(first).wait
        return row | {
            "of": sum(other["instance"] == row["instance"] for other in rows),
            "prompt_tokens": round(float(self._groups["prompt_tokens"][at])),
            "output_tokens": round(float(self._groups["output_tokens"][at])),
            "running": len(self._running(number)),
            "oldest_at": min(asked.arrived_at for asked in members),
            "tenants": [list(pair) for pair in tenants.most_common()],
            "first_wait_s": wait.mean_s if wait else None,
            "first_wait_p90_s": wait.quantile_s(Z_P90) if wait else None,
            "can_undo": self._can_undo(number),
            "prices": {action.value: asdict(self.price(number, action, 60.0)) for action in self.possible(number)},
        }

    def possible(self, number: int) -> list[GroupAction]:
        at = self._find(number)
        this, now_s = self._groups[at], self.dispatcher.queue.moment_s
        actions = [GroupAction.UNPIN if this["pinned"] else GroupAction.PIN]
        if this["preceding"] != NONE or not this["pinned"]:
            actions.append(GroupAction.BUMP)
        actions.append(GroupAction.RELEASE if this["hold_until_s"] > now_s else GroupAction.HOLD)
        if self._running(number):
            actions.append(GroupAction.EVICT)
        return actions

    def price(self, number: int, action: GroupAction, hold_s: float = 0.0) -> Price:
        """Return the price of *action* without changing anything. Raises ActionError where it cannot be done."""
        at = self._checked(number, action, hold_s)
        before, starts = self._worth(number)
        standing = self._standing(at)
        self._make(at, action, hold_s)
        try:
            after, starts_after = self._worth(number)
        finally:
            self._restore(at, standing)
        later = [
            {**row, "later_s": round(start_s - starts[other][1], 1)}
            for other, (row, start_s) in starts_after.items()
            if other != number and other in starts and start_s - starts[other][1] >= LATER_S
        ]
        later.sort(key=lambda row: -row["later_s"])
        evicted = len(self._running(number)) if action == GroupAction.EVICT else 0
        return Price(before, after, [LaterGroup(**row) for row in later[:SHOWN_LATER]], len(later), evicted)

    def act(
        self, number: int, action: GroupAction, operator: str, hold_s: float = 0.0, reason: str = ""
    ) -> dict[str, Any]:
        """Do *action* on the group; return its row as it was, and the price. Raises ActionError where it cannot be done."""
        at = self._find(number)
        row, _, _ = self._read(number)
        if action == GroupAction.UNDO:
            price = self._undone(number, at)
        else:
            price = self.price(number, action, hold_s)
            if action != GroupAction.EVICT:
                self._undo[number] = (self.dispatcher.clock() + UNDO_S, self._standing(at))
            else:
                self._undo.pop(number, None)
            self._make(at, action, hold_s)
            for request in self._running(number) if action == GroupAction.EVICT else ():
                self.dispatcher.evict(request.asked.number)
        self._note(row, action, operator, hold_s, reason, price)
        endpoint = self.dispatcher.topology.endpoint(row["model"], row["region"])
        if endpoint is not None:
            self.dispatcher.placement.pump(endpoint)
        return {"group": row, "price": asdict(price)}

    # Internals

    @property
    def _groups(self) -> Any:
        return self.dispatcher.queue.arrays.groups.groups

    def _find(self, number: int) -> int:
        at = np.flatnonzero((self._groups["number"] == number) & (self._groups["endpoint"] >= 0))
        if not at.size:
            raise gone(number)
        return int(at[0])

    def _checked(self, number: int, action: GroupAction, hold_s: float) -> int:
        at = self._find(number)
        if self._groups["queue"][at] < 0:
            raise ActionError(f"Group {number} stands in no virtual queue: no instance serves it")
        if action == GroupAction.HOLD and not 0.0 < hold_s <= LONGEST_HOLD_S:
            raise ActionError(f"A group is held for up to {LONGEST_HOLD_S / 60:.0f} min")
        if action not in self.possible(number):
            raise ActionError(f"Group {number} cannot be {DONE[action]} as it stands")
        return at

    def _running(self, number: int) -> list[Request]:
        """Return requests of the group that are on an instance and can be evicted."""
        replicas = self.dispatcher.topology.replicas.values()
        return [
            request
            for replica in replicas
            for request in replica.requests
            if request.group == number and (request.asked.evictable or not request.output_tokens)
        ]

    def _read(self, number: int) -> tuple[Row, list[Row], Score]:
        """Return the row of the group, the rows of all groups, and the current score of the queues."""
        if (seen := see(self.dispatcher)) is not None:
            score = worth(seen)
            rows = group_rows(self.dispatcher, seen, score)
            for row in rows:
                if row["number"] == number:
                    return row, rows, score
        raise gone(number)

    def _worth(self, number: int) -> tuple[Worth, dict[int, tuple[Row, float]]]:
        """Return the current worth of the queues, and the row and start of each group."""
        own, rows, score = self._read(number)
        names = ("number", "count", "slo_class", "model")
        starts = {
            row["number"]: ({name: row[name] for name in names}, row["start_s"])
            for row in rows
            if row["start_s"] is not None
        }
        late = sum(row["risk"] == "late" for row in rows)
        return Worth(round(score.attainment, 4), round(score.lateness_s, 2), late, own["start_s"]), starts

    def _standing(self, at: int) -> Standing:
        this, place, before = self._groups[at], 0, int(self._groups["preceding"][at])
        while before >= 0:
            place, before = place + 1, int(self._groups["preceding"][before])
        return Standing(int(this["queue"]), place, int(this["pinned"]), float(this["hold_until_s"]))

    def _make(self, at: int, action: GroupAction, hold_s: float) -> None:
        arrays = self.dispatcher.queue.arrays.groups
        queue = int(self._groups["queue"][at])
        match action:
            case GroupAction.PIN:
                self._groups["pinned"][at] = 1
            case GroupAction.UNPIN:
                self._groups["pinned"][at] = 0
            case GroupAction.BUMP:
                unqueue(arrays, at)
                put_before(arrays, at, queue, int(arrays.queues["first"][queue]))
                self._groups["pinned"][at] = 1
                self._groups["hold_until_s"][at] = -np.inf
            case GroupAction.HOLD:
                self._groups["hold_until_s"][at] = self.dispatcher.queue.moment_s + hold_s
            case GroupAction.RELEASE:
                self._groups["hold_until_s"][at] = -np.inf
            case GroupAction.EVICT:
                unqueue(arrays, at)
                put_before(arrays, at, queue, NONE)
                self._groups["pinned"][at] = 0

    def _restore(self, at: int, standing: Standing) -> None:
        """Put the group back in the same place from the front, among the groups now in that queue."""
        arrays = self.dispatcher.queue.arrays.groups
        unqueue(arrays, at)
        after = int(arrays.queues["first"][standing.queue])
        for _ in range(standing.place):
            if after >= 0:
                after = int(self._groups["following"][after])
        put_before(arrays, at, standing.queue, after)
        self._groups["pinned"][at] = standing.pinned
        self._groups["hold_until_s"][at] = standing.hold_until_s

    def _can_undo(self, number: int) -> bool:
        until_s, _ = self._undo.get(number, (-np.inf, None))
        return self.dispatcher.clock() <= until_s

    def _undone(self, number: int, at: int) -> Price:
        if not self._can_undo(number):
            raise ActionError(f"Nothing was done to group {number} in the last {UNDO_S:.0f} s")
        _, standing = self._undo.pop(number)
        before, _ = self._worth(number)
        self._restore(at, standing)
        after, _ = self._worth(number)
        return Price(before, after, [], 0, 0)

    def _note(
        self, row: dict[str, Any], action: GroupAction, operator: str, hold_s: float, reason: str, price: Price
    ) -> None:
        """List the action among the last changes; an earlier one of this group can no longer be undone."""
        changes = self.dispatcher.reordering.changes
        number, clock_s = row["number"], self.dispatcher.clock()
        self._undo = {each: kept for each, kept in self._undo.items() if kept[0] >= clock_s}
        for place, change in enumerate(changes):
            if change.undo == number:
                changes[place] = replace(change, undo=None)
        what = f"{DONE[action]} group {number}: {row['count']} {row['slo_class']} of {row['model']}"
        if action == GroupAction.HOLD:
            what += f", for {hold_s:.0f} s"
        if price.later_groups:
            worst = price.later[0]
            what += f"; {price.later_groups} later, the most by {worst.later_s:.0f} s"
        changes.append(
            QueueChange(
                time.time(), operator, reason or f"{operator} {DONE[action]} it", what[:1].upper() + what[1:],
                price.before.attainment_ratio, price.after.attainment_ratio, price.before.lateness_s,
                price.after.lateness_s, undo=number if number in self._undo else None,
            )
        )  # fmt: skip


def gone(number: int) -> ActionError:
    return ActionError(f"Group {number} has left the queue")
