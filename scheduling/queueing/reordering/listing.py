"""List scheduling: orders built group by group, each group for the queue that is free first.

The group is chosen by a composite index (ATCS: apparent tardiness cost with setups; Lee, Bhaskaran and Pinedo 1997).
"""

import math
from typing import Final, NamedTuple

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.rows import Terms
from scheduling.struct_of_arrays import struct_of_arrays

IN_TIME: Final = 24
"""Groups per model that a free queue chooses from, by deadline, among those that can still be in time."""
LATE: Final = 6
"""The same among those that are late anyway."""
GRID: Final = [
    (near, near * swaps, 1.5 / math.sqrt(near)) for near in (0.2, 0.1, 0.4, 0.05, 0.8) for swaps in (0.8, 1.2)
]
"""Scale of slack in mean service times, scale of swaps in mean swap times, and loss of a late group."""


@struct_of_arrays
class Listing(NamedTuple):
    """An order under construction: the groups in the order of choice, with their queues; and scratch space."""

    chosen: Ints
    """(movable groups,)"""
    queue: Ints
    """(movable groups,)"""
    time: Floats
    """(Q,)"""
    loaded: Ints
    """(Q,)"""
    taken: Ints
    """(N,): 1 once the group is taken."""
    value: Floats
    """(T, N): log of its requests per second of service."""
    highest: Floats
    """(T, M): upper bound on the values of the model's groups."""
    least: Floats
    """(N,): least offset over all types; from minus this time on the group is late on any queue."""
    by_near: Floats
    """(M,): reciprocal of the scale of slack."""
    waiting: Ints
    """(M,): rank of the first waiting group of each model."""
    in_time: Ints
    """(M,): first rank from which groups can be in time."""
    serving: Ints
    """(Q,): queues that serve groups."""
    weights: Floats
    """(2 M + 1,): per model the log of the scale of slack, and the loss of a late group; the log of the scale of swaps."""
    unserved: Floats
    """(1,): cost of a request that no queue serves."""


def allocate_listing(terms: Terms) -> Listing:
    size, queues, models = terms.movable.size, terms.kind.size, terms.first.size - 1
    value = np.log(np.maximum(terms.weight, 1.0)) - np.log(np.maximum(terms.service, 1e-6))
    highest = np.full((terms.service.shape[0], models), -np.inf)
    for kind in range(highest.shape[0]):
        np.maximum.at(highest[kind], terms.model[terms.movable], value[kind, terms.movable])
    served = terms.service[:, terms.movable]
    span_s = float(terms.free.max()) + float(served[np.isfinite(served)].sum())
    return Listing(
        chosen=np.empty(size, np.int64),
        queue=np.empty(size, np.int64),
        time=np.empty(queues),
        loaded=np.empty(queues, np.int64),
        taken=np.empty(terms.model.size, np.int64),
        value=value,
        highest=highest,
        least=terms.offset.min(axis=0, initial=np.inf),
        by_near=np.empty(models),
        waiting=np.empty(models, np.int64),
        in_time=np.empty(models, np.int64),
        serving=np.arange(queues),
        weights=np.zeros(2 * models + 1),
        unserved=np.array([terms.kappa[0] + span_s]),
    )


def order_listed(listing: Listing, count: int, queues: int) -> Order:
    """Return the first *count* choices as an order of *queues* queues."""
    queue = listing.queue[:count]
    first = np.searchsorted(queue[by := np.argsort(queue, kind="stable")], np.arange(queues + 1))
    return Order(first.astype(np.int64), listing.chosen[:count][by])


