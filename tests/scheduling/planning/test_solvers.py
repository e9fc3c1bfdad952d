"""What solvers may do instead of solving: be absent, die, hang, hold no plan, or return halves of instances."""

import sys
import time
from dataclasses import replace

import numpy as np
import pulp
import pytest

from scheduling.planning import planner
from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT
from scheduling.planning.planner import plan_fast, solve
from scheduling.planning.solvers import exact, exact_subprocess, relaxation
from scheduling.planning.solvers.exact import OutOfTime, SolverLost, solve_exact
from scheduling.planning.solvers.exact_subprocess import solve_in_subprocess
from scheduling.planning.solvers.relaxation import Relaxation
from tests.scheduling.planning.problems import plain_rows, synthetic

NOTHING_MISSING = ([], {}, {}, {})


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
    assert plan.solver.startswith("CBC")
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
    plan = solve(problem, gap=1.0)
    assert plan.solver == "CBC relaxation, rounded"
    assert "Time limit reached" in plan.note
    assert plain_rows(problem, plan.targets) == NOTHING_MISSING


def test_a_relaxation_stopped_by_its_time_limit_is_no_bound():
    with pytest.raises(SolverLost, match="Time limit"):
        Relaxation(synthetic(30, 20, 5, seed=0)).solve(time_limit_s=0.0)


def answer(solution_status, value):
    """A solver that leaves *value* in every variable and says *solution_status*."""

    def run(problem, written, gap, time_limit_s, start):
        for variable in written.model.variables():
            variable.varValue = value
        written.model.assignStatus(pulp.LpStatusOptimal, solution_status)
        return -np.inf, False

    return run


@pytest.mark.parametrize(
    ("solution_status", "value", "words"),
    [
        # CBC on timeout: no solution, and yet all variables hold fractions.
        (pulp.LpSolutionNoSolutionFound, 0.4, "found no plan"),
        (pulp.LpSolutionInfeasible, 0.0, "found no plan"),
        # HiGHS on timeout: "optimal", says PuLP.
        (pulp.LpSolutionIntegerFeasible, 0.4, "fractions"),
        (pulp.LpSolutionOptimal, None, "fractions"),
    ],
)
def test_no_answer_is_believed_unread(problem, monkeypatch, solution_status, value, words):
    monkeypatch.setattr(exact, "_by_highs", answer(solution_status, value))
    with pytest.raises(SolverLost, match=words):
        solve_exact(problem, 0.005, 10.0)


def test_a_worse_or_wrong_plan_of_the_exact_solver_is_not_taken(problem, monkeypatch):
    # All variables 0 but for present ones: nothing changes, which serves too little.
    monkeypatch.setattr(exact, "_by_highs", answer(pulp.LpSolutionIntegerFeasible, 0.0))
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
