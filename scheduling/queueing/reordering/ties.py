"""Groups of one model that may change places at no cost: who is due first goes first.

The objective does not tell apart orders that keep the same groups in time, so that annealing leaves groups of one class in
any order. Those that came first would wait longest as well as not, and nobody could foresee it.
"""

from typing import Final

import numpy as np

from scheduling.queueing.reordering.evaluate import Score, evaluate
from scheduling.queueing.reordering.problem import Order, Problem

MOST_TRIES: Final = 200
"""Exchanges of two groups that are tried, of all models together, where not all can be exchanged at once."""
ROUNDING: Final = 1e-9
"""Share of the objective that counts as none."""


def in_turn(problem: Problem, order: Order, score: Score, kappa_s: float) -> tuple[Order, Score]:
    """*order*, which is worth *score*, with groups of each model by due time as far as that costs nothing; and its worth.

    Groups that are fixed or held stay where they are.
    """
    groups, tries = order.groups.copy(), MOST_TRIES
    most = score.objective * (1.0 + ROUNDING) + ROUNDING
    free = (problem.fixed < 0) & (problem.hold_s <= 0.0)
    for model in np.unique(problem.model[groups]).tolist():
        places = np.flatnonzero((problem.model[groups] == model) & free[groups])
        places = places[np.argsort(score.start_s[groups[places]], kind="stable")]
        theirs = groups[places]
        by_due = theirs[np.lexsort((theirs, problem.due_s[theirs]))]
        if np.array_equal(theirs, by_due):
            continue
        wanted = groups.copy()
        wanted[places] = by_due
        found = evaluate(problem, Order(order.first, wanted), kappa_s)
        if _is_as_good(found, score, most):
            groups, score = wanted, found
            continue
        at = 0
        while at < places.size - 1 and tries > 0:
            before, after = places[at : at + 2]
            if problem.due_s[groups[before]] > problem.due_s[groups[after]]:
                tries -= 1
                wanted = groups.copy()
                wanted[before], wanted[after] = groups[after], groups[before]
                found = evaluate(problem, Order(order.first, wanted), kappa_s)
                if _is_as_good(found, score, most):
                    groups, score = wanted, found
                    at = max(at - 1, 0)
                    continue
            at += 1
    return Order(order.first, groups), score


def _is_as_good(found: Score, score: Score, most: float) -> bool:
    return found.left_over <= score.left_over and found.objective <= most and found.swaps <= score.swaps
