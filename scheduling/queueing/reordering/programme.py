"""QLM's mixed-integer programme (equations 6 to 13) with PuLP and HiGHS: for small sizes and comparisons.

It is read as docs/papers/queueing.md explains: earliness does not pay for lateness elsewhere, every switch delays all
later groups by the drain of the previous model and the swap to the next, groups are weighted by their requests, and the
first token of a group's last request counts. Switches need no big-M: entering and leaving a model are continuous variables
pushed up by the binary ones. The solver's status is checked, and its order is verified and scored again.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from scheduling.queueing.reordering.problem import Order, Problem, begin, broken_rules

GAP = 1e-6
"""Relative gap at which a solver may stop."""

TIME_LIMIT_S = 5.0
"""As in the paper; enough to prove two queues of six groups."""


class NoAnswer(Exception):
    """The solver found no order in time, or proved that there is none."""


class Solved(NamedTuple):
    order: Order
    objective: float
    """Of the programme, in request-seconds."""
    proved: bool


class _Written(NamedTuple):
    model: Any
    chosen: dict[tuple[int, int, int], Any]
    """x: (queue, group, position)."""
    fixed: list[list[int]]


def write(problem: Problem, kappa_s: float) -> _Written:
    """Return *problem* as a PuLP model.

    Positions run from 0 to the number of groups - 1; those after the last group stay empty.
    """
    import pulp  # takes HiGHS with it

    fixed, free_s, loaded = begin(problem)
    models = problem.swap_s.shape[1]
    places = {group for queue in fixed for group in queue}
    groups = [group for group in range(problem.requests.size) if group not in places]
    model = pulp.LpProblem("queues", pulp.LpMinimize)
    chosen: dict[tuple[int, int, int], Any] = {}
    objective: list[tuple[Any, float]] = []
    most_s = _horizon_s(problem)
    late: dict[int, Any] = {}
    for group in groups:
        if not math.isfinite(problem.due_s[group]):
            continue  # never late
        late[group] = model.add_variable(f"p_{group}", 0.0)  # equation 11
        objective.append((late[group], float(problem.requests[group])))
        if kappa_s > 0.0:
            missed = model.add_variable(f"missed_{group}", 0, 1, pulp.LpInteger)
            worst_s = max(0.0, most_s + float(_finite_most(problem.own_s[group])) - float(problem.due_s[group]))
            model += late[group] <= worst_s * missed
            objective.append((missed, kappa_s * float(problem.requests[group])))

    for queue, kind in enumerate(problem.queue_type.tolist()):
        swap_s, drain_s = problem.swap_s[kind], problem.drain_s[kind]
        can = [group for group in groups if _can(problem, queue, group, int(loaded[queue]))]
        for group in can:
            for place in range(len(can)):
                chosen[queue, group, place] = model.add_variable(f"x_{queue}_{group}_{place}", 0, 1, pulp.LpInteger)
        waited: Any = float(free_s[queue])  # equation 10, without the group at this position
        holds: dict[int, Any] = {k: 1.0 if k == loaded[queue] else 0.0 for k in range(models)}
        used: Any = 1.0
        for place in range(len(can)):
            here = {group: chosen[queue, group, place] for group in can}
            taken = pulp.lpSum(here.values())
            model += taken <= 1  # equation 6, second part: an empty group has no model, no deadline and takes no time
            if place:
                model += taken <= used
            now = {k: pulp.lpSum(here[group] for group in can if problem.model[group] == k) for k in range(models)}  # 7
            start = model.add_variable(f"wt_{queue}_{place}", 0)
            terms = []
            for k in range(models):  # equation 9: t is entering one model and leaving another
                if not any(problem.model[group] == k for group in can) and k != loaded[queue]:
                    continue
                if math.isfinite(swap_s[k]):
                    entered = model.add_variable(f"in_{queue}_{place}_{k}", 0)
                    model += entered >= now[k] - holds[k]
                    terms.append((entered, float(swap_s[k])))
                else:
                    model += now[k] <= holds[k]
                left = model.add_variable(f"out_{queue}_{place}_{k}", 0)
                model += left >= holds[k] - now[k] - (1 - taken)
                terms.append((left, float(drain_s[k])))
            model += start >= waited + pulp.LpAffineExpression(terms)
            for group in can:
                # Equation 11 for the group at this position (8 is its deadline): binding only if x is 1.
                if group in late:
                    slack_s = float(problem.due_s[group]) - float(problem.own_s[group, kind])
                    unbound_s = max(0.0, most_s - slack_s)
                    model += late[group] >= start - slack_s - unbound_s * (1 - here[group])
            after = model.add_variable(f"end_{queue}_{place}", 0)
            model += after >= start + pulp.lpSum(float(problem.service_s[g, kind]) * here[g] for g in can)
            waited, holds, used = after, now, taken
    for group in groups:
        at = [variable for (_, g, _), variable in chosen.items() if g == group]
        if not at:
            raise NoAnswer(f"no queue can serve group {group}")
        model += pulp.lpSum(at) == 1  # equation 6, first part
    model.setObjective(pulp.LpAffineExpression(objective))
    return _Written(model, chosen, fixed)


def _finite_most(values: Any) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def _can(problem: Problem, queue: int, group: int, loaded: int) -> bool:
    kind, model = int(problem.queue_type[queue]), int(problem.model[group])
    loadable = math.isfinite(problem.swap_s[kind, model]) or loaded == model
    return loadable and math.isfinite(problem.service_s[group, kind])


def _horizon_s(problem: Problem) -> float:
    """Return an upper bound on starts: all groups on the slowest queue, each with a swap and a drain."""
    service = sum(_finite_most(row) for row in problem.service_s)
    return (
        _finite_most(problem.free_s)
        + service
        + (problem.requests.size + 1) * (_finite_most(problem.swap_s) + _finite_most(problem.drain_s))
    )


def solve(problem: Problem, kappa_s: float = 0.0, time_limit_s: float = TIME_LIMIT_S) -> Solved:
    """Return the best order that the programme finds within *time_limit_s* (HiGHS may overrun).

    Raise NoAnswer if HiGHS fails or has no integer solution.
    """
    import pulp  # takes HiGHS with it

    written = write(problem, kappa_s)
    try:
        written.model.solve(pulp.HiGHS(msg=False, gapRel=GAP, timeLimit=time_limit_s, threads=1))
    except pulp.PulpError as error:
        raise NoAnswer(f"HiGHS failed: {error}") from error
    # PuLP also calls a run that hit its time limit optimal; only the status of the solution is reliable.
    if written.model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise NoAnswer(f"HiGHS found no order: {pulp.LpSolution[written.model.sol_status]}")
    queues: list[list[tuple[int, int]]] = [[] for _ in range(problem.queue_type.size)]
    for (queue, group, place), variable in written.chosen.items():
        value = math.nan if variable.varValue is None else variable.varValue
        if not min(abs(value), abs(value - 1.0)) <= 1e-4:
            raise NoAnswer("HiGHS returned fractions of groups")
        if value > 0.5:
            queues[queue].append((place, group))
    order = Order.of(
        [[*first, *(group for _, group in sorted(rest))] for first, rest in zip(written.fixed, queues, strict=True)]
    )
    if broken := broken_rules(problem, order):
        raise NoAnswer(f"HiGHS returned an order that cannot be carried out: {broken[0]}")
    objective = float(pulp.value(written.model.objective) or 0.0)
    bound = float(written.model.solverModel.getInfo().mip_dual_bound)
    optimal = written.model.sol_status == pulp.LpSolutionOptimal
    proved = optimal and objective - bound <= 1e-4 * max(1.0, abs(objective))
    return Solved(order, objective, proved)
