"""The queues as kernels read and change them: a row of groups each, with what is needed to price a change without a walk.

The objective is the sum over groups of n (max(0, L) + kappa 1(L > 0)), L being how late the first token of the last request
is. A shift of all groups from a position on by D seconds is priced by three numbers kept for each position: while D makes no
group late nor in time, the price is D times the weight that is late; else that product still bounds it from below.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, record
from scheduling.queueing.reordering.problem import Floats, Ints, Order, Problem
from scheduling.struct_of_arrays import struct_of_arrays

GROUP = record([("service", np.float64), ("offset", np.float64), ("weight", np.float64), ("model", np.int64)])
"""A group as queues of one type see it: fields as in `Terms`."""
POSITION = record(
    [
        ("ready", np.float64),  # when the queue is done with all before
        ("start", np.float64),  # seconds from now when the group begins
        ("late", np.float64),  # how late it is; negative when in time
        ("cost", np.float64),  # of all groups before
        ("late_weight", np.float64),  # of this group and all after it
        ("rise", np.float64),  # by how much all from here on may be put off until another one is late
        ("fall", np.float64),  # by how much they may be brought forward until one of them is in time
        ("group", np.int32),
        ("loaded", np.int32),  # the model that is loaded when the queue is done with all before, -1 for none
    ]
)
"""A position of a queue: what a change there or behind it costs is read from one line of the processor's cache."""
PLACE = record([("queue", np.int32), ("position", np.int32)])


@struct_of_arrays
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
    group: NDArray[np.void]
    """(T, N): GROUP, the four above once more, together."""
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


@struct_of_arrays
class Sequences(NamedTuple):
    """An order, in rows of one length; `length` says how much of each counts."""

    length: Ints
    """(Q,)"""
    end: Floats
    """(Q,): when each queue is empty."""
    row: NDArray[np.void]
    """(Q, width + 1): POSITION; the entry after the last has no group."""
    place: NDArray[np.void]
    """(N,): PLACE of each group, -1 for nowhere."""
    scratch: Ints
    """(2, width)"""


def terms_of(problem: Problem, kappa_s: float, free_s: Floats, loaded: Ints) -> Terms:
    """*problem* for kernels; *free_s* (Q,) and *loaded* (Q,) say how queues begin once fixed groups are served.

    Movable are groups that are neither fixed nor held, and that some queue can serve.
    """
    queue_type, held = problem.queue_type, loaded >= 0
    able = np.zeros(problem.swap_s.shape, bool)  # whether a queue of the type holds or may load the model
    able[queue_type] = np.isfinite(problem.swap_s[queue_type])
    able[queue_type[held], loaded[held]] = True
    can = (np.isfinite(problem.service_s) & able[:, problem.model].T).any(axis=1)
    movable = (problem.fixed < 0) & (problem.hold_s <= 0.0) & can
    order = np.lexsort((problem.due_s, problem.model))
    order = order[movable[order]]
    models = problem.swap_s.shape[1]
    rank = np.full(problem.requests.size, -1, np.int64)
    rank[order] = np.arange(order.size)
    with np.errstate(invalid="ignore"):
        offset = np.where(np.isfinite(problem.service_s), problem.own_s - problem.due_s[:, None], np.inf)
    weight, model = problem.requests.astype(np.float64), problem.model
    service, offset = np.ascontiguousarray(problem.service_s.T), np.ascontiguousarray(offset.T)
    group = np.zeros(service.shape, GROUP)
    for name, values in (("service", service), ("offset", offset), ("weight", weight), ("model", model)):
        group[name] = values
    span_s = max(1e-9, float(free_s.mean()) + _work_s(problem) / problem.queue_type.size)
    return Terms(
        weight=weight,
        model=model,
        service=service,
        offset=offset,
        group=group,
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
    place = np.zeros(groups, PLACE)
    place["queue"] = place["position"] = -1
    return Sequences(
        length=np.zeros(queues, np.int64),
        end=np.zeros(queues),
        row=np.zeros((queues, width + 1), POSITION),
        place=place,
        scratch=np.zeros((2, width), np.int64),
    )


def order_of(state: Sequences) -> Order:
    inside = np.arange(state.row.shape[1]) < state.length[:, None]
    groups = state.row["group"][inside].astype(np.int64)
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(state.length)]), groups)


