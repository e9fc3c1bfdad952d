"""`solve` against all plans there are, and a solver that fails."""

import itertools
from dataclasses import replace

import numpy as np
import pulp
import pytest
from hypothesis import assume, given

from scheduling.planning import planner, programme
from scheduling.planning.planner import GAP, OPTIMAL, SHORT, solve
from scheduling.planning.problem import broken_rows
from scheduling.planning.programme import Solved, SolverLost, solve_exact
from tests.scheduling.planning.problems import plain_cost, plain_rows, shortage_usd, small_problems, synthetic

CLOSE = 1e-6
NOTHING_MISSING = ([], {}, {}, {})


@pytest.fixture(scope="module")
def problem():
    return synthetic(4, 3, 2, seed=1)


def every_plan(problem):
    """Yield all whole plans that break no hard row."""
    n, r, g = problem.shape
    ranges = []
    for i, j, k in np.ndindex(n, r, g):
        most = min(problem.max_instances[i, j], problem.capacity[j, k] // problem.gpus[i, k])
        ranges.append(range(int(most) + 1 if problem.capability_tokens_per_s[i, k] > 0 else 1))
    assume(np.prod([len(numbers) for numbers in ranges]) <= 3000)
    plans = (np.array(numbers, np.int64).reshape(n, r, g) for numbers in itertools.product(*ranges))
    return [targets for targets in plans if not broken_rows(problem, targets)]


@given(small_problems(most=(2, 2, 2), most_instances=3))
def test_it_finds_the_best_of_all_plans(problem):
    """Return the least shortage, and the cheapest of the plans that are no shorter."""
    plans = every_plan(problem)
    plan = solve(problem, gap=0.0, time_limit_s=60.0)
    least = min(shortage_usd(problem, targets) for targets in plans)
    assert shortage_usd(problem, plan.targets) == pytest.approx(least, rel=CLOSE, abs=CLOSE)
    asked = replace(problem, waived=problem.shortage(plan.targets))
    best = min(problem.cost_usd(targets) for targets in plans if not asked.shortage(targets).any)
    assert plan.cost_usd == pytest.approx(best, rel=2e-4, abs=1e-4)


@given(small_problems())
def test_every_row_is_held_or_named_and_the_bounds_are_bounds(problem):
    plan = solve(problem, gap=0.0, time_limit_s=60.0)
    broken, own_region, total, few = plain_rows(problem, plan.targets)
    assert broken == []
    assert plan.cost_usd == pytest.approx(plain_cost(problem, plan.targets))
    assert (plan.status == SHORT) == bool(own_region or total or few)
    assert len(plan.infeasible) == len(own_region) + len(total) + len(few)
    assert set(plan.reasons) == {tuple(at) for at in np.argwhere(plan.delta != 0).tolist()}
    assert plan.bound_usd <= plan.cost_usd * (1 + CLOSE) + CLOSE


@given(small_problems())
def test_no_plan_goes_below_the_load_of_now_unless_it_says_what_forbids_it(problem):
    plan = solve(problem, gap=0.0, time_limit_s=60.0)
    theta, said = problem.capability_tokens_per_s, [row for row in plan.infeasible if "can be served" in row]
    for i, model in enumerate(problem.models):
        load, served = problem.load_tokens_per_s[i], (plan.targets[i] * theta[i]).sum(axis=1)
        if served.sum() < load.sum() - CLOSE:
            assert any(row.startswith(f"{model}, all regions") for row in said)
        for j, region in enumerate(problem.regions):
            taken = served[j] < (problem.instances[i, j] * theta[i]).sum() - CLOSE
            if taken and served[j] < load[j] - CLOSE:
                assert any(row.startswith(f"{model} in {region}") for row in said)


@pytest.mark.parametrize(("size", "gap"), [((10, 5, 3), 0.02), ((4, 3, 2), GAP)])
def test_every_row_is_kept_within_the_gap(size, gap):
    problem = synthetic(*size, 0)
    plan = solve(problem, gap=gap, time_limit_s=60.0)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
    assert plan.cost_usd == pytest.approx(plain_cost(problem, plan.targets))
    assert plan.status == OPTIMAL
    assert plan.gap <= gap


def test_too_little_capacity_serves_what_it_can():
    problem = synthetic(6, 3, 3, seed=3)
    problem = replace(problem, capacity=problem.capacity * 2 // 3)
    plan = solve(problem, gap=0.02, time_limit_s=60.0)
    assert plan.status == SHORT
    broken, own_region, total, few = plain_rows(problem, plan.targets)
    assert broken == []
    assert total
    assert few == {}
    assert len(plan.infeasible) == len(own_region) + len(total)
    assert all("no room on" in line for line in plan.infeasible)
    assert plan.unmet_total_tokens_per_s == pytest.approx([total.get(i, 0.0) for i in range(6)])
    # No model goes without while others have all they asked for.
    assert np.all(plan.unmet_total_tokens_per_s < 0.6 * problem.need_total_tokens_per_s)


def test_the_least_shortage_alone_is_a_plan_where_no_time_is_left(monkeypatch):
    def lost(problem, gap, time_limit_s, shortage=False):
        if problem.waived is not None:
            raise SolverLost("no time")
        return solve_exact(problem, gap, 30.0, shortage)

    problem = synthetic(2, 2, 2, seed=3)
    problem = replace(problem, capacity=problem.capacity // 2)
    monkeypatch.setattr(planner, "solve_exact", lost)
    plan = solve(problem)
    assert (plan.status, plan.bound_usd) == (SHORT, -np.inf)
    assert "not the cheapest: no time" in plan.note


def test_the_same_problem_gives_the_same_plan():
    problem = synthetic(4, 3, 2, seed=4)
    first, second = solve(problem), solve(problem)
    assert (first.delta == second.delta).all()
    assert (first.bound_usd, first.status) == (second.bound_usd, second.status)


def test_nothing_to_do_is_nothing_done():
    problem = synthetic(4, 3, 2, seed=5)
    done = replace(problem, instances=solve(problem, gap=0.0).targets, spot=0)
    plan = solve(done, gap=0.0)
    # What was started is there now, so that the plan of before costs no start, and nothing beats it by more than starts.
    assert plan.cost_usd <= done.cost_usd(done.instances) + CLOSE
    assert done.shortage(done.instances).total_tokens_per_s.sum() == 0.0


@pytest.mark.parametrize("value", [0.4, np.nan])
def test_fractions_of_instances_are_not_taken(problem, monkeypatch, value):
    """C37."""
    whole = programme.whole_numbers
    monkeypatch.setattr(programme, "whole_numbers", lambda each: whole(np.full(each.shape, value)))
    with pytest.raises(SolverLost, match="fractions"):
        solve_exact(problem, 0.005, 10.0)


def test_no_plan_by_the_time_limit_is_an_error():
    with pytest.raises(SolverLost, match="found no plan: Time limit"):
        solve_exact(synthetic(20, 10, 4, seed=0), 0.0, 0.0)


def test_whole_numbers_without_an_end_are_found_out_by_presolve(problem, monkeypatch):
    """C35: HiGHS 1.15 branches on this for ever, whatever its time limit, unless presolve finds that it cannot hold."""

    def endless(*_):  # 4y = z, 8x + z = -19
        model = pulp.LpProblem("endless")
        x, y, z = columns = [model.add_variable(name, cat=pulp.LpInteger) for name in "xyz"]
        model += pulp.LpAffineExpression([(y, 4.0), (z, -1.0)]) == 0
        model += pulp.LpAffineExpression([(x, 8.0), (z, 1.0)]) == -19
        model.setObjective(pulp.LpAffineExpression([(x, 0.0)]))
        return programme.Written(model, columns, np.zeros(3, np.int64))

    monkeypatch.setattr(programme, "write_model", endless)
    assert solve_exact(problem, 0.0, 30.0) is None


@pytest.mark.parametrize(
    ("more", "words"), [(0, "left a row short"), (1000, "broke a row")]
)  # fmt: skip
def test_a_plan_of_the_solver_that_breaks_a_row_is_none(problem, monkeypatch, more, words):
    monkeypatch.setattr(planner, "solve_exact", lambda problem, *_: Solved(problem.instances + more, -np.inf))
    with pytest.raises(SolverLost, match=words):
        solve(problem)
