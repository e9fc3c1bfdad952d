"""The steps of a run, from the calls that it made.

A call is caused by the step that ended last before it began. Calls of a unit that run at once and have the same cause are
one step with that parallelism; calls of different units are branches.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scheduling.applications.demand_graph import MOST_STEPS, RunRecord, Step

NO_UNIT = "request"
"""Unit of calls that name none."""
AFTER_TOOL, AFTER_USER, SUBAGENT = "after-tool", "after-user", "subagent"
SESSION_UNITS = frozenset((AFTER_TOOL, AFTER_USER, SUBAGENT))
"""Units of the calls of an agent's session, by what the call ends with."""
IDLE_S, SESSION_IDLE_S = 120.0, 1800.0
"""A run without an open call for so long has ended: a program calls again within seconds, a session once its user has
read the answer."""
TOGETHER_S = 0.05
"""A call that began up to this before an answer ended counts as sent after it: clocks and streams are not exact."""


class Call(NamedTuple):
    """One request of a run, or one execution of a unit that is no LLM. Times are seconds of any clock."""

    unit: str
    began_s: float
    ended_s: float
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    duration_s: float = 0.0
    """0 unless its unit is no LLM."""
    predicted_tokens: float = 0.0
    """Output tokens that were predicted when it came; 0: not known."""


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
        longest=max(max(call.output_tokens, call.duration_s) for call in group.calls) if count > 1 else 0.0,
        predicted_tokens=sum(call.predicted_tokens for call in group.calls) / count,
    )
