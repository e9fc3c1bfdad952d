"""Queues as the search reads and changes them: a row of groups for each, with its time and cost at each position.

The objective is the sum over groups of n (max(0, L) + kappa 1(L > 0)), where L is the lateness of the first token of the
last request. A row's cost is that of its groups plus a small price of the square of its end: where nothing is late, fewer
swaps and balanced queues win.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.queueing.reordering.problem import Floats, Ints, Order, Problem
from scheduling.struct_of_arrays import struct_of_arrays

BALANCE = 0.05
"""Price of a late end where nothing is late, as a share of the mean requests of a group."""


@struct_of_arrays
class Terms(NamedTuple):
    """A problem as kernels read it; fixed groups are not in `movable`."""

    weight: Floats
    """(N,)"""
    model: Ints
    """(N,)"""
    service: Floats
    """(T, N)"""
    offset: Floats
    """(T, N): own_s - due_s, which plus the start is the lateness; minus infinity without a deadline."""
    change: Floats
    """(T, M + 1, M): as `Problem.change_s`."""
    kind: Ints
    """(Q,): type of the queue."""
    free: Floats
    """(Q,)"""
    loaded: Ints
    """(Q,)"""
    due: Floats
    """(N,)"""
    movable: Ints
    """(movable groups,): by model, then deadline."""
    first: Ints
    """(M + 1,): start of each model in `movable`."""
    rank: Ints
    """(N,): position in `movable`, -1 for none."""
    kappa: Floats
    """(1,): seconds of lateness added for any late request."""
    balance: Floats
    """(1,): price of the square of a queue's end."""


@struct_of_arrays
class Rows(NamedTuple):
    """An order, in rows of one width; `length` is the used part of each."""

    length: Ints
    """(Q,)"""
    group: Ints
    """(Q, width)"""
    ready: Floats
    """(Q, width + 1): when the queue has served all groups before the position."""
    cost: Floats
    """(Q, width + 1): of all groups before the position."""
    total: Floats
    """(Q,): cost of the row including its end."""
    place: Ints
    """(N, 2): queue and position of each group; queue -1 for none."""
    scratch: Ints
    """(2, width)"""


def terms_of(problem: Problem, kappa_s: float, free_s: Floats, loaded: Ints, span_s: float) -> Terms:
    """Return *problem* for kernels; *free_s* (Q,) and *loaded* (Q,) are those of queues after their fixed groups.

    Movable groups are not fixed, and some queue can serve them. *span_s* is about the time that the fleet
    needs for all groups.
    """
    queue_type, held = problem.queue_type, loaded >= 0
    able = np.zeros(problem.swap_s.shape, bool)  # whether a queue of the type holds or may load the model
    able[queue_type] = np.isfinite(problem.swap_s[queue_type])
    able[queue_type[held], loaded[held]] = True
    can = (np.isfinite(problem.service_s) & able[:, problem.model].T).any(axis=1)
    movable = (problem.fixed < 0) & can
    order = np.lexsort((problem.due_s, problem.model))
    order = order[movable[order]]
    rank = np.full(problem.requests.size, -1, np.int64)
    rank[order] = np.arange(order.size)
    with np.errstate(invalid="ignore"):
        offset = np.where(np.isfinite(problem.service_s), problem.own_s - problem.due_s[:, None], np.inf)
    mean_requests = float(problem.requests.mean()) if problem.requests.size else 1.0
    return Terms(
        weight=problem.requests.astype(np.float64),
        model=problem.model,
        service=np.ascontiguousarray(problem.service_s.T),
        offset=np.ascontiguousarray(offset.T),
        change=problem.change_s(),
        kind=problem.queue_type,
        free=np.array(free_s, np.float64),
        loaded=np.array(loaded, np.int64),
        due=problem.due_s,
        movable=order.astype(np.int64),
        first=np.searchsorted(problem.model[order], np.arange(problem.swap_s.shape[1] + 1)).astype(np.int64),
        rank=rank,
        kappa=np.array([kappa_s]),
        balance=np.array([BALANCE * mean_requests / max(1e-9, span_s)]),
    )


def rows_of(terms: Terms, order: Order, new: Ints | None = None) -> tuple[Rows, float]:
    """Return *order* in rows with room to grow, with *new* groups inserted, and its cost."""
    n, queues, added = terms.weight.size, terms.kind.size, 0 if new is None else new.size
    longest = int(np.diff(order.first).max(initial=0))
    width = max(1, min(n, 2 * longest + added + 4 * n // queues + 64))
    rows = Rows(
        length=np.zeros(queues, np.int64),
        group=np.zeros((queues, width), np.int64),
        ready=np.zeros((queues, width + 1)),
        cost=np.zeros((queues, width + 1)),
        total=np.zeros(queues),
        place=np.full((n, 2), -1, np.int64),
        scratch=np.zeros((2, width), np.int64),
    )
    load(terms, rows, order.first, order.groups)
    if new is not None and new.size:
        insert(terms, rows, new)
    return rows, float(rows.total.sum())


def order_of(length: Ints, group: Ints) -> Order:
    """Return the order in rows."""
    inside = np.arange(group.shape[1]) < length[:, None]
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(length)]), group[inside])


