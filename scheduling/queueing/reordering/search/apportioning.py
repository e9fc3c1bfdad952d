"""How many queues of each type serve which model: with this the search for an allotment begins.

A model's cost is looked at as a function of these numbers alone: always those of its queues that lose least time by it, its
groups listed by one index. So it is listed once for each such row of numbers and remembered, and thousands of apportionments
are gone through for a few hundred listings. Moves exchange queues of two types at once, as one fast queue is worth several
slow ones: a step of one queue alone mostly leads uphill.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal, compiled_without_gil
from scheduling.queueing.reordering.problem import Floats, Ints
from scheduling.queueing.reordering.search.annealing import PATIENCE, below, draw, flag
from scheduling.queueing.reordering.search.listing import Listing
from scheduling.queueing.reordering.search.model_listing import CHEAPER, Allotment, list_queues
from scheduling.queueing.reordering.search.sequences import Terms
from scheduling.struct_of_arrays import struct_of_arrays

SLOTS: Final = 1 << 14
"""Room for costs that are remembered; two thirds of it is used."""
MOST_GIVEN: Final = 2
"""Queues of a type that a move gives to another model at the most; a power of two."""
MOST_RETURNED: Final = 4
"""Queues of another type that this one gives at the most; a power of two."""


@struct_of_arrays
class Apportionment(NamedTuple):
    """How many queues of each type serve each model, and what is remembered of what that costs."""

    shares: Ints
    """(M, T): queues of the type that serve the model."""
    best: Ints
    """(M, T): the cheapest so far."""
    cost: Floats
    """(M + 1,): of each model now; then of the cheapest so far, all together."""
    usable: Ints
    """(M, T): queues that could serve the model."""
    preferred: Ints
    """(M, Q): queues by type; first those that it has to begin with, then by the time that they lose, then by when they are
    free; those that it cannot use come last."""
    begins: Ints
    """(Q,): the model that each queue has to begin with."""
    first: Ints
    """(T + 1,): where each type begins in a row of `preferred`."""
    key: Ints
    """(SLOTS,): a model and its numbers of queues, mixed into 63 bits; -1 where nothing is remembered."""
    known: Floats
    """(SLOTS,): what that costs."""
    listed: Ints
    """(1,): costs that were worked out."""


def usable_queues(terms: Terms) -> NDArray[np.bool_]:
    """(M, Q): whether the queue could serve a group of the model from now on."""
    models = terms.first.size - 1
    served = np.zeros((models, terms.service.shape[0]), bool)
    for model in range(models):
        groups = terms.movable[terms.first[model] : terms.first[model + 1]]
        served[model] = np.isfinite(terms.service[:, groups]).any(axis=1)
    return served[:, terms.kind] & np.isfinite(terms.change[terms.kind, terms.loaded + 1]).T


def allocate_apportionment(terms: Terms, model: Ints) -> Apportionment:
    """Each queue serves its *model* (Q,), or the first model that it could where that is -1 or nothing that it can serve."""
    usable, kind, types = usable_queues(terms), terms.kind, terms.service.shape[0]
    models, queues = usable.shape
    any_model = usable.any(axis=0)
    keeps = (model >= 0) & usable[model, np.arange(queues)]
    model = np.where(keeps, model, usable.argmax(axis=0))
    count, able = np.zeros((models, types), np.int64), np.zeros((models, types), np.int64)
    np.add.at(count, (model[any_model], kind[any_model]), 1)
    preferred = np.zeros((models, queues), np.int64)
    for number in range(models):
        lost_s = np.where(usable[number], terms.change[kind, terms.loaded + 1, number], np.inf)
        preferred[number] = np.lexsort((terms.free, lost_s, (model != number) | ~usable[number], kind))
        able[number] = np.bincount(kind[usable[number]], minlength=types)
    return Apportionment(
        shares=count,
        best=count.copy(),
        cost=np.full(models + 1, np.inf),
        usable=able,
        preferred=preferred,
        begins=model,
        first=np.searchsorted(np.sort(kind), np.arange(types + 1)).astype(np.int64),
        key=np.full(SLOTS, -1, np.int64),
        known=np.empty(SLOTS),
        listed=np.zeros(1, np.int64),
    )


@compiled_inline
def drawn_model(terms: Terms, bits: np.uint64) -> int:
    """The model of a group drawn by *bits*; none is drawn that has no groups, whatever models the fleet has beside."""
    return int(terms.model[terms.movable[below(bits, terms.movable.size)]])


@compiled_internal
def cost_of(terms: Terms, listing: Listing, allotment: Allotment, apportionment: Apportionment, model: int) -> float:
    """What *model* costs with the numbers of queues that it has now."""
    if terms.first[model] == terms.first[model + 1]:
        return 0.0
    types, served, odd = terms.service.shape[0], 0, np.uint64(0x9E3779B97F4A7C15)
    mixed = np.uint64(model + 1) * odd
    for kind in range(types):
        mixed = ((mixed ^ (mixed >> np.uint64(32))) + np.uint64(apportionment.shares[model, kind])) * odd
    mixed ^= mixed >> np.uint64(32)
    key = np.int64(mixed >> np.uint64(1))
    slot = key & (SLOTS - 1)
    while apportionment.key[slot] >= 0:
        if apportionment.key[slot] == key:
            return apportionment.known[slot]  # type: ignore[no-any-return]
        slot = (slot + 1) & (SLOTS - 1)
    for kind in range(types):
        for at in range(apportionment.shares[model, kind]):
            allotment.queues[served] = apportionment.preferred[model, apportionment.first[kind] + at]
            served += 1
    _, cost = list_queues(terms, listing, allotment, model, served, 0, np.inf)
    if 3 * apportionment.listed[0] < 2 * SLOTS:
        apportionment.key[slot], apportionment.known[slot] = key, cost
    apportionment.listed[0] += 1
    return cost


@compiled_without_gil
def apportion(
    terms: Terms,
    listing: Listing,
    allotment: Allotment,
    apportionment: Apportionment,
    random: NDArray[np.uint64],
    tries: int,
    hot: float,
) -> None:
    """Try *tries* changes of *apportionment* at a temperature of *hot* (units of cost).

    A model gives queues of one type to another; half the time this one gives queues of any type back, or to a third model.
    """
    count, usable, cost = apportionment.shares, apportionment.usable, apportionment.cost
    models, types = count.shape
    for model in range(models):
        cost[model] = cost_of(terms, listing, allotment, apportionment, model)
    for attempt in range(tries + 1):
        total = cost[:models].sum()
        if total < cost[models] * CHEAPER:
            cost[models] = total
            for model in range(models):
                for kind in range(types):
                    apportionment.best[model, kind] = count[model, kind]
        if attempt == tries:
            break
        bits = draw(random)
        a, kind, given = drawn_model(terms, bits), int(bits & np.uint64(0xFFFF)) % types, 1
        given += int((bits >> np.uint64(16)) & np.uint64(MOST_GIVEN - 1))
        bits = draw(random)
        b, other, returned, c = drawn_model(terms, bits), int(bits & np.uint64(0xFFFF)) % types, 0, a
        given = min(given, int(count[a, kind]), int(usable[b, kind] - count[b, kind]))
        if a == b or given <= 0:
            continue
        if flag(bits, 16):
            returned = 1 + int((bits >> np.uint64(17)) & np.uint64(MOST_RETURNED - 1))
            if flag(bits, 30):
                c = drawn_model(terms, draw(random))
            returned = min(returned, int(count[b, other]), int(usable[c, other] - count[c, other]))
            if b == c or (a == c and kind == other) or returned <= 0:
                continue
        before = cost[a] + cost[b] + (cost[c] if a != c else 0.0)
        count[a, kind] -= given
        count[b, kind] += given
        count[b, other] -= returned
        count[c, other] += returned
        cost_a = cost_of(terms, listing, allotment, apportionment, a)
        cost_b = cost_of(terms, listing, allotment, apportionment, b)
        cost_c = cost_of(terms, listing, allotment, apportionment, c) if a != c else 0.0
        patience = PATIENCE[draw(random) & np.uint64(PATIENCE.size - 1)]
        if cost_a + cost_b + cost_c < before * CHEAPER + hot * patience:
            cost[a], cost[b] = cost_a, cost_b
            if a != c:
                cost[c] = cost_c
        else:
            count[a, kind] += given
            count[b, kind] -= given
            count[b, other] += returned
            count[c, other] -= returned


@compiled
def price_shifts(
    terms: Terms, listing: Listing, allotment: Allotment, apportionment: Apportionment, price: NDArray[np.float64]
) -> float:
    """Add to *price* (M, M, T) what it costs if the first model gives a queue of the type to the second; the cost now.

    Infinity where it has none to give, or the other cannot use one more.
    """
    count, usable, cost = apportionment.shares, apportionment.usable, apportionment.cost
    models, types = count.shape
    for model in range(models):
        cost[model] = cost_of(terms, listing, allotment, apportionment, model)
    for model in range(models):
        for kind in range(types):
            less, more = np.inf, np.inf
            if count[model, kind] > 0:
                count[model, kind] -= 1
                less = cost_of(terms, listing, allotment, apportionment, model) - cost[model]
                count[model, kind] += 1
            if count[model, kind] < usable[model, kind]:
                count[model, kind] += 1
                more = cost_of(terms, listing, allotment, apportionment, model) - cost[model]
                count[model, kind] -= 1
            for other in range(models):
                price[model, other, kind] += less
                price[other, model, kind] += more
    return cost[:models].sum()  # type: ignore[no-any-return]


def models_of(terms: Terms, apportionment: Apportionment) -> Ints:
    """(Q,): a model for each queue, as many of each type as the cheapest apportionment has.

    Queues keep what they have to begin with as long as there are not too many of it; then who loses least time goes first.
    """
    usable, left = usable_queues(terms), apportionment.best.copy()
    queues = terms.kind.size
    lost_s = np.where(usable, terms.change[terms.kind, terms.loaded + 1].T, np.inf)
    other = apportionment.begins[None, :] != np.arange(usable.shape[0])[:, None]
    model = np.full(queues, -1, np.int64)
    for flat in np.lexsort((lost_s.ravel(), other.ravel(), ~usable.ravel())).tolist():
        number, queue = divmod(flat, queues)
        if model[queue] < 0 and usable[number, queue] and left[number, terms.kind[queue]] > 0:
            model[queue] = number
            left[number, terms.kind[queue]] -= 1
    return np.where(model >= 0, model, apportionment.begins)
