"""Which queue serves which model, from begin to end: orders with no swap but the first, made model by model.

With one model to a queue the models have nothing to do with each other. What an allotment costs is a sum over models, and to
move a queue from one model to another only the groups of these two are listed anew: a thousand allotments are tried in the
time of a hundred orders of everything. Annealing hardly ever ends with another allotment than it began with, as much of a
queue has to change over before anything is gained.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.search.annealing import PATIENCE, below, draw, flag, part
from scheduling.queueing.reordering.search.listing import LOOKED_AT, Listing, order_listed
from scheduling.queueing.reordering.search.sequences import Terms

NEARS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Scales of slack that the search begins with, in mean service times."""
GIVE_UP = 1.5
"""What a late group loses then, by the root of that scale."""
RETUNED = 0.4
"""Share of trials that change how the groups of a model are listed; the others change who serves it."""
STEP = 1.0
"""The most that such a trial changes the logarithms by."""
TRIES = 50
"""Trials between two looks at the clock."""
HOT = 0.002
"""Temperature that the search begins with, by cost; it falls to nothing."""
HOT_UNTIL = 0.8
"""Share of the search after which only what is cheaper is kept."""


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
    first, end, size, served = terms.first[model], terms.first[model + 1], 0, 0
    by_near, give_up, kappa = 1.0 / allotment.near[model], allotment.give_up[model], terms.kappa[0]
    for queue in range(terms.kind.size):
        if allotment.model[queue] == model:
            kind = terms.kind[queue]
            listing.time[served] = terms.free[queue] + terms.change[kind, terms.loaded[queue] + 1, model]
            allotment.queues[served] = queue
            served += 1
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
            kind, highest = terms.kind[allotment.queues[at]], -np.inf
            late_less = give_up + now_s * by_near
            for slot in range(size):
                rank = window[slot]
                if now_s + listing.offset[kind, rank] <= 0.0:
                    index = listing.key[kind, rank]
                else:
                    index = listing.value[kind, rank] - late_less
                if index > highest:
                    best, highest = slot, index
            if best < 0:
                listing.time[at] = np.inf  # it can serve none of them
        if best < 0:
            for slot in range(size):
                cost += terms.weight[terms.movable[window[slot]]] * allotment.unserved[0]
            for rank in range(following, end):
                cost += terms.weight[terms.movable[rank]] * allotment.unserved[0]
            break
        group = terms.movable[window[best]]
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
            if cost < allotment.cost[model]:
                allotment.cost[model], best = cost, near
        allotment.near[model], allotment.give_up[model] = best, GIVE_UP * math.sqrt(nears[-1] / best / NEARS[-1])


@compiled_internal
def _retune(terms: Terms, listing: Listing, allotment: Allotment, model: int, bits: np.uint64) -> None:
    near, give_up = allotment.near[model], allotment.give_up[model]
    allotment.near[model] = near * math.exp(STEP * (part(bits, 0) + part(bits, 16) - 1.0))
    allotment.give_up[model] = give_up * math.exp(STEP * (part(bits, 32) + part(bits, 48) - 1.0))
    _, cost = list_model(terms, listing, allotment, model, 0, allotment.cost[model])
    if cost < allotment.cost[model]:
        allotment.cost[model] = cost
    else:
        allotment.near[model], allotment.give_up[model] = near, give_up


@compiled_internal
def _cheapest(terms: Terms, allotment: Allotment, kind: int, a: int, b: int) -> int:
    """The queue of type *kind* that takes least of its time to serve model *b* from now on rather than *a*; -1 for none."""
    best, least_s = -1, np.inf
    for queue in range(terms.kind.size):
        if terms.kind[queue] == kind and allotment.model[queue] == a:
            loaded = terms.loaded[queue] + 1
            more_s = terms.change[kind, loaded, b] - terms.change[kind, loaded, a]
            if more_s < least_s:
                best, least_s = queue, more_s
    return best


