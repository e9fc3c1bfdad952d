"""`solve`: the plan for a problem, by the exact model, or by the rounded relaxation if the problem is large or has no time.

If rows cannot hold, the least shortage is found first, then the cheapest plan that is no shorter.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT, Plan
from scheduling.planning.problem import Problem, broken_rows
from scheduling.planning.programme import Solved, SolverLost, relax, solve_exact
from scheduling.planning.rounding import round_shares

GAP = 0.005
EXACT_UP_TO: Final = 200
"""Places (l x r x g) up to which the exact model is used: it takes less than a second, and HiGHS keeps its time limit."""
QUICK_UP_TO: Final = 24
"""Those up to which it takes some milliseconds."""
PULP, ROUNDED = "PuLP model by HiGHS", "HiGHS relaxation, rounded"
"""`Plan.solver`"""


@dataclass(frozen=True, eq=False)
class Draft:
    """A whole plan that breaks no hard row, before it is explained."""

    targets: NDArray[np.int64]
    bound_usd: float
    solver: str
    note: str = ""


def solve(problem: Problem, *, gap: float = GAP, time_limit_s: float = 10.0, exact_up_to: int = EXACT_UP_TO) -> Plan:
    """Return a plan for *problem* that breaks no hard row, at most *gap* above the best if *time_limit_s* allows.

    The exact model is used up to *exact_up_to* places. The relaxation and its rounding have no time limit: they take 1 s at
    50 models, 30 regions and 6 GPU types. Raise SolverLost if HiGHS cannot solve the relaxation.
    """
    began_s = time.monotonic()
    exact = bool(np.prod(problem.shape) <= exact_up_to)

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
    note = ""
    if exact:
        try:
            solved = _exactly(problem, gap, left_s())
            return Draft(solved.targets, solved.bound, PULP)
        except SolverLost as lost:
            note = str(lost)
    relaxed = relax(problem)
    if relaxed is None:
        return None
    starts = [relaxed.shares] if start is None else [start.astype(np.float64), relaxed.shares]
    return Draft(round_shares(problem, starts), relaxed.objective, ROUNDED, note)


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


def _exactly(problem: Problem, gap: float, time_limit_s: float, shortage: bool = False) -> Solved:
    """Return the exact plan. Raise SolverLost also for one that breaks a row, and if there is no time."""
    if time_limit_s <= 0.0:
        raise SolverLost("no time was left for the exact model")
    solved = solve_exact(problem, gap, time_limit_s, shortage)
    if broken := broken_rows(problem, solved.targets):
        raise SolverLost(f"HiGHS broke a row: {broken[0]}")
    if not shortage and problem.shortage(solved.targets).any:
        raise SolverLost("HiGHS left a row short")
    return solved


def _weight(problem: Problem, targets: NDArray[np.int64]) -> float:
    return problem.shortage_usd(problem.shortage(targets))
