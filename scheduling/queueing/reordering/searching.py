"""A search for an order of what may be moved: from nothing or from an order, within a budget, in parts side by side."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from scheduling.queueing.reordering.budget import Budget
from scheduling.queueing.reordering.problem import Ints, Order
from scheduling.queueing.reordering.rules import fcfs
from scheduling.queueing.reordering.search.allotting import (
    begin_random,
    best_allotment,
    best_of,
    tuned,
)
from scheduling.queueing.reordering.search.annealing import (
    MIX,
    MIX_OF_FEW,
    MIX_OF_WARM,
    Mix,
    allocate_best,
    anneal,
    best_order,
)
from scheduling.queueing.reordering.search.insertion import insert, keep
from scheduling.queueing.reordering.search.listing import allocate_listing, best_listing
from scheduling.queueing.reordering.search.model_listing import CHEAPER, Allotment
from scheduling.queueing.reordering.search.parts import join, served_most, split
from scheduling.queueing.reordering.search.relisting import relisted, shifted
from scheduling.queueing.reordering.search.scanning import allocate_lanes, fill
from scheduling.queueing.reordering.search.sequences import Sequences, Terms, allocate_sequences, load, order_of

Result = TypeVar("Result")

MOST_LISTINGS = 3000
LISTING_MOVES = 1000
"""Moves that one list scheduling is counted as where a budget is in moves."""
MODEL_LISTING_MOVES = 100
"""The same of one listing of one model's groups."""
FEW = 16
"""Groups up to which there are few: almost any order is tried then."""
RELISTED = 40.0
"""Moves for each group from which on a warm search lists models anew."""
LONG = 500.0
"""Moves for each group from which on a budget is long."""


class Scheme(NamedTuple):
    """How a budget is spent. Temperatures are by mean requests of a group x mean service.

    The numbers were chosen on seeds 0 to 7 of the benchmark's problems; it judges on others.
    """

    allotted: float
    """Share of the budget after which the search for an allotment of queues to models ends."""
    listed: float
    """Share of the budget after which list scheduling ends."""
    hot: float
    """Temperature that annealing begins with."""
    cold: float = 0.003
    """Temperature that it ends with."""
    allotments: int = 1
    """Searches for an allotment, which share its part of the budget."""
    tried: int = 1
    """Starts, the cheapest ones, that are annealed for a while before one of them is chosen."""
    trial: float = 0.0
    """Share of the budget that each of them has for it."""
    mix: Mix = MIX
    """Moves of annealing."""


COLD = Scheme(0.3, 0.35, 0.03)
COLD_LONG = Scheme(0.12, 0.15, 0.13, 0.033, allotments=3, tried=3, trial=0.03)
COLD_FEW = Scheme(0.1, 0.3, 10.0, 0.01)
WARM = Scheme(0.45, 0.45, 0.03, 0.006, mix=MIX_OF_WARM)


