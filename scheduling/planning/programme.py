"""The integer programme of SageServe section 5 in PuLP, solved by HiGHS: the model to read with the paper.

Values from the solver are checked to be whole, and the caller checks all rows with other code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem

WHOLE = 1e-4
"""Largest accepted distance of a solver's value from a whole number."""


FEW_PLACES = 200
"""Up to which HiGHS's heuristics take longer than they save: a plan of 2 models, 3 regions and 2 types takes 6 ms without
them and 17 with. Of larger problems they find the first plan.
"""
HEURISTICS_OFF = {
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_detect_symmetry": False,
}


class SolverLost(Exception):
    """The solver ended without a usable answer."""


@dataclass(frozen=True, eq=False)
class Written:
    """A problem as a PuLP model. The instances of a place are the sum of its columns."""

    model: Any
    columns: Sequence[Any]
    """Variables that count instances, in order of addition."""
    places: NDArray[np.int64]
    """Flat index into (l, r, g) of each column."""


@dataclass(frozen=True, eq=False)
class Solved:
    """A whole plan."""

    targets: NDArray[np.int64]
    """(l, r, g)"""
    bound: float
    """No plan has a lower objective; minus infinity if the solver gives no bound."""


def write_model(problem: Problem, shortage: bool = False) -> Written:
    """Return *problem* as a PuLP model. With *shortage*, soft rows may fall short, and
    shortage is minimised instead of cost.

    The cost of a place is convex in its instances: present ones, then the model's own spot, then others. So each of the
    three is a column, and starts need no row. Units that the region has not acquired yet cost extra.
    """
    import pulp  # takes HiGHS with it

    n, r, g = problem.shape
    theta, gpus, start = problem.capability_tokens_per_s, problem.gpus, problem.start_cost_usd
    model = pulp.LpProblem("instances", pulp.LpMinimize)
    columns: list[Any] = []
    places: list[int] = []
    of_place: dict[tuple[int, int, int], list[Any]] = {}
    cost: list[tuple[Any, float]] = []
    weighed: list[tuple[Any, float]] = []

    for place, (i, j, k) in enumerate(np.ndindex(n, r, g)):
        of_place[i, j, k] = []
        alpha = float(problem.instance_cost_usd[i, k])
        prices = alpha, alpha + float(start.same_spot[i, k]), alpha + float(problem.redeploy_cost_usd[i, j, k])
        for name, width, price in zip(("kept", "reclaimed", "started"), widths(problem, i, j, k), prices, strict=True):
            if width > 0:
                column = model.add_variable(f"{name}_{i}_{j}_{k}", 0, width, pulp.LpInteger)
                of_place[i, j, k].append(column)
                columns.append(column)
                places.append(place)
                cost.append((column, price))

    def missing(name: str, weight: float, need: float) -> list[tuple[Any, float]]:
        """Return the shortage of a row in two columns; the second half of its need weighs more."""
        if not shortage:
            return []
        halves = [(model.add_variable(f"{name}_{half}", 0, need / 2.0), 1.0) for half in range(2)]
        weighed.extend((halves[half][0], weight * (1.0, SECOND_HALF_WEIGHT)[half]) for half in range(2))
        return halves

    for i in range(n):
        weight = float(problem.shortage_weight_usd[i])
        served = [[(column, float(theta[i, k])) for k in range(g) for column in of_place[i, j, k]] for j in range(r)]
        for j in range(r):
            need, least = float(problem.need_tokens_per_s[i, j]), int(problem.least_instances[i, j])
            short = missing(f"own_region_{i}_{j}", OWN_REGION_SHARE * weight, need)
            model += pulp.LpAffineExpression(served[j] + short) >= need
            count = [(column, 1.0) for column, _ in served[j]]
            model += pulp.LpAffineExpression(count) <= int(problem.max_instances[i, j])
            if shortage and least > 0:
                below = model.add_variable(f"below_{i}_{j}", 0, least)
                weighed.append((below, float(problem.instance_weight_usd[i])))
                count.append((below, 1.0))
            model += pulp.LpAffineExpression(count) >= least
        need = float(problem.need_total_tokens_per_s[i])
        short = missing(f"total_{i}", weight, need)
        for lost in range(r) if problem.survives_loss else (r,):
            left = [term for j, region in enumerate(served) for term in region if j != lost]
            model += pulp.LpAffineExpression(left + short) >= need

    for j, k in np.ndindex(r, g):
        capacity, acquired = int(problem.capacity[j, k]), int(problem.acquired_units[j, k])
        units = [(column, float(gpus[i, k])) for i in range(n) for column in of_place[i, j, k]]
        if capacity > acquired:
            anew = model.add_variable(f"acquired_{j}_{k}", 0, capacity - acquired)
            units.append((anew, -1.0))
            cost.append((anew, float(start.new_vm[k])))
        model += pulp.LpAffineExpression(units) <= min(acquired, capacity)

    model.setObjective(pulp.LpAffineExpression(weighed if shortage else cost))
    return Written(model, columns, np.array(places, np.int64))


