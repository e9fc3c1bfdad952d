"""The queues as kernels read and change them: a row of groups each, with what is needed to price a change without a walk.

The objective is the sum over groups of n (max(0, L) + kappa 1(L > 0)), L being how late the first token of the last request
is. A shift of all groups from a position on by D seconds is priced by three numbers kept for each position: while D makes no
group late nor in time, the price is D times the weight that is late; else that product still bounds it from below.
"""

from typing import NamedTuple

import numpy as np

from scheduling.compiled import compiled, compiled_inline
from scheduling.queueing.reordering.problem import Floats, Ints, Order, Problem


class Terms(NamedTuple):
    """A problem as kernels read it; groups that are fixed or held are already served and not among `movable`."""

    weight: Floats
    """(N,)"""
    model: Ints
    """(N,)"""
    service: Floats
    """(T, N)"""
    offset: Floats
    """(T, N): own_s - due_s, which added to the start is the lateness; minus infinity without a deadline."""
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
    hold: Floats
    """(N,)"""
    movable: Ints
    """(movable groups,): by model, then deadline."""
    first: Ints
    """(M + 1,): of each model in `movable`."""
    rank: Ints
    """(N,): position in `movable`, -1 for none."""
    kappa: Floats
    """(1,): seconds of lateness that being late at all counts as."""
    balance: Floats
    """(1,): price of the square of a queue's end: where nothing is late, few swaps and even queues are better."""


class Sequences(NamedTuple):
    """An order, in rows of one length; `length` says how much of each counts."""

    length: Ints
    """(Q,)"""
    group: Ints
    """(Q, width)"""
    ready: Floats
    """(Q, width + 1): when the queue is done with all before; the entry after the last is when it is empty."""
    loaded: Ints
    """(Q, width + 1): the model that is loaded then, -1 for none."""
    start: Floats
    """(Q, width): seconds from now when the group begins."""
    late: Floats
    """(Q, width): how late it is; negative when in time."""
    cost: Floats
    """(Q, width + 1): of all groups before."""
    late_weight: Floats
    """(Q, width + 1): of this group and all after it."""
    rise: Floats
    """(Q, width + 1): by how much all from here on may be put off until another one is late."""
    fall: Floats
    """(Q, width + 1): by how much they may be brought forward until one of them is in time."""
    queue: Ints
    """(N,): where each group is, -1 for nowhere."""
    place: Ints
    """(N,)"""
    scratch: Ints
    """(2, width)"""


def terms_of(problem: Problem, kappa_s: float, free_s: Floats, loaded: Ints) -> Terms:
    """*problem* for kernels; *free_s* (Q,) and *loaded* (Q,) say how queues begin once fixed groups are served.

    Movable are groups that are neither fixed nor held, and that some queue can serve.
    """
    queue_type = problem.queue_type
    can = np.isfinite(problem.service_s[:, queue_type]) & (
        np.isfinite(problem.swap_s[queue_type][:, problem.model].T) | (loaded[None, :] == problem.model[:, None])
    )
    movable = (problem.fixed < 0) & (problem.hold_s <= 0.0) & can.any(axis=1)
    order = np.lexsort((problem.due_s, problem.model))
    order = order[movable[order]]
    models = problem.swap_s.shape[1]
    rank = np.full(problem.requests.size, -1, np.int64)
    rank[order] = np.arange(order.size)
    with np.errstate(invalid="ignore"):
        offset = np.where(np.isfinite(problem.service_s), problem.own_s - problem.due_s[:, None], np.inf)
    span_s = max(1e-9, float(free_s.mean()) + _work_s(problem) / problem.queue_type.size)
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
        hold=problem.hold_s,
        movable=order.astype(np.int64),
        first=np.searchsorted(problem.model[order], np.arange(models + 1)).astype(np.int64),
        rank=rank,
        kappa=np.array([kappa_s]),
        balance=np.array([0.05 * float(problem.requests.mean() if problem.requests.size else 1.0) / span_s]),
    )


def _work_s(problem: Problem) -> float:
    """Seconds of service of all groups, each where it is served fastest."""
    fastest = problem.service_s[:, np.unique(problem.queue_type)].min(axis=1, initial=np.inf)
    return float(fastest[np.isfinite(fastest)].sum())


def allocate_sequences(queues: int, groups: int, width: int) -> Sequences:
    """Empty queues of *groups* groups, at most *width* each."""
    return Sequences(
        length=np.zeros(queues, np.int64),
        group=np.zeros((queues, width), np.int64),
        ready=np.zeros((queues, width + 1)),
        loaded=np.zeros((queues, width + 1), np.int64),
        start=np.zeros((queues, width)),
        late=np.zeros((queues, width)),
        cost=np.zeros((queues, width + 1)),
        late_weight=np.zeros((queues, width + 1)),
        rise=np.zeros((queues, width + 1)),
        fall=np.zeros((queues, width + 1)),
        queue=np.full(groups, -1, np.int64),
        place=np.full(groups, -1, np.int64),
        scratch=np.zeros((2, width), np.int64),
    )