@compiled_inline
def serve(
    terms: Terms,
    rows: Rows,
    kind: int,
    row: int,
    first: int,
    end: int,
    time_s: float,
    model: int,
    cost: float,
    most: float,
) -> tuple[float, int, float]:
    """Serve positions *first* to *end* - 1 of *row* by a queue of type *kind*; return (end, model loaded then, cost).

    The end is infinite if the queue cannot serve them, or the cost exceeds *most*.
    """
    kappa = terms.kappa[0]
    for position in range(first, end):
        group = rows.group[row, position]
        wanted = terms.model[group]
        time_s += terms.change[kind, model + 1, wanted]
        late_s = time_s + terms.offset[kind, group]
        if late_s > 0.0:
            cost += terms.weight[group] * (late_s + kappa)
            if cost > most:
                return np.inf, wanted, np.inf
        time_s += terms.service[kind, group]
        model = wanted
    return time_s, model, cost


@compiled_inline
def loaded_at(terms: Terms, rows: Rows, queue: int, at: int) -> int:
    """Return the model that is loaded when the queue has served all groups before position *at*."""
    return int(terms.model[rows.group[queue, at - 1]] if at > 0 else terms.loaded[queue])


@compiled_inline
def refresh(terms: Terms, rows: Rows, queue: int, at: int) -> None:
    """Recompute times, costs and places of the row *queue*, whose groups from position *at* on are new."""
    kind = terms.kind[queue]
    if at == 0:
        rows.ready[queue, 0], rows.cost[queue, 0] = terms.free[queue], 0.0
    model = loaded_at(terms, rows, queue, at)
    time_s, cost = rows.ready[queue, at], rows.cost[queue, at]
    for position in range(at, rows.length[queue]):
        group = rows.group[queue, position]
        rows.place[group, 0], rows.place[group, 1] = queue, position
        time_s, model, cost = serve(terms, rows, kind, queue, position, position + 1, time_s, model, cost, np.inf)
        rows.ready[queue, position + 1], rows.cost[queue, position + 1] = time_s, cost
    rows.total[queue] = cost + terms.balance[0] * time_s * time_s


@compiled
def load(terms: Terms, rows: Rows, first: Ints, groups: Ints) -> None:
    """Write an order into *rows*, which must be wide enough."""
    for queue in range(rows.length.size):
        rows.length[queue] = first[queue + 1] - first[queue]
        for position in range(rows.length[queue]):
            rows.group[queue, position] = groups[first[queue] + position]
        refresh(terms, rows, queue, 0)


@compiled
def insert(terms: Terms, rows: Rows, groups: Ints) -> int:
    """Insert each of *groups* where it adds the least cost; return the number inserted. A full row takes none."""
    width, placed = rows.group.shape[1], 0
    for k in range(groups.size):
        group = groups[k]
        model, best, best_at, least = terms.model[group], -1, 0, np.inf
        for queue in range(rows.length.size):
            kind, length, total = terms.kind[queue], rows.length[queue], rows.total[queue]
            if terms.service[kind, group] == np.inf or length == width:
                continue
            for at in range(length, -1, -1):
                before = loaded_at(terms, rows, queue, at)
                start_s = rows.ready[queue, at] + terms.change[kind, before + 1, model]
                late_s, cost = start_s + terms.offset[kind, group], rows.cost[queue, at]
                if late_s > 0.0:
                    cost += terms.weight[group] * (late_s + terms.kappa[0])
                if not start_s < np.inf or cost - total >= least:
                    continue
                end_s, _, cost = serve(
                    terms,
                    rows,
                    kind,
                    queue,
                    at,
                    length,
                    start_s + terms.service[kind, group],
                    model,
                    cost,
                    least + total,
                )
                price = cost + terms.balance[0] * end_s * end_s - total
                if price < least:
                    best, best_at, least = queue, at, price
        if best < 0:
            continue
        for position in range(rows.length[best], best_at, -1):
            rows.group[best, position] = rows.group[best, position - 1]
        rows.group[best, best_at] = group
        rows.length[best] += 1
        refresh(terms, rows, best, best_at)
        placed += 1
    return placed


def kept(terms: Terms, order: Order) -> Order:
    """Return the movable groups of *order* that their queues can serve there, each once. *order* may name any groups."""
    first, groups = np.clip(order.first, 0, order.groups.size), np.ascontiguousarray(order.groups)
    its = Order(np.zeros(terms.kind.size + 1, np.int64), np.empty(groups.size, np.int64))
    keep(terms, np.maximum.accumulate(first), groups, its.first, its.groups, terms.rank >= 0)
    return Order(its.first, its.groups[: its.first[-1]])


@compiled
def keep(
    terms: Terms, first: Ints, groups: Ints, kept_first: Ints, kept_groups: Ints, lacking: NDArray[np.bool_]
) -> None:
    """Write the groups that `kept` keeps of the order *first*, *groups* into *kept_first* and *kept_groups*."""
    count = 0
    for queue in range(terms.kind.size):
        kind, model = terms.kind[queue], terms.loaded[queue]
        for at in range(first[queue], first[queue + 1]) if queue + 1 < first.size else range(0):
            group = groups[at]
            if group < 0 or group >= lacking.size or not lacking[group]:
                continue
            if terms.change[kind, model + 1, terms.model[group]] + terms.service[kind, group] < np.inf:
                kept_groups[count], lacking[group], model = group, False, terms.model[group]
                count += 1
        kept_first[queue + 1] = count