class Search:
    """One problem's movable groups, with all that kernels need to work on them.

    *unit* is what temperatures are multiples of; *threads* may search side by side where the budget is in seconds.
    """

    def __init__(self, terms: Terms, budget: Budget, unit: float, seed: int, threads: int = 1) -> None:
        self.terms, self.budget, self.unit, self.seed, self.threads = terms, budget, unit, seed, threads
        self.random = np.array([(seed * 2654435761 + 88172645463325252) % (2**64 - 1) + 1], np.uint64)

    def complete(self, order: Order) -> Order:
        """*order* without what is not movable or cannot be served where it is; movable groups that it lacks are inserted."""
        terms, lacking = self.terms, self.terms.rank >= 0
        first, groups = np.clip(order.first, 0, order.groups.size), np.ascontiguousarray(order.groups)
        kept = Order(np.empty(terms.kind.size + 1, np.int64), np.empty(groups.size, np.int64))
        keep(terms, np.maximum.accumulate(first), groups, kept.first, kept.groups, lacking)
        new = terms.movable[lacking[terms.movable]]
        state, _ = rows_of(terms, kept, new[np.argsort(terms.due[new], kind="stable")])
        return order_of(state)

    def cold(self, begin: Order) -> Order:
        """Annealing from the best of *begin*, FCFS, allotments of queues to models, and list scheduling.

        The best to begin with need not be the cheapest, so some are annealed for a while where there is time for it.
        """
        each = self.budget.likely_moves / max(1, self.terms.movable.size)
        few = self.terms.movable.size <= FEW and each >= LONG
        scheme = COLD_FEW if few else COLD_LONG if each >= LONG else COLD
        starts = [begin, self.complete(fcfs(self.terms))]
        for number in range(scheme.allotments):
            starts += self._allotted(scheme, number)
        if listed := best_listing(self.terms, allocate_listing(self.terms), self._lists(scheme), self.seed):
            starts.append(listed)
        starts.sort(key=self.cost)
        if scheme.tried > 1:
            starts = [
                self.annealed(start, scheme._replace(hot=COLD.hot), self.budget.spent() + scheme.trial)
                for start in starts[: scheme.tried]
            ]
            starts.sort(key=self.cost)
        return self.annealed(starts[0], scheme)

    def _allotted(self, scheme: Scheme, number: int) -> list[Order]:
        """Of searches for an allotment of queues to models, one in each thread."""

        def search(budget: Budget, thread: int) -> Order:
            seed, done = self.seed + 1000 * number + 100 * thread, self._listed(budget, scheme)
            return best_allotment(self.terms, allocate_listing(self.terms), done, seed, number)

        begun = self.budget.spent()
        end = begun + (scheme.allotted - begun) / (scheme.allotments - number)
        return [self.complete(order) for order in self._in_threads(self.threads, end, search)]

    def warm(self, order: Order) -> Order:
        """Annealing from *order*, or, if that is cheaper, with models listed anew where there is time for it."""
        start, groups = order, self.terms.movable.size
        if groups > FEW and self.budget.likely_moves >= RELISTED * groups:
            state, cost = rows_of(self.terms, order)
            anew = self.complete(self.list_anew(order, state))
            start = anew if self.cost(anew) < CHEAPER * cost else order
        return self.annealed(start, WARM)

    def list_anew(self, order: Order, state: Sequences) -> Order:
        """*order*, which *state* has in rows, with the models listed anew that are cheaper so; groups may be missing."""
        terms, listing = self.terms, allocate_listing(self.terms)
        allotment, listed = shifted(terms, listing, served_most(terms, order))

        def tune(budget: Budget, thread: int) -> Allotment:
            random, done = begin_random(self.seed + 1000 * thread), self._listed(budget, WARM)
            return tuned(terms, allocate_listing(terms), allotment, done, listed, random)

        allotments = self._in_threads(self.threads, WARM.allotted, tune)
        return relisted(terms, listing, order, state, best_of(allotments))

    def cost(self, order: Order) -> float:
        """Of *order*, which has movable groups only."""
        return rows_of(self.terms, order)[1]

    def _listed(self, budget: Budget, scheme: Scheme) -> Callable[[int], float]:
        """The share of a search for an allotment, with *budget* alone, that is done after so many listings of a model."""
        if budget.moves is None:
            return lambda listed: budget.spent()
        listings = max(10, int(budget.moves * scheme.allotted / scheme.allotments / MODEL_LISTING_MOVES))
        return lambda listed: listed / listings

    def _lists(self, scheme: Scheme) -> Callable[[int], bool]:
        """Whether list scheduling goes on after so many orders."""
        if self.budget.moves is None:
            return lambda listed: listed < MOST_LISTINGS and self.budget.spent() < scheme.listed
        listings = max(10, min(MOST_LISTINGS, int(self.budget.moves * scheme.listed / LISTING_MOVES)))
        return lambda listed: listed < listings

    def annealed(self, order: Order, scheme: Scheme, until: float = 1.0) -> Order:
        """The best order of annealing from *order* by *scheme* until the share *until* of the budget is spent.

        In parts side by side, as far as there are threads and models.
        """
        parts = split(self.terms, order, self.threads) if self.threads > 1 else []
        if not parts:
            return self._annealed(order, scheme, until)

        def anneal_part(budget: Budget, number: int) -> Order:
            its = Search(parts[number].terms, budget, self.unit, self.seed + 1000 * number)
            return its._annealed(parts[number].order, scheme, 1.0)

        return join(parts, self._in_threads(len(parts), until, anneal_part))

    def _in_threads(self, threads: int, until: float, work: Callable[[Budget, int], Result]) -> list[Result]:
        """What *work*(budget, number) gives in each of *threads*; all have a budget until the share *until* of this one.

        A budget in moves is handed on as it is, to one.
        """
        if self.budget.moves is not None:
            return [work(self.budget, 0)]
        left_s, clock, budgets = self.budget.left_s(until), self.budget.clock, list[Budget]()

        def begin(number: int) -> Result:
            budget = Budget(left_s, None, clock)  # here: the clock may be this thread's own
            budgets.append(budget)
            return work(budget, number)

        if threads == 1:
            results = [begin(0)]
        else:
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(begin, range(threads)))
        self.budget.spend(until, sum(budget.tried for budget in budgets))
        return results

    def _annealed(self, order: Order, scheme: Scheme, until: float) -> Order:
        terms, budget, hot, cold = self.terms, self.budget, scheme.hot * self.unit, scheme.cold * self.unit
        state, cost = rows_of(terms, order)
        best = allocate_best(state, cost, float(terms.balance[0] * (state.end**2).sum()))
        lanes, mix = allocate_lanes(terms), MIX_OF_FEW if terms.movable.size <= FEW else scheme.mix
        fill(terms, state, lanes)
        first = spent = budget.spent()
        while spent < until and terms.movable.size * terms.kind.size > 1:
            moves = budget.chunk()
            done = (spent - first) / (until - first)
            then = min(1.0, done + moves / budget.likely_moves / (until - first))
            begin, end = hot * (cold / hot) ** done, hot * (cold / hot) ** then
            anneal(terms, state, lanes, best, mix, self.random, moves, begin, end)
            budget.tried += moves
            spent = budget.spent()
        return best_order(best)


def rows_of(terms: Terms, order: Order, new: Ints | None = None) -> tuple[Sequences, float]:
    """*order* in rows that have room to grow, with *new* groups inserted, and its cost."""
    n, queues, added = terms.weight.size, terms.kind.size, 0 if new is None else new.size
    longest = int(np.diff(order.first).max(initial=0))
    state = allocate_sequences(queues, n, max(1, min(n, 2 * longest + added + 4 * n // queues + 64)))
    cost = np.array([load(terms, state, order.first, order.groups), 0.0])
    if new is not None and new.size:
        insert(terms, state, new, cost)
    return state, float(cost[0])
