"""The global scheduler (QLM section 7): a better order of all virtual queues within a time budget, with the reason.

It keeps the previous order if all groups are in time. The result is never worse than the previous order with new groups
inserted, nor, when a group would be late, than any of the simple rules (`CANDIDATES`): each call prices all of them by
the objective of the search, and a rule that is as good as the search wins.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scheduling.queueing.reordering.allotting import best_allotment
from scheduling.queueing.reordering.annealing import allocate_best, anneal, by_due_time
from scheduling.queueing.reordering.bound import Shortage, nothing_missing, shortage
from scheduling.queueing.reordering.evaluate import Score, evaluate
from scheduling.queueing.reordering.listing import best_listing, mean_service_s
from scheduling.queueing.reordering.problem import Floats, Order, Problem, begin, contiguous
from scheduling.queueing.reordering.programme import NoAnswer, solve
from scheduling.queueing.reordering.rows import kept, order_of, rows_of, terms_of
from scheduling.queueing.reordering.rules import CANDIDATES, PROGRAMME, RULES, SEARCH, edf_earliest_completion

KAPPA = 0.2
"""Cost of being late at all, as a share of the time in which the fleet could serve all waiting work."""
HOT, COLD = 0.02, 0.003
"""Temperatures at which annealing starts and ends, in mean requests of a group x mean service."""
FEW = 16
"""Most groups that count as few: almost any order is tried then, from `HOT_FEW` to `COLD_FEW`."""
HOT_FEW, COLD_FEW = 10.0, 0.01
ROUNDING = 1e-9
"""Share of the cost that counts as zero."""
EXCHANGES = 4
"""Most exchanges of neighbours per group to sort groups by due time."""
ALLOTTED = 0.3
"""Share of a budget in seconds after which the search for an allotment of queues to models ends."""
LISTING_MOVES = 2
"""Moves that listing one group counts as, if the budget is in moves; as many are left for annealing."""
CHUNK, MOST_CHUNK = 4_000, 100_000
"""Moves between two readings of the clock, some milliseconds; also the step if the budget is in moves."""
MOVES_PER_S = 2e6
"""Moves per second assumed for a budget in seconds."""
LEAST_GAIN = 1e-3
"""Least relative gain of the objective for which an order is changed."""

PROGRAMME_GROUPS = 12
"""Most groups that the programme is given."""


class Answer(NamedTuple):
    """An order and the reason for it."""

    order: Order
    changed: bool
    """Whether it differs from the previous order with new groups inserted."""
    before: Score
    """Score of the previous order with new groups inserted; without a previous one, of EDF with earliest completion."""
    after: Score
    moves: int
    """Annealing moves tried; the same number and seed give the same order."""
    shortage: Shortage
    """What no order can avoid: if it is positive, only more instances help."""
    reason: str


class _Search:
    """A problem's movable groups, and the fixed groups that the search leaves out."""

    def __init__(self, problem: Problem, kappa_s: float | None, budget: "Budget", seed: int) -> None:
        self.problem, self.budget = problem, budget
        self.fixed, free_s, loaded = begin(problem)
        span = span_s(problem, free_s)
        self.kappa_s = KAPPA * span if kappa_s is None else kappa_s
        self.terms = terms_of(problem, self.kappa_s, free_s, loaded, span)
        self.unit = max(
            1e-9, mean_service_s(self.terms) * float(problem.requests.mean() if problem.requests.size else 1.0)
        )
        self.random = np.array([(seed * 2654435761 + 88172645463325252) % (2**64 - 1) + 1], np.uint64)

    def finish(self, order: Order) -> Order:
        """Return *order* of movable groups with fixed ones first."""
        if any(self.fixed):
            order = Order.of([[*first, *rest] for first, rest in zip(self.fixed, order.queues(), strict=True)])
        return order

    def complete(self, order: Order) -> Order:
        """Return *order* without immovable or unservable groups, and with missing movable ones inserted."""
        order, terms = kept(self.terms, order), self.terms
        new = np.setdiff1d(terms.movable, order.groups)
        rows, _ = rows_of(terms, order, new[np.argsort(terms.due[new], kind="stable")])
        return order_of(rows.length, rows.group)

    def cost(self, order: Order) -> float:
        """Return the cost of *order*, which has movable groups only."""
        return rows_of(self.terms, order)[1]

    def by_rule(self) -> tuple[str, Order]:
        """Return the best order of a rule, with the rule's name; uneven ends of queues cost nothing here."""
        orders = [(name, self.complete(RULES[name](self.terms))) for name in CANDIDATES]
        return min(orders, key=lambda each: _worth(evaluate(self.problem, self.finish(each[1]), self.kappa_s)))

    def improved(self, starts: list[Order]) -> Order:
        """Anneal from the cheapest of *starts* and of list scheduling until the budget is spent; return the best."""
        terms, budget = self.terms, self.budget
        starts = [*starts, self.complete(best_allotment(terms, self.random, self._listed))]
        if listed := best_listing(terms):
            starts = [*starts, listed]
        rows, _ = rows_of(terms, min(starts, key=self.cost))
        few = terms.movable.size <= FEW
        hot, cold = (self.unit * share for share in ((HOT_FEW, COLD_FEW) if few else (HOT, COLD)))
        best = allocate_best(rows)
        first = spent = budget.spent()
        while spent < 1.0 and terms.movable.size * terms.kind.size > 1:
            moves = budget.chunk()
            done = (spent - first) / (1.0 - first)
            then = min(1.0, done + moves / budget.likely_moves / (1.0 - first))
            begin_at, end_at = hot * (cold / hot) ** done, hot * (cold / hot) ** then
            anneal(terms, rows, best, self.random, moves, begin_at, end_at)
            budget.tried += moves
            spent = budget.spent()
        return order_of(best.length, best.group)

    def by_due_time(self, order: Order) -> Order:
        """Return *order* with groups of each model by due time where that costs nothing."""
        terms, (rows, cost) = self.terms, rows_of(self.terms, order)
        queue, position = rows.place[order.groups].T
        ranked = order.groups[np.lexsort((rows.ready[queue, position], terms.model[order.groups]))]
        first = np.searchsorted(terms.model[ranked], np.arange(terms.first.size)).astype(np.int64)
        by_due_time(terms, rows, ranked, first, ROUNDING * (cost + 1.0), EXCHANGES * ranked.size)
        return order_of(rows.length, rows.group)

    def _listed(self, orders: float) -> float:
        """Return the share of the time for allotments spent after *orders* were listed."""
        if not self.terms.movable.size:
            return 1.0
        if self.budget.moves is None:
            return self.budget.spent() / ALLOTTED
        return orders * LISTING_MOVES * self.terms.movable.size / max(1, self.budget.moves)


