"""Queue keys: the order in which requests leave an endpoint's queue. The lowest key goes first; ties by arrival.

The key of a request alone is constant while it waits. `ssjf`, `deadline` and `slack` still age requests: their keys are
moments, later arrivals have later ones, and so no request is overtaken for ever. Orders by application (Hermes section
3.3) have the same keys, made from the run of a request (`run_key`); such a key changes with its run. The keys of `vtc` and
`wfq` are virtual times of tenants (`fair_shares`). docs/papers/ordering.md has the proofs;
tests/scheduling/queueing/test_ordering.py tests them.
"""

import math
from typing import Final, NamedTuple

from scheduling.compiled import compiled

FCFS: Final = 0
PRIORITY: Final = 1
SHORTEST: Final = 2
DEADLINE: Final = 3
SSJF: Final = 4
SLACK: Final = 5
SJF: Final = 6
QLM: Final = 7
APPLICATION: Final = 8
SRPT: Final = 9
HERMES: Final = 10
RUN_DEADLINE: Final = 11
RUN_SLACK: Final = 12
VTC: Final = 13
WFQ: Final = 14

ORDERINGS: Final[dict[str, int]] = {
    "fcfs": FCFS,
    "priority": PRIORITY,
    "ssjf": SSJF,
    "shortest": SHORTEST,
    "sjf": SJF,
    "deadline": DEADLINE,
    "slack": SLACK,
    "qlm": QLM,
    "application": APPLICATION,
    "srpt": SRPT,
    "hermes": HERMES,
    "run_deadline": RUN_DEADLINE,
    "run_slack": RUN_SLACK,
    "vtc": VTC,
    "wfq": WFQ,
}
"""Codes by the name in deployments and scenarios.

`ssjf` is speculative shortest job first with aging (SSJF section 6; Shadmi 2022), `shortest` the same without aging, as
in the paper, and `sjf` its oracle by actual output, known only to a simulation. `deadline` is earliest deadline first
and `slack` least slack first. `qlm` orders request groups in virtual queues (QLM); its keys are those of `deadline`,
which apply where the groups decide nothing, and inside groups requests may follow their runs (`groups.BY_RANK`). A
deployment cannot have `shortest`, which may starve a request, nor `sjf`.

`application` is first come, first served by application run (Parrot), `srpt` shortest expected remaining work of the run
first, `hermes` lowest Gittins rank first (Hermes equation 1), `run_deadline` and `run_slack` earliest deadline and least
worst-case slack of the run first (equation 2). `vtc` serves the tenant that was served least (virtual token counter),
`wfq` tenants by weighted fair queueing.
"""

BY_SERVICE: Final = frozenset({SSJF, SHORTEST, SJF, SRPT, HERMES, RUN_SLACK})
"""Orderings whose keys depend on the service time; `slack` needs only that of the first token."""
BY_RUN: Final = (APPLICATION, SRPT, HERMES, RUN_DEADLINE, RUN_SLACK)
"""Orderings by application run."""
FAIR: Final = (VTC, WFQ)
"""Orderings by the share of a tenant."""
AGED: Final = (SSJF, SRPT, HERMES)
BY_CLASS: Final = (FCFS, PRIORITY, VTC, WFQ)
"""Orderings under which an engine orders by SLO class, and equals by arrival."""

PRIORITY_STEP_S: Final = 1e9
"""Key difference per step of priority; outweighs any difference of arrival."""
LONGEST_STRETCHED_S: Final = 1e8
"""Cap of a stretched service time, so that no request drops out of its priority."""
NO_DEADLINE_S: Final = 86_400.0
"""A request without a deadline counts as due a day after arrival: it waits behind those with one, but not for ever."""
CLASS_STEP: Final = 10**13
"""Step of `engine_priority` per priority: more than any moment in milliseconds."""


class Standing(NamedTuple):
    """Where an application run stands, in seconds of service; what orders it among others."""

    began_s: float
    due_s: float
    """Absolute; infinity for never."""
    rank_s: float
    """Gittins rank over the tenant's weight (Hermes equation 1)."""
    mean_s: float
    """Expected remaining service over the tenant's weight."""
    worst_s: float
    """Longest path to its end: the supremum of equation 2 less what was attained. Parallel requests count once: a
    deadline is a moment."""
    attained_s: float


