"""Whose turn it is at an endpoint: the key under which a request waits. The lowest goes first; ties by arrival."""

from typing import Final

from scheduling.compiled import compiled

FCFS: Final = 0
PRIORITY: Final = 1
SHORTEST: Final = 2
DEADLINE: Final = 3

PRIORITY_STEP_S: Final = 1e9
"""One step of priority outweighs any difference of arrival."""

ORDERINGS: Final[dict[str, int]] = {"fcfs": FCFS, "priority": PRIORITY, "shortest": SHORTEST, "deadline": DEADLINE}
"""Codes by the name that deployments and scenarios use. `shortest` is speculative shortest job first (SSJF)."""


@compiled
def turn_key(ordering: int, arrival_s: float, deadline_s: float, priority: int, output_tokens: int) -> float:
    """The key of a request by the ordering with code *ordering*; *output_tokens* are the predicted ones.

    *deadline_s* is absolute. ValueError for an unknown code.
    """
    if ordering == FCFS:
        return arrival_s
    if ordering == PRIORITY:
        return priority * PRIORITY_STEP_S + arrival_s
    if ordering == SHORTEST:
        return float(output_tokens)
    if ordering == DEADLINE:
        return deadline_s
    raise ValueError("unknown ordering")