class Budget:
    """A budget in seconds of a clock, or in moves, which give the same answer on every machine."""

    def __init__(self, seconds: float, moves: int | None, clock: Callable[[], float]) -> None:
        self.seconds, self.moves, self.clock = seconds, moves, clock
        self.began_s, self.tried = clock(), 0

    def spent(self) -> float:
        """Return the spent share; 1 or more if all is spent."""
        if self.moves is not None:
            return self.tried / max(1, self.moves)
        return (self.clock() - self.began_s) / self.seconds if self.seconds > 0 else 1.0

    @property
    def likely_moves(self) -> float:
        """Return the expected number of moves within the budget."""
        return float(self.moves) if self.moves is not None else max(CHUNK, MOVES_PER_S * self.seconds)

    def chunk(self) -> int:
        """Return the moves to try before the clock is read again."""
        return CHUNK if self.moves is None else max(1, min(MOST_CHUNK, self.moves - self.tried))


def _reason(before: Score, after: Score, lacking: Shortage) -> str:
    """Return one sentence on the gain of the new order, and one on what no order can gain."""
    text = (
        f"Requests in time {before.attainment:.1%} -> {after.attainment:.1%}, "
        f"mean lateness {before.lateness_s:.1f} s -> {after.lateness_s:.1f} s."
    )
    if lacking.seconds > 0.0 and after.objective > 0.0:
        text += f" Only more instances help: {lacking.seconds:.0f} s of service are missing in {lacking.due_s:.0f} s."
    return text


def order_by(name: str, problem: Problem) -> Order:
    """Return the order of the rule *name* of `rules.RULES` or of the `programme`, fixed groups first.

    Raise KeyError for an unknown rule, and NoAnswer if the programme finds none within `programme.TIME_LIMIT_S`.
    """
    problem = contiguous(problem)
    if name == "programme":
        return solve(problem).order
    search = _Search(problem, None, Budget(0.0, 0, time.perf_counter), 0)
    return search.finish(search.complete(RULES[name](search.terms)))


