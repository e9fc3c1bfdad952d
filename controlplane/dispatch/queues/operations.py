"""Operators' actions on what waits: pin or bump a request group, move an application run first, or stop it."""

import time
from enum import StrEnum
from typing import Any, Final

import numpy as np

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.queues.view import group_rows
from controlplane.dispatch.wire import QueueChange, Row
from controlplane.fleet.lifecycle.states import ActionError
from scheduling.queueing.groups import put_before, unqueue
from scheduling.queueing.served import worth


class GroupAction(StrEnum):
    PIN = "pin"
    """Keep its place in its virtual queue, whatever the global scheduler decides."""
    UNPIN = "unpin"
    BUMP = "bump"
    """Put it first after the running requests, pinned there."""


class RunAction(StrEnum):
    FIRST = "first"
    """Serve its calls before all others of their class, waiting ones and later ones."""
    STOP = "stop"
    """End its open calls, and refuse later ones."""


DONE: Final = {GroupAction.PIN: "pinned", GroupAction.UNPIN: "unpinned", GroupAction.BUMP: "bumped"}


class QueueOperations:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def act(self, number: int, action: GroupAction, operator: str, reason: str = "") -> Row:
        """Do *action* on group *number*; return its row as it was. Raises ActionError where it has left the queue."""
        dispatcher = self.dispatcher
        seen = dispatcher.reordering.control.read(pinned=True)
        rows = group_rows(dispatcher, seen, worth(seen)) if seen else []
        row = next((row for row in rows if row["number"] == number), None)
        if row is None:
            raise ActionError(f"Group {number} has left the queue, or no instance serves it")
        arrays = dispatcher.queue.arrays.groups
        groups: Any = arrays.groups
        at = int(np.flatnonzero((groups["number"] == number) & (groups["endpoint"] >= 0))[0])
        if action == GroupAction.BUMP:
            queue = int(groups["queue"][at])
            unqueue(arrays, at)
            put_before(arrays, at, queue, int(arrays.queues["first"][queue]))
        groups["pinned"][at] = action != GroupAction.UNPIN
        done = DONE[action]
        what = f"{done.capitalize()} group {number}: {row['count']} {row['slo_class']} of {row['model']}"
        dispatcher.reordering.changes.append(
            QueueChange(time.time(), operator, reason or f"{operator} {done} it", what)
        )
        endpoint = dispatcher.topology.endpoint(row["model"], row["region"])
        if endpoint is not None:
            dispatcher.placement.pump(endpoint)
        return row

    def act_on_run(self, application: tuple[int, str], run: str, action: RunAction) -> int:
        """Do *action* on a run of *application*, (tenant id, name); return how many open calls it had.

        Raises ActionError where it cannot be done.
        """
        dispatcher = self.dispatcher
        calls = len(dispatcher.calls_of(application, run))
        if action == RunAction.STOP:
            dispatcher.stop_run(application, run)
        elif dispatcher.runs.is_stopped(application, run):
            raise ActionError(f"Run {run} was stopped")
        elif not dispatcher.runs.control.by_run().any():
            raise ActionError("No deployment orders by application run: choose such an order first")
        elif not dispatcher.runs.move_first(application, run):
            raise ActionError(f"Run {run} has no call in progress, and none lately")
        dispatcher.placement.pump_all()
        return calls
