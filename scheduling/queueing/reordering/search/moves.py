"""Changes of an order: two runs of groups change places, in two queues or in one; a run may be empty."""

import numpy as np

from scheduling.compiled import compiled_inline
from scheduling.queueing.reordering.search.sequences import (
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
    kind, here, rest = terms.kind[queue], state.row[queue, at], state.row[queue, at + removed]
    time_s, model, cost = walk(terms, state, kind, other, there, added, here.ready, here.loaded)
    cost -= rest.cost - here.cost
    if at + removed == state.length[queue]:
        return cost, 0.0, time_s
    shift_s = time_s + terms.change[kind, model + 1, terms.group[kind, rest.group].model] - rest.start
    return cost, shift_s, state.end[queue] + shift_s


@compiled_inline
def price_removal(terms: Terms, state: Sequences, queue: int, at: int) -> float:
    """Change of cost and balance, together, when the group at *at* leaves; infinity when what is behind cannot follow."""
    kind, here, rest = terms.kind[queue], state.row[queue, at], state.row[queue, at + 1]
    cost, end_s = here.cost - rest.cost, state.end[queue]
    if at + 1 == state.length[queue]:
        shift_s = here.ready - end_s
    else:
        shift_s = here.ready + terms.change[kind, here.loaded + 1, terms.group[kind, rest.group].model] - rest.start
        if not shift_s < np.inf:
            return np.inf
        cost += shift_cost(terms, state, queue, at + 1, shift_s)
    return cost + terms.balance[0] * shift_s * (2.0 * end_s + shift_s)  # type: ignore[no-any-return]


@compiled_inline
def _total(
    terms: Terms,
    state: Sequences,
    a: int,
    rest_a: int,
    shift_a: float,
    end_a: float,
    b: int,
    rest_b: int,
    shift_b: float,
    end_b: float,
    cost: float,
    most: float,
) -> tuple[float, float]:
    """(cost, balance) of a change of two rows that costs *cost* but for the shifts of their rests; infinity above *most*.

    A rest is walked only where bounds say too little.
    """
    old_a, old_b = state.end[a], state.end[b]
    balance = terms.balance[0] * ((end_a - old_a) * (end_a + old_a) + (end_b - old_b) * (end_b + old_b))
    most -= balance
    least_b = least_shift_cost(terms, state, b, rest_b, shift_b)
    if cost + least_b + least_shift_cost(terms, state, a, rest_a, shift_a) > most:
        return np.inf, np.inf
    cost += shift_cost(terms, state, a, rest_a, shift_a)
    if cost + least_b > most:
        return np.inf, np.inf
    cost += shift_cost(terms, state, b, rest_b, shift_b)
    if cost > most:
        return np.inf, np.inf
    return cost, balance


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
    return _total(terms, state, a, at + count, shift_a, end_a, b, there + others, shift_b, end_b, cost_a + cost_b, most)


@compiled_inline
def price_swap(terms: Terms, state: Sequences, a: int, at: int, b: int, there: int, most: float) -> tuple[float, float]:
    """`price_exchange` of one group each, both of one model: they begin when the other did, and nothing is swapped anew."""
    kind_a, kind_b, kappa = terms.kind[a], terms.kind[b], terms.kappa[0]
    here_a, here_b = state.row[a, at], state.row[b, there]
    old_a, old_b = terms.group[kind_a, here_a.group], terms.group[kind_b, here_b.group]
    new_a, new_b = terms.group[kind_a, here_b.group], terms.group[kind_b, here_a.group]
    shift_a, shift_b = new_a.service - old_a.service, new_b.service - old_b.service
    if not shift_a + shift_b < np.inf:
        return np.inf, np.inf
    late_a, late_b, cost = here_a.start + new_a.offset, here_b.start + new_b.offset, 0.0
    if late_a > 0.0:
        cost += new_a.weight * (late_a + kappa)
    if late_b > 0.0:
        cost += new_b.weight * (late_b + kappa)
    if here_a.late > 0.0:
        cost -= old_a.weight * (here_a.late + kappa)
    if here_b.late > 0.0:
        cost -= old_b.weight * (here_b.late + kappa)
    end_a, end_b = state.end[a] + shift_a, state.end[b] + shift_b
    return _total(terms, state, a, at + 1, shift_a, end_a, b, there + 1, shift_b, end_b, cost, most)


@compiled_inline
def swap(terms: Terms, state: Sequences, a: int, at: int, b: int, there: int) -> None:
    """Do what `price_swap` prices."""
    here_a, here_b = state.row[a, at], state.row[b, there]
    group = here_a.group
    here_a.group = here_b.group
    here_b.group = group
    refresh(terms, state, a, at)
    refresh(terms, state, b, there)


@compiled_inline
def exchange(terms: Terms, state: Sequences, a: int, at: int, count: int, b: int, there: int, others: int) -> None:
    """Do what `price_exchange` prices. The rows must be wide enough."""
    for k in range(count):
        state.scratch[0, k] = state.row[a, at + k].group
    for k in range(others):
        state.scratch[1, k] = state.row[b, there + k].group
    _splice(state, a, at, count, 1, others)
    _splice(state, b, there, others, 0, count)
    refresh(terms, state, a, at)
    refresh(terms, state, b, there)


@compiled_inline
def _splice(state: Sequences, queue: int, at: int, removed: int, scratch: int, added: int) -> None:
    row, length, by = state.row[queue], state.length[queue], added - removed
    if by > 0:
        for position in range(length - 1, at + removed - 1, -1):
            row[position + by].group = row[position].group
    elif by < 0:
        for position in range(at + removed, length):
            row[position + by].group = row[position].group
    for k in range(added):
        row[at + k].group = state.scratch[scratch, k]
    state.length[queue] = length + by


@compiled_inline
def _price_pair(terms: Terms, state: Sequences, queue: int, at: int, there: int, most: float) -> float:
    """Change of cost if two groups of one model in one row change places: what is between them begins later or sooner, what
    is behind them as before. Infinity when it costs more than *most*."""
    kind, kappa, row = terms.kind[queue], terms.kappa[0], state.row[queue]
    here, later, between = row[at], row[there], row[at + 1]
    one, two = terms.group[kind, here.group], terms.group[kind, later.group]
    shift_s, cost = two.service - one.service, 0.0
    late_1, late_2 = later.start + shift_s + one.offset, here.start + two.offset
    if late_1 > 0.0:
        cost += one.weight * (late_1 + kappa)
    if late_2 > 0.0:
        cost += two.weight * (late_2 + kappa)
    if here.late > 0.0:
        cost -= one.weight * (here.late + kappa)
    if later.late > 0.0:
        cost -= two.weight * (later.late + kappa)
    if cost - (later.cost - between.cost if shift_s < 0.0 else 0.0) > most:
        return np.inf
    if shift_s <= between.rise if shift_s >= 0.0 else -shift_s < between.fall:
        cost += shift_s * (between.late_weight - later.late_weight)
    else:
        for position in range(at + 1, there):
            late = row[position].late
            moved = late + shift_s
            weight = terms.group[kind, row[position].group].weight
            if late > 0.0:
                cost += weight * (-late - kappa if moved <= 0.0 else shift_s)
            elif moved > 0.0:
                cost += weight * (moved + kappa)
    return cost if cost <= most else np.inf


@compiled_inline
def price_rotation(
    terms: Terms, state: Sequences, queue: int, at: int, count: int, there: int, others: int, most: float
) -> tuple[float, float]:
    """The same within one row, *there* being at least *at* + *count*; what lies between them stays between."""
    if (
        count == 1
        and others == 1
        and terms.model[state.row[queue, at].group] == terms.model[state.row[queue, there].group]
    ):
        return _price_pair(terms, state, queue, at, there, most), 0.0
    kind, middle, rest = terms.kind[queue], at + count, there + others
    here, after, old_s = state.row[queue, at], state.row[queue, rest], state.end[queue]
    time_s, model, cost = walk(terms, state, kind, queue, there, others, here.ready, here.loaded)
    time_s, model, more = walk(terms, state, kind, queue, middle, there - middle, time_s, model)
    time_s, model, last = walk(terms, state, kind, queue, at, count, time_s, model)
    if not time_s < np.inf:
        return np.inf, np.inf
    cost += more + last - (after.cost - here.cost)
    shift_s, end_s = 0.0, time_s
    if rest < state.length[queue]:
        shift_s = time_s + terms.change[kind, model + 1, terms.group[kind, after.group].model] - after.start
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
    row = state.row[queue]
    for k in range(at, there + others):
        state.scratch[0, k - at] = row[k].group
    position = at
    for k in range(others):
        row[position].group = state.scratch[0, there - at + k]
        position += 1
    for k in range(at + count, there):
        row[position].group = state.scratch[0, k - at]
        position += 1
    for k in range(count):
        row[position].group = state.scratch[0, k]
        position += 1
    refresh(terms, state, queue, at)
