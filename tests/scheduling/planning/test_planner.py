"""`solve` against all plans there are, the relaxation and its rounding against it, and a solver that fails."""

import importlib
import itertools
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduling.planning import exact_subprocess, planner, programme
from scheduling.planning.exact_subprocess import solve_in_subprocess
from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT
from scheduling.planning.planner import AUTO, EXACT, FAST, GAP, PULP, ROUNDED, solve
from scheduling.planning.problem import broken_rows
from scheduling.planning.programme import OutOfTime, Solved, SolverLost, relax, solve_exact
from scheduling.planning.rounding import round_shares
from tests.scheduling.planning.problems import plain_cost, plain_rows, small_problems, synthetic

CLOSE = 1e-6
NOTHING_MISSING = ([], {}, {}, {})


@pytest.fixture(scope="module")
def problem():
    return synthetic(4, 3, 2, seed=1)


def weight(problem, targets):
    return problem.shortage_usd(problem.shortage(targets))


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
    least = min(weight(problem, targets) for targets in plans)
    assert weight(problem, plan.targets) == pytest.approx(least, rel=CLOSE, abs=CLOSE)
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

    relaxed = relax(problem)
    assert relaxed is not None or plan.status == SHORT
    if plan.status != SHORT:
        assert relaxed.objective <= plan.cost_usd * (1 + CLOSE) + CLOSE
    assert relax(problem, shortage=True).objective <= weight(problem, plan.targets) * (1 + CLOSE) + CLOSE


@given(small_problems(), st.integers(0, 2**32 - 1))
def test_rounding_breaks_no_hard_row_wherever_it_starts(problem, seed):
    shares = np.random.default_rng(seed).uniform(0, 6, problem.shape)
    assert plain_rows(problem, round_shares(problem, [shares]))[0] == []


@pytest.mark.parametrize("seed", range(4))
def test_rounding_comes_near_the_exact_plan(seed):
    problem = synthetic(4, 3, 2, seed)
    rounded = round_shares(problem, [relax(problem).shares])
    assert plain_rows(problem, rounded) == NOTHING_MISSING
    assert problem.cost_usd(rounded) <= 1.03 * solve(problem).cost_usd


@pytest.mark.parametrize(("size", "solver", "gap"), [((10, 5, 3), AUTO, GAP), ((30, 20, 5), FAST, 0.01)])
def test_large_problems_keep_every_row_and_come_near_the_bound(size, solver, gap):
    problem = synthetic(*size, 0)
    plan = solve(problem, solver=solver)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
    assert plan.cost_usd == pytest.approx(plain_cost(problem, plan.targets))
    assert plan.gap <= gap
    assert plan.status == (OPTIMAL if plan.gap <= GAP else FEASIBLE)


