"""Simulated annealing of an order: runs of groups change places within a queue and between queues.

A move is drawn with the bound it must keep to (Metropolis with the random number drawn first), so that most moves are
rejected by what is kept for each position, without a walk along the queue. Deterministic for a seed and a number of moves.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, index
from scheduling.queueing.reordering.moves import exchange, price_exchange, price_rotation, price_swap, rotate, swap
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.sequences import Sequences, Terms

LONGEST_RUN = 8
"""Groups in a run that a move takes at most, but in tails."""
SAME_MODEL = 0.9
"""Share of moves whose other group is of the same model."""
PATIENCE = -np.log1p(-(np.arange(1024) + 0.5) / 1024)
"""What a move may cost in temperatures, one of these as likely as another: exponentially distributed (Metropolis)."""
MIX = np.cumsum([0.06, 0.8, 0.06, 0.06, 0.02])
"""Of moves: relocate, swap, exchange of runs, exchange of tails, append."""
COOLING_STEP = 128
"""Moves at one temperature."""


class Best(NamedTuple):
    """The best order met, in rows as in `Sequences`."""

    length: Ints
    group: Ints
    changed: Ints
    """(Q,): 1 where the current order differs from it."""
    cost: Floats
    """(4,): cost and balance of the current order, then of the best."""


def allocate_best(state: Sequences, cost: float, balance: float) -> Best:
    """*state* is the best order so far."""
    none = np.zeros(state.length.size, np.int64)
    groups = state.row["group"][:, :-1].astype(np.int64)
    return Best(state.length.copy(), groups, none, np.array([cost, balance, cost, balance]))


def best_order(best: Best) -> Order:
    inside = np.arange(best.group.shape[1]) < best.length[:, None]
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(best.length)]), best.group[inside])


@compiled_inline
def draw(random: NDArray[np.uint64]) -> np.uint64:
    """64 random bits; SplitMix64 (Steele, Lea and Flood 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    x = random[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.uint64 = x ^ (x >> np.uint64(31))
    return mixed


@compiled_inline
def below(bits: np.uint64, limit: int) -> int:
    """A whole number from 0 to *limit* - 1, by the upper half of *bits*."""
    return np.int64(((bits >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))  # type: ignore[return-value]


@compiled_inline
def part(bits: np.uint64, at: int) -> float:
    """A number in [0, 1), by the sixteen of *bits* from the bit *at* on."""
    return float(np.int64((bits >> np.uint64(at)) & np.uint64(0xFFFF))) * (1.0 / 65536.0)


@compiled_inline
def flag(bits: np.uint64, at: int) -> bool:
    return (bits >> np.uint64(at)) & np.uint64(1) == np.uint64(1)  # type: ignore[no-any-return]


@compiled_inline
def run_wanted(bits: np.uint64, at: int) -> int:
    """1 to `LONGEST_RUN`, by the three of *bits* from the bit *at* on."""
    return np.int64((bits >> np.uint64(at)) & np.uint64(LONGEST_RUN - 1)) + 1  # type: ignore[return-value]


@compiled_inline
def run_length(terms: Terms, state: Sequences, queue: int, at: int, most: int) -> int:
    """Groups of one model from position *at* on, at most *most*."""
    end = min(state.length[queue], at + most)
    position = at + 1
    model = terms.model[state.row[queue, at].group]
    while position < end and terms.model[state.row[queue, position].group] == model:
        position += 1
    return position - at


@compiled_inline
def keep(state: Sequences, best: Best) -> None:
    """The current order is the best from now on."""
    for queue in range(state.length.size):
        if best.changed[queue]:
            best.changed[queue] = 0
            best.length[queue] = state.length[queue]
            for position in range(state.length[queue]):
                best.group[queue, position] = state.row[queue, position].group
    best.cost[2], best.cost[3] = best.cost[0], best.cost[1]


@compiled
def anneal(
    terms: Terms,
    state: Sequences,
    best: Best,
    mix: Floats,
    random: NDArray[np.uint64],
    moves: int,
    hot: float,
    cold: float,
) -> int:
    """Try *moves* moves while the temperature falls from *hot* to *cold* (units of cost); moves made."""
    queues, width = state.length.size, state.row.shape[1] - 1
    movable, made = terms.movable.size, 0
    temperature = hot
    cooling = math.exp(math.log(cold / hot) * COOLING_STEP / max(moves, 1))
    for move in range(moves):
        if move % COOLING_STEP == 0 and move > 0:
            temperature *= cooling
        bits = draw(random)
        group = terms.movable[below(bits, movable)]
        kind, most = part(bits, 16), temperature * PATIENCE[bits & np.uint64(PATIENCE.size - 1)]
        bits = draw(random)
        place = state.place[group]
        if place.queue < 0:
            continue  # no queue could take it
        a, at = index(place.queue), index(place.position)
        count, others, alike = 1, 1, False
        if kind >= mix[3]:
            b = below(bits, queues)
            if terms.group[terms.kind[b], group].service == np.inf:
                continue
            there, others = state.length[b], 0
            if flag(bits, 16):
                count = run_length(terms, state, a, at, LONGEST_RUN)
            if a == b and at + count == there:
                continue
        else:
            model = terms.model[group]
            if part(bits, 0) < SAME_MODEL:
                first, end, rank = terms.first[model], terms.first[model + 1], terms.rank[group]
                far = part(bits, 32)
                far *= far
                far = 1 + int(far * far * (end - first))
                other_rank = rank + far if flag(bits, 16) else rank - far
                if other_rank < first or other_rank >= end:
                    other_rank = 2 * rank - other_rank  # as far to the other side
                    if other_rank < first or other_rank >= end:
                        continue
                other, alike = terms.movable[other_rank], True
            else:
                other = terms.movable[below(bits, movable)]
                if other == group:
                    continue
            place = state.place[other]
            if place.queue < 0:
                continue
            b, there = index(place.queue), index(place.position)
            if kind < mix[0]:
                others = 0
                if bits >> np.uint64(17) & np.uint64(3) == np.uint64(0):
                    count = run_length(terms, state, a, at, run_wanted(bits, 20))
                if flag(bits, 19):
                    there += 1
            elif kind >= mix[2]:
                if a == b:
                    continue
                if flag(bits, 19):
                    there += 1
                count, others = state.length[a] - at, state.length[b] - there
            elif kind >= mix[1]:
                count = run_length(terms, state, a, at, run_wanted(bits, 20))
                others = run_length(terms, state, b, there, run_wanted(bits, 23))
            elif alike and a != b:
                cost, balance = price_swap(terms, state, a, at, b, there, most)
                if cost == np.inf:
                    continue
                swap(terms, state, a, at, b, there)
                count = 0  # done
                best.changed[b] = 1
        if count == 0:
            pass
        elif a != b:
            if state.length[a] - count + others > width or state.length[b] - others + count > width:
                continue
            cost, balance = price_exchange(terms, state, a, at, count, b, there, others, most)
            if cost == np.inf:
                continue
            exchange(terms, state, a, at, count, b, there, others)
            best.changed[b] = 1
        else:
            if others == 0:  # a run moves: it changes places with what lies between it and where it goes
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
            cost, balance = price_rotation(terms, state, a, at, count, there, others, most)
            if cost == np.inf:
                continue
            rotate(terms, state, a, at, count, there, others)
        best.changed[a] = 1
        best.cost[0] += cost
        best.cost[1] += balance
        made += 1
        gained = best.cost[0] - best.cost[2]
        if gained < -1e-6 or (gained < 1e-6 and best.cost[1] < best.cost[3] - 1e-6):
            keep(state, best)
    return made
