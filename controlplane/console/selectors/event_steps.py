"""Steps of one move as one row: an instance that starts passes several states, and each step is an event."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from controlplane.console.formats import duration
from controlplane.console.selectors.events import REQUESTS, ROUTINE, STEP, event_row, event_title
from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import InstanceState

PASSING = frozenset({InstanceState.PROVISIONING, InstanceState.LOADING, InstanceState.DRAINING})
"""States that an instance is on its way through."""
DECISIONS = ("scaling.added", "scaling.removed")
KINDS = frozenset({*ROUTINE, *DECISIONS})
SAME_MOVE = timedelta(seconds=60)  # between a decision or request and the step that carries it out
WORST_FIRST = (Severity.CRITICAL, Severity.WARNING)


@dataclass(slots=True)
class Move:
    """Events of one move of one instance, newest first."""

    events: list[Event] = field(default_factory=list)

    def takes(self, older: Event) -> bool:
        """Whether *older*, of the same instance, is a step of this move before those that it has."""
        soon = self.events[-1].at - older.at <= SAME_MOVE
        if older.kind in DECISIONS:
            return soon and not any(event.kind in DECISIONS for event in self.events)
        if older.kind in REQUESTS:
            return soon
        state = older.after.get("state")
        first = next((event for event in reversed(self.events) if event.kind == STEP), None)
        if first is None:  # the decision was written down after the step that begins to carry it out
            return soon and state in PASSING
        return state in PASSING and first.before.get("state") == state

    def row(self) -> dict[str, Any]:
        """As `event_row`; the decision or first step, with what came of it, and *steps*, oldest first."""
        newest, oldest = self.events[0], self.events[-1]
        head = next((event for event in self.events if event.kind in DECISIONS), oldest)
        row = event_row(head) | {"at": newest.at.timestamp(), "actor": head.actor, "steps": []}
        if len(self.events) == 1:
            return row
        steps = [event for event in reversed(self.events) if event is not head or head.kind == STEP]
        moved = [step for step in steps if step.kind == STEP]
        if moved:
            state = moved[-1].after.get("state", "?")
            row["title"] = f"{head.subject}: {moved[0].before.get('state', '?')} to {state}"
            if head.kind in DECISIONS:
                row["title"] = f"{event_title(head)}, {'still' if state in PASSING else 'now'} {state}"
            if state not in PASSING:
                row["took"] = duration((newest.at - oldest.at).total_seconds())
        row["severity"] = next(
            (worst for worst in WORST_FIRST if worst in {e.severity for e in self.events}), head.severity
        )
        if newest.severity == Severity.CRITICAL:
            row["reason"] = newest.reason  # what went wrong matters more than why it began
        row["steps"] = [event_row(step, with_subject=False) for step in steps]
        return row


def folded(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Rows for *events*, newest first, with the steps of each move folded into one, at the place of its newest event."""
    moves: list[Move] = []
    of_instance: dict[str, Move] = {}
    for event in events:
        steps = event.subject_type == "instance" and event.kind in KINDS
        move = of_instance.get(event.subject_id) if steps else None
        if move is None or not move.takes(event):
            move = Move()
            moves.append(move)
            if steps:
                of_instance[event.subject_id] = move
        move.events.append(event)
    return [move.row() for move in moves]
