"""A plan: instances to add and remove, the cost and the reasons, in numbers and words."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem

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

    @property
    def start_usd(self) -> float:
        """Return the cost of starts."""
        return self.problem.start_usd(self.targets)

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