def warm_up() -> None:
    """Load every kernel from the cache, or compile it (half a minute, once). Call it before the first order is needed."""
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
    )
    reorder(problem, Order.of([[0], []]), moves=1)


def span_s(problem: Problem, free_s: Floats) -> float:
    """Return the approximate time until the fleet has served all waiting work, at its fastest and spread evenly."""
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
    """Return an order of the groups of *problem*, searched for *budget_s* seconds of *clock*, or for *moves* moves.

    *previous* names groups by their number in *problem*; missing ones are inserted. *kappa_s* is the cost of being late
    at all, in seconds of lateness per request; None: `KAPPA` of the time that the fleet needs for all. *by* may name a
    rule of `rules.RULES` to compare with, or the `programme`, which continues from the result of the search if there
    are few groups (`is_small`), for at most `programme.TIME_LIMIT_S`.

    Raise ValueError if the arrays of *problem* do not fit together or there is no queue.
    """
    problem = contiguous(problem)
    if not problem.queue_type.size:
        raise ValueError("there is no queue")
    budget = Budget(budget_s, moves, clock)
    search = _Search(problem, kappa_s, budget, seed)
    kappa_s = search.kappa_s
    fallback = search.complete(edf_earliest_completion(search.terms) if previous is None else previous)
    base = search.finish(fallback)
    before = evaluate(problem, base, kappa_s)
    # If an order serves all in time, nothing is missing.
    lacking = shortage(problem) if before.objective > 0.0 else nothing_missing(problem)
    if by in RULES:
        order = order_by(by, problem)
        changed = order.queues() != base.queues()
        return Answer(order, changed, before, evaluate(problem, order, kappa_s), 0, lacking, f"As {by} has it.")
    if before.objective <= 0.0:
        return Answer(base, False, before, before, 0, lacking, "No group is late.")
    rule, ruled = search.by_rule()
    order = search.finish(ruled)
    after = evaluate(problem, order, kappa_s)
    if after.objective > 0.0 or after.swaps > 0:
        sought = search.finish(search.by_due_time(search.improved([fallback, ruled])))
        score = evaluate(problem, sought, kappa_s)
        # A rule that is as good leaves more slack for later arrivals, which neither knows.
        if _worth(score) < _worth(after):
            rule, order, after = SEARCH, sought, score
    if (after.left_over, after.objective) >= (before.left_over, before.objective * (1.0 - LEAST_GAIN)):
        reason = "No better order was found." if previous is not None else "EDF with earliest completion is as good."
        answer = Answer(base, False, before, before, budget.tried, lacking, reason)
    else:
        reason = _reason(before, after, lacking)
        if rule != SEARCH:
            reason += f" As {rule} has it: nothing better was found."
        answer = Answer(order, True, before, after, budget.tried, lacking, reason)
    return _by_programme(problem, answer, kappa_s) if by == PROGRAMME and is_small(problem) else answer


def judged(problem: Problem, previous: Order, order: Order) -> Answer:
    """Return *order*, which another process found, as an answer, with its worth and that of *previous*."""
    problem = contiguous(problem)
    search = _Search(problem, None, Budget(0.0, 0, time.perf_counter), 0)
    before = evaluate(problem, search.finish(search.complete(previous)), search.kappa_s)
    after = evaluate(problem, order, search.kappa_s)
    lacking = shortage(problem) if before.objective > 0.0 else nothing_missing(problem)
    changed = order.queues() != previous.queues()
    return Answer(order, changed, before, after, 0, lacking, _reason(before, after, lacking))


def is_small(problem: Problem) -> bool:
    """Whether the programme can be expected to solve *problem* within `programme.TIME_LIMIT_S`."""
    return 0 < problem.requests.size <= PROGRAMME_GROUPS


def _by_programme(problem: Problem, answer: Answer, kappa_s: float) -> Answer:
    """Return *answer* with the programme's order if that is better, and found in time."""
    try:
        solved = solve(problem, kappa_s)
    except NoAnswer:
        return answer
    score = evaluate(problem, solved.order, kappa_s)
    if (score.left_over, score.objective) < (answer.after.left_over, answer.after.objective * (1.0 - LEAST_GAIN)):
        reason = _reason(answer.before, score, answer.shortage)
        return answer._replace(order=solved.order, changed=True, after=score, reason=reason)
    return answer


def _worth(score: Score) -> tuple[int, float, int]:
    """Return the key by which orders are compared; lower is better."""
    return score.left_over, score.objective, score.swaps