@compiled
def queue_key(
    ordering: int, arrival_s: float, deadline_s: float, priority: int, service_s: float, stretch: float
) -> float:
    """Return the key of a request by the ordering with code *ordering*.

    *service_s* is its expected service time alone (`profile.service_time_s`), under `slack` that until its first token;
    *deadline_s* is when that token is due (`first_due_s`), absolute, infinity for none. `priority` and those that age serve
    lower priorities first, before all else; the others ignore them. Under orders by application these are the values of the
    request's run (`run_key`); under `vtc` and `wfq`, *service_s* is its virtual start (`waiting_set.claim`).

    Under `ssjf` a request is overtaken only by those that arrive within `stretch * service_s` seconds after it: stretch
    0 is first come, first served; a larger one is nearer to shortest first. So is a run under `srpt` and `hermes`. Under
    `deadline` and `slack` only requests that arrive before its deadline overtake it.

    Raise ValueError for an unknown code.
    """
    if ordering in (FCFS, APPLICATION):
        return arrival_s
    if ordering == PRIORITY:
        return priority * PRIORITY_STEP_S + arrival_s
    if ordering in AGED:
        return priority * PRIORITY_STEP_S + arrival_s + min(stretch * service_s, LONGEST_STRETCHED_S)
    if ordering in (SHORTEST, SJF, VTC, WFQ):
        return service_s
    end_s = deadline_s if deadline_s < math.inf else arrival_s + NO_DEADLINE_S
    if ordering in (DEADLINE, QLM, RUN_DEADLINE):
        return end_s
    if ordering in (SLACK, RUN_SLACK):
        # A request that was late on arrival has no slack from then on, and no precedence over earlier ones.
        return max(arrival_s, end_s - service_s)
    raise ValueError("unknown ordering")


@compiled
def run_key(
    ordering: int,
    began_s: float,
    due_s: float,
    priority: int,
    rank_s: float,
    mean_s: float,
    worst_s: float,
    stretch: float,
) -> float:
    """Return the key of a request whose run began at *began_s* and is due at *due_s*, absolute, infinity for never.

    *rank_s* is the Gittins rank of the run, *mean_s* its expected and *worst_s* its longest path to the end, in seconds.
    """
    service_s = rank_s if ordering == HERMES else mean_s if ordering == SRPT else worst_s
    return queue_key(ordering, began_s, due_s, priority, service_s, stretch)


@compiled
def due_in_run(key: float, arrival_s: float, due_s: float, worst_s: float) -> float:
    """Return the queue key, under `qlm`, of a request that is due at *key* as such, and whose run is due at *due_s*.

    It is due when the rest of the run must begin, if that takes *worst_s*, where that is earlier (Hermes equation 2). A run
    that was late when the request arrived makes it no more urgent.
    """
    slack_s = due_s - worst_s
    return slack_s if arrival_s <= slack_s < key else key


@compiled
def run_due_s(ttft_s: float, end_s: float, service_s: float) -> float:
    """Return seconds until a request without a run is due as a run of one request that takes *service_s*.

    That is when its last token is due, or without such a promise when its first one is due and as long as its answer takes.
    """
    return end_s if end_s < math.inf else ttft_s + service_s


@compiled
def engine_priority(ordering: int, priority: int, key: float) -> int:
    """Return the priority sent to the engine with a request (vLLM: lower is earlier); *key* is that of `queue_key`.

    Under `fcfs`, `priority`, `vtc` and `wfq` it is that of the request's class: the engine orders equals by arrival.
    Otherwise it is the key in milliseconds, below the class if the ordering uses classes, so that an instance short of
    memory keeps the same order and preempts those with the last keys first.
    """
    if ordering in BY_CLASS:
        return priority
    if ordering in AGED:
        return priority * CLASS_STEP + int((key - priority * PRIORITY_STEP_S) * 1000.0)
    return int(key * 1000.0)


@compiled
def first_due_s(ttft_s: float, end_s: float, decode_s: float) -> float:
    """Return seconds from arrival until the first token is due, infinity for never (QLM sections 2 and 9).

    It is due after *ttft_s* if that is promised, and early enough for the last token to come within *end_s* (end to
    end, or a deadline) when decoding takes *decode_s*: predicted tokens times their pace (`profile.decode_time_s`).
    """
    return min(ttft_s, max(0.0, end_s - decode_s))


def hold_s(deadline_s: float, max_hold_s: float) -> float:
    """Return the longest hold while no instance has room: until the class's deadline, otherwise *max_hold_s*."""
    return deadline_s if deadline_s < math.inf else max_hold_s
