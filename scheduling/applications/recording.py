"""The steps of a run, from the calls that it made.

A call is caused by the step that ended last before it began. Calls of a unit that run at once and have the same cause are
one step with that parallelism; calls of different units are branches.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scheduling.applications.demand_graph import MOST_STEPS, RunRecord, Step

NO_UNIT = "request"
"""Unit of calls that name none."""
RECOGNIZED = "~"
"""Begins the names of applications and runs that nothing marks; no mark can begin with it."""
AFTER_TOOL, AFTER_USER, SUBAGENT = "after-tool", "after-user", "subagent"
SESSION_UNITS = frozenset((AFTER_TOOL, AFTER_USER, SUBAGENT))
"""Units of the calls of an agent's session, and of conversations that nothing marks: by what the call ends with."""
IDLE_S, SESSION_IDLE_S = 120.0, 1800.0
"""A run without an open call for so long has ended: a program calls again within seconds, a session once its user has
read the answer."""
TOGETHER_S = 0.05
"""A call that began up to this before an answer ended counts as sent after it: clocks and streams are not exact."""
LONGEST_ID = 60
"""Of a request whose id its client gave, so much is in the name of a recognized run."""


def run_named(request_id: str, given_at: float | None) -> str:
    """Return the name of the run that a request begins, by its id, and by the epoch second *given_at* where its client gave
    the id: all requests of a client may have the same.
    """
    if given_at is None:
        return RECOGNIZED + request_id[:79]
    return f"{RECOGNIZED}{request_id[:LONGEST_ID]}@{given_at * 1000:.0f}"


def first_request(run: str) -> tuple[str, float | None]:
    """Return what `run_named` was given, the id up to `LONGEST_ID` characters where there is a moment."""
    request_id, _, given_ms = run.removeprefix(RECOGNIZED).partition("@")
    return request_id, float(given_ms) / 1000 if given_ms.isdigit() else None


class Call(NamedTuple):
    """One request of a run, or one execution of a unit that is no LLM. Times are seconds of any clock."""

    unit: str
    began_s: float
    ended_s: float
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    duration_s: float = 0.0
    """0 unless its unit is no LLM."""


class _Group(NamedTuple):
    parent: int
    calls: list[Call]

    @property
    def ended_s(self) -> float:
        return max(call.ended_s for call in self.calls)


def record_of(calls: Iterable[Call]) -> RunRecord:
    """Return the record of a run that ended. ValueError for a run without calls.

    A run of more than `MOST_STEPS` steps is cut off there.
    """
    groups: list[_Group] = []
    for call in sorted(calls, key=lambda one: (one.began_s, one.ended_s)):
        ended = [at for at, group in enumerate(groups) if group.ended_s <= call.began_s + TOGETHER_S]
        parent = max(ended, key=lambda at: groups[at].ended_s, default=-1)
        for group in reversed(groups):
            # A call joins those of its unit that still run, unless it waited for something that they did not.
            running = group.parent == parent and group.calls[0].unit == call.unit
            if running and call.began_s + TOGETHER_S < group.ended_s:
                group.calls.append(call)
                break
        else:
            groups.append(_Group(parent, [call]))
    return RunRecord(tuple(_step(group) for group in groups[:MOST_STEPS]))


def _step(group: _Group) -> Step:
    count = len(group.calls)
    return Step(
        unit=group.calls[0].unit,
        parent=group.parent,
        input_tokens=sum(call.input_tokens for call in group.calls) / count,
        output_tokens=sum(call.output_tokens for call in group.calls) / count,
        duration_s=sum(call.duration_s for call in group.calls) / count,
        parallelism=count,
    )
