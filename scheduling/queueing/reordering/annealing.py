"""Simulated annealing of an order: runs of groups change places within a queue and between queues.

A move is drawn together with its bound (Metropolis with the random number drawn first), so that the walk along the
queues ends once it costs too much. Deterministic for a given seed and number of moves.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_without_gil
from scheduling.queueing.reordering.problem import Floats, Ints
from scheduling.queueing.reordering.rows import Rows, Terms, loaded_at, refresh, serve
from scheduling.struct_of_arrays import struct_of_arrays

LONGEST_RUN: Final = 8
"""Most groups in the run of a move, except tails."""
SAME_MODEL: Final = 0.9
"""Share of moves between queues whose other group is of the same model."""
PAIR, RELOCATE, RUNS, TAILS = 0.5, 0.7, 0.82, 0.95
"""Cumulative shares of moves: swap two groups, relocate a run, swap two runs, swap two tails; append a run."""
LATE_DRAWS: Final = 8
"""Most draws to get a late group."""
COOLING_STEP: Final = 128
"""Moves at one temperature."""


@struct_of_arrays
class Best(NamedTuple):
    """The best order found."""

    length: Ints
    """(Q,)"""
    group: Ints
    """(Q, width)"""
    changed: Ints
    """(Q,): 1 where the current order differs from it."""
    cost: Floats
    """(4,): lateness and total cost of the current order, then of the best; the total includes the price of queue ends.
    """


def allocate_best(rows: Rows) -> Best:
    """Return *rows* as the best order."""
    queues = np.arange(rows.length.size)
    lateness, whole = float(rows.cost[queues, rows.length].sum()), float(rows.total.sum())
    none = np.zeros(queues.size, np.int64)
    return Best(rows.length.copy(), rows.group.copy(), none, np.array([lateness, whole, lateness, whole]))


@compiled_inline
def draw(random: NDArray[np.uint64]) -> float:
    """Return a random number in [0, 1); SplitMix64 (Steele, Lea and Flood 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    x = random[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float(np.int64((x ^ (x >> np.uint64(31))) >> np.uint64(11))) * (1.0 / 9007199254740992.0)


@compiled_inline
def run_length(terms: Terms, rows: Rows, queue: int, at: int, most: int) -> int:
    """Return the number of groups of one model from position *at* on, at most *most*."""
    end, position, model = min(rows.length[queue], at + most), at + 1, terms.model[rows.group[queue, at]]
    while position < end and terms.model[rows.group[queue, position]] == model:
        position += 1
    return position - at


@compiled_inline
def replaced(
    terms: Terms, rows: Rows, queue: int, at: int, removed: int, other: int, there: int, added: int, most: float
) -> float:
    """Cost of row *queue* with *added* groups of *other* for *removed* ones; infinity if impossible or above *most*."""
    kind = terms.kind[queue]
    time_s, model, cost = rows.ready[queue, at], loaded_at(terms, rows, queue, at), rows.cost[queue, at]
    time_s, model, cost = serve(terms, rows, kind, other, there, there + added, time_s, model, cost, most)
    if time_s < np.inf:
        end = rows.length[queue]
        time_s, model, cost = serve(terms, rows, kind, queue, at + removed, end, time_s, model, cost, most)
    return float(cost + terms.balance[0] * time_s * time_s)


@compiled_inline
def rotated(terms: Terms, rows: Rows, queue: int, at: int, count: int, there: int, others: int, most: float) -> float:
    """Cost of row *queue* if *count* groups at *at* change places with *others* at *there*; infinity if impossible."""
    kind = terms.kind[queue]
    time_s, model, cost = rows.ready[queue, at], loaded_at(terms, rows, queue, at), rows.cost[queue, at]
    for part in range(4):
        first, end = there, there + others
        if part == 1:
            first, end = at + count, there
        elif part == 2:
            first, end = at, at + count
        elif part == 3:
            first, end = there + others, rows.length[queue]
        time_s, model, cost = serve(terms, rows, kind, queue, first, end, time_s, model, cost, most)
        if time_s == np.inf:
            return np.inf
    return float(cost + terms.balance[0] * time_s * time_s)


@compiled_inline
def splice(rows: Rows, queue: int, at: int, removed: int, scratch: int, added: int) -> None:
    """Replace *removed* groups at *at* by *added* groups of a scratch row."""
    length, by = rows.length[queue], added - removed
    if by > 0:
        for position in range(length - 1, at + removed - 1, -1):
            rows.group[queue, position + by] = rows.group[queue, position]
    elif by < 0:
        for position in range(at + removed, length):
            rows.group[queue, position + by] = rows.group[queue, position]
    for k in range(added):
        rows.group[queue, at + k] = rows.scratch[scratch, k]
    rows.length[queue] = length + by


@compiled_inline
def exchange(terms: Terms, rows: Rows, a: int, at: int, count: int, b: int, there: int, others: int) -> None:
    """Exchange *count* groups of row *a* at *at* with *others* of row *b* at *there*."""
    for k in range(count):
        rows.scratch[0, k] = rows.group[a, at + k]
    for k in range(others):
        rows.scratch[1, k] = rows.group[b, there + k]
    splice(rows, a, at, count, 1, others)
    splice(rows, b, there, others, 0, count)
    refresh(terms, rows, a, at)
    refresh(terms, rows, b, there)


@compiled_inline
def rotate(terms: Terms, rows: Rows, queue: int, at: int, count: int, there: int, others: int) -> None:
    """Apply the move that `rotated` prices."""
    for k in range(at, there + others):
        rows.scratch[0, k - at] = rows.group[queue, k]
    for k in range(others):
        rows.group[queue, at + k] = rows.scratch[0, there - at + k]
    for k in range(there - at - count):
        rows.group[queue, at + others + k] = rows.scratch[0, count + k]
    for k in range(count):
        rows.group[queue, there + others - count + k] = rows.scratch[0, k]
    refresh(terms, rows, queue, at)


@compiled_inline
def keep(rows: Rows, best: Best) -> None:
    """Save the current order as the best."""
    for queue in range(rows.length.size):
        if best.changed[queue]:
            best.changed[queue] = 0
            best.length[queue] = rows.length[queue]
            for position in range(rows.length[queue]):
                best.group[queue, position] = rows.group[queue, position]
    best.cost[2], best.cost[3] = best.cost[0], best.cost[1]


@compiled_without_gil
def anneal(
    terms: Terms, rows: Rows, best: Best, random: NDArray[np.uint64], moves: int, hot: float, cold: float
) -> None:
    """Try *moves* moves while the temperature falls from *hot* to *cold* (in units of cost)."""
    queues, width, temperature = rows.length.size, rows.group.shape[1], hot
    cooling = math.exp(math.log(cold / hot) * COOLING_STEP / max(moves, 1))
    for move in range(moves):
        if move % COOLING_STEP == 0 and move > 0:
            temperature *= cooling
        group, wanted = terms.movable[0], draw(random) < 0.5
        for _ in range(LATE_DRAWS):
            group = terms.movable[int(draw(random) * terms.movable.size)]
            queue, position = rows.place[group, 0], rows.place[group, 1]
            if not wanted or (queue >= 0 and rows.cost[queue, position + 1] > rows.cost[queue, position]):
                break
        kind, most = draw(random), -temperature * math.log1p(-draw(random))
        a, at, count, others = rows.place[group, 0], rows.place[group, 1], 1, 1
        if a < 0:
            continue  # no queue could take it
        if kind < PAIR:
            b, there = a, int(draw(random) * rows.length[a])
        elif kind >= TAILS:
            b, others = int(draw(random) * queues), 0
            there = rows.length[b]
            if draw(random) < 0.5:
                count = run_length(terms, rows, a, at, LONGEST_RUN)
        else:
            if draw(random) < SAME_MODEL:  # prefer one that is due at a similar time
                model, far = terms.model[group], draw(random)
                first, end, rank = terms.first[model], terms.first[model + 1], terms.rank[group]
                away = 1 + int(far * far * far * far * (end - first))
                other_rank = rank + away if draw(random) < 0.5 else rank - away
                if other_rank < first or other_rank >= end:
                    other_rank = 2 * rank - other_rank
                if other_rank < first or other_rank >= end:
                    continue
                other = terms.movable[other_rank]
            else:
                other = terms.movable[int(draw(random) * terms.movable.size)]
            b, there = rows.place[other, 0], rows.place[other, 1]
            if b < 0 or other == group:
                continue
            if kind < RELOCATE:
                others = 0
                if draw(random) < 0.25:
                    count = run_length(terms, rows, a, at, 1 + int(draw(random) * LONGEST_RUN))
                if draw(random) < 0.5:
                    there += 1
            elif kind < RUNS:
                count = run_length(terms, rows, a, at, 1 + int(draw(random) * LONGEST_RUN))
                others = run_length(terms, rows, b, there, 1 + int(draw(random) * LONGEST_RUN))
            else:
                if draw(random) < 0.5:
                    there += 1
                count, others = rows.length[a] - at, rows.length[b] - there
        if a != b:
            if rows.length[a] - count + others > width or rows.length[b] - others + count > width:
                continue
            before = rows.total[a] + rows.total[b]
            one = replaced(terms, rows, a, at, count, b, there, others, before + most)
            if not one <= before + most:
                continue
            cost = one + replaced(terms, rows, b, there, others, a, at, count, before + most - one) - before
            if not cost <= most:
                continue
            best.cost[0] -= rows.cost[a, rows.length[a]] + rows.cost[b, rows.length[b]]
            exchange(terms, rows, a, at, count, b, there, others)
            best.cost[0] += rows.cost[a, rows.length[a]] + rows.cost[b, rows.length[b]]
        else:
            if others == 0:  # a run moves: it changes places with the groups in between
                if there > at + count:
                    others, there = there - at - count, at + count
                elif there < at:
                    at, count, there, others = there, at - there, at, count
                else:
                    continue
            elif there < at:
                at, count, there, others = there, others, at, count
            if there < at + count:
                continue
            cost = rotated(terms, rows, a, at, count, there, others, rows.total[a] + most) - rows.total[a]
            if not cost <= most:
                continue
            best.cost[0] -= rows.cost[a, rows.length[a]]
            rotate(terms, rows, a, at, count, there, others)
            best.cost[0] += rows.cost[a, rows.length[a]]
        best.changed[a] = best.changed[b] = 1
        best.cost[1] += cost
        gained = best.cost[0] - best.cost[2]
        if gained < -1e-6 or (gained < 1e-6 and best.cost[1] < best.cost[3] - 1e-6):
            keep(rows, best)


@compiled
def by_due_time(terms: Terms, rows: Rows, ranked: Ints, first: Ints, most: float, tries: int) -> None:
    """Swap neighbours of one model if the later one is due first, for at most *most* of cost in total.

    *ranked* has the groups by model, then start; *first* (M + 1,) is where each model starts there. Orders that keep
    the same groups in time cost the same; without this pass the first to arrive might wait longest.
    """
    for model in range(first.size - 1):
        at = first[model]
        while at < first[model + 1] - 1 and tries > 0:
            before, after = ranked[at], ranked[at + 1]
            at += 1
            if terms.due[before] <= terms.due[after]:
                continue
            tries -= 1
            a, here, b, there = rows.place[before, 0], rows.place[before, 1], rows.place[after, 0], rows.place[after, 1]
            if a == b:
                here, there = min(here, there), max(here, there)
                cost = rotated(terms, rows, a, here, 1, there, 1, np.inf) - rows.total[a]
            else:
                cost = replaced(terms, rows, a, here, 1, b, there, 1, np.inf) - rows.total[a]
                cost += replaced(terms, rows, b, there, 1, a, here, 1, np.inf) - rows.total[b]
            if not cost <= most:
                continue
            most -= max(cost, 0.0)
            if a == b:
                rotate(terms, rows, a, here, 1, there, 1)
            else:
                exchange(terms, rows, a, here, 1, b, there, 1)
            ranked[at - 1], ranked[at] = after, before
            at = max(at - 2, first[model])
