"""Searching through small problems: beside every plan there is, and beside HiGHS."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from scheduling.planning.planner import FAST, plan_small, solve
from scheduling.planning.solvers.enumeration import cheapest
from scheduling.planning.solvers.exact import SolverLost, solve_exact
from scheduling.planning.solvers.search import terms_of
from tests.scheduling.planning.problems import plain_cost, plain_rows, small_problems, synthetic
from tests.scheduling.planning.test_planner import every_plan

NOTHING_MISSING = ([], {}, {}, {})


@given(small_problems(most=(2, 2, 2), most_instances=3))
def test_it_finds_the_best_of_all_plans_that_hold_every_row(problem):
    holding = [targets for targets in every_plan(problem) if plain_rows(problem, targets) == NOTHING_MISSING]
    made = cheapest(problem, terms_of(problem))
    assert (made is None) == (not holding)
    if made is not None:
        assert plain_rows(problem, made) == NOTHING_MISSING
        assert plain_cost(problem, made) == pytest.approx(min(plain_cost(problem, each) for each in holding))


@given(small_problems(most=(3, 3, 3)))
def test_it_is_as_cheap_as_highs_proves(problem):
    made = cheapest(problem, terms_of(problem))
    try:
        best = solve_exact(problem, 0.0, 60.0)
    except SolverLost:  # not all rows can hold
        assert made is None
        return
    assert made is not None
    assert problem.cost_usd(made) == pytest.approx(problem.cost_usd(best.targets), rel=2e-4, abs=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 5, 7])
def test_a_fleet_of_dozens_of_instances_is_proved_and_the_same_every_time(seed):
    problem = synthetic(2, 2, 2, seed=seed)
    plan, again = solve(problem, solver=FAST), solve(problem, solver=FAST)
    assert (plan.solver, plan.status, plan.gap) == ("branch and bound", "optimal", 0.0)
    assert (plan.targets == again.targets).all()
    assert problem.cost_usd(solve_exact(problem, 0.0, 60.0, plan.targets).targets) == pytest.approx(
        plan.cost_usd, rel=1e-4
    )


def test_what_is_too_large_is_left_to_the_other_methods():
    assert plan_small(synthetic(20, 10, 4, seed=0)) is None
    problem = synthetic(2, 2, 2, seed=0)
    assert cheapest(problem, terms_of(problem), most_branches=3) is None


def test_what_cannot_hold_all_rows_is_left_to_the_other_methods():
    problem = synthetic(2, 2, 2, seed=0)
    assert plan_small(replace(problem, demand_tokens_per_s=100.0 * problem.demand_tokens_per_s)) is None


def test_models_that_share_no_gpus_are_searched_one_by_one():
    """Of eight such models together no branch and bound that takes them as one would come to an end."""
    one = synthetic(1, 3, 1, seed=2)
    count, (_, r, _) = 8, one.shape
    alone = np.eye(count, dtype=np.int64)
    start = one.start_cost_usd
    together = replace(
        one,
        models=[f"model-{at}" for at in range(count)],
        gpu_types=[f"gpu-{at}" for at in range(count)],
        instances=alone[:, None, :] * one.instances[:, :, :1],
        spot=alone[:, None, :] * one.spot[:, :, :1],
        capability_tokens_per_s=alone * one.capability_tokens_per_s[0, 0],
        demand_tokens_per_s=np.repeat(one.demand_tokens_per_s, count, axis=0),
        vm_cost_usd=np.repeat(one.vm_cost_usd, count),
        start_cost_usd=replace(
            start,
            **{
                name: np.full((count, count), getattr(start, name)[0, 0])
                for name in ("same_spot", "other_spot", "remote_weights")
            },
            new_vm=np.repeat(start.new_vm, count),
        ),
        min_instances=1,
        max_instances=1000,
        capacity=np.repeat(one.capacity, count, axis=1),
        gpus=1,
        weights_local=np.repeat(one.weights_local, count, axis=0),
        epsilon=0.8,
        buffer_tokens_per_s=np.repeat(one.buffer_tokens_per_s, count, axis=0),
    )
    assert r == together.shape[1]
    made, each = plan_small(together), plan_small(one)
    assert made is not None
    assert each is not None
    assert (made.targets.sum(axis=2) == each.targets.sum(axis=2)).all()
