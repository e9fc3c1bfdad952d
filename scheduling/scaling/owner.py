"""Ownership of endpoints: the floor, strategy or plan that last moved one owns it for a cooldown.

Until then no other removes an instance that the owner added, and what an approved plan added stays while the plan is
valid. Adding is never delayed, because requests wait for it. A move that undoes another says so.
"""

from enum import StrEnum
from typing import Final, NamedTuple


class Mover(StrEnum):
    """A mover: what scales an endpoint."""

    FLOOR = "floor"
    STRATEGY = "strategy"
    PLAN = "plan"
    """A plan approved by an operator."""
    OPERATOR = "operator"
    ANOTHER = "another"
    """Other than the floor of a gateway, which sees no more of others' moves."""


AUTOMATIC: Final = (Mover.FLOOR, Mover.STRATEGY)
"""Movers that wait for an owner; people do not."""
UNDONE_WITHIN_S: Final = 900.0
"""Time after which undoing a move is no conflict."""


class Change(NamedTuple):
    """The last move at an endpoint."""

    by: str = ""
    """Empty: unknown."""
    delta: int = 0
    age_s: float = 0.0
    holds_s: float = 0.0
    """Remaining validity of an approved plan."""

    def owner(self, cooldown_s: float) -> str:
        """Return the mover whose additions others may not remove yet; empty for none."""
        return self.by if self.delta > 0 and (self.holds_s > 0 or self.age_s < cooldown_s) else ""

    def words(self) -> str:
        """Return a text such as `the floor added one 40 s ago`."""
        who = self.by if self.by == Mover.ANOTHER else f"the {self.by}"
        return f"{who} {'added' if self.delta > 0 else 'took away'} one {self.age_s:.0f} s ago"


UNCHANGED: Final = Change()


def waits(last: Change, by: str, cooldown_s: float) -> str:
    """Return why *by* may not remove an instance yet, in words; empty if it may."""
    if by not in AUTOMATIC or last.owner(cooldown_s) in ("", by):
        return ""
    if last.holds_s > 0:
        return f"{last.words()}, and it holds for {last.holds_s:.0f} s more"
    return f"{last.words()}, and who else scales waits for {cooldown_s:.0f} s"


def undoing(reason: str, last: Change, by: str, delta: int) -> str:
    """Return *reason* of a move of *delta* by *by*, with the mover whose move it undoes, if that is another."""
    if not last.by or last.by == by or last.delta * delta >= 0 or last.age_s > UNDONE_WITHIN_S:
        return reason
    words = last.words()
    return f"{reason} {words[:1].upper()}{words[1:]}."