@compiled_inline
def refresh(terms: Terms, state: Sequences, queue: int, at: int) -> None:
    """Write all that is kept for the row *queue*, whose groups from position *at* on are new."""
    kind, length, kappa = terms.kind[queue], state.length[queue], terms.kappa[0]
    row = state.row[queue]
    if at == 0:
        row[0].ready, row[0].loaded, row[0].cost = terms.free[queue], terms.loaded[queue], 0.0
    time_s, model, cost = row[at].ready, np.int64(row[at].loaded), row[at].cost
    for position in range(at, length):
        here = row[position]
        group = terms.group[kind, here.group]
        time_s = max(time_s + terms.change[kind, model + 1, group.model], terms.hold[here.group])
        model = group.model
        late = time_s + group.offset
        here.start, here.late = time_s, late
        place = state.place[here.group]
        place.queue, place.position = queue, position
        time_s += group.service
        if late > 0.0:
            cost += group.weight * (late + kappa)
        after = row[position + 1]
        after.ready, after.loaded, after.cost = time_s, model, cost
    state.end[queue] = time_s
    weight, rise, fall = 0.0, np.inf, np.inf
    last = row[length]
    last.late_weight, last.rise, last.fall = weight, rise, fall
    for position in range(length - 1, -1, -1):
        here = row[position]
        late = here.late
        if late > 0.0:
            weight += terms.group[kind, here.group].weight
            fall = min(fall, late)
        else:
            rise = min(rise, -late)
        here.late_weight, here.rise, here.fall = weight, rise, fall


@compiled_inline
def walk(
    terms: Terms, state: Sequences, kind: int, queue: int, first: int, count: int, time_s: float, model: int
) -> tuple[float, int, float]:
    """Serve *count* groups of the row *queue* from *first* on, by a queue of type *kind*: (end, model loaded then, cost)."""
    cost, kappa = 0.0, terms.kappa[0]
    for position in range(first, first + count):
        group = terms.group[kind, state.row[queue, position].group]
        time_s += terms.change[kind, model + 1, group.model]
        late = time_s + group.offset
        if late > 0.0:
            cost += group.weight * (late + kappa)
        time_s += group.service
        model = group.model
    return time_s, model, cost


@compiled_inline
def least_shift_cost(terms: Terms, state: Sequences, queue: int, at: int, shift_s: float) -> float:
    """A bound from below of what it costs to put off all groups from position *at* on by *shift_s*."""
    here = state.row[queue, at]
    weight = float(here.late_weight)
    if weight == 0.0:
        return 0.0
    if shift_s >= 0.0 or -shift_s < here.fall:
        return shift_s * weight
    return float(shift_s - terms.kappa[0]) * weight


@compiled_inline
def shift_cost(terms: Terms, state: Sequences, queue: int, at: int, shift_s: float) -> float:
    """What it costs to put off all groups from position *at* on by *shift_s*; negative to bring them forward.

    The walk ends where no group behind comes to be late or in time, which the position after the last always is.
    """
    cost, kappa = 0.0, terms.kappa[0]
    kind, position = terms.kind[queue], at
    while True:
        here = state.row[queue, position]
        if shift_s <= here.rise if shift_s >= 0.0 else -shift_s < here.fall:
            return cost + (shift_s * here.late_weight if here.late_weight > 0.0 else 0.0)
        late = here.late
        moved = late + shift_s
        if late > 0.0:
            cost += terms.group[kind, here.group].weight * (-late - kappa if moved <= 0.0 else shift_s)
        elif moved > 0.0:
            cost += terms.group[kind, here.group].weight * (moved + kappa)
        position += 1


@compiled
def load(terms: Terms, state: Sequences, first: Ints, groups: Ints) -> float:
    """Write an order into *state* and return its cost; its rows must be wide enough."""
    for group in range(state.place.size):
        state.place[group].queue = -1
    cost = 0.0
    for queue in range(state.length.size):
        state.length[queue] = first[queue + 1] - first[queue]
        for position in range(state.length[queue]):
            state.row[queue, position].group = groups[first[queue] + position]
        refresh(terms, state, queue, 0)
        cost += state.row[queue, state.length[queue]].cost
    return cost
