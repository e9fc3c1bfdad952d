"""The integer programme of SageServe section 5, written with PuLP, and solved by HiGHS through it, by CBC without HiGHS.

This is the model to read beside the paper, row by row, and the only one: every other planner is compared with it. Nothing
that a solver says is believed unread: it counts what PuLP says of the solution and not of the run, values must be whole, and
the caller checks all rows again.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem

WHOLE = 1e-4
"""How far a solver's value may lie from a whole number."""


class SolverLost(Exception):
    """A solver is not there, or ended without an answer that can be used."""


class Cut(NamedTuple):
    """A row that whole plans hold and split ones may not: coefficients[k] x targets[model, region, k], summed, >= least."""

    model: int
    region: int
    """-1: summed over all regions."""
    coefficients: NDArray[np.float64]
    """(g,)"""
    least: float


class OutOfTime(SolverLost):
    """A solver was stopped because it did not keep to its time limit."""


@dataclass(frozen=True, eq=False)
class Written:
    """A problem as a PuLP model. Each array is (l, r, g) of integer variables; delta = restarted + started - given_up."""

    model: Any
    given_up: NDArray[Any]
    restarted: NDArray[Any]
    """From the model's own spot."""
    started: NDArray[Any]
    """On any other GPUs."""


@dataclass(frozen=True, eq=False)
class Solved:
    """What a solver came back with."""

    targets: NDArray[np.int64]
    """(l, r, g)"""
    bound: float
    """No plan has a lower objective; minus infinity where the solver does not say."""
    proved: bool
    """The solver says that the gap asked for is reached."""
    solver: str


