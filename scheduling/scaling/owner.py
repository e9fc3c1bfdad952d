"""Who owns an endpoint: floor, strategy or plan, as the last of them that moved it, for a cooldown.

Until it is over none of the others takes an instance away that the owner added, and what an approved plan added stays as
long as the plan holds. Adding is never held back, for requests wait for it. What undoes another's move says so.
"""

from enum import StrEnum
from typing import Final, NamedTuple


class Mover(StrEnum):
    """Who scales an endpoint."""

    FLOOR = "floor"
    STRATEGY = "strategy"
    PLAN = "plan"
    """That an operator approved."""
    OPERATOR = "operator"
    ANOTHER = "another"
    """Than the floor of a gateway, which sees no more of others' moves."""


AUTOMATIC: Final = (Mover.FLOOR, Mover.STRATEGY)
"""Movers that wait for an owner; people do not."""
UNDONE_WITHIN_S: Final = 900.0
"""What is taken back later than that is no contest."""


class Change(NamedTuple):
    """The last move at an endpoint."""

    by: str = ""
    """Empty: none is known."""
    delta: int = 0
    age_s: float = 0.0
    holds_s: float = 0.0
    """Of an approved plan: for how long it is still valid."""

    def owner(self, cooldown_s: float) -> str:
        """Mover whose addition others do not take away yet; empty for none."""
        return self.by if self.delta > 0 and (self.holds_s > 0 or self.age_s < cooldown_s) else ""

    def words(self) -> str:
        """Such as `the floor added one 40 s ago`."""
        who = self.by if self.by == Mover.ANOTHER else f"the {self.by}"
        return f"{who} {'added' if self.delta > 0 else 'took away'} one {self.age_s:.0f} s ago"


UNCHANGED: Final = Change()


def waits(last: Change, by: str, cooldown_s: float) -> str:
    """Why *by* may not take an instance away yet, in words; empty if it may."""
    if by not in AUTOMATIC or last.owner(cooldown_s) in ("", by):
        return ""
    if last.holds_s > 0:
        return f"{last.words()}, and it holds for {last.holds_s:.0f} s more"
    return f"{last.words()}, and who else scales waits for {cooldown_s:.0f} s"


def undoing(reason: str, last: Change, by: str, delta: int) -> str:
    """*reason* of a move of *delta* by *by*, with whose move it takes back, if that is another's."""
    if not last.by or last.by == by or last.delta * delta >= 0 or last.age_s > UNDONE_WITHIN_S:
        return reason
    words = last.words()
    return f"{reason} {words[:1].upper()}{words[1:]}."