def widths(problem: Problem, i: int, j: int, k: int) -> tuple[int, int, int]:
    """Return the most instances of a place that are kept, taken back from the model's own spot, and started otherwise."""
    if problem.capability_tokens_per_s[i, k] <= 0.0:
        return 0, 0, 0
    most = min(int(problem.max_instances[i, j]), int(problem.capacity[j, k] // problem.gpus[i, k]))
    kept = min(int(problem.instances[i, j, k]), most)
    reclaimed = min(int(problem.spot[i, j, k]), most - kept)
    return kept, reclaimed, most - kept - reclaimed


def solve_exact(problem: Problem, gap: float, time_limit_s: float, shortage: bool = False) -> Solved | None:
    """Return a plan within *gap* of the best, or the best found in time; None if the rows cannot hold together.

    Raise SolverLost if HiGHS fails or finds no plan. With thousands of places it may take four times the time limit.
    """
    written = write_model(problem, shortage)
    if not written.columns:
        needed = (problem.need_tokens_per_s, problem.need_total_tokens_per_s, problem.least_instances)
        if not shortage and any(each.any() for each in needed):
            return None
        return Solved(np.zeros(problem.shape, np.int64), 0.0)
    heuristics = HEURISTICS_OFF if np.prod(problem.shape) <= FEW_PLACES else {}
    highs = _run(written, gapRel=gap, timeLimit=time_limit_s, **heuristics)
    status, info = highs.modelStatusToString(highs.getModelStatus()), highs.getInfo()
    if status == "Infeasible":
        return None
    if info.primal_solution_status != 2:
        raise SolverLost(f"HiGHS found no plan: {status}")
    return Solved(whole_numbers(_by_place(problem, written, highs)), float(info.mip_dual_bound))


def _run(written: Written, **options: Any) -> Any:
    """Return HiGHS after its run."""
    import pulp  # takes HiGHS with it

    solver, model = pulp.HiGHS(msg=False, threads=1, mip=True, **options), written.model
    try:
        solver.createAndConfigureSolver(model)
        solver.buildSolverModel(model)
        solver.callSolver(model)
    except pulp.PulpError as error:
        raise SolverLost(f"HiGHS failed: {error}") from error
    return model.solverModel


def _by_place(problem: Problem, written: Written, highs: Any) -> NDArray[np.float64]:
    values = np.asarray(highs.getSolution().col_value)[[column.index for column in written.columns]]
    counts = np.bincount(written.places, values, int(np.prod(problem.shape)))
    return counts.astype(np.float64).reshape(problem.shape)


def whole_numbers(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return *values*, which are whole except for rounding. Raise SolverLost if they are not."""
    if not np.all(np.abs(values - np.rint(values)) <= WHOLE):  # NaN fails too
        raise SolverLost("HiGHS returned fractions of instances")
    return np.asarray(np.rint(values), np.int64)