@compiled
def improve(
    terms: Terms, listing: Listing, allotment: Allotment, random: NDArray[np.uint64], tries: int, hot: float
) -> int:
    """Try *tries* changes of *allotment* at a temperature of *hot* (units of cost); in how many queues were moved.

    A queue goes to another model; half the time one of that model goes to a third one, or to the first.
    """
    queues, models, moved = terms.kind.size, allotment.cost.size, 0
    for _ in range(tries):
        bits = draw(random)
        if part(bits, 0) < RETUNED:
            model = below(bits, models)
            _retune(terms, listing, allotment, model, draw(random))
            continue
        queue, bits = below(bits, queues), draw(random)
        a, b, c, other = allotment.model[queue], below(bits, models), -1, -1
        queue = _cheapest(terms, allotment, terms.kind[queue], a, b) if a != b else -1
        if queue < 0:
            continue
        if flag(bits, 0):
            bits = draw(random)
            other = below(bits, queues)
            for _ in range(queues):  # the first of that model from there on
                if allotment.model[other] == b:
                    break
                other = (other + 1) % queues
            bits = draw(random)
            c = below(bits, models)
            other = _cheapest(terms, allotment, terms.kind[other], b, c) if allotment.model[other] == b != c else -1
            if other < 0:
                c = -1
        third = c >= 0 and c != a
        most = allotment.cost[a] + allotment.cost[b] + (allotment.cost[c] if third else 0.0)
        most += hot * PATIENCE[draw(random) & np.uint64(PATIENCE.size - 1)]
        allotment.model[queue] = b
        if other >= 0:
            allotment.model[other] = c
        _, cost_a = list_model(terms, listing, allotment, a, 0, most)
        cost_b, cost_c = np.inf, 0.0
        if cost_a < most:
            _, cost_b = list_model(terms, listing, allotment, b, 0, most - cost_a)
            if third and cost_a + cost_b < most:
                _, cost_c = list_model(terms, listing, allotment, c, 0, most - cost_a - cost_b)
        if cost_a + cost_b + cost_c < most:
            allotment.cost[a], allotment.cost[b] = cost_a, cost_b
            if third:
                allotment.cost[c] = cost_c
            moved += 1
        else:
            allotment.model[queue] = a
            if other >= 0:
                allotment.model[other] = b
    return moved


def best_allotment(terms: Terms, listing: Listing, done: Callable[[int], float], seed: int) -> Order:
    """The order of the allotment found until the share *done*(trials) of the search is 1; groups that no queue of theirs can
    serve are not in it."""
    queues, models = terms.kind.size, terms.first.size - 1
    served = terms.service[:, terms.movable]
    served = served[np.isfinite(served)]
    mean_s = max(1e-9, float(served.mean()) if served.size else 1.0)
    can = np.isfinite(terms.change[terms.kind, terms.loaded + 1])
    model = np.where(terms.loaded >= 0, terms.loaded, can.argmax(axis=1))
    span_s = float(terms.free.max()) + float(served.sum())
    allotment = Allotment(
        model=model.astype(np.int64),
        near=np.empty(models),
        give_up=np.empty(models),
        cost=np.empty(models),
        unserved=np.array([terms.kappa[0] + span_s]),
        queues=np.empty(queues, np.int64),
    )
    begin_allotment(terms, listing, allotment, np.array(NEARS) * mean_s)
    random = np.array([(seed * 2654435761 + 1442695040888963407) % (2**64 - 1) + 1], np.uint64)
    tried = 0
    while (share := done(tried)) < 1.0:
        hot = HOT * float(allotment.cost.sum()) * max(0.0, 1.0 - share / HOT_UNTIL)
        improve(terms, listing, allotment, random, TRIES, hot)
        tried += TRIES
    count = 0
    for number in range(models):
        count, _ = list_model(terms, listing, allotment, number, count, np.inf)
    return order_listed(listing, count, queues)
