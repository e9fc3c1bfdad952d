"""Solve time and optimality gap of plans: random problems of four sizes (models x regions x GPU types).

`few_2x3x2_ms` is a fast `solve` of problems with few instances, common in simulations; `ilp_4x3x2_ms` and
`ilp_10x5x3_ms` are `solve` to a gap of 0.5 %, `ilp_30x20x5_s` to 2 %, as in simulations. Every row of every plan is
checked. Medians over problems of the shorter of two runs; `_cpu` is processor time, which other work on the machine
affects less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from scheduling.planning.planner import GAP, solve
from scheduling.planning.problem import Problem, broken_rows
from tests.scheduling.planning.problems import synthetic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=9, help="problems of each size")


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of *call*, and wall and processor seconds, each the minimum of two runs."""
    walls_s, processor_s = [], []
    for _ in range(2):
        started_s, began_s = time.perf_counter(), time.process_time()
        plan = call()
        walls_s.append(time.perf_counter() - started_s)
        processor_s.append(time.process_time() - began_s)
    return plan, min(walls_s), min(processor_s)


def few(problem: Problem) -> Problem:
    """Return *problem* for a tenth of the demand, with at most three instances per place and six per endpoint."""
    return replace(
        problem,
        instances=np.minimum(problem.instances, 3),
        spot=np.minimum(problem.spot, 1),
        demand_tokens_per_s=0.1 * problem.demand_tokens_per_s,
        buffer_tokens_per_s=0.1 * problem.buffer_tokens_per_s,
        max_instances=np.array(6),
    )


def check(problem, targets) -> None:
    """Assert that the plan breaks no row."""
    broken = broken_rows(problem, targets)
    if broken or problem.shortage(targets).any:
        raise AssertionError(f"a plan broke rows: {broken or 'demand or minima'}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    solve(synthetic(2, 2, 2, seed=0))
    result: dict[str, Any] = {"seeds": options.seeds}
    for name, size in (("few_2x3x2", (2, 3, 2)), ("ilp_4x3x2", (4, 3, 2)), ("ilp_10x5x3", (10, 5, 3))):
        walls_s, cpu_s, gaps = [], [], []
        for seed in range(options.seeds):
            problem = synthetic(*size, seed)
            problem = few(problem) if name.startswith("few") else problem
            plan, wall_s, used_s = timed(lambda p=problem: solve(p, gap=GAP))
            check(problem, plan.targets)
            assert plan.gap <= GAP, f"seed {seed} ended with a gap of {plan.gap:.2%}"
            walls_s.append(wall_s)
            cpu_s.append(used_s)
            gaps.append(plan.gap)
        result[f"{name}_ms"] = round(1000 * statistics.median(walls_s), 2)
        result[f"{name}_worst_ms"] = round(1000 * max(walls_s), 2)
        result[f"{name}_cpu_ms"] = round(1000 * statistics.median(cpu_s), 2)
        result[f"{name}_gap"] = round(statistics.median(gaps), 5)

    for size in ((30, 20, 5),):
        name = "ilp_" + "x".join(map(str, size))
        walls_s, cpu_s, gaps = [], [], []
        for seed in range(options.seeds):
            problem = synthetic(*size, seed)
            plan, wall_s, used_s = timed(lambda p=problem: solve(p, gap=0.02, time_limit_s=20.0))
            check(problem, plan.targets)
            walls_s.append(wall_s)
            cpu_s.append(used_s)
            gaps.append(plan.cost_usd / plan.bound_usd - 1.0)
        result[f"{name}_s"] = round(statistics.median(walls_s), 4)
        result[f"{name}_worst_s"] = round(max(walls_s), 4)
        result[f"{name}_cpu_s"] = round(statistics.median(cpu_s), 4)
        result[f"{name}_gap"] = round(statistics.median(gaps), 5)
        result[f"{name}_worst_gap"] = round(max(gaps), 5)
    return result
