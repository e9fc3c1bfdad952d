"""`solve` against the PuLP model, that against all plans there are, and every row by a checker that knows none of them."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduling.planning import planner
from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT
from scheduling.planning.planner import GAP, plan_fast, solve
from scheduling.planning.problem import broken_rows
from scheduling.planning.solvers import kernels
from scheduling.planning.solvers.cuts import violated_cuts
from scheduling.planning.solvers.exact import solve_exact, solve_split
from scheduling.planning.solvers.greedy import greedy_targets
from scheduling.planning.solvers.kernels import add_up, allocate_tally
from scheduling.planning.solvers.relaxation import Relaxation
from scheduling.planning.solvers.search import price_usd, search, terms_of
from tests.scheduling.planning.problems import plain_cost, plain_rows, small_problems, synthetic

CLOSE = 1e-6


def weight(problem, targets):
    return problem.shortage_usd(problem.shortage(targets))


def every_plan(problem):
    """All whole plans that break no hard row."""
    n, r, g = problem.shape
    ranges = []
    for i, j, k in np.ndindex(n, r, g):
        most = min(problem.max_instances[i, j], problem.capacity[j, k] // problem.gpus[i, k])
        ranges.append(range(int(most) + 1 if problem.capability_tokens_per_s[i, k] > 0 else 1))
    assume(np.prod([len(numbers) for numbers in ranges]) <= 3000)
    plans = (np.array(numbers, np.int64).reshape(n, r, g) for numbers in itertools.product(*ranges))
    return [targets for targets in plans if not broken_rows(problem, targets)]


@given(small_problems(most=(2, 2, 2), most_instances=3))
def test_the_pulp_model_finds_the_best_of_all_plans(problem):
    plans = every_plan(problem)
    least = min(weight(problem, targets) for targets in plans)
    shortest = solve_exact(problem, 0.0, 60.0, shortage=True)
    assert weight(problem, shortest.targets) == pytest.approx(least, abs=CLOSE)
    asked = replace(problem, waived=problem.shortage(shortest.targets))
    best = min(problem.cost_usd(targets) for targets in plans if not asked.shortage(targets).any)
    solved = solve_exact(asked, 0.0, 60.0)
    assert solved.proved
    assert problem.cost_usd(solved.targets) == pytest.approx(best, abs=1e-4)
    assert not broken_rows(problem, solved.targets)


@pytest.mark.parametrize("branches", [0, planner.SEARCHED_BRANCHES])
@given(problem=small_problems())
def test_solve_agrees_with_the_pulp_model(branches, problem):
    with patch.object(planner, "SEARCHED_BRANCHES", branches):
        plan = solve(problem, gap=0.0, time_limit_s=60.0)
    shortest = solve_exact(problem, 0.0, 60.0, shortage=True)
    least = weight(problem, shortest.targets)
    assert weight(problem, plan.targets) == pytest.approx(least, rel=CLOSE, abs=CLOSE)
    asked = replace(problem, waived=problem.shortage(plan.targets))
    best = problem.cost_usd(solve_exact(asked, 0.0, 60.0).targets)
    assert plan.cost_usd == pytest.approx(best, rel=2e-4, abs=1e-4)

    broken, own_region, total, few = plain_rows(problem, plan.targets)
    assert broken == []
    assert plan.cost_usd == pytest.approx(plain_cost(problem, plan.targets))
    assert (plan.status == SHORT) == bool(own_region or total or few)
    assert len(plan.infeasible) == len(own_region) + len(total) + len(few)
    assert set(plan.reasons) == {tuple(at) for at in np.argwhere(plan.delta != 0).tolist()}
    assert plan.bound_usd <= plan.cost_usd * (1 + CLOSE) + CLOSE


@given(small_problems())
def test_the_relaxation_is_that_of_the_pulp_model(problem):
    relaxed, twin = Relaxation(problem).solve(), solve_split(problem)
    assert (relaxed is None) == (twin is None)
    if relaxed is not None:
        assert relaxed.objective_usd == pytest.approx(twin[1], rel=CLOSE, abs=CLOSE)
    priced = Relaxation(problem, shortage=True).solve()
    # The PuLP model looks at shortage alone; the relaxation adds the cost to a thousandfold of it.
    least = solve_split(problem, shortage=True)[1]
    assert priced.objective_usd >= 1e3 * least - CLOSE * max(1.0, priced.objective_usd)


@given(small_problems(most=(2, 2, 3)), st.integers(0, 2**32 - 1))
def test_cuts_lose_no_whole_plan(problem, seed):
    # Shares that just meet the needs, as those of the relaxation do, but anywhere.
    random = np.random.default_rng(seed)
    theta, need = problem.capability_tokens_per_s, problem.need_tokens_per_s
    shares = random.dirichlet(np.ones(len(problem.gpu_types)), need.shape) * need[:, :, None]
    shares = np.divide(shares, theta[:, None, :], out=np.zeros(problem.shape), where=theta[:, None, :] > 0)
    whole = np.array(list(itertools.product(range(9), repeat=len(problem.gpu_types))))
    for cut in violated_cuts(problem, shares):
        asked = problem.need_total_tokens_per_s[cut.model] if cut.region < 0 else need[cut.model, cut.region]
        split = shares[cut.model].sum(axis=0) if cut.region < 0 else shares[cut.model, cut.region]
        assert (cut.coefficients * split).sum() < cut.least
        enough = whole[whole @ theta[cut.model] >= asked]
        assert np.all(enough @ cut.coefficients >= cut.least - 1e-6)


@given(small_problems(), st.data())
def test_a_move_is_priced_as_the_plans_before_and_after_it(problem, data):
    size = int(np.prod(problem.shape))
    tally = allocate_tally(problem)
    numbers = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    tally.targets[...] = np.array(numbers).reshape(problem.shape)
    terms = terms_of(problem)
    add_up(terms, tally)
    at = tuple(data.draw(st.integers(0, axis - 1)) for axis in problem.shape)
    by = data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))
    moved = tally.targets.copy()
    moved[at] += by
    # Python has no way into parts of kernels, so this is their source, run by Python.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "missing", kernels.missing.py_func)
        price = kernels.change.py_func(terms, tally, *at, by)
    if np.isinf(price):
        assert broken_rows(problem, moved)
    else:
        before, after = price_usd(problem, tally.targets), price_usd(problem, moved)
        assert price == pytest.approx(after - before, rel=1e-6, abs=1e-6 * max(before, after, 1.0))


@given(small_problems(), st.sampled_from([0.02, 0.5, 1.0]))
def test_search_breaks_no_hard_row_wherever_it_starts(problem, threshold):
    random = np.random.default_rng(0)
    shares = random.uniform(0, 6, problem.shape)
    targets = search(problem, [(shares, threshold)])
    assert plain_rows(problem, targets)[0] == []
    greedy = greedy_targets(problem)
    assert plain_rows(problem, greedy)[0] == []
    assert price_usd(problem, search(problem, [(greedy.astype(float), 1.0)])) <= price_usd(problem, greedy) + CLOSE


@pytest.mark.parametrize(
    ("size", "gap"), [((4, 3, 2), GAP), ((10, 5, 3), GAP), ((20, 10, 4), 0.006), ((30, 20, 5), 0.006)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_large_problems_keep_every_row_and_come_near_the_bound(size, gap, seed):
    problem = synthetic(*size, seed)
    plan = solve(problem)
    assert plain_rows(problem, plan.targets) == ([], {}, {}, {})
    assert plan.cost_usd == pytest.approx(plain_cost(problem, plan.targets))
    assert plan.gap <= gap
    assert plan.status == (OPTIMAL if plan.gap <= GAP else FEASIBLE)
    # Cuts raise the bound.
    assert Relaxation(problem).solve().objective_usd < plan.bound_usd


def test_too_little_capacity_serves_what_it_can():
    problem = synthetic(6, 3, 3, seed=3)
    problem = replace(problem, capacity=problem.capacity * 2 // 3)
    plan = solve(problem, time_limit_s=60.0)
    assert plan.status == SHORT
    broken, own_region, total, few = plain_rows(problem, plan.targets)
    assert broken == []
    assert total
    assert few == {}
    assert len(plan.infeasible) == len(own_region) + len(total)
    assert all("no room on" in line for line in plan.infeasible)
    assert plan.unmet_total_tokens_per_s == pytest.approx([total.get(i, 0.0) for i in range(6)])
    # Nobody goes without while others have all they asked for.
    assert np.all(plan.unmet_total_tokens_per_s < 0.6 * problem.need_total_tokens_per_s)


@pytest.mark.parametrize(("size", "seed", "share"), [((10, 5, 3), 2, 0.7), ((30, 20, 5), 0, 0.65)])
def test_room_is_made_by_moving_other_models(size, seed, share):
    # So little capacity that rounded shares do not fit as they are.
    problem = synthetic(*size, seed)
    problem = replace(problem, capacity=np.ceil(problem.capacity * share).astype(int))
    assert plain_rows(problem, plan_fast(problem).targets) == ([], {}, {}, {})


def test_a_shortage_that_is_not_proved_says_so(monkeypatch):
    monkeypatch.setattr(planner, "EXACT_UP_TO", 0)
    problem = synthetic(10, 5, 3, seed=1)
    problem = replace(problem, capacity=np.ceil(problem.capacity * 0.65).astype(int))
    assert Relaxation(problem).solve() is not None
    plan = solve(problem)
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


def test_the_fast_method_starts_from_a_given_plan_too():
    problem = synthetic(4, 3, 2, seed=0)
    exact = solve(problem)
    assert problem.cost_usd(plan_fast(problem, exact.targets).targets) <= exact.cost_usd + CLOSE
