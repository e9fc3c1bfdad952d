"""`solve`: the plan for a problem by the exact model.

If rows cannot hold, the least shortage is solved first, then the cheapest plan that is no shorter.
"""

import time
from dataclasses import replace
from typing import Final

import numpy as np

from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT, Plan
from scheduling.planning.problem import Problem, broken_rows
from scheduling.planning.programme import Solved, SolverLost, solve_exact

GAP: Final = 0.005
PULP: Final = "PuLP model by HiGHS"
"""`Plan.solver`"""


def solve(problem: Problem, *, gap: float = GAP, time_limit_s: float = 10.0) -> Plan:
    """Return a plan for *problem* that breaks no hard row, at most *gap* above the best if *time_limit_s* allows.

    Raise SolverLost if HiGHS finds no plan in that time.
    """
    began_s = time.monotonic()

    def left_s() -> float:
        return max(began_s + time_limit_s - time.monotonic(), 0.0)

    solved, note = _checked(problem, gap, left_s()), ""
    if solved is None:
        least = _checked(problem, 0.0, left_s() / 2.0, shortage=True)
        assert least is not None, "rows that may be short always hold"
        asked = replace(problem, waived=problem.shortage(least.targets))
        try:
            solved = _checked(asked, gap, left_s())
        except SolverLost as lost:
            note = f"as short as need be, but not the cheapest: {lost}"
        solved = solved or Solved(least.targets, -np.inf)
    plan = Plan(
        problem=problem,
        delta=solved.targets - problem.instances,
        cost_usd=problem.cost_usd(solved.targets),
        bound_usd=solved.bound,
        status=FEASIBLE,
        solver=PULP,
        wall_s=time.monotonic() - began_s,
        note=note,
    )
    if problem.shortage(solved.targets).any:
        return replace(plan, status=SHORT)
    return replace(plan, status=OPTIMAL) if plan.gap <= gap else plan


def _checked(problem: Problem, gap: float, time_limit_s: float, shortage: bool = False) -> Solved | None:
    """Return the exact plan; None if the rows cannot hold together. Raise SolverLost also for one that breaks a row."""
    solved = solve_exact(problem, gap, time_limit_s, shortage)
    if solved is None:
        return None
    if broken := broken_rows(problem, solved.targets):
        raise SolverLost(f"HiGHS broke a row: {broken[0]}")
    if not shortage and problem.shortage(solved.targets).any:
        raise SolverLost("HiGHS left a row short")
    return solved
