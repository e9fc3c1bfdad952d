"""How long a plan takes and how far it is from the best: drawn problems of three sizes (models x regions x GPU types).

`few_2x3x2_ms` is the whole of a fast `solve` of problems of few instances, which are searched through,
`few_2x3x2_by_highs_ms` the same by the other methods. `ilp_4x3x2_ms` is the whole of `solve` to a gap of 0.5 %.
`ilp_30x20x5_s` and `ilp_50x30x6_s` are the fast method alone, and their `_gap` is to the bound of the plain relaxation,
without cuts; `_proved_gap` is to the bound with cuts. Every row of every plan is checked. `pulp_4x3x2_ms` is the PuLP model
alone, by HiGHS, from nothing. Kernels are compiled before. Medians over problems of the shorter of two runs; `_cpu` is
processor time, which other work on the machine moves less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from scheduling.planning import planner
from scheduling.planning.planner import FAST, GAP, plan_fast, solve
from scheduling.planning.problem import Problem, broken_rows
from scheduling.planning.solvers.exact import solve_exact
from scheduling.planning.solvers.relaxation import Relaxation
from tests.scheduling.planning.problems import synthetic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=9, help="problems of each size")


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of *call*, and wall and processor seconds, each the less of two runs: other work only adds to them."""
    walls_s, processor_s = [], []
    for _ in range(2):
        started_s, began_s = time.perf_counter(), time.process_time()
        plan = call()
        walls_s.append(time.perf_counter() - started_s)
        processor_s.append(time.process_time() - began_s)
    return plan, min(walls_s), min(processor_s)


def few(problem: Problem) -> Problem:
    """*problem* for a tenth of the demand, with at most three instances in a place and six at an endpoint."""
    return replace(
        problem,
        instances=np.minimum(problem.instances, 3),
        spot=np.minimum(problem.spot, 1),
        demand_tokens_per_s=0.1 * problem.demand_tokens_per_s,
        buffer_tokens_per_s=0.1 * problem.buffer_tokens_per_s,
        max_instances=np.array(6),
    )


def check(problem, targets) -> None:
    """No plan counts that breaks a row."""
    broken = broken_rows(problem, targets)
    if broken or problem.shortage(targets).any:
        raise AssertionError(f"a plan broke rows: {broken or 'demand or minima'}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    plan_fast(synthetic(2, 2, 2, seed=0))
    result: dict[str, Any] = {"seeds": options.seeds}

    for name, branches in (("few_2x3x2_ms", planner.SEARCHED_BRANCHES), ("few_2x3x2_by_highs_ms", 0)):
        walls_s = []
        with patch.object(planner, "SEARCHED_BRANCHES", branches):
            for seed in range(options.seeds):
                problem = few(synthetic(2, 3, 2, seed))
                plan, wall_s, _ = timed(lambda p=problem: solve(p, gap=GAP, solver=FAST))
                check(problem, plan.targets)
                assert (plan.solver == "branch and bound") == (branches > 0), f"seed {seed} was solved by {plan.solver}"
                walls_s.append(wall_s)
        result[name] = round(1000 * statistics.median(walls_s), 2)

    plans, cpu_s, pulp_s = [], [], []
    for seed in range(options.seeds):
        problem = synthetic(4, 3, 2, seed)
        plan, wall_s, used_s = timed(lambda p=problem: solve(p, gap=GAP))
        check(problem, plan.targets)
        assert plan.gap <= GAP, f"seed {seed} ended with a gap of {plan.gap:.2%}"
        plans.append((wall_s, plan.gap))
        cpu_s.append(used_s)
        solved, wall_s, _ = timed(lambda p=problem: solve_exact(p, GAP, 30.0))
        check(problem, solved.targets)
        pulp_s.append(wall_s)
    result["ilp_4x3x2_ms"] = round(1000 * statistics.median(wall_s for wall_s, _ in plans), 2)
    result["ilp_4x3x2_worst_ms"] = round(1000 * max(wall_s for wall_s, _ in plans), 2)
    result["ilp_4x3x2_cpu_ms"] = round(1000 * statistics.median(cpu_s), 2)
    result["ilp_4x3x2_gap"] = round(statistics.median(gap for _, gap in plans), 5)
    result["pulp_4x3x2_ms"] = round(1000 * statistics.median(pulp_s), 2)

    for size in ((30, 20, 5), (50, 30, 6)):
        name = "ilp_" + "x".join(map(str, size))
        walls_s, cpu_s, gaps, proved = [], [], [], []
        for seed in range(options.seeds):
            problem = synthetic(*size, seed)
            draft, wall_s, used_s = timed(lambda p=problem: plan_fast(p))
            check(problem, draft.targets)
            cost, relaxed = problem.cost_usd(draft.targets), Relaxation(problem).solve()
            assert relaxed is not None
            walls_s.append(wall_s)
            cpu_s.append(used_s)
            gaps.append(cost / relaxed.objective_usd - 1.0)
            proved.append(cost / draft.bound_usd - 1.0)
        result[f"{name}_s"] = round(statistics.median(walls_s), 4)
        result[f"{name}_worst_s"] = round(max(walls_s), 4)
        result[f"{name}_cpu_s"] = round(statistics.median(cpu_s), 4)
        result[f"{name}_gap"] = round(statistics.median(gaps), 5)
        result[f"{name}_worst_gap"] = round(max(gaps), 5)
        result[f"{name}_proved_gap"] = round(statistics.median(proved), 5)
    return result
