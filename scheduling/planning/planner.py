"""`solve`: the plan for a problem, by the method that fits its size and the time there is.

First the fast method, which always ends with a plan: a small problem is searched through; of another the relaxation,
tightened by cuts, is rounded and improved by local search. Then, by `EXACT` and for all but large problems by `AUTO`, the
exact model in PuLP goes on from there. Where rows cannot hold, the least shortage is found first, then the cheapest plan
that is no shorter. Without a solver a greedy plan stands in.
"""

import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.plan import FEASIBLE, OPTIMAL, SHORT, Plan
from scheduling.planning.problem import Problem, StartCosts, broken_rows
from scheduling.planning.solvers.cuts import violated_cuts
from scheduling.planning.solvers.enumeration import MOST_BRANCHES, cheapest
from scheduling.planning.solvers.exact import Cut, OutOfTime, Solved, SolverLost, solve_exact, solve_split
from scheduling.planning.solvers.exact_subprocess import solve_in_subprocess
from scheduling.planning.solvers.greedy import greedy_targets
from scheduling.planning.solvers.relaxation import Relaxation
from scheduling.planning.solvers.search import THRESHOLDS, price_usd, search, terms_of

GAP = 0.005
AUTO, EXACT, FAST = "auto", "exact", "fast"
"""Who solves: the exact model where it is small enough to be proved in its time, always, or never."""
PULP: Final = "PuLP model by"
"""Begin of `Plan.solver` where the exact model was proved; the solver's name follows."""
EXACT_UP_TO = 2000
"""Places (l x r x g) up to which the exact model is small enough."""
HERE_UP_TO = 200
"""Places up to which the exact model is solved in this process: there the solver was seen to keep its time limit."""
SEARCHED_BRANCHES = MOST_BRANCHES
"""After which a problem is no small one."""
ROUNDS = 4
"""Rounds of cuts; later ones were not seen to move the bound."""
FEW_CUTS = 0.02
"""New cuts, as a share of the demand rows, below which a round is the last."""
FEW_THRESHOLDS = (0.4, 0.6)
"""Of `THRESHOLDS`, for problems whose search takes long."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A plan on its way."""

    targets: NDArray[np.int64]
    bound_usd: float
    solver: str
    cuts: tuple[Cut, ...] = ()
    note: str = ""


def solve(problem: Problem, *, gap: float = GAP, time_limit_s: float = 10.0, solver: str = AUTO) -> Plan:
    """A plan for *problem* that breaks no hard row, at most *gap* above the best if that can be had in *time_limit_s*, by
    *solver*: `AUTO`, `EXACT` or `FAST`.

    The fast method is not cut short: it takes well below a second at 50 models, 30 regions and 6 GPU types.
    """
    began_s = time.monotonic()
    ends_s = began_s + time_limit_s
    draft = plan_small(problem) or plan_fast(problem)
    asked = problem
    exact = solver == EXACT or (solver == AUTO and np.prod(problem.shape) <= EXACT_UP_TO)
    if problem.shortage(draft.targets).any:
        possible = np.isfinite(draft.bound_usd)
        targets, note = _least_shortage(problem, draft, ends_s) if exact else (draft.targets, "")
        if possible and not exact:
            note = _joined(note, "split instances would hold all rows; no whole plan was found that does")
        asked = replace(problem, waived=problem.shortage(targets))
        draft = plan_fast(asked, targets)
        draft = replace(draft, note=_joined(draft.note, note))
    if exact:
        draft = _refine(asked, draft, gap, ends_s)

    assert not broken_rows(problem, draft.targets), "a planner broke a hard row"
    plan = Plan(
        problem=problem,
        delta=draft.targets - problem.instances,
        cost_usd=problem.cost_usd(draft.targets),
        bound_usd=draft.bound_usd,
        status=FEASIBLE,
        solver=draft.solver,
        wall_s=time.monotonic() - began_s,
        note=draft.note,
    )
    if problem.shortage(draft.targets).any:
        return replace(plan, status=SHORT)
    return replace(plan, status=OPTIMAL) if plan.gap <= gap else plan


def plan_small(problem: Problem) -> Draft | None:
    """The cheapest plan, where all rows can hold and the problem is small enough to search through."""
    targets = cheapest(problem, terms_of(problem), SEARCHED_BRANCHES)
    return None if targets is None else Draft(targets, problem.cost_usd(targets), "branch and bound")


