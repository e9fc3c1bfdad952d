"""The global scheduler (QLM section 7): a better order of all virtual queues within a time budget, and why.

It returns the previous order where that serves everybody in time. It never returns one that is worse than the previous order
with new groups inserted, nor, without a previous one, than EDF with earliest completion or FCFS.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scheduling.queueing.reordering.bound import Shortage, nothing_missing, shortage
from scheduling.queueing.reordering.evaluate import Score, evaluate
from scheduling.queueing.reordering.problem import Floats, Ints, Order, Problem, begin, contiguous
from scheduling.queueing.reordering.programme import solve
from scheduling.queueing.reordering.rules import RULES, SEARCH, edf_earliest_completion, fcfs
from scheduling.queueing.reordering.search.allotting import best_allotment
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
from scheduling.queueing.reordering.search.model_listing import CHEAPER
from scheduling.queueing.reordering.search.relisting import relisted
from scheduling.queueing.reordering.search.scanning import allocate_lanes, fill
from scheduling.queueing.reordering.search.sequences import (
    Sequences,
    Terms,
    allocate_sequences,
    load,
    order_of,
    terms_of,
)
from scheduling.queueing.reordering.search.ties import by_due_time

KAPPA = 0.2
"""Being late at all counts as this share of the time in which the fleet could serve all that waits."""
LEAST_GAIN = 1e-3
"""Share of the objective that a new order must save to be worth a change."""
MOST_LISTINGS = 3000
CHUNK = 2_000
"""Moves between two looks at the clock, some millisecond: other threads of Python wait that long."""
MOVES_PER_S = 2e6
"""Moves that a budget in seconds is taken for before the clock has said more."""
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


COLD = Scheme(0.42, 0.47, 0.03)
COLD_LONG = Scheme(0.12, 0.15, 0.13, 0.033, allotments=3, tried=3, trial=0.03)
COLD_FEW = Scheme(0.1, 0.3, 10.0, 0.01)
WARM = Scheme(0.33, 0.33, 0.03, 0.006, mix=MIX_OF_WARM)


class Answer(NamedTuple):
    """An order and why."""

    order: Order
    changed: bool
    """Whether it is another order than the previous one with new groups inserted."""
    before: Score
    """Of the previous order with new groups inserted; without a previous one, of EDF with earliest completion."""
    after: Score
    moves: int
    """Of annealing that were tried; the same number and seed give the same order again."""
    shortage: Shortage
    """What no order can be rid of: where it is positive, only more instances help."""
    reason: str


class _Budget:
    """Seconds of a clock; or moves and listings, which give the same answer on every machine."""

    def __init__(self, seconds: float, moves: int | None, clock: Callable[[], float]) -> None:
        self.seconds, self.moves, self.clock = seconds, moves, clock
        self.began_s, self.tried = clock(), 0

    def spent(self) -> float:
        """Share that is spent, 1 and above for all."""
        if self.moves is not None:
            return self.tried / max(1, self.moves)
        return (self.clock() - self.began_s) / self.seconds if self.seconds > 0 else 1.0

    @property
    def likely_moves(self) -> float:
        """All moves that it is likely to be."""
        return float(self.moves) if self.moves is not None else max(CHUNK, MOVES_PER_S * self.seconds)

    def chunk(self) -> int:
        """Moves to try before the next look at the clock."""
        return CHUNK if self.moves is None else max(1, min(CHUNK, self.moves - self.tried))


class _Search:
    """One problem with all that kernels need to work on it."""

    def __init__(self, problem: Problem, kappa_s: float | None, budget: _Budget, seed: int) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.fixed, free_s, loaded = begin(problem)
        self.kappa_s = KAPPA * span_s(problem, free_s) if kappa_s is None else kappa_s
        self.terms = terms_of(problem, self.kappa_s, free_s, loaded)
        self.held = np.flatnonzero((problem.hold_s > 0.0) & (problem.fixed < 0))
        served = self.terms.service[:, self.terms.movable]
        served = served[np.isfinite(served)]
        mean_s = float(served.mean()) if served.size else 1.0
        self.unit = max(1e-9, mean_s * float(problem.requests.mean() if problem.requests.size else 1.0))
        self.random = np.array([(seed * 2654435761 + 88172645463325252) % (2**64 - 1) + 1], np.uint64)

    def finish(self, order: Order) -> Order:
        """*order* of movable groups with held ones inserted and fixed ones first."""
        if self.held.size:
            state, _ = rows_of(self.terms, order, self.held[np.argsort(self.problem.hold_s[self.held], kind="stable")])
            order = order_of(state)
        if any(self.fixed):
            order = Order.of([[*first, *rest] for first, rest in zip(self.fixed, order.queues(), strict=True)])
        return order

    def by_due_time(self, order: Order) -> Order:
        """*order* with groups of each model by due time where that costs nothing."""
        state, cost = rows_of(self.terms, order)
        by_due_time(self.terms, state, cost)
        return order_of(state)

    def complete(self, order: Order) -> Order:
        """*order* without what is not movable or cannot be served where it is; movable groups that it lacks are inserted."""
        terms, lacking = self.terms, self.terms.rank >= 0
        first, groups = np.clip(order.first, 0, order.groups.size), np.ascontiguousarray(order.groups)
        kept = Order(np.empty(terms.kind.size + 1, np.int64), np.empty(groups.size, np.int64))
        keep(terms, np.maximum.accumulate(first), groups, kept.first, kept.groups, lacking)
        new = terms.movable[lacking[terms.movable]]
        state, _ = rows_of(terms, kept, new[np.argsort(terms.due[new], kind="stable")])
        return order_of(state)

    def cold(self, fallback: Order) -> Order:
        """Annealing from the best of *fallback*, FCFS, allotments of queues to models, and list scheduling.

        The best to begin with need not be the cheapest, so some are annealed for a while where there is time for it.
        """
        each = self.budget.likely_moves / max(1, self.terms.movable.size)
        few = self.terms.movable.size <= FEW and each >= LONG
        scheme = COLD_FEW if few else COLD_LONG if each >= LONG else COLD
        starts, room = [fallback, self.complete(fcfs(self.terms))], allocate_listing(self.terms)
        for number in range(scheme.allotments):
            allotted = best_allotment(self.terms, room, self._allots(scheme, number), self.seed + 1000 * number, number)
            starts.append(self.complete(allotted))
        if listed := best_listing(self.terms, room, self._lists(scheme), self.seed):
            starts.append(listed)
        starts.sort(key=self.cost)
        if scheme.tried > 1:
            starts = [
                self.annealed(start, scheme._replace(hot=COLD.hot), self.budget.spent() + scheme.trial)
                for start in starts[: scheme.tried]
            ]
            starts.sort(key=self.cost)
        return self.annealed(starts[0], scheme)

    def warm(self, fallback: Order) -> Order:
        """Annealing from *fallback*, or, if that is cheaper, with models listed anew where there is time for it."""
        start, groups = fallback, self.terms.movable.size
        if groups > FEW and self.budget.likely_moves >= RELISTED * groups:
            state, _ = rows_of(self.terms, fallback)
            listing, done = allocate_listing(self.terms), self._allots(WARM, 0)
            anew = self.complete(relisted(self.terms, listing, fallback, state, done, self.seed))
            start = anew if self.cost(anew) < CHEAPER * self.cost(fallback) else fallback
        return self.annealed(start, WARM)

    def cost(self, order: Order) -> float:
        """Of *order*, which has movable groups only."""
        return rows_of(self.terms, order)[1]

    def _allots(self, scheme: Scheme, number: int) -> Callable[[int], float]:
        """The share of the search for an allotment that is done after so many listings of a model."""
        if self.budget.moves is None:
            began = self.budget.spent()
            end = began + (scheme.allotted - began) / (scheme.allotments - number)
            return lambda listed: (self.budget.spent() - began) / max(1e-9, end - began)
        listings = max(10, int(self.budget.moves * scheme.allotted / scheme.allotments / MODEL_LISTING_MOVES))
        return lambda listed: listed / listings

    def _lists(self, scheme: Scheme) -> Callable[[int], bool]:
        """Whether list scheduling goes on after so many orders."""
        if self.budget.moves is None:
            return lambda listed: listed < MOST_LISTINGS and self.budget.spent() < scheme.listed
        listings = max(10, min(MOST_LISTINGS, int(self.budget.moves * scheme.listed / LISTING_MOVES)))
        return lambda listed: listed < listings

    def annealed(self, order: Order, scheme: Scheme, until: float = 1.0) -> Order:
        """The best order of annealing from *order* by *scheme* until the share *until* of the budget is spent."""
        budget = self.budget
        state, cost = rows_of(self.terms, order)
        best = allocate_best(state, cost, float(self.terms.balance[0] * (state.end**2).sum()))
        lanes, mix = allocate_lanes(self.terms), MIX_OF_FEW if self.terms.movable.size <= FEW else scheme.mix
        fill(self.terms, state, lanes)
        hot, cold = scheme.hot * self.unit, scheme.cold * self.unit
        first = spent = budget.spent()
        while spent < until and self.terms.movable.size * self.terms.kind.size > 1:
            moves = budget.chunk()
            done = (spent - first) / (until - first)
            then = min(1.0, done + moves / budget.likely_moves / (until - first))
            anneal(
                self.terms,
                state,
                lanes,
                best,
                mix,
                self.random,
                moves,
                hot * (cold / hot) ** done,
                hot * (cold / hot) ** then,
            )
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


def _reason(before: Score, after: Score, lacking: Shortage) -> str:
    """One sentence on what the new order gains, and one on what no order can."""
    text = (
        f"Requests in time {before.attainment:.1%} -> {after.attainment:.1%}, "
        f"mean lateness {before.lateness_s:.1f} s -> {after.lateness_s:.1f} s."
    )
    if lacking.seconds > 0.0 and after.objective > 0.0:
        text += f" Only more instances help: {lacking.seconds:.0f} s of service are missing in {lacking.due_s:.0f} s."
    return text


def order_by(name: str, problem: Problem) -> Order:
    """The order of the rule *name* of `rules.RULES`, fixed groups first, held ones inserted; or that of the `programme`.

    KeyError for an unknown rule; NoAnswer where the programme has none within `programme.TIME_LIMIT_S`.
    """
    problem = contiguous(problem)
    if name == "programme":
        return solve(problem).order
    search = _Search(problem, None, _Budget(0.0, 0, time.perf_counter), 0)
    return search.finish(search.complete(RULES[name](search.terms)))


def warm_up() -> None:
    """Load every kernel from the cache, or compile it (half a minute, once). Call it before the first order is asked for."""
    n, ones, queues = 3, np.ones((1, 2)), np.zeros(2, np.int64)
    problem = Problem(
        requests=np.ones(n, np.int64),
        model=np.array([0, 1, 0]),
        due_s=np.zeros(n),
        service_s=np.ones((n, 1)),
        own_s=np.zeros((n, 1)),
        queue_type=queues,
        free_s=np.zeros(2),
        loaded=queues,
        swap_s=ones,
        drain_s=ones,
        fixed=np.full(n, -1),
        hold_s=np.zeros(n),
    )
    order = Order.of([[0], []])
    reorder(problem, order, moves=1)
    reorder(problem, moves=1)
    terms = _Search(problem, None, _Budget(0.0, 0, time.perf_counter), 0).terms
    relisted(terms, allocate_listing(terms), order, rows_of(terms, order)[0], lambda listed: listed / 100, 0)


def span_s(problem: Problem, free_s: Floats) -> float:
    """About the time until the fleet has served all that waits: service where it is fastest, spread evenly."""
    fastest = problem.service_s[:, np.unique(problem.queue_type)].min(axis=1, initial=np.inf)
    return float(free_s.mean()) + float(fastest[np.isfinite(fastest)].sum()) / problem.queue_type.size


def reorder(
    problem: Problem,
    previous: Order | None = None,
    budget_s: float = 0.1,
    *,
    moves: int | None = None,
    seed: int = 0,
    kappa_s: float | None = None,
    by: str = SEARCH,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """An order of the groups of *problem*, searched for *budget_s* seconds of *clock*, or for *moves* moves.

    *previous* names groups by their number in *problem*; those that it lacks are inserted. *kappa_s* is what being late at
    all counts as, in seconds of lateness of each request; None: `KAPPA` of the time that the fleet needs for all. *by* may
    name a rule of `rules.RULES` or the `programme` instead of the search, to compare with.
    ValueError for a problem whose arrays do not fit together or which has no queue.
    """
    problem = contiguous(problem)
    if not problem.queue_type.size:
        raise ValueError("there is no queue")
    budget = _Budget(budget_s, moves, clock)
    search = _Search(problem, kappa_s, budget, seed)
    kappa_s = search.kappa_s
    fallback = search.complete(edf_earliest_completion(search.terms) if previous is None else previous)
    base = search.finish(fallback)
    before = evaluate(problem, base, kappa_s)
    # Where an order serves all in time, nothing is missing.
    lacking = shortage(problem) if before.objective > 0.0 else nothing_missing(problem)
    if by != SEARCH:
        order = order_by(by, problem)
        changed = order.queues() != base.queues()
        return Answer(order, changed, before, evaluate(problem, order, kappa_s), 0, lacking, f"As {by} has it.")
    if before.objective <= 0.0:
        return Answer(base, False, before, before, 0, lacking, "No group is late.")
    order = search.cold(fallback) if previous is None else search.warm(fallback)
    order = search.finish(search.by_due_time(order))
    after = evaluate(problem, order, kappa_s)
    if (after.left_over, after.objective) >= (before.left_over, before.objective * (1.0 - LEAST_GAIN)):
        reason = "No better order was found." if previous is not None else "EDF with earliest completion is as good."
        return Answer(base, False, before, before, budget.tried, lacking, reason)
    return Answer(order, True, before, after, budget.tried, lacking, _reason(before, after, lacking))