def write_model(problem: Problem, cuts: Sequence[Cut] = (), shortage: bool = False) -> Written:
    """*problem* as the paper's programme. With *shortage*, rows may be short, and that is made small, not the cost.

    delta is written in its parts, since a start from the model's own spot is cheaper than others: its cost is convex, so no
    solution gives up and starts instances at the same place. Whatever units the region has not acquired yet cost extra.
    """
    import pulp

    n, r, g = problem.shape
    theta, gpus, start = problem.capability_tokens_per_s, problem.gpus, problem.start_cost_usd
    spot, usable = problem.spot, problem.usable
    model = pulp.LpProblem("instances", pulp.LpMinimize)
    parts = [np.empty((n, r, g), object) for _ in range(3)]
    given_up, restarted, started = parts
    cost: list[tuple[Any, float]] = []
    weighed: list[tuple[Any, float]] = []

    for i, j, k in np.ndindex(n, r, g):
        place, present = f"{i}_{j}_{k}", int(problem.instances[i, j, k])
        most = (
            min(int(problem.max_instances[i, j]), int(problem.capacity[j, k] // gpus[i, k])) if usable[i, j, k] else 0
        )
        own = min(int(spot[i, j, k]), max(most - present, 0))
        given_up[i, j, k] = model.add_variable(f"v_{place}", max(present - most, 0), present, pulp.LpInteger)
        restarted[i, j, k] = model.add_variable(f"a_{place}", 0, own, pulp.LpInteger)
        started[i, j, k] = model.add_variable(f"b_{place}", 0, max(most - present - own, 0), pulp.LpInteger)
        alpha = float(problem.instance_cost_usd[i, k])
        cost.append((given_up[i, j, k], -alpha))
        cost.append((restarted[i, j, k], alpha + float(start.same_spot[i, k])))
        cost.append((started[i, j, k], alpha + float(problem.redeploy_cost_usd[i, j, k])))

    def change(i: int, regions: Sequence[int], coefficients: NDArray[Any]) -> Any:
        """Sum over regions and types of coefficients x delta."""
        terms = []
        for j in regions:
            for k in range(g):
                if coefficients[k]:
                    terms.append((given_up[i, j, k], -float(coefficients[k])))
                    terms.append((restarted[i, j, k], float(coefficients[k])))
                    terms.append((started[i, j, k], float(coefficients[k])))
        return pulp.LpAffineExpression(terms)

    def missing(name: str, weight: float, need: float) -> Any:
        """What a row misses, in two variables; the second half of its need is dearer."""
        terms = []
        for part, steepness in enumerate((1.0, SECOND_HALF_WEIGHT)):
            variable = model.add_variable(f"{name}_{part}", 0, need / 2.0)
            weighed.append((variable, weight * steepness))
            terms.append((variable, 1.0))
        return pulp.LpAffineExpression(terms)

    ones = np.ones(g)
    for i in range(n):
        weight = float(problem.shortage_weight_usd[i])
        present_tokens = problem.served_tokens_per_s(problem.instances)[i]
        for j in range(r):
            served, count = change(i, (j,), theta[i]), change(i, (j,), ones)
            need, present = float(problem.need_tokens_per_s[i, j]), int(problem.instances[i, j].sum())
            model += count <= int(problem.max_instances[i, j]) - present
            if shortage:
                served += missing(f"own_region_{i}_{j}", OWN_REGION_SHARE * weight, need)
                below = model.add_variable(f"below_{i}_{j}", 0, int(problem.least_instances[i, j]))
                weighed.append((below, float(problem.instance_weight_usd[i])))
                count = count + below
            model += served >= need - float(present_tokens[j])
            model += count >= int(problem.least_instances[i, j]) - present
        served, need = change(i, range(r), theta[i]), float(problem.need_total_tokens_per_s[i])
        if shortage:
            served += missing(f"total_{i}", weight, need)
        model += served >= need - float(present_tokens.sum())
    for cut in cuts:
        regions = range(r) if cut.region < 0 else (cut.region,)
        present_sum = float((problem.instances[cut.model, list(regions)] * cut.coefficients).sum())
        model += change(cut.model, regions, cut.coefficients) >= cut.least - present_sum

    for j, k in np.ndindex(r, g):
        grown = pulp.LpAffineExpression(
            [
                (variable, sign * int(gpus[i, k]))
                for i in range(n)
                for variable, sign in ((given_up[i, j, k], -1), (restarted[i, j, k], 1), (started[i, j, k], 1))
            ]
        )
        present_units = int((gpus[:, k] * problem.instances[:, j, k]).sum())
        model += grown <= int(problem.capacity[j, k]) - present_units
        free = int(problem.capacity[j, k] - problem.acquired_units[j, k])
        if free > 0:
            acquired = model.add_variable(f"e_{j}_{k}", 0, free)
            model += acquired >= grown - (int(problem.acquired_units[j, k]) - present_units)
            cost.append((acquired, float(start.new_vm[k])))

    # What present instances cost, as a column: solvers leave a constant out of the gap, which then is one of near zero.
    cost.append(
        (model.add_variable("present", 1, 1), float((problem.instance_cost_usd[:, None, :] * problem.instances).sum()))
    )
    model.setObjective(pulp.LpAffineExpression(weighed if shortage else cost))
    return Written(model, given_up, restarted, started)


def solve_exact(
    problem: Problem,
    gap: float,
    time_limit_s: float,
    start: NDArray[np.int64] | None = None,
    cuts: Sequence[Cut] = (),
    shortage: bool = False,
    solver: str = "HiGHS",
) -> Solved:
    """A plan within *gap* of the best by *solver*, `HiGHS` or `CBC`; *start* (l, r, g) is a plan for HiGHS to begin from.

    The time limit is only asked for: HiGHS was seen to take four times as long. `exact_subprocess` has one that holds.
    Raises SolverLost when the solver is not installed, fails, or returns nothing that can be used.
    """
    try:
        import pulp
    except ImportError as error:
        raise SolverLost(f"PuLP cannot be imported: {error}") from error
    written = write_model(problem, cuts, shortage)
    started_s = time.monotonic()
    try:
        if solver == "CBC":
            written.model.solve(_cbc(gapRel=gap, timeLimit=time_limit_s))
        else:
            _by_highs(written, gap, time_limit_s, None if start is None else _parts(problem, start))
    except pulp.PulpError as error:
        raise SolverLost(f"{solver} failed: {error}") from error
    in_time = solver != "CBC" or time.monotonic() - started_s < time_limit_s  # CBC's end says "optimal" of both
    proved = written.model.sol_status == pulp.LpSolutionOptimal and in_time
    targets = problem.instances + changes(written, solver)
    if solver == "CBC":  # PuLP does not read its bound; all that is known is what was asked for
        bound = float(pulp.value(written.model.objective)) * (1.0 - gap) if proved else -np.inf
    else:
        bound = float(written.model.solverModel.getInfo().mip_dual_bound)
    return Solved(targets, bound, proved, solver)


def _parts(problem: Problem, start: NDArray[np.int64]) -> NDArray[np.int64]:
    """The plan *start* as (3, l, r, g): given up, restarted, started."""
    added = np.maximum(start - problem.instances, 0)
    own = np.minimum(added, problem.spot)
    return np.stack([np.maximum(problem.instances - start, 0), own, added - own])


def _by_highs(written: Written, gap: float, time_limit_s: float, start: NDArray[np.int64] | None) -> None:
    """Solve what is *written* by HiGHS, from *start* on; PuLP's own `solve` takes no start that is not of all columns."""
    import pulp

    try:
        import highspy  # noqa: F401
    except ImportError as error:
        raise SolverLost(f"HiGHS cannot be imported: {error}") from error
    chosen = pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_s, threads=1)
    model = written.model
    chosen.createAndConfigureSolver(model)
    chosen.buildSolverModel(model)
    if start is not None:
        variables = np.stack([written.given_up, written.restarted, written.started]).ravel()
        index = np.array([variable.index for variable in variables], np.int32)
        model.solverModel.setSolution(index.size, index, start.ravel().astype(np.float64))
    chosen.callSolver(model)
    highs = model.solverModel
    if not highs.getSolution().value_valid:
        raise SolverLost(f"HiGHS found no plan: {highs.modelStatusToString(highs.getModelStatus())}")
    model.assignStatus(*chosen.findSolutionValues(model))


def changes(written: Written, solver: str) -> NDArray[np.int64]:
    """delta (l, r, g), as *solver* has solved what was *written*. Raises SolverLost if it has not."""
    import pulp

    if written.model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverLost(f"{solver} found no plan: {pulp.LpSolution[written.model.sol_status]}")

    def values(variables: NDArray[Any]) -> NDArray[np.int64]:
        numbers = [np.nan if variable.varValue is None else variable.varValue for variable in variables.ravel()]
        return whole_numbers(solver, np.array(numbers, float).reshape(variables.shape))

    return values(written.restarted) + values(written.started) - values(written.given_up)


def whole_numbers(solver: str, values: NDArray[np.float64]) -> NDArray[np.int64]:
    """*values*, which are whole but for rounding. Raises SolverLost if they are not."""
    if not np.all(np.abs(values - np.rint(values)) <= WHOLE):  # NaN fails too
        raise SolverLost(f"{solver} returned fractions of instances")
    return np.asarray(np.rint(values), np.int64)


def solve_split(problem: Problem, shortage: bool = False) -> tuple[NDArray[np.float64], float] | None:
    """The same model by CBC, instances being split: their number (l, r, g) and the objective. None if rows cannot hold.

    The slower twin of `relaxation`, for where HiGHS is not there. Raises SolverLost as `solve_exact`.
    """
    try:
        import pulp
    except ImportError as error:
        raise SolverLost(f"PuLP cannot be imported: {error}") from error
    written = write_model(problem, (), shortage)
    try:
        written.model.solve(_cbc(mip=False))
    except pulp.PulpError as error:
        raise SolverLost(f"CBC failed: {error}") from error
    if written.model.sol_status == pulp.LpSolutionInfeasible:
        return None
    if written.model.sol_status != pulp.LpSolutionOptimal:
        raise SolverLost(f"CBC found no optimum: {pulp.LpSolution[written.model.sol_status]}")

    def values(variables: NDArray[Any]) -> NDArray[np.float64]:
        # A column without entries is left out of the model file; its lower bound is as good as any value.
        numbers = [
            variable.lowBound if variable.varValue is None else variable.varValue for variable in variables.ravel()
        ]
        return np.array(numbers, np.float64).reshape(problem.shape)

    shares = problem.instances + values(written.restarted) + values(written.started) - values(written.given_up)
    return np.maximum(shares, 0.0), float(pulp.value(written.model.objective))


def _cbc(**options: Any) -> Any:
    """The CBC that comes with PuLP 3."""
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it goes with PuLP 4, which we do not allow yet
        chosen = pulp.PULP_CBC_CMD(msg=False, threads=1, **options)
    if not chosen.available():
        raise SolverLost("CBC is not installed")
    return chosen
