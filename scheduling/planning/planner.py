"""Plans: instances to add and remove, their cost and the reasons; `solve` makes one by the exact model.

If rows cannot hold, the least shortage is solved first, then the cheapest plan that is no shorter.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem, broken_rows
from scheduling.planning.programme import Solved, SolverLost, solve_exact

GAP: Final = 0.005
PULP: Final = "PuLP model by HiGHS"
"""`Plan.solver`"""


OPTIMAL, FEASIBLE, SHORT = "optimal", "feasible", "short"
"""Status: within the gap; rows hold, but the gap is larger or unknown; some rows cannot hold (`infeasible`)."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The planned instances of `problem`. `infeasible` lists the rows that fell short; others hold."""

    problem: Problem
    delta: NDArray[np.int64]
    """(l, r, g): instances to add, or if negative to remove."""
    cost_usd: float
    """Cost of all instances after the change over the horizon, and of the starts."""
    bound_usd: float
    """No plan that serves as much in every row costs less; minus infinity if no solver gave a bound."""
    status: str
    """`OPTIMAL`, `FEASIBLE` or `SHORT`."""
    solver: str
    """Solver, such as `HiGHS relaxation, rounded`."""
    wall_s: float
    note: str = ""
    """Deviations, such as a missing solver."""

    @property
    def gap(self) -> float:
        """Return the share of the cost above the bound: 0 is proved optimal. Infinity without a bound."""
        if self.cost_usd <= 0.0:
            return 0.0
        return max(0.0, (self.cost_usd - self.bound_usd) / self.cost_usd)

    @property
    def targets(self) -> NDArray[np.int64]:
        """(l, r, g): instances after the change."""
        return np.asarray(self.problem.instances + self.delta)

    @property
    def by_endpoint(self) -> NDArray[np.int64]:
        """(l, r): instances after the change, on all GPU types."""
        return np.asarray(self.targets.sum(axis=2))

    @cached_property
    def _short(self) -> Any:
        return self.problem.shortage(self.targets)

    @property
    def unmet_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l, r): how much a region falls short of what it must serve itself."""
        return np.asarray(self._short.own_region_tokens_per_s)

    @property
    def unmet_total_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l,): how much all regions together fall short of the total demand."""
        return np.asarray(self._short.total_tokens_per_s)

    @cached_property
    def binding(self) -> list[str]:
        """Return the rows that keep the plan from being smaller, or the next instance from being added, in words."""
        from scheduling.planning.explain import binding_rows

        return binding_rows(self)

    @cached_property
    def reasons(self) -> dict[tuple[int, int, int], str]:
        """Return the reason for each place (i, j, k) whose number of instances changes."""
        from scheduling.planning.explain import reasons

        return reasons(self)

    @cached_property
    def infeasible(self) -> list[str]:
        """Return the rows that could not hold and by how much they fall short, in words; empty if all hold."""
        from scheduling.planning.explain import short_rows

        return short_rows(self)


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
