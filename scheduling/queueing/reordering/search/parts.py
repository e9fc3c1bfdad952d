"""An order in parts that are searched side by side: queues that serve other models have hardly anything to exchange.

Each part is a problem of its own, with the queues of some models and what waits in them, so that threads share nothing.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduling.queueing.reordering.problem import Ints, Order
from scheduling.queueing.reordering.search.sequences import Terms

LEAST_GROUPS: Final = 100
"""A part with fewer is not worth a thread."""


class Part(NamedTuple):
    """Some queues of an order, and the groups in them."""

    queues: Ints
    """(queues of the part,): their numbers in the whole."""
    groups: Ints
    """(groups of the part,): the same."""
    terms: Terms
    order: Order
    """In numbers of the part."""


def served_most(terms: Terms, order: Order) -> Ints:
    """(Q,): the model that most groups of each queue are of; what is loaded, or -1, where there are none."""
    queues, models = terms.kind.size, terms.first.size - 1
    row = np.repeat(np.arange(queues), np.diff(order.first))
    groups = np.bincount(row * models + terms.model[order.groups], minlength=queues * models).reshape(queues, models)
    return np.where(groups.any(axis=1), groups.argmax(axis=1), terms.loaded)


def split(terms: Terms, order: Order, most: int) -> list[Part]:
    """*order*, of movable groups, in at most *most* parts of about as many groups; empty where it cannot be split.

    The queues that serve most of one model stay together.
    """
    models, lengths = served_most(terms, order), np.diff(order.first)
    groups = np.bincount(models + 1, lengths, terms.first.size)  # of no model first
    parts = min(most, int((groups > 0).sum()))
    if parts < 2:
        return []
    part_of, filled = np.zeros(groups.size, np.int64), np.zeros(parts)
    for model in np.argsort(-groups, kind="stable").tolist():
        part_of[model] = filled.argmin()
        filled[part_of[model]] += groups[model]
    if filled.min() < LEAST_GROUPS:
        return []
    return [part(terms, order, np.flatnonzero(part_of[models + 1] == number)) for number in range(parts)]


def part(terms: Terms, order: Order, queues: Ints) -> Part:
    """The part of *order* that is in *queues*."""
    lengths = np.diff(order.first)
    inside = np.zeros(lengths.size, bool)
    inside[queues] = True
    groups = order.groups[np.repeat(inside, lengths)]
    movable = np.argsort(terms.rank[groups])
    rank = np.empty(groups.size, np.int64)
    rank[movable] = np.arange(groups.size)
    model = terms.model[groups]
    its = terms._replace(
        weight=terms.weight[groups],
        model=model,
        service=np.ascontiguousarray(terms.service[:, groups]),
        offset=np.ascontiguousarray(terms.offset[:, groups]),
        group=np.ascontiguousarray(terms.group[:, groups]),
        kind=terms.kind[queues],
        free=terms.free[queues],
        loaded=terms.loaded[queues],
        due=terms.due[groups],
        hold=terms.hold[groups],
        movable=movable,
        first=np.searchsorted(model[movable], np.arange(terms.first.size)).astype(np.int64),
        rank=rank,
    )
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[queues])])
    return Part(queues, groups, its, Order(first, np.arange(groups.size)))


def join(parts: list[Part], orders: list[Order]) -> Order:
    """The *orders* of all *parts* of an order, as one again."""
    rows: dict[int, Ints] = {}
    for its, order in zip(parts, orders, strict=True):
        rows |= zip(its.queues.tolist(), np.split(its.groups[order.groups], order.first[1:-1]), strict=True)
    queues = [rows[queue] for queue in range(len(rows))]
    sizes = [row.size for row in queues]
    return Order(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]), np.concatenate(queues))
