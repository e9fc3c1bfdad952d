"""Allotments of queues to models: orders in which each queue serves only one model.

Annealing seldom leaves the allotment that it starts from, because much of a queue must change before anything is
gained. With one model per queue, the cost is a sum over models, and that of a model depends only on how many queues of
each type serve it. Each such combination is listed once and cached, so thousands of allotments cost a few hundred
listings.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.queueing.reordering.annealing import draw
from scheduling.queueing.reordering.listing import Listing, allocate_listing, list_groups, mean_service_s, order_listed
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.rows import Terms
from scheduling.struct_of_arrays import struct_of_arrays

NEAR: Final = 0.1
"""Scale of slack for listing groups during the exchanges, in mean service times."""
NEARS: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Scales for listing the groups of the final allotment: each model has its best."""
GIVE_UP: Final = 1.5
"""Loss of a late group during the exchanges, divided by the root of that scale."""
HOT: Final = 0.01
"""Initial temperature of the exchanges, as a share of the cost; it falls to zero at `HOT_UNTIL`."""
HOT_UNTIL: Final = 0.8
SETTLED: Final = 2000
"""Exchanges without a new listing after which the allotment is final."""
MOVES = 20
"""Exchanges of queues between two readings of the budget."""
MOST_GIVEN, MOST_RETURNED = 2, 4
"""Most queues of a type that an exchange takes from a model or returns: a fast one is worth several slow."""
CHEAPER: Final = 1.0 - 1e-9
"""A cost above this share of another counts as equal."""
SLOTS: Final = 1 << 14
"""Slots of the cost cache, of which two thirds are used."""


@struct_of_arrays
class Allotment(NamedTuple):
    """Number of queues of each type that serve each model, with known costs."""

    shares: Ints
    """(M, T): queues of the type that serve the model."""
    best: Ints
    """(M, T): the cheapest met."""
    cost: Floats
    """(M + 1,): current cost of each model; last, the total of the cheapest allotment met."""
    usable: Ints
    """(M, T): queues that could serve the model."""
    preferred: Ints
    """(M, Q): queues by type, time lost to the model, and when they are free; last those that cannot serve it."""
    first: Ints
    """(T + 1,): start of each type in a row of `preferred`."""
    key: Ints
    """(SLOTS,): a model and its numbers of queues, hashed to 63 bits; -1 if the slot is empty."""
    known: Floats
    """(SLOTS,): cost for that key."""
    listed: Ints
    """(1,): number of models listed."""


def usable_queues(terms: Terms) -> NDArray[np.bool_]:
    """Return (M, Q): whether the queue can serve a group of the model."""
    models = terms.first.size - 1
    served = np.zeros((models, terms.service.shape[0]), bool)
    for model in range(models):
        groups = terms.movable[terms.first[model] : terms.first[model + 1]]
        served[model] = np.isfinite(terms.service[:, groups]).any(axis=1)
    return served[:, terms.kind] & np.isfinite(terms.change[terms.kind, terms.loaded + 1]).T


def allocate_allotment(terms: Terms, usable: NDArray[np.bool_]) -> Allotment:
    """Return the first allotment: each queue serves the model that it holds, or the first that it can serve."""
    kind, types, (models, queues) = terms.kind, terms.service.shape[0], usable.shape
    holds = (terms.loaded >= 0) & usable[terms.loaded, np.arange(queues)]
    model, serves = np.where(holds, terms.loaded, usable.argmax(axis=0)), usable.any(axis=0)
    shares, able = np.zeros((models, types), np.int64), np.zeros((models, types), np.int64)
    np.add.at(shares, (model[serves], kind[serves]), 1)
    preferred = np.zeros((models, queues), np.int64)
    for number in range(models):
        lost_s = np.where(usable[number], terms.change[kind, terms.loaded + 1, number], np.inf)
        preferred[number] = np.lexsort((terms.free, lost_s, ~usable[number], kind))
        able[number] = np.bincount(kind[usable[number]], minlength=types)
    return Allotment(
        shares=shares,
        best=shares.copy(),
        cost=np.full(models + 1, np.inf),
        usable=able,
        preferred=preferred,
        first=np.searchsorted(np.sort(kind), np.arange(types + 1)).astype(np.int64),
        key=np.full(SLOTS, -1, np.int64),
        known=np.empty(SLOTS),
        listed=np.zeros(1, np.int64),
    )


@compiled_inline
def drawn_model(terms: Terms, random: NDArray[np.uint64]) -> int:
    """Return the model of a random group."""
    return int(terms.model[terms.movable[int(draw(random) * terms.movable.size)]])


@compiled_internal
def cost_of(terms: Terms, listing: Listing, allotment: Allotment, model: int) -> float:
    """Return the cost of *model* with its current numbers of queues."""
    if terms.first[model] == terms.first[model + 1]:
        return 0.0
    types, served, odd = terms.service.shape[0], 0, np.uint64(0x9E3779B97F4A7C15)
    mixed = np.uint64(model + 1) * odd
    for kind in range(types):
        mixed = ((mixed ^ (mixed >> np.uint64(32))) + np.uint64(allotment.shares[model, kind])) * odd
    mixed ^= mixed >> np.uint64(32)
    key = np.int64(mixed >> np.uint64(1))
    slot = key & (SLOTS - 1)
    while allotment.key[slot] >= 0:
        if allotment.key[slot] == key:
            return float(allotment.known[slot])
        slot = (slot + 1) & (SLOTS - 1)
    for kind in range(types):
        for at in range(allotment.shares[model, kind]):
            listing.serving[served] = allotment.preferred[model, allotment.first[kind] + at]
            served += 1
    _, cost = list_groups(terms, listing, served, model, model + 1, 0, np.inf)
    if 3 * allotment.listed[0] < 2 * SLOTS:
        allotment.key[slot], allotment.known[slot] = key, cost
    allotment.listed[0] += 1
    return float(cost)