def plan_fast(problem: Problem, start: NDArray[np.int64] | None = None) -> Draft:
    """The fast method alone; *start* (l, r, g) is a plan to be improved as well. Never fails: greedy without a solver."""
    starts = [] if start is None else [(start.astype(np.float64), 1.0)]
    thresholds = THRESHOLDS if np.prod(problem.shape) <= EXACT_UP_TO else FEW_THRESHOLDS
    try:
        relaxation = Relaxation(problem)
        relaxed = relaxation.solve()
        if relaxed is None:  # the rows cannot hold together, even with split instances
            relaxation = Relaxation(problem, shortage=True)
            relaxed = relaxation.solve()
            assert relaxed is not None, "rows that may give always hold"
            targets = search(problem, [*starts, *((relaxed.shares, threshold) for threshold in thresholds)])
            return Draft(targets, -np.inf, "HiGHS relaxation, rounded")
        bound, cuts = relaxed.objective_usd, list[Cut]()
        for _ in range(ROUNDS):
            new_cuts = violated_cuts(problem, relaxed.shares)
            if not new_cuts:
                break
            relaxation.add(new_cuts)
            tighter = relaxation.solve()
            if tighter is None:
                break
            relaxed, bound = tighter, max(bound, tighter.objective_usd)
            cuts += new_cuts
            if len(new_cuts) < FEW_CUTS * (problem.need_tokens_per_s.size + len(problem.models)):
                break
        targets = search(problem, [*starts, *((relaxed.shares, threshold) for threshold in thresholds)])
        return Draft(targets, bound, "HiGHS relaxation, rounded", tuple(cuts))
    except SolverLost as lost:
        note = str(lost)
    try:
        split = solve_split(problem)
        bound = -np.inf if split is None else split[1]
        split = split or solve_split(problem, shortage=True)
        assert split is not None, "rows that may give always hold"
        targets = search(problem, [*starts, *((split[0], threshold) for threshold in thresholds)])
        return Draft(targets, bound, "CBC relaxation, rounded", note=note)
    except SolverLost as lost:
        targets = search(problem, [*starts, (greedy_targets(problem).astype(np.float64), 1.0)])
        return Draft(targets, -np.inf, "greedy", note=_joined("no solver", note, str(lost)))


def _least_shortage(problem: Problem, draft: Draft, ends_s: float) -> tuple[NDArray[np.int64], str]:
    """The plan with the least shortage, by the exact model, as far as half of the time that is left goes."""
    solved, note = _exactly(problem, draft, 0.0, (ends_s - time.monotonic()) / 2.0, shortage=True)
    if solved is not None and _weight(problem, solved.targets) < _weight(problem, draft.targets):
        return solved.targets, note
    return draft.targets, note


def _joined(*notes: str) -> str:
    """All that was noted, each thing once."""
    return "; ".join(dict.fromkeys(part for note in notes for part in note.split("; ") if part))


def _weight(problem: Problem, targets: NDArray[np.int64]) -> float:
    return problem.shortage_usd(problem.shortage(targets))


def _refine(problem: Problem, draft: Draft, gap: float, ends_s: float) -> Draft:
    """The exact model from *draft* on, in the time that is left."""
    solved, note = _exactly(problem, draft, gap, max(ends_s - time.monotonic(), 0.0))
    note = _joined(draft.note, note)
    if solved is None:
        return replace(draft, note=note)
    bound, name = max(draft.bound_usd, solved.bound), f"{PULP} {solved.solver}"
    if broken_rows(problem, solved.targets) or price_usd(problem, solved.targets) >= price_usd(problem, draft.targets):
        return replace(draft, bound_usd=bound, note=note, solver=name if solved.proved else draft.solver)
    return Draft(solved.targets, bound, name, note=note)


def _exactly(
    problem: Problem, draft: Draft, gap: float, time_limit_s: float, shortage: bool = False
) -> tuple[Solved | None, str]:
    """By HiGHS, else by CBC, else None; and what went wrong."""
    run = solve_exact if np.prod(problem.shape) <= HERE_UP_TO else solve_in_subprocess
    cuts = () if shortage else draft.cuts
    ends_s = time.monotonic() + time_limit_s
    notes: list[str] = []
    for solver in ("HiGHS", "CBC"):
        try:
            left_s = max(ends_s - time.monotonic(), 0.01)
            return run(problem, gap, left_s, draft.targets, cuts, shortage, solver), _joined(*notes)
        except SolverLost as lost:
            notes.append(str(lost))
            if isinstance(lost, OutOfTime):
                break
    return None, _joined(*notes)


def warm_up() -> None:
    """Load HiGHS and every kernel, or compile these (seconds, once)."""
    problem = Problem(
        models=["model"],
        regions=["region"],
        gpu_types=["gpu"],
        instances=np.array(0),
        capability_tokens_per_s=np.array(1.0),
        demand_tokens_per_s=np.ones((1, 1, 1)),
        vm_cost_usd=np.array(1.0),
        start_cost_usd=StartCosts.paid_while_starting(np.ones(1), 3600.0, 1),
        min_instances=np.array(0),
        max_instances=np.array(2),
        capacity=np.array(2),
    )
    plan_small(problem)
    plan_fast(problem)
