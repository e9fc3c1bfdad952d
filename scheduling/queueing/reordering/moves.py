"""Changes of an order: two runs of groups change places, in two queues or in one; a run may be empty."""

import numpy as np

from scheduling.compiled import compiled_inline
from scheduling.queueing.reordering.sequences import (
    Sequences,
    Terms,
    least_shift_cost,
    refresh,
    shift_cost,
    walk,
)


@compiled_inline
def _replaced(
    terms: Terms, state: Sequences, queue: int, at: int, removed: int, other: int, there: int, added: int
) -> tuple[float, float, float]:
    """*added* groups of row *other* from *there* on in place of *removed* ones of row *queue* at *at*.

    (cost of what comes less that of what goes, shift of the rest of the row, its new end).
    """
    kind, rest = terms.kind[queue], at + removed
    time_s, model = state.ready[queue, at], state.loaded[queue, at]
    time_s, model, cost = walk(terms, state, kind, other, there, added, time_s, model)
    cost -= state.cost[queue, rest] - state.cost[queue, at]
    if rest == state.length[queue]:
        return cost, 0.0, time_s
    wanted = terms.model[state.group[queue, rest]]
    shift_s = time_s + terms.change[kind, model + 1, wanted] - state.start[queue, rest]
    return cost, shift_s, state.ready[queue, state.length[queue]] + shift_s


@compiled_inline
def price_exchange(
    terms: Terms, state: Sequences, a: int, at: int, count: int, b: int, there: int, others: int, most: float
) -> tuple[float, float]:
    """Change of (cost, balance) if *count* groups of row *a* at *at* change places with *others* of row *b* at *there*.

    Two rows. Infinity when it cannot be done or costs more than *most*.
    """
    cost_a, shift_a, end_a = _replaced(terms, state, a, at, count, b, there, others)
    if not end_a < np.inf:
        return np.inf, np.inf
    cost_b, shift_b, end_b = _replaced(terms, state, b, there, others, a, at, count)
    if not end_b < np.inf:
        return np.inf, np.inf
    old_a, old_b = state.ready[a, state.length[a]], state.ready[b, state.length[b]]
    balance = terms.balance[0] * ((end_a - old_a) * (end_a + old_a) + (end_b - old_b) * (end_b + old_b))
    rest_a, rest_b = at + count, there + others
    cost = cost_a + cost_b
    least_b = least_shift_cost(terms, state, b, rest_b, shift_b)
    if cost + balance + least_b + least_shift_cost(terms, state, a, rest_a, shift_a) > most:
        return np.inf, np.inf
    cost += shift_cost(terms, state, a, rest_a, shift_a)
    if cost + balance + least_b > most:
        return np.inf, np.inf
    cost += shift_cost(terms, state, b, rest_b, shift_b)
    if cost + balance > most:
        return np.inf, np.inf
    return cost, balance


@compiled_inline
def exchange(terms: Terms, state: Sequences, a: int, at: int, count: int, b: int, there: int, others: int) -> None:
    """Do what `price_exchange` prices. The rows must be wide enough."""
    for k in range(count):
        state.scratch[0, k] = state.group[a, at + k]
    for k in range(others):
        state.scratch[1, k] = state.group[b, there + k]
    _splice(state, a, at, count, 1, others)
    _splice(state, b, there, others, 0, count)
    refresh(terms, state, a, at)
    refresh(terms, state, b, there)


@compiled_inline
def _splice(state: Sequences, queue: int, at: int, removed: int, scratch: int, added: int) -> None:
    length, by = state.length[queue], added - removed
    if by > 0:
        for position in range(length - 1, at + removed - 1, -1):
            state.group[queue, position + by] = state.group[queue, position]
    elif by < 0:
        for position in range(at + removed, length):
            state.group[queue, position + by] = state.group[queue, position]
    for k in range(added):
        state.group[queue, at + k] = state.scratch[scratch, k]
    state.length[queue] = length + by


@compiled_inline
def price_rotation(
    terms: Terms, state: Sequences, queue: int, at: int, count: int, there: int, others: int, most: float
) -> tuple[float, float]:
    """The same within one row, *there* being at least *at* + *count*; what lies between them stays between."""
    kind, middle, rest = terms.kind[queue], at + count, there + others
    old_s = state.ready[queue, state.length[queue]]
    time_s, model = state.ready[queue, at], state.loaded[queue, at]
    time_s, model, cost = walk(terms, state, kind, queue, there, others, time_s, model)
    time_s, model, more = walk(terms, state, kind, queue, middle, there - middle, time_s, model)
    time_s, model, last = walk(terms, state, kind, queue, at, count, time_s, model)
    if not time_s < np.inf:
        return np.inf, np.inf
    cost += more + last - (state.cost[queue, rest] - state.cost[queue, at])
    shift_s, end_s = 0.0, time_s
    if rest < state.length[queue]:
        wanted = terms.model[state.group[queue, rest]]
        shift_s = time_s + terms.change[kind, model + 1, wanted] - state.start[queue, rest]
        end_s = old_s + shift_s
        if not end_s < np.inf:
            return np.inf, np.inf
    balance = terms.balance[0] * (end_s - old_s) * (end_s + old_s)
    if cost + balance + least_shift_cost(terms, state, queue, rest, shift_s) > most:
        return np.inf, np.inf
    cost += shift_cost(terms, state, queue, rest, shift_s)
    if cost + balance > most:
        return np.inf, np.inf
    return cost, balance


@compiled_inline
def rotate(terms: Terms, state: Sequences, queue: int, at: int, count: int, there: int, others: int) -> None:
    """Do what `price_rotation` prices."""
    for k in range(at, there + others):
        state.scratch[0, k - at] = state.group[queue, k]
    position = at
    for k in range(others):
        state.group[queue, position] = state.scratch[0, there - at + k]
        position += 1
    for k in range(at + count, there):
        state.group[queue, position] = state.scratch[0, k - at]
        position += 1
    for k in range(count):
        state.group[queue, position] = state.scratch[0, k]
        position += 1
    refresh(terms, state, queue, at)
