"""`solve`: the plan for a problem, by the exact model, or by the rounded relaxation if the model has no time.

If rows cannot hold, the least shortage is found first, then the cheapest plan that is no shorter.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.exact_subprocess import solve_in_subprocess
from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT, Plan
from scheduling.planning.problem import Problem, broken_rows
from scheduling.planning.programme import OutOfTime, Solved, SolverLost, relax, solve_exact
from scheduling.planning.rounding import price_usd, round_shares

GAP = 0.005
AUTO, EXACT, FAST = "auto", "exact", "fast"
EXACT_UP_TO: Final = {AUTO: 2000, EXACT: np.inf, FAST: 24}
"""Places (l x r x g) up to which the exact model is used. Up to those of `FAST` it takes some milliseconds."""
HERE_UP_TO = 200
"""Places up to which the exact model is solved in process: there HiGHS keeps its time limit."""
PULP, ROUNDED = "PuLP model by HiGHS", "HiGHS relaxation, rounded"
"""`Plan.solver`"""


@dataclass(frozen=True, eq=False)
class Draft:
    """A whole plan that breaks no hard row, before it is explained."""

    targets: NDArray[np.int64]
    bound_usd: float
    solver: str
    note: str = ""


def solve(problem: Problem, *, gap: float = GAP, time_limit_s: float = 10.0, solver: str = AUTO) -> Plan:
    """Return a plan for *problem* that breaks no hard row, at most *gap* above the best if *time_limit_s* allows.

    *solver* is `AUTO`, `EXACT` or `FAST`. The relaxation and its rounding have no time limit: they take 1 s at 50
    models, 30 regions and 6 GPU types. Raise SolverLost if HiGHS cannot solve the relaxation.
    """
    began_s = time.monotonic()
    exact = bool(np.prod(problem.shape) <= EXACT_UP_TO[solver])

    def left_s() -> float:
        return max(began_s + time_limit_s - time.monotonic(), 0.0)

    draft, note = _cheapest(problem, gap, left_s, exact), ""
    if draft is None or problem.shortage(draft.targets).any:
        if draft is not None and not exact:
            note = "split instances would hold all rows; no whole plan was found that does"
        least = _least_shortage(problem, left_s() / 2.0, exact)
        if draft is not None and _weight(problem, draft.targets) < _weight(problem, least.targets):
            least = draft
        asked = replace(problem, waived=problem.shortage(least.targets))
        draft = _cheapest(asked, gap, left_s, exact, least.targets)
        assert draft is not None, "the plan with the least shortage holds what is not waived"
        note = "; ".join(filter(None, dict.fromkeys((note, least.note, draft.note))))
    else:
        note = draft.note

    assert not broken_rows(problem, draft.targets), "a planner broke a hard row"
    plan = Plan(
        problem=problem,
        delta=draft.targets - problem.instances,
        cost_usd=problem.cost_usd(draft.targets),
        bound_usd=draft.bound_usd,
        status=FEASIBLE,
        solver=draft.solver,
        wall_s=time.monotonic() - began_s,
        note=note,
    )
    if problem.shortage(draft.targets).any:
        return replace(plan, status=SHORT)
    return replace(plan, status=OPTIMAL) if plan.gap <= gap else plan


def _cheapest(
    problem: Problem,
    gap: float,
    left_s: Callable[[], float],
    exact: bool,
    start: NDArray[np.int64] | None = None,
) -> Draft | None:
    """Return the cheapest plan found; None if the rows cannot hold together. It falls short only where *start* does."""
    here, note = np.prod(problem.shape) <= HERE_UP_TO, ""
    if exact and here:
        try:
            solved = _exactly(problem, gap, left_s(), start)
            return Draft(solved.targets, solved.bound, PULP)
        except SolverLost as lost:
            note = str(lost)
    relaxed = relax(problem)
    if relaxed is None:
        return None
    starts = [relaxed.shares] if start is None else [start.astype(np.float64), relaxed.shares]
    draft = Draft(round_shares(problem, starts), relaxed.objective, ROUNDED, note)
    if exact and not here:
        try:
            solved = _exactly(problem, gap, left_s(), draft.targets)
        except SolverLost as lost:
            return replace(draft, note=str(lost))
        draft = replace(draft, bound_usd=max(draft.bound_usd, solved.bound), solver=PULP if solved.proved else ROUNDED)
        if price_usd(problem, solved.targets) < price_usd(problem, draft.targets):
            return replace(draft, targets=solved.targets, solver=PULP)
    return draft


def _least_shortage(problem: Problem, time_limit_s: float, exact: bool) -> Draft:
    """Return the plan with the least shortage at any cost."""
    note = ""
    if exact:
        try:
            return Draft(_exactly(problem, 0.0, time_limit_s, shortage=True).targets, -np.inf, PULP)
        except SolverLost as lost:
            note = str(lost)
    relaxed = relax(problem, shortage=True)
    assert relaxed is not None, "rows that may be short always hold"
    return Draft(round_shares(problem, [relaxed.shares]), -np.inf, ROUNDED, note)


def _exactly(
    problem: Problem,
    gap: float,
    time_limit_s: float,
    start: NDArray[np.int64] | None = None,
    shortage: bool = False,
) -> Solved:
    """Return the exact plan, solved here or in a subprocess. Raise SolverLost also for one that breaks a row."""
    if time_limit_s <= 0.0:
        raise OutOfTime("no time was left for the exact model")
    run = solve_exact if np.prod(problem.shape) <= HERE_UP_TO else solve_in_subprocess
    solved = run(problem, gap, time_limit_s, start, shortage)
    if broken := broken_rows(problem, solved.targets):
        raise SolverLost(f"HiGHS broke a row: {broken[0]}")
    if not shortage and problem.shortage(solved.targets).any:
        raise SolverLost("HiGHS left a row short")
    return solved


def _weight(problem: Problem, targets: NDArray[np.int64]) -> float:
    return problem.shortage_usd(problem.shortage(targets))
