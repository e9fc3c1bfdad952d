"""The PuLP model by HiGHS, as PuLP hands it over: the plain twin of `scheduling.planning.solvers.branch_and_bound`."""

import numpy as np
import pulp

from scheduling.planning.solvers.exact import Solved, changes, write_model


def built(problem, gap, time_limit_s, cuts=(), shortage=False):
    """(what was written, PuLP's solver, which has built its model)."""
    written = write_model(problem, cuts, shortage)
    chosen = pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_s, threads=1)
    chosen.createAndConfigureSolver(written.model)
    chosen.buildSolverModel(written.model)
    return written, chosen


def solve_by_pulp(problem, gap, time_limit_s, start=None, cuts=(), shortage=False):
    """As `solve_exact`."""
    written, chosen = built(problem, gap, time_limit_s, cuts, shortage)
    model = written.model
    if start is not None:
        added = np.maximum(start - problem.instances, 0)
        own = np.minimum(added, problem.spot)
        parts = (
            (written.given_up, np.maximum(problem.instances - start, 0)),
            (written.restarted, own),
            (written.started, added - own),
        )
        index = np.array([variable.index for variables, _ in parts for variable in variables.ravel()], np.int32)
        value = np.concatenate([values.ravel() for _, values in parts]).astype(np.float64)
        model.solverModel.setSolution(index.size, index, value)
    chosen.callSolver(model)
    model.assignStatus(*chosen.findSolutionValues(model))
    targets = problem.instances + changes(written, "HiGHS")
    proved = model.sol_status == pulp.LpSolutionOptimal
    return Solved(targets, float(model.solverModel.getInfo().mip_dual_bound), proved, "HiGHS")