@pytest.mark.parametrize("solver", [AUTO, FAST])
def test_too_little_capacity_serves_what_it_can(solver):
    problem = synthetic(6, 3, 3, seed=3)
    problem = replace(problem, capacity=problem.capacity * 2 // 3)
    plan = solve(problem, time_limit_s=60.0, solver=solver)
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


def test_a_shortage_that_is_not_proved_says_so():
    problem = synthetic(10, 5, 3, seed=1)
    problem = replace(problem, capacity=np.ceil(problem.capacity * 0.65).astype(int))
    assert relax(problem) is not None
    plan = solve(problem, solver=FAST)
    assert plan.status == SHORT
    assert "no whole plan was found" in plan.note
    assert plain_rows(problem, plan.targets)[0] == []


def test_the_same_problem_gives_the_same_plan():
    problem = synthetic(10, 5, 3, seed=4)
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


@pytest.mark.parametrize(
    ("solver", "limits", "by"),
    [
        (AUTO, {AUTO: 24}, PULP),
        (AUTO, {AUTO: 23}, ROUNDED),
        (EXACT, {}, PULP),
        (FAST, {}, PULP),
        (FAST, {FAST: 23}, ROUNDED),
    ],
)
def test_the_method_is_chosen_by_the_setting_and_the_size(problem, monkeypatch, solver, limits, by):
    monkeypatch.setattr(planner, "EXACT_UP_TO", planner.EXACT_UP_TO | limits)
    plan = solve(problem, solver=solver)
    assert plan.solver == by
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


def test_a_relaxation_stopped_by_its_time_limit_is_no_bound():
    with pytest.raises(SolverLost, match="Time limit"):
        relax(synthetic(30, 20, 5, seed=0), time_limit_s=0.0)


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


@pytest.mark.parametrize("limit", [0, 200])
def test_a_plan_of_the_exact_model_that_is_short_is_not_taken(problem, monkeypatch, limit):
    monkeypatch.setattr(planner, "HERE_UP_TO", limit)
    for name in ("solve_exact", "solve_in_subprocess"):
        monkeypatch.setattr(planner, name, lambda problem, *_: Solved(problem.instances, -np.inf, False))
    plan = solve(problem, gap=0.0)
    assert plan.solver == ROUNDED
    assert "left a row short" in plan.note
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


def test_the_time_limit_holds_in_a_subprocess():
    large = synthetic(20, 10, 4, seed=0)
    started_s = time.monotonic()
    with pytest.raises(OutOfTime, match="stopped after"):
        solve_in_subprocess(large, 0.0, 0.3)
    # No judgement of speed: without the limit this takes minutes.
    assert time.monotonic() - started_s < 30.0


ENDLESS = """
import pulp
from scheduling.planning import programme

def write_model(problem, shortage=False):
    model = pulp.LpProblem("endless")
    x, y, z = columns = [model.add_variable(name, cat=pulp.LpInteger) for name in "xyz"]
    model += pulp.LpAffineExpression([(y, 4.0), (z, -1.0)]) == 0
    model += pulp.LpAffineExpression([(x, 8.0), (z, 1.0)]) == -19
    model.setObjective(pulp.LpAffineExpression([(x, 0.0)]))
    return programme.Written(model, columns, None)

class Endless(programme.Problem):
    pass

programme.write_model = write_model
run = programme._run
programme._run = lambda *args, **options: run(*args, **options | {"presolve": PRESOLVE})
"""


def endless(problem, presolve, tmp_path, monkeypatch):
    """Return *problem* as a class whose module, once loaded, has HiGHS solve 4y = z, 8x + z = -19 in whole numbers."""
    (tmp_path / f"endless_{presolve}.py").write_text(ENDLESS.replace("PRESOLVE", repr(presolve)))
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as here:
        for name in ("write_model", "_run"):
            here.setattr(programme, name, getattr(programme, name))  # it is replaced in the subprocess alone
        made = importlib.import_module(f"endless_{presolve}").Endless
    return made(**{field.name: getattr(problem, field.name) for field in fields(problem)})


def test_a_solver_without_an_end_is_killed_and_the_plan_says_so(problem, tmp_path, monkeypatch):
    """C35: HiGHS 1.15 branches on this for ever, whatever its time limit, unless presolve finds that it cannot hold."""
    stuck = endless(problem, "off", tmp_path, monkeypatch)
    monkeypatch.setattr(planner, "HERE_UP_TO", 0)
    monkeypatch.setattr(planner, "solve_in_subprocess", lambda *_: solve_in_subprocess(stuck, 0.0, 2.0))
    started_s = time.monotonic()
    plan = solve(problem, gap=0.0)
    assert (plan.solver, plan.note) == (ROUNDED, "HiGHS was stopped after 2.0 s")
    assert time.monotonic() - started_s < 2.0 + 2.0
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
    with pytest.raises(SolverLost, match="Infeasible"):
        solve_in_subprocess(endless(problem, "on", tmp_path, monkeypatch), 0.0, 30.0)


def test_the_subprocess_answers_as_the_call_does(problem):
    there, here = solve_in_subprocess(problem, 0.005, 60.0), solve_exact(problem, 0.005, 60.0)
    assert there.proved
    assert there.bound == pytest.approx(here.bound)
    assert (there.targets == here.targets).all()


def test_an_error_in_the_subprocess_comes_back(problem):
    with pytest.raises(SolverLost, match="found no plan"):
        solve_in_subprocess(replace(problem, capacity=problem.instances.sum(axis=0) // 4, spot=0), 0.005, 60.0)


def test_a_subprocess_that_dies_costs_only_the_exact_plan(problem, monkeypatch):
    monkeypatch.setattr(planner, "HERE_UP_TO", 0)
    monkeypatch.setattr(exact_subprocess.sys, "executable", "/bin/false")
    plan = solve(problem, gap=0.0)
    assert plan.solver == ROUNDED
    assert "HiGHS died" in plan.note
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


@pytest.mark.parametrize("limit", [0, 200])
def test_no_time_left_is_the_rounded_plan(problem, monkeypatch, limit):
    monkeypatch.setattr(planner, "HERE_UP_TO", limit)
    plan = solve(problem, gap=0.0, time_limit_s=0.0)
    assert (plan.solver, plan.status) == (ROUNDED, FEASIBLE)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