@compiled
def list_groups(
    terms: Terms, listing: Listing, queues: int, first: int, end_model: int, count: int, most: float
) -> tuple[int, float]:
    """List the groups of models *first* to *end_model* - 1 on the first *queues* of `Listing.serving`.

    The queue that is free first takes the group with the highest index. Choices are written from *count* on. Return
    (new count, cost).

    The index of a group is the log of its requests per second of service, less the time until it can start over the scale
    of swaps, less its slack over the scale of slack, or less the loss of a late group (`Listing.weights`). Listing stops
    once the cost exceeds *most*.
    """
    models, chosen, cost = terms.first.size - 1, end_model - first, 0.0
    by_swap = math.exp(-listing.weights[2 * models])
    for at in range(queues):
        queue = listing.serving[at]
        listing.time[queue], listing.loaded[queue] = terms.free[queue], terms.loaded[queue]
    for rank in range(terms.first[first], terms.first[end_model]):
        listing.taken[terms.movable[rank]] = 0
    for model in range(first, end_model):
        listing.waiting[model] = listing.in_time[model] = terms.first[model]
        listing.by_near[model] = math.exp(-listing.weights[model])
    last_count = count + terms.first[end_model] - terms.first[first]
    while count < last_count:
        queue, now_s = -1, np.inf
        for at in range(queues):
            if listing.time[listing.serving[at]] < now_s:
                queue = listing.serving[at]
                now_s = listing.time[queue]
        if queue < 0:
            for rank in range(terms.first[first], terms.first[end_model]):
                group = terms.movable[rank]
                cost += (1 - listing.taken[group]) * terms.weight[group] * listing.unserved[0]
            return count, cost
        kind, loaded, best, highest = terms.kind[queue], listing.loaded[queue], -1, -np.inf
        for k in range(chosen):
            model = first + (max(loaded - first, 0) + k) % chosen  # the loaded model first: it is usually the best
            give_up = listing.weights[models + model]
            end, change_s = terms.first[model + 1], terms.change[kind, loaded + 1, model]
            while listing.waiting[model] < end and listing.taken[terms.movable[listing.waiting[model]]]:
                listing.waiting[model] += 1
            listing.in_time[model] = max(listing.in_time[model], listing.waiting[model])
            while listing.in_time[model] < end:
                group = terms.movable[listing.in_time[model]]
                if not listing.taken[group] and now_s + listing.least[group] <= 0.0:
                    break
                listing.in_time[model] += 1
            base = -change_s * by_swap
            if change_s == np.inf or base + listing.highest[kind, model] + max(0.0, -give_up) <= highest:
                continue
            start_s, by_near = now_s + change_s, listing.by_near[model]
            for ranks in range(2):
                rank, left = (listing.waiting[model], LATE) if ranks == 0 else (listing.in_time[model], IN_TIME)
                last = listing.in_time[model] if ranks == 0 else end
                while rank < last and left > 0:
                    group = terms.movable[rank]
                    rank += 1
                    if listing.taken[group]:
                        continue
                    left -= 1
                    late_s = start_s + terms.offset[kind, group]
                    index = base + listing.value[kind, group] + (late_s * by_near if late_s <= 0.0 else -give_up)
                    if index > highest and terms.service[kind, group] < np.inf:
                        best, highest = group, index
        if best < 0:
            listing.time[queue] = np.inf
            continue
        model = terms.model[best]
        start_s = now_s + terms.change[kind, loaded + 1, model]
        late_s = start_s + terms.offset[kind, best]
        if late_s > 0.0:
            cost += terms.weight[best] * (late_s + terms.kappa[0])
            if cost > most:
                return count, np.inf
        listing.time[queue], listing.loaded[queue] = start_s + terms.service[kind, best], model
        listing.chosen[count], listing.queue[count], listing.taken[best] = best, queue, 1
        count += 1
    return count, cost


def best_listing(terms: Terms) -> Order | None:
    """Return the best order of `GRID`; None if no listing places every group."""
    listing, models, waiting = allocate_listing(terms), terms.first.size - 1, np.flatnonzero(np.diff(terms.first))
    swaps = terms.change[:, waiting + 1][:, :, waiting]
    swaps = swaps[np.isfinite(swaps) & (swaps > 0)]
    swap_s = float(swaps.mean()) if swaps.size else 1.0
    best, least = None, np.inf
    for near, swap, give_up in GRID:
        listing.weights[:models] = math.log(near * mean_service_s(terms))
        listing.weights[models : 2 * models] = give_up
        listing.weights[2 * models] = math.log(swap * swap_s)
        count, cost = list_groups(terms, listing, terms.kind.size, 0, models, 0, least)
        if count == terms.movable.size and cost < least:
            best, least = order_listed(listing, count, terms.kind.size), cost
    return best


def mean_service_s(terms: Terms) -> float:
    """Return the mean service time of movable groups over the types that can serve them."""
    served = terms.service[:, terms.movable]
    served = served[np.isfinite(served)]
    return max(1e-6, float(served.mean())) if served.size else 1.0
