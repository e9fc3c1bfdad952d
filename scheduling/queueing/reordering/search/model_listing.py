"""The groups of one model in an order, by queues that serve nothing else than it.

With one model to a queue the models have nothing to do with each other: what an allotment of queues to models costs is a sum
over models, and only those whose queues change are listed anew.
"""

import math
from typing import NamedTuple

import numpy as np

from scheduling.compiled import compiled, compiled_internal, index
from scheduling.queueing.reordering.problem import Floats, Ints
from scheduling.queueing.reordering.search.listing import LOOKED_AT, Listing
from scheduling.queueing.reordering.search.sequences import Terms
from scheduling.struct_of_arrays import struct_of_arrays

CHEAPER = 1.0 - 1e-9
"""What costs more than this share of the other costs as much: live and simulated costs differ by their rounding."""
NEARS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Scales of slack that are tried, in mean service times."""
GIVE_UP = 1.5
"""What a late group loses then, by the root of that scale."""


@struct_of_arrays
class Allotment(NamedTuple):
    """Which model each queue serves, how groups are listed, and what that costs."""

    model: Ints
    """(Q,)"""
    near: Floats
    """(M,): scale of slack in seconds, as in `listing`."""
    give_up: Floats
    """(M,)"""
    cost: Floats
    """(M,)"""
    unserved: Floats
    """(1,): what a request costs that no queue is left for."""
    queues: Ints
    """(Q,): room for those of one model."""


@compiled
def list_model(
    terms: Terms, listing: Listing, allotment: Allotment, model: int, count: int, most: float
) -> tuple[int, float]:
    """The groups of *model* in an order, by its queues alone: the queue that is free first takes the one with the largest
    index, as in `listing`.

    Choices are written from *count* on; (count then, cost), or infinity once that is above *most*.
    """
    served = 0
    for queue in range(terms.kind.size):
        if allotment.model[queue] == model:
            allotment.queues[served] = queue
            served += 1
    return list_queues(terms, listing, allotment, model, served, count, most)


@compiled_internal
def list_queues(
    terms: Terms, listing: Listing, allotment: Allotment, model: int, served: int, count: int, most: float
) -> tuple[int, float]:
    """`list_model` by the first *served* of `allotment.queues`, whichever model these serve."""
    first, end, size = terms.first[model], terms.first[model + 1], 0
    by_near, give_up, kappa = 1.0 / allotment.near[model], allotment.give_up[model], terms.kappa[0]
    for at in range(served):
        queue = allotment.queues[at]
        listing.time[at] = terms.free[queue] + terms.change[terms.kind[queue], terms.loaded[queue] + 1, model]
    for kind in range(listing.key.shape[0]):
        for rank in range(first, end):
            listing.key[kind, rank] = listing.value[kind, rank] + listing.offset[kind, rank] * by_near
    window, following, cost = listing.window[model], first, 0.0
    for _ in range(first, end):
        while size < LOOKED_AT and following < end:
            window[size] = following
            size += 1
            following += 1
        best, kind, now_s, at = -1, 0, np.inf, 0
        while best < 0:
            now_s = np.inf
            for other in range(served):
                if listing.time[other] < now_s:
                    at, now_s = other, listing.time[other]
            if now_s == np.inf:
                break
            kind, highest = index(terms.kind[index(allotment.queues[at])]), -np.inf
            late_less = give_up + now_s * by_near
            for slot in range(size):
                rank = index(window[slot])
                if now_s + listing.offset[kind, rank] <= 0.0:
                    its = listing.key[kind, rank]
                else:
                    its = listing.value[kind, rank] - late_less
                if its > highest:
                    best, highest = slot, its
            if best < 0:
                listing.time[at] = np.inf  # it can serve none of them
        if best < 0:
            for slot in range(size):
                cost += terms.weight[terms.movable[window[slot]]] * allotment.unserved[0]
            for rank in range(following, end):
                cost += terms.weight[terms.movable[rank]] * allotment.unserved[0]
            break
        group = index(terms.movable[index(window[best])])
        size -= 1
        for slot in range(best, size):
            window[slot] = window[slot + 1]
        late_s = now_s + terms.offset[kind, group]
        if late_s > 0.0:
            cost += terms.weight[group] * (late_s + kappa)
            if cost > most:
                return count, np.inf
        listing.time[at] = now_s + terms.service[kind, group]
        listing.chosen[count], listing.queue[count] = group, allotment.queues[at]
        count += 1
    return count, cost


@compiled
def begin_allotment(terms: Terms, listing: Listing, allotment: Allotment, nears: Floats) -> None:
    """Cost the models of *allotment*, each with the best of *nears* as its scale of slack."""
    for model in range(allotment.cost.size):
        allotment.cost[model], best = np.inf, nears[0]
        for near in nears:
            allotment.near[model], allotment.give_up[model] = near, GIVE_UP * math.sqrt(nears[-1] / near / NEARS[-1])
            _, cost = list_model(terms, listing, allotment, model, 0, np.inf)
            if cost < allotment.cost[model] * CHEAPER:
                allotment.cost[model], best = cost, near
        allotment.near[model], allotment.give_up[model] = best, GIVE_UP * math.sqrt(nears[-1] / best / NEARS[-1])
