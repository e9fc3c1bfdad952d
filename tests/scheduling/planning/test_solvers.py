"""What solvers may do instead of solving: be absent, die, hang, hold no plan, or return halves of instances."""

import sys
import time
from dataclasses import replace

import numpy as np
import pulp
import pytest

from scheduling.planning import planner
from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT
from scheduling.planning.planner import AUTO, EXACT, FAST, plan_fast, solve
from scheduling.planning.solvers import exact, exact_subprocess, relaxation
from scheduling.planning.solvers.exact import OutOfTime, Solved, SolverLost, solve_exact
from scheduling.planning.solvers.exact_subprocess import solve_in_subprocess
from scheduling.planning.solvers.relaxation import Relaxation
from tests.scheduling.planning.problems import plain_rows, synthetic

NOTHING_MISSING = ([], {}, {}, {})


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch):
    """Small problems are searched through without any solver."""
    monkeypatch.setattr(planner, "SEARCHED_BRANCHES", 0)


@pytest.fixture(scope="module")
def problem():
    return synthetic(4, 3, 2, seed=1)


@pytest.fixture(scope="module")
def good_usd(problem):
    """Within half a percent of the least; to prove the least takes the exact solver a minute."""
    return solve(problem).cost_usd


@pytest.fixture
def no_highs(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)


def test_without_highs_cbc_stands_in(monkeypatch):
    problem = synthetic(2, 2, 2, seed=1)
    best_usd = solve(problem, gap=0.0, time_limit_s=60.0).cost_usd
    monkeypatch.setitem(sys.modules, "highspy", None)
    plan = solve(problem, time_limit_s=60.0)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
    assert plan.cost_usd <= best_usd * 1.005 + 1e-6
    assert plan.solver == "PuLP model by CBC"
    assert "HiGHS cannot be imported" in plan.note
    assert plan.bound_usd <= best_usd + 1e-6


