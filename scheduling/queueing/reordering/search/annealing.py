"""Simulated annealing of an order: runs of groups change places within a queue and between queues.

A move is drawn with the bound it must keep to (Metropolis with the random number drawn first), so that most moves are
rejected by what is kept for each position, without a walk along the queue. Deterministic for a seed and a number of moves.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_inline, compiled_without_gil, index
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.search.moves import (
    exchange,
    price_exchange,
    price_removal,
    price_rotation,
    price_swap,
    rotate,
    swap,
)
from scheduling.queueing.reordering.search.scanning import (
    MOST_LOOKED_AT,
    NONE,
    OFFSETS,
    PAID,
    ZERO,
    Lanes,
    scan_places,
    scan_swaps,
    spread,
)
from scheduling.queueing.reordering.search.sequences import Sequences, Terms
from scheduling.struct_of_arrays import struct_of_arrays

LONGEST_RUN = 8
"""Groups in a run that a move takes at most, but in tails."""
SAME_MODEL = 0.9
"""Share of moves whose other group is of the same model."""
PATIENCE = -np.log1p(-(np.arange(1024) + 0.5) / 1024)
"""What a move may cost in temperatures, one of these as likely as another: exponentially distributed (Metropolis)."""
LOOKED_AT = 32
"""Groups to each side that a scan looks at where it does not look at all of the model: those whose due times are nearest."""
LATE_DRAWS = 16
"""Groups that are drawn at the most until one is late, where one that is late is wanted."""
COOLING_STEP = 128
"""Moves at one temperature."""
MODEL_STEP = 512
"""Moves in a row that begin with a group of one model, where there are more groups than these: what they read stays in the
processor's first cache then."""


@struct_of_arrays
class Mix(NamedTuple):
    """How often which move is tried."""

    kinds: Floats
    """(7,): cumulative shares of the best swap of many, the best place of many, exchange of two groups; relocate, exchange
    of runs, of tails; append. The first two are scans."""
    late_swapped: float = 0.0
    """Share of the best swaps for which a group that is late is looked for; the others are of any group."""
    late_placed: float = 0.0
    """The same of the best places."""
    all_looked_at: float = 0.3
    """Share of scans that look at all groups of the model."""
    same_queue: float = 0.9
    """Share of exchanges of two groups that are in one queue; the others are of any two."""


MIX = Mix(np.cumsum([0.23, 0.05, 0.58, 0.02, 0.03, 0.07, 0.02]), all_looked_at=0.4, same_queue=0.95)
"""Chosen on the benchmark's seeds 0 to 7 by what moves gain in the time that they take."""
MIX_OF_WARM = Mix(np.cumsum([0.2, 0.08, 0.56, 0.03, 0.04, 0.06, 0.03]), 0.45, 0.5, 0.4, 0.97)
"""Where an order is there that was searched for: runs and tails have their places, and who is late is looked for first."""
MIX_OF_FEW = Mix(np.cumsum([0.04, 0.03, 0.15, 0.1, 0.35, 0.31, 0.02]))
"""Where there are few groups: scans have little to look at, and most of the cost may be swaps of models."""


@struct_of_arrays
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


