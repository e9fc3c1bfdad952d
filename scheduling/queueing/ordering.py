"""Queue keys: the order in which requests leave an endpoint's queue. The lowest key goes first; ties by arrival.

A key stays as it is while its request waits, so no heap is ever put in order again. Three of the orderings age all the
same: their keys are moments, a new request's moment lies later the longer one waits, and so nobody is overtaken for ever.
docs/ordering.md has the proofs; tests/scheduling/queueing/test_ordering.py tests them.
"""

import math
from typing import Final

from scheduling.compiled import compiled

FCFS: Final = 0
PRIORITY: Final = 1
SHORTEST: Final = 2
DEADLINE: Final = 3
SSJF: Final = 4
SLACK: Final = 5
SJF: Final = 6
QLM: Final = 7

ORDERINGS: Final[dict[str, int]] = {
    "fcfs": FCFS,
    "priority": PRIORITY,
    "ssjf": SSJF,
    "shortest": SHORTEST,
    "sjf": SJF,
    "deadline": DEADLINE,
    "slack": SLACK,
    "qlm": QLM,
}
"""Codes by the name that deployments and scenarios use.

`ssjf` is speculative shortest job first with aging (SSJF section 6; Shadmi 2022), `shortest` the same without aging, as
the paper has it, `sjf` its oracle: by the output that will really come, which only a simulation knows. `deadline` is
earliest deadline first and `slack` least slack first. `qlm` orders request groups in virtual queues (QLM); its keys are
those of `deadline`, in whose order requests leave where the groups say nothing. A deployment cannot have `shortest`,
which may starve a request, nor `sjf`.
"""

BY_SERVICE: Final = frozenset({SSJF, SHORTEST, SJF})
"""Those whose keys depend on the service time; `slack` asks for that of the first token alone."""

PRIORITY_STEP_S: Final = 1e9
"""One step of priority outweighs any difference of arrival."""
LONGEST_STRETCHED_S: Final = 1e8
"""A stretched service time beyond this counts as this, so that no request falls out of its priority."""
NO_DEADLINE_S: Final = 86_400.0
"""A request without a deadline counts as due a day after it came, so that it waits behind those with one, not for ever."""
CLASS_STEP: Final = 10**13
"""Of `engine_priority`: one step of priority is more than any moment in milliseconds."""


@compiled
def queue_key(
    ordering: int, arrival_s: float, deadline_s: float, priority: int, service_s: float, stretch: float
) -> float:
    """The key of a request by the ordering with code *ordering*.

    *service_s* is how long it is expected to take alone (`profile.service_time_s`), under `slack` until its first token;
    *deadline_s* when that token is due (`first_due_s`), absolute, infinity for none. `priority` and `ssjf` serve lower
    priorities first, whatever the rest says; the others do not look at them.

    Under `ssjf` a request is overtaken only by those that come within `stretch * service_s` seconds after it: stretch 0
    is first come, first served; the larger it is, the nearer to shortest first. Under `deadline` and `slack` only those
    that come before its deadline overtake it.

    ValueError for an unknown code.
    """
    if ordering == FCFS:
        return arrival_s
    if ordering == PRIORITY:
        return priority * PRIORITY_STEP_S + arrival_s
    if ordering == SSJF:
        return priority * PRIORITY_STEP_S + arrival_s + min(stretch * service_s, LONGEST_STRETCHED_S)
    if ordering == SHORTEST:
        return service_s
    if ordering == SJF:
        return service_s
    end_s = deadline_s if deadline_s < math.inf else arrival_s + NO_DEADLINE_S
    if ordering in (DEADLINE, QLM):
        return end_s
    if ordering == SLACK:
        # One that cannot be in time any more has no slack from when it came, and no claim on those before it.
        return max(arrival_s, end_s - service_s)
    raise ValueError("unknown ordering")


@compiled
def engine_priority(ordering: int, priority: int, key: float) -> int:
    """The priority that an instance is given with a request (vLLM: lower is earlier), *key* being that of `queue_key`.

    By `fcfs` and `priority` it is that of the request's class: the engine itself goes by arrival among equals. Otherwise
    it is the key in milliseconds, with the class above it where the ordering looks at classes, so that an instance short
    of memory keeps to the same order, and takes it back first from those with the last keys.
    """
    if ordering <= PRIORITY:
        return priority
    if ordering == SSJF:
        return priority * CLASS_STEP + int((key - priority * PRIORITY_STEP_S) * 1000.0)
    return int(key * 1000.0)


@compiled
def first_due_s(ttft_s: float, end_s: float, decode_s: float) -> float:
    """Seconds from arrival until the first token is due, infinity for never (QLM sections 2 and 9).

    It is due after *ttft_s* where that is promised, and so early that the last one comes within *end_s* (end to end, or a
    deadline), decoding taking *decode_s*: predicted tokens times their pace (`profile.decode_time_s`).
    """
    return min(ttft_s, max(0.0, end_s - decode_s))


def hold_s(deadline_s: float, max_hold_s: float) -> float:
    """Seconds from arrival for which a request is held while no instance has room: to the deadline of its class if it has
    one, for nobody waits for it sooner or later; else *max_hold_s*."""
    return deadline_s if deadline_s < math.inf else max_hold_s
