"""Value of an order: the start and lateness of each group, the share of requests in time, the objective.

The objective is equation 13 as read in docs/papers/queueing.md: sum of n (max(0, L) + kappa 1(L > 0)) with L = start
+ own_s - due_s, so that earliness gains nothing and a group counts once per request.
"""

from typing import NamedTuple

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.reordering.problem import Floats, Ints, Order, Problem


class Score(NamedTuple):
    """Value of an order; times are seconds from now."""

    start_s: Floats
    """(N,): start of each group; infinity for those not in the order."""
    late_s: Floats
    """(N,): lateness of the first token of the group's last request; negative if in time."""
    end_s: Floats
    """(Q,): when each queue is empty."""
    swaps: int
    attainment: float
    """Share of requests whose group is in time; 1 if there are none. Groups not in the order count as late."""
    lateness_s: float
    """Mean lateness of requests in the order, those in time counting 0."""
    objective: float
    """In request-seconds, of groups in the order."""
    left_over: int
    """Requests not in the order."""


@compiled
def _serve(
    problem: Problem, change_s: Floats, first: Ints, groups: Ints, start_s: Floats, late_s: Floats, end_s: Floats
) -> int:
    swaps = 0
    for queue in range(end_s.size):
        kind, loaded = problem.queue_type[queue], problem.loaded[queue]
        time_s = problem.free_s[queue]
        for position in range(first[queue], first[queue + 1]):
            group = groups[position]
            model = problem.model[group]
            if model != loaded:
                swaps += 1
            time_s += change_s[kind, loaded + 1, model]
            start_s[group] = time_s
            late_s[group] = time_s + problem.own_s[group, kind] - problem.due_s[group]
            time_s += problem.service_s[group, kind]
            loaded = model
        end_s[queue] = time_s
    return swaps


def evaluate(problem: Problem, order: Order, kappa_s: float) -> Score:
    """Return the score of *order*; a late request counts as *kappa_s* more seconds of lateness."""
    n = problem.requests.size
    start_s, late_s, end_s = np.full(n, np.inf), np.full(n, np.inf), np.empty(problem.queue_type.size)
    swaps = _serve(problem, problem.change_s(), order.first, order.groups, start_s, late_s, end_s)
    inside = np.isfinite(start_s)
    late = late_s > 0.0
    requests = problem.requests.astype(np.float64)
    weight = requests[inside & late]
    lateness = float(weight @ late_s[inside & late])
    total, served = float(requests.sum()), float(requests[inside].sum())
    return Score(
        start_s=start_s,
        late_s=late_s,
        end_s=end_s,
        swaps=int(swaps),
        attainment=float(requests[~late].sum()) / total if total else 1.0,
        lateness_s=lateness / served if served else 0.0,
        objective=lateness + kappa_s * float(weight.sum()),
        left_over=int(problem.requests[~inside].sum()),
    )