@compiled_without_gil
def anneal(
    terms: Terms,
    state: Sequences,
    lanes: Lanes,
    best: Best,
    mix: Mix,
    random: NDArray[np.uint64],
    moves: int,
    hot: float,
    cold: float,
) -> int:
    """Try *moves* moves while the temperature falls from *hot* to *cold* (units of cost); moves made."""
    queues, width = state.length.size, state.row.shape[1] - 1
    types, made, base, drawn_from = terms.service.shape[0], 0, 0, terms.movable.size
    shares, temperature = mix.kinds, hot
    cooling = math.exp(math.log(cold / hot) * COOLING_STEP / max(moves, 1))
    for move in range(moves):
        if move % COOLING_STEP == 0 and move > 0:
            temperature *= cooling
        if move % MODEL_STEP == 0 and terms.movable.size > MODEL_STEP:
            model = terms.model[terms.movable[below(draw(random), terms.movable.size)]]
            base, drawn_from = terms.first[model], terms.first[model + 1] - terms.first[model]
        bits = draw(random)
        group = terms.movable[base + below(bits, drawn_from)]
        kind, most = part(bits, 16), temperature * PATIENCE[bits & np.uint64(PATIENCE.size - 1)]
        bits = draw(random)
        if kind < shares[1] and part(bits, 16) < (mix.late_swapped if kind < shares[0] else mix.late_placed):
            for _ in range(LATE_DRAWS):
                if lanes.now[PAID, terms.rank[group]] > ZERO:
                    break
                group = terms.movable[base + below(draw(random), drawn_from)]
        place = state.place[group]
        if place.queue < 0:
            continue  # no queue could take it
        a, at = index(place.queue), index(place.position)
        count, others = 1, 1
        if kind < shares[1]:
            model, rank = terms.model[group], terms.rank[group]
            first, end = terms.first[model], terms.first[model + 1]
            reach = MOST_LOOKED_AT // 2 if part(bits, 0) < mix.all_looked_at else LOOKED_AT
            first, end = max(first, rank - reach), min(end, rank + reach)
            kinds, drawn = (0, types - 1), below(bits, OFFSETS)
            if types > 2:
                kinds = (terms.kind[a], np.int64(bits & np.uint64(0xFFFF)) % types)
            if kind < shares[0]:
                chosen = scan_swaps(terms, lanes, rank, first, end, kinds, temperature, drawn)
            else:
                removed = price_removal(terms, state, a, at)
                if removed == np.inf:
                    continue
                chosen = scan_places(terms, lanes, rank, removed, first, end, kinds, temperature, drawn)
            if chosen == NONE:
                continue
            chosen &= MOST_LOOKED_AT - 1
            most = temperature * lanes.patience[drawn + chosen]
            place = state.place[terms.movable[first + chosen]]
            b, there = index(place.queue), index(place.position)
            if kind < shares[0]:
                cost, balance = price_swap(terms, state, a, at, b, there, most)
                if cost == np.inf:
                    continue
                swap(terms, state, a, at, b, there)
                count = 0  # done
            else:
                there, others = there + 1, 0
        elif kind >= shares[5]:
            b = below(bits, queues)
            if terms.group[terms.kind[b], group].service == np.inf:
                continue
            there, others = state.length[b], 0
            if flag(bits, 16):
                count = run_length(terms, state, a, at, LONGEST_RUN)
            if a == b and at + count == there:
                continue
        elif kind < shares[2] and part(bits, 0) < mix.same_queue:
            b, there = a, below(bits, state.length[a])
        else:
            model = terms.model[group]
            if kind >= shares[2] and part(bits, 0) < SAME_MODEL:
                first, end, rank = terms.first[model], terms.first[model + 1], terms.rank[group]
                far = part(bits, 32)
                far *= far
                far = 1 + int(far * far * (end - first))
                other_rank = rank + far if flag(bits, 16) else rank - far
                if other_rank < first or other_rank >= end:
                    other_rank = 2 * rank - other_rank  # as far to the other side
                    if other_rank < first or other_rank >= end:
                        continue
                other = terms.movable[other_rank]
            else:
                other = terms.movable[below(bits, terms.movable.size)]
                if other == group:
                    continue
            place = state.place[other]
            if place.queue < 0:
                continue
            b, there = index(place.queue), index(place.position)
            if kind < shares[2]:
                pass
            elif kind < shares[3]:
                others = 0
                if bits >> np.uint64(17) & np.uint64(3) == np.uint64(0):
                    count = run_length(terms, state, a, at, run_wanted(bits, 20))
                if flag(bits, 19):
                    there += 1
            elif kind >= shares[4]:
                if a == b:
                    continue
                if flag(bits, 19):
                    there += 1
                count, others = state.length[a] - at, state.length[b] - there
            else:
                count = run_length(terms, state, a, at, run_wanted(bits, 20))
                others = run_length(terms, state, b, there, run_wanted(bits, 23))
        if count == 0:
            pass
        elif a != b:
            if state.length[a] - count + others > width or state.length[b] - others + count > width:
                continue
            cost, balance = price_exchange(terms, state, a, at, count, b, there, others, most)
            if cost == np.inf:
                continue
            exchange(terms, state, a, at, count, b, there, others)
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
        spread(terms, state, lanes, a)
        if a != b:
            spread(terms, state, lanes, b)
        best.changed[a] = best.changed[b] = 1
        best.cost[0] += cost
        best.cost[1] += balance
        made += 1
        gained = best.cost[0] - best.cost[2]
        if gained < -1e-6 or (gained < 1e-6 and best.cost[1] < best.cost[3] - 1e-6):
            keep(state, best)
    return made