@compiled
def apportion(
    terms: Terms, listing: Listing, allotment: Allotment, random: NDArray[np.uint64], tries: int, hot: float
) -> None:
    """Try *tries* exchanges of queues at a temperature of *hot* (units of cost).

    A model gives queues of one type to another. Half the time that one returns queues of any type, to the first or to a
    third model.
    """
    shares, usable, cost = allotment.shares, allotment.usable, allotment.cost
    models, types = shares.shape
    for model in range(models):
        cost[model] = cost_of(terms, listing, allotment, model)
    for attempt in range(tries + 1):
        total = cost[:models].sum()
        if total < cost[models] * CHEAPER:
            cost[models] = total
            for model in range(models):
                for kind in range(types):
                    allotment.best[model, kind] = shares[model, kind]
        if attempt == tries:
            break
        a, b, kind, other = drawn_model(terms, random), drawn_model(terms, random), 0, 0
        kind, other = int(draw(random) * types), int(draw(random) * types)
        given, returned, c = 1 + int(draw(random) * MOST_GIVEN), 0, a
        given = min(given, shares[a, kind], usable[b, kind] - shares[b, kind])
        if a == b or given <= 0:
            continue
        if draw(random) < 0.5:
            returned = 1 + int(draw(random) * MOST_RETURNED)
            if draw(random) < 0.5:
                c = drawn_model(terms, random)
            returned = min(returned, shares[b, other], usable[c, other] - shares[c, other])
            if b == c or (a == c and kind == other) or returned <= 0:
                continue
        before = cost[a] + cost[b] + (cost[c] if a != c else 0.0)
        shares[a, kind] -= given
        shares[b, kind] += given
        shares[b, other] -= returned
        shares[c, other] += returned
        cost_a, cost_b = cost_of(terms, listing, allotment, a), cost_of(terms, listing, allotment, b)
        cost_c = cost_of(terms, listing, allotment, c) if a != c else 0.0
        if cost_a + cost_b + cost_c < before * CHEAPER - hot * math.log1p(-draw(random)):
            cost[a], cost[b] = cost_a, cost_b
            if a != c:
                cost[c] = cost_c
        else:
            shares[a, kind] += given
            shares[b, kind] -= given
            shares[b, other] += returned
            shares[c, other] -= returned


def models_of(terms: Terms, allotment: Allotment, usable: NDArray[np.bool_]) -> Ints:
    """Return (Q,): a model for each queue, by the cheapest allotment; queues that lose the least time first."""
    left, model = allotment.best.copy(), np.full(terms.kind.size, -1, np.int64)
    lost_s = np.where(usable, terms.change[terms.kind, terms.loaded + 1].T, np.inf)
    for flat in np.argsort(lost_s, axis=None, kind="stable").tolist():
        number, queue = divmod(flat, terms.kind.size)
        if model[queue] < 0 and usable[number, queue] and left[number, terms.kind[queue]] > 0:
            model[queue] = number
            left[number, terms.kind[queue]] -= 1
    return np.where((model < 0) & usable.any(axis=0), usable.argmax(axis=0), model)


@compiled_inline
def list_model(terms: Terms, listing: Listing, models: Ints, model: int, count: int, most: float) -> tuple[int, float]:
    """List the groups of *model* on the queues that *models* (Q,) assigns to it; see `list_groups`."""
    served = 0
    for queue in range(models.size):
        if models[queue] == model:
            listing.serving[served] = queue
            served += 1
    return list_groups(terms, listing, served, model, model + 1, count, most)


@compiled
def list_models(terms: Terms, listing: Listing, models: Ints, cost: Floats) -> int:
    """List each model on its queues by *models* (Q,), write *cost* (M,) and return the number of groups placed."""
    count = 0
    for model in range(cost.size):
        count, cost[model] = list_model(terms, listing, models, model, count, np.inf)
    return count


def best_allotment(terms: Terms, random: NDArray[np.uint64], share_done: Callable[[float], float]) -> Order:
    """Return the order of the best allotment found until *share_done*(orders listed) is 1.

    Groups that no queue of their model can serve are left out.
    """
    listing, usable, models = allocate_listing(terms), usable_queues(terms), terms.first.size - 1
    allotment, mean_s = allocate_allotment(terms, usable), mean_service_s(terms)
    present = max(1, int((np.diff(terms.first) > 0).sum()))  # models without groups change nothing

    def list_by(near: float) -> None:
        listing.weights[:models], listing.weights[models : 2 * models] = (
            math.log(near * mean_s),
            GIVE_UP / math.sqrt(near),
        )

    list_by(NEAR)
    tried = settled = listed = 0
    while (share := share_done(listed / present)) < 1.0 and tried - settled < SETTLED:
        cost = float(allotment.cost[:-1].sum()) if tried else 0.0
        apportion(terms, listing, allotment, random, MOVES, HOT * cost * max(0.0, 1.0 - share / HOT_UNTIL))
        tried += MOVES
        if allotment.listed[0] > listed:
            listed, settled = int(allotment.listed[0]), tried
    serves, best, costs = models_of(terms, allotment, usable), np.full(models, np.inf), np.empty(models)
    weights = listing.weights.copy()
    for near in NEARS:
        list_by(near)
        list_models(terms, listing, serves, costs)
        cheaper = np.flatnonzero(costs < best * CHEAPER)
        best[cheaper] = costs[cheaper]
        for at in (cheaper, cheaper + models):
            weights[at] = listing.weights[at]
    listing.weights[:] = weights
    return order_listed(listing, list_models(terms, listing, serves, costs), terms.kind.size)