def ends_s(state: Sequences) -> Floats:
    """(Q,): when each queue is empty."""
    return np.take_along_axis(state.ready, state.length[:, None], axis=1)[:, 0]


def order_of(state: Sequences) -> Order:
    inside = np.arange(state.group.shape[1]) < state.length[:, None]
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(state.length)]), state.group[inside])


@compiled_inline
def refresh(terms: Terms, state: Sequences, queue: int, at: int) -> None:
    """Write all that is kept for the row *queue*, whose groups from position *at* on are new."""
    kind, length, kappa = terms.kind[queue], state.length[queue], terms.kappa[0]
    if at == 0:
        state.ready[queue, 0], state.loaded[queue, 0], state.cost[queue, 0] = (
            terms.free[queue],
            terms.loaded[queue],
            0.0,
        )
    time_s, model, cost = state.ready[queue, at], state.loaded[queue, at], state.cost[queue, at]
    for position in range(at, length):
        group = state.group[queue, position]
        time_s = max(time_s + terms.change[kind, model + 1, terms.model[group]], terms.hold[group])
        model = terms.model[group]
        late = time_s + terms.offset[kind, group]
        state.start[queue, position], state.late[queue, position] = time_s, late
        state.queue[group], state.place[group] = queue, position
        time_s += terms.service[kind, group]
        if late > 0.0:
            cost += terms.weight[group] * (late + kappa)
        state.ready[queue, position + 1], state.loaded[queue, position + 1] = time_s, model
        state.cost[queue, position + 1] = cost
    weight, rise, fall = 0.0, np.inf, np.inf
    state.late_weight[queue, length] = weight
    state.rise[queue, length], state.fall[queue, length] = rise, fall
    for position in range(length - 1, -1, -1):
        late = state.late[queue, position]
        if late > 0.0:
            weight += terms.weight[state.group[queue, position]]
            fall = min(fall, late)
        else:
            rise = min(rise, -late)
        state.late_weight[queue, position] = weight
        state.rise[queue, position], state.fall[queue, position] = rise, fall


@compiled_inline
def walk(
    terms: Terms, state: Sequences, kind: int, queue: int, first: int, count: int, time_s: float, model: int
) -> tuple[float, int, float]:
    """Serve *count* groups of the row *queue* from *first* on, by a queue of type *kind*: (end, model loaded then, cost)."""
    cost, kappa = 0.0, terms.kappa[0]
    for position in range(first, first + count):
        group = state.group[queue, position]
        wanted = terms.model[group]
        time_s += terms.change[kind, model + 1, wanted]
        late = time_s + terms.offset[kind, group]
        if late > 0.0:
            cost += terms.weight[group] * (late + kappa)
        time_s += terms.service[kind, group]
        model = wanted
    return time_s, model, cost


@compiled_inline
def least_shift_cost(terms: Terms, state: Sequences, queue: int, at: int, shift_s: float) -> float:
    """A bound from below of what it costs to put off all groups from position *at* on by *shift_s*."""
    weight = float(state.late_weight[queue, at])
    if weight == 0.0:
        return 0.0
    if shift_s >= 0.0 or -shift_s < state.fall[queue, at]:
        return shift_s * weight
    return float(shift_s - terms.kappa[0]) * weight


@compiled_inline
def shift_cost(terms: Terms, state: Sequences, queue: int, at: int, shift_s: float) -> float:
    """What it costs to put off all groups from position *at* on by *shift_s*; negative to bring them forward."""
    if (shift_s >= 0.0 and shift_s <= state.rise[queue, at]) or (shift_s < 0.0 and -shift_s < state.fall[queue, at]):
        weight = state.late_weight[queue, at]
        return float(shift_s * weight) if weight > 0.0 else 0.0
    cost, kappa = 0.0, terms.kappa[0]
    for position in range(at, state.length[queue]):
        late = state.late[queue, position]
        moved = late + shift_s
        if late > 0.0:
            by = -late - kappa if moved <= 0.0 else shift_s
            cost += terms.weight[state.group[queue, position]] * by
        elif moved > 0.0:
            cost += terms.weight[state.group[queue, position]] * (moved + kappa)
    return cost


@compiled
def load(terms: Terms, state: Sequences, first: Ints, groups: Ints) -> float:
    """Write an order into *state* and return its cost; its rows must be wide enough."""
    for group in range(state.queue.size):
        state.queue[group] = -1
    cost = 0.0
    for queue in range(state.length.size):
        state.length[queue] = first[queue + 1] - first[queue]
        for position in range(state.length[queue]):
            state.group[queue, position] = groups[first[queue] + position]
        refresh(terms, state, queue, 0)
        cost += state.cost[queue, state.length[queue]]
    return cost
