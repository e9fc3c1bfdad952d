"""Simulated annealing of an order: runs of groups change places within a queue and between queues.

A move is drawn with the bound it must keep to (Metropolis with the random number drawn first), so that most moves are
rejected by what is kept for each position, without a walk along the queue. Deterministic for a seed and a number of moves.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.queueing.reordering.moves import exchange, price_exchange, price_rotation, rotate
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.sequences import Sequences, Terms

LONGEST_RUN = 8
"""Groups in a run that a move takes at most, but in tails."""
SAME_MODEL = 0.9
"""Share of moves whose other group is of the same model."""
NEAR = 4.0
"""Exponent by which that group's deadline is drawn near."""
MIX = np.cumsum([0.15, 0.55, 0.15, 0.1, 0.05])
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
    return Best(state.length.copy(), state.group.copy(), none, np.array([cost, balance, cost, balance]))


def best_order(best: Best) -> Order:
    inside = np.arange(best.group.shape[1]) < best.length[:, None]
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(best.length)]), best.group[inside])


@compiled_inline
def draw(random: NDArray[np.uint64]) -> float:
    """A number in [0, 1); xorshift64*."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled_inline
def run_length(terms: Terms, state: Sequences, queue: int, at: int, most: int) -> int:
    """Groups of one model from position *at* on, at most *most*."""
    end = min(state.length[queue], at + most)
    position = at + 1
    model = terms.model[state.group[queue, at]]
    while position < end and terms.model[state.group[queue, position]] == model:
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
                best.group[queue, position] = state.group[queue, position]
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
    queues, width = state.group.shape
    movable, made = terms.movable.size, 0
    temperature = hot
    cooling = math.exp(math.log(cold / hot) * COOLING_STEP / max(moves, 1))
    for move in range(moves):
        if move % COOLING_STEP == 0 and move > 0:
            temperature *= cooling
        group = terms.movable[int(draw(random) * movable)]
        a, at = state.queue[group], state.place[group]
        kind = draw(random)
        most = -temperature * math.log(1.0 - draw(random))
        count, others = 1, 1
        if kind >= mix[3]:
            b = int(draw(random) * queues)
            there, others = state.length[b], 0
            count = run_length(terms, state, a, at, LONGEST_RUN)
            if draw(random) < 0.5:
                count = 1
            if a == b and at + count == there:
                continue
        else:
            if draw(random) < SAME_MODEL:
                model = terms.model[group]
                first, end = terms.first[model], terms.first[model + 1]
                far = draw(random) ** NEAR * (end - first)
                other_rank = terms.rank[group] + (int(far) + 1 if draw(random) < 0.5 else -int(far) - 1)
                if other_rank < first or other_rank >= end:
                    continue
            else:
                other_rank = int(draw(random) * movable)
            other = terms.movable[other_rank]
            if other == group:
                continue
            b, there = state.queue[other], state.place[other]
            if kind < mix[0]:
                others = 0
                if draw(random) < 0.25:
                    count = run_length(terms, state, a, at, 1 + int(draw(random) * LONGEST_RUN))
                if draw(random) < 0.5:
                    there += 1
            elif kind >= mix[2]:
                if a == b:
                    continue
                if draw(random) < 0.5:
                    there += 1
                count, others = state.length[a] - at, state.length[b] - there
            elif kind >= mix[1]:
                count = run_length(terms, state, a, at, 1 + int(draw(random) * LONGEST_RUN))
                others = run_length(terms, state, b, there, 1 + int(draw(random) * LONGEST_RUN))
        if a != b:
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
