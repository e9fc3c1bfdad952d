"""A plan: how many instances to add and take away, what that costs, and why. It explains itself in words."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem

OPTIMAL, FEASIBLE, SHORT = "optimal", "feasible", "short"
"""Status: within the gap asked for; all rows hold, the gap is larger or unknown; some rows could not hold (`infeasible`)."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a planner would have done to the instances of `problem`. `infeasible` says which rows fell short; others hold."""

    problem: Problem
    delta: NDArray[np.int64]
    """(l, r, g): instances to add, or to take away where negative."""
    cost_usd: float
    """Of all instances after the change, for the horizon, and of the starts."""
    bound_usd: float
    """No plan that serves as much in every row costs less; minus infinity when no solver could say."""
    status: str
    """`OPTIMAL`, `FEASIBLE` or `SHORT`."""
    solver: str
    """What found it, such as `HiGHS relaxation, rounded`."""
    wall_s: float
    note: str = ""
    """What went otherwise than it should, such as a solver that is not there."""

    @property
    def gap(self) -> float:
        """Share of the cost that lies above the bound: 0 is proved to be the best. Infinity without a bound."""
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
        """(l, r): by how much a region falls short of what it must be able to serve by itself."""
        return np.asarray(self._short.own_region_tokens_per_s)

    @property
    def unmet_total_tokens_per_s(self) -> NDArray[np.float64]:
        """(l,): by how much all regions together fall short of the demand of all."""
        return np.asarray(self._short.total_tokens_per_s)

    @property
    def start_usd(self) -> float:
        """The part of the cost that starts have."""
        return self.problem.start_usd(self.targets)

    @cached_property
    def binding(self) -> list[str]:
        """Rows because of which the plan cannot be smaller, or the next instance cannot be added, in words."""
        from scheduling.planning.explain import binding_rows

        return binding_rows(self)

    @cached_property
    def reasons(self) -> dict[tuple[int, int, int], str]:
        """Why, for each place (i, j, k) whose number of instances changes."""
        from scheduling.planning.explain import reasons

        return reasons(self)

    @cached_property
    def infeasible(self) -> list[str]:
        """Rows that could not hold and by how much they fall short, in words; empty if all hold."""
        from scheduling.planning.explain import short_rows

        return short_rows(self)
