"""Groups of one model that may change places at no cost: who is due first goes first.

Orders that keep the same groups in time are worth the same, so that annealing leaves groups of one class in any order. Those
that came first would wait longest as well as not, and no estimate could say so.
"""

from typing import Final

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.reordering.problem import Ints
from scheduling.queueing.reordering.search.moves import price_rotation, price_swap, rotate, swap
from scheduling.queueing.reordering.search.sequences import Sequences, Terms

TRIES: Final = 4
"""Exchanges of two groups that are tried, by group, at the most."""
ROUNDING: Final = 1e-9
"""Share of the cost that counts as none."""


def by_due_time(terms: Terms, state: Sequences, cost: float) -> None:
    """Put groups of each model in *state*, an order that costs *cost*, by due time as far as that costs nothing."""
    inside = np.arange(state.row.shape[1]) < state.length[:, None]
    groups = state.row["group"][inside].astype(np.int64)
    ranked = groups[np.lexsort((state.row["start"][inside], terms.model[groups]))]
    first = np.searchsorted(terms.model[ranked], np.arange(terms.first.size)).astype(np.int64)
    exchange_neighbours(terms, state, ranked, first, ROUNDING * (cost + 1.0), TRIES * groups.size)


@compiled
def exchange_neighbours(terms: Terms, state: Sequences, ranked: Ints, first: Ints, most: float, tries: int) -> None:
    """*ranked* has the groups by model, then start, and *first* (M + 1,) where each model begins there. Neighbours change
    places, at most *tries* are tried; all together may cost *most*."""
    for model in range(first.size - 1):
        at = first[model]
        while at < first[model + 1] - 1 and tries > 0:
            before, after = ranked[at], ranked[at + 1]
            if terms.due[before] > terms.due[after]:
                tries -= 1
                a, b = state.place[before].queue, state.place[after].queue
                here, there = state.place[before].position, state.place[after].position
                if a == b:
                    cost, _ = price_rotation(terms, state, a, min(here, there), 1, max(here, there), 1, np.inf)
                else:
                    cost, _ = price_swap(terms, state, a, here, b, there, np.inf)
                if cost <= most:
                    most -= cost
                    if a == b:
                        rotate(terms, state, a, min(here, there), 1, max(here, there), 1)
                    else:
                        swap(terms, state, a, here, b, there)
                    ranked[at], ranked[at + 1] = after, before
                    at = max(at - 1, first[model])
                    continue
            at += 1