def test_without_any_solver_a_greedy_plan_stands_in(problem, good_usd, no_highs, monkeypatch):
    monkeypatch.setitem(sys.modules, "pulp", None)
    plan = solve(problem)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING
    assert (plan.solver, plan.status, plan.gap) == ("greedy", FEASIBLE, np.inf)
    assert plan.note.startswith("no solver; HiGHS cannot be imported")
    assert plan.cost_usd < 1.1 * good_usd
    short = replace(problem, capacity=problem.capacity // 2)
    plan = solve(short)
    assert plan.status == SHORT
    assert plain_rows(short, plan.targets)[0] == []


def test_a_solver_that_ends_the_relaxation_without_optimum_is_not_believed(problem, monkeypatch):
    def lost(self, time_limit_s=60.0):
        raise SolverLost("HiGHS ended the relaxation with: Time limit reached")

    monkeypatch.setattr(relaxation.Relaxation, "solve", lost)
    plan = solve(problem, gap=1.0, solver=FAST)
    assert plan.solver == "CBC relaxation, rounded"
    assert "Time limit reached" in plan.note
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


def test_a_relaxation_stopped_by_its_time_limit_is_no_bound():
    with pytest.raises(SolverLost, match="Time limit"):
        Relaxation(synthetic(30, 20, 5, seed=0)).solve(time_limit_s=0.0)


def answer(value, status=pulp.LpSolutionIntegerFeasible):
    """CBC that leaves *value* in every variable and says *status*."""

    class Answering(pulp.LpSolver):
        def actualSolve(self, model, **_):
            for variable in model.variables():
                variable.varValue = value
            model.assignStatus(pulp.LpStatusOptimal, status)
            return pulp.LpStatusOptimal

    return lambda **options: Answering(msg=False)


@pytest.mark.parametrize(
    ("status", "value", "words"),
    [
        # CBC on timeout: no solution, and yet all variables hold fractions.
        (pulp.LpSolutionNoSolutionFound, 0.4, "found no plan"),
        (pulp.LpSolutionInfeasible, 0.0, "found no plan"),
        (pulp.LpSolutionIntegerFeasible, 0.4, "fractions"),
        (pulp.LpSolutionOptimal, None, "fractions"),
    ],
)
def test_no_answer_is_believed_unread(problem, monkeypatch, status, value, words):
    monkeypatch.setattr(exact, "_cbc", answer(value, status))
    with pytest.raises(SolverLost, match=words):
        solve_exact(problem, 0.005, 10.0, solver="CBC")


@pytest.mark.parametrize(("values", "words"), [(0.4, "fractions"), (np.nan, "fractions")])
def test_no_fraction_of_highs_is_taken(problem, monkeypatch, values, words):
    whole = exact.whole_numbers
    monkeypatch.setattr(exact, "whole_numbers", lambda solver, each: whole(solver, np.full(each.shape, values)))
    with pytest.raises(SolverLost, match=words):
        solve_exact(problem, 0.005, 10.0)


def test_no_plan_by_the_time_limit_is_none():
    with pytest.raises(SolverLost, match="found no plan: Time limit"):
        solve_exact(synthetic(20, 10, 4, seed=0), 0.0, 0.0)


def test_a_worse_or_wrong_plan_of_the_exact_solver_is_not_taken(problem, monkeypatch):
    def unchanged(problem, *_):
        return Solved(problem.instances, -np.inf, False, "HiGHS")  # which serves too little

    monkeypatch.setattr(planner, "solve_exact", unchanged)
    draft, plan = plan_fast(problem), solve(problem, gap=0.0)
    assert (plan.targets == draft.targets).all()


def test_the_time_limit_holds_in_a_process_of_its_own():
    large = synthetic(20, 10, 4, seed=0)
    started_s = time.monotonic()
    with pytest.raises(OutOfTime, match="stopped after"):
        solve_in_subprocess(large, 0.0, 0.3)
    # No judgement of speed: without the limit this takes minutes.
    assert time.monotonic() - started_s < 30.0


def test_the_process_answers_as_the_call_does(problem):
    there, here = solve_in_subprocess(problem, 0.005, 60.0), solve_exact(problem, 0.005, 60.0)
    assert there.proved
    assert there.bound == pytest.approx(here.bound)
    assert (there.targets == here.targets).all()


def test_an_error_in_the_process_comes_back(problem):
    with pytest.raises(SolverLost, match="found no plan"):
        solve_in_subprocess(replace(problem, capacity=problem.instances.sum(axis=0) // 4, spot=0), 0.005, 60.0)


def test_a_process_that_dies_costs_only_the_exact_plan(monkeypatch):
    monkeypatch.setattr(planner, "HERE_UP_TO", 0)
    monkeypatch.setattr(exact_subprocess.sys, "executable", "/bin/false")
    problem = synthetic(4, 3, 2, seed=0)
    plan = solve(problem, gap=0.0)
    assert plan.solver == "HiGHS relaxation, rounded"
    assert "HiGHS died" in plan.note
    assert "CBC died" in plan.note
    assert plan.status in (FEASIBLE, OPTIMAL)
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


def test_no_time_left_is_the_fast_plan(problem):
    plan = solve(problem, gap=0.0, time_limit_s=0.0)
    assert (plan.targets == plan_fast(problem).targets).all()
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


@pytest.mark.parametrize(
    ("solver", "exact_up_to", "by"),
    [
        (AUTO, 2000, "PuLP model by HiGHS"),
        (EXACT, 0, "PuLP model by HiGHS"),
        (AUTO, 0, "HiGHS relaxation, rounded"),
        (FAST, 2000, "HiGHS relaxation, rounded"),
    ],
)
def test_who_solves_is_chosen(problem, good_usd, monkeypatch, solver, exact_up_to, by):
    monkeypatch.setattr(planner, "EXACT_UP_TO", exact_up_to)
    plan = solve(problem, solver=solver)
    assert plan.solver == by
    assert plan.cost_usd <= 1.01 * good_usd
    assert plan.status == OPTIMAL or solver != EXACT


def test_what_was_searched_through_is_proved_by_the_model_too(monkeypatch):
    monkeypatch.undo()
    problem = synthetic(2, 2, 2, seed=1)
    fast, exact_plan = solve(problem, solver=FAST), solve(problem, gap=0.0, solver=EXACT)
    assert (fast.solver, exact_plan.solver) == ("branch and bound", "PuLP model by HiGHS")
    assert exact_plan.status == OPTIMAL
    assert exact_plan.cost_usd == pytest.approx(fast.cost_usd, rel=1e-6)
