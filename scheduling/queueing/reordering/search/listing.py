"""List scheduling: orders that are built group by group, each for the queue that is free first.

The group is chosen by a composite index (ATCS: apparent tardiness cost with setups; Lee, Bhaskaran and Pinedo 1997), whose
parameters are searched for each problem by a (1+1) evolution strategy: an order of a thousand groups takes some tenths of a
millisecond to build, so hundreds are tried.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scheduling.compiled import compiled, compiled_inline
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.search.sequences import Terms
from scheduling.struct_of_arrays import struct_of_arrays

LOOKED_AT = 24
"""Groups of each model that a free queue chooses from, by deadline."""
LATE_LOOKED_AT = 6
"""Of those that no queue can serve in time any more."""
GRID = [(near, near * swaps, 1.5 / math.sqrt(near)) for near in (0.2, 0.1, 0.4, 0.05, 0.8) for swaps in (0.8, 1.2)]
"""What the search begins with: scale of slack in mean service times, that of swaps in mean swap times, and what
a late group loses. The three go together: of 3,000 draws for each of three problems the best lay on this line."""
CHANGED = 0.3
"""Share of parameters that a mutation changes."""
STEP = 0.35
"""Standard deviation of a mutation, at the median: each has its own, log-normal."""


@struct_of_arrays
class Listing(NamedTuple):
    """An order as it is built: the groups in the order they were chosen in, and their queues; and room to work.

    Where a number stands for a group it is its rank, its position in `Terms.movable`, by model and then deadline.
    """

    chosen: Ints
    """(movable groups,)"""
    queue: Ints
    """(movable groups,)"""
    time: Floats
    """(Q,)"""
    loaded: Ints
    """(Q,)"""
    heap: Ints
    """(Q,): queues, the one that is free first at the top; a binary heap."""
    taken: Ints
    """(N,): 1 once it is taken."""
    value: Floats
    """(T, movable groups): log of its requests by second of service; minus infinity where it cannot be served."""
    offset: Floats
    """(T, movable groups): as in `Terms`."""
    least: Floats
    """(movable groups,): the least offset of any type; at times above minus it the group is late wherever it goes."""
    key: Floats
    """(T, movable groups): part of the index of a group in time that does not change while an order is built."""
    by_near: Floats
    """(M,): one over the scale of slack."""
    window: Ints
    """(M, LOOKED_AT): by deadline, what a queue chooses from."""
    size: Ints
    """(M,): of each window."""
    following: Ints
    """(M,): next group that comes into the window."""
    highest: Floats
    """(T, M): no value in the window is greater."""
    in_time: Floats
    """(T, M): until then all groups of the window may begin and none is late."""
    expires: Floats
    """(M,): when the first group of the window is late wherever it goes."""
    late: Ints
    """(movable groups,): of each model, from `Terms.first` on, those that are."""
    late_first: Ints
    """(M,): the first of them that waits."""
    late_end: Ints
    """(M,)"""
    best: Ints
    """(2, T, M): group with the greatest key in the window, and late group with the greatest value; -1 for none."""


def allocate_listing(terms: Terms) -> Listing:
    size, queues, models = terms.movable.size, terms.kind.size, terms.first.size - 1
    types = terms.service.shape[0]
    served, offset = np.take(terms.service, terms.movable, axis=1), np.take(terms.offset, terms.movable, axis=1)
    weight = np.maximum(terms.weight[terms.movable], 1.0)
    value = np.where(np.isfinite(served), np.log(weight) - np.log(np.maximum(served, 1e-6)), -np.inf)
    return Listing(
        chosen=np.empty(size, np.int64),
        queue=np.empty(size, np.int64),
        time=np.empty(queues),
        loaded=np.empty(queues, np.int64),
        heap=np.empty(queues, np.int64),
        taken=np.empty(terms.model.size, np.int64),
        value=value,
        highest=np.empty((types, models)),
        in_time=np.empty((types, models)),
        offset=offset,
        least=offset.min(axis=0),
        key=np.empty((types, size)),
        by_near=np.empty(models),
        window=np.empty((models, LOOKED_AT), np.int64),
        size=np.empty(models, np.int64),
        following=np.empty(models, np.int64),
        expires=np.empty(models),
        late=np.empty(size, np.int64),
        late_first=np.empty(models, np.int64),
        late_end=np.empty(models, np.int64),
        best=np.empty((2, types, models), np.int64),
    )


def order_listed(listing: Listing, count: int, queues: int) -> Order:
    """The first *count* choices as an order of *queues* queues."""
    queue = listing.queue[:count]
    first = np.searchsorted(queue[by := np.argsort(queue, kind="stable")], np.arange(queues + 1))
    return Order(first.astype(np.int64), listing.chosen[:count][by])


@compiled_inline
def _look(listing: Listing, kind: int, model: int) -> None:
    """Find what is best in the window of *model* for queues of type *kind*."""
    best, most, highest, offset = -1, -np.inf, -np.inf, -np.inf
    for k in range(listing.size[model]):
        rank = listing.window[model, k]
        key = listing.key[kind, rank]
        if key > most:
            best, most = rank, key
        highest = max(highest, listing.value[kind, rank])
        offset = max(offset, listing.offset[kind, rank])
    listing.best[0, kind, model], listing.highest[kind, model] = best, highest
    listing.in_time[kind, model] = -offset


@compiled_inline
def _fill(terms: Terms, listing: Listing, model: int, now_s: float) -> None:
    """Fill the window of *model* up; groups that are late wherever they go are put to the late ones."""
    end, became_late = terms.first[model + 1], False
    while listing.size[model] < LOOKED_AT and listing.following[model] < end:
        rank = listing.following[model]
        listing.following[model] += 1
        if now_s + listing.least[rank] > 0.0:
            listing.late[listing.late_end[model]] = rank
            listing.late_end[model] += 1
            became_late = True
            continue
        listing.window[model, listing.size[model]] = rank
        listing.size[model] += 1
        listing.expires[model] = min(listing.expires[model], -listing.least[rank])
        for kind in range(listing.key.shape[0]):
            best = listing.best[0, kind, model]
            if listing.key[kind, rank] > (listing.key[kind, best] if best >= 0 else -np.inf):
                listing.best[0, kind, model] = rank
            listing.highest[kind, model] = max(listing.highest[kind, model], listing.value[kind, rank])
            listing.in_time[kind, model] = min(listing.in_time[kind, model], -listing.offset[kind, rank])
    if became_late:
        _look_at_late(listing, model)


@compiled_inline
def _leave_late(terms: Terms, listing: Listing, model: int, now_s: float) -> None:
    """Put groups in the window of *model* that are late wherever they go to the late ones, and fill it up."""
    size, expires_s = 0, np.inf
    for k in range(listing.size[model]):
        rank = listing.window[model, k]
        if now_s + listing.least[rank] > 0.0:
            listing.late[listing.late_end[model]] = rank
            listing.late_end[model] += 1
        else:
            listing.window[model, size] = rank
            expires_s = min(expires_s, -listing.least[rank])
            size += 1
    listing.size[model], listing.expires[model] = size, expires_s
    for kind in range(listing.key.shape[0]):
        _look(listing, kind, model)
    _fill(terms, listing, model, now_s)
    _look_at_late(listing, model)


@compiled_inline
def _look_at_late(listing: Listing, model: int) -> None:
    """Find the best of the first late groups of *model*."""
    first = listing.late_first[model]
    end = min(first + LATE_LOOKED_AT, listing.late_end[model])
    for kind in range(listing.key.shape[0]):
        best, most = -1, -np.inf
        for k in range(first, end):
            value = listing.value[kind, listing.late[k]]
            if value > most:
                best, most = listing.late[k], value
        listing.best[1, kind, model] = best


@compiled_inline
def _take(terms: Terms, listing: Listing, model: int, rank: int, now_s: float) -> None:
    """Take a group out of the window of *model*, or else of its late ones."""
    size = listing.size[model]
    for k in range(size):
        if listing.window[model, k] == rank:
            for later in range(k, size - 1):
                listing.window[model, later] = listing.window[model, later + 1]
            listing.size[model] = size - 1
            for kind in range(listing.key.shape[0]):
                if listing.best[0, kind, model] == rank:
                    _look(listing, kind, model)
            _fill(terms, listing, model, now_s)
            return
    at = listing.late_first[model]
    while listing.late[at] != rank:
        at += 1
    for earlier in range(at, listing.late_first[model], -1):
        listing.late[earlier] = listing.late[earlier - 1]
    listing.late_first[model] += 1
    _look_at_late(listing, model)


@compiled_inline
def _sift(listing: Listing, at: int) -> None:
    """Put the queue at *at* of the heap, which is free later than it was, in its place; ties by number."""
    queues, queue = listing.heap.size, listing.heap[at]
    time_s = listing.time[queue]
    while 2 * at + 1 < queues:
        below = 2 * at + 1
        one = listing.heap[below]
        if below + 1 < queues:
            other = listing.heap[below + 1]
            if listing.time[other] < listing.time[one] or (listing.time[other] == listing.time[one] and other < one):
                below, one = below + 1, other
        if time_s < listing.time[one] or (time_s == listing.time[one] and queue < one):
            break
        listing.heap[at] = one
        at = below
    listing.heap[at] = queue


@compiled
def list_groups(
    terms: Terms,
    listing: Listing,
    affinity: Floats,
    near_s: Floats,
    swap_s: float,
    give_up: float,
    most: float,
) -> tuple[int, float]:
    """The queue that is free first takes the group with the largest index; (how many were taken, cost).

    The index of a group is log of its requests by second of service, plus affinity (T, M), less the time until it can begin
    by *swap_s*, less its slack by *near_s* (M,), less *give_up* if it is late. A queue chooses from the first `LOOKED_AT` of
    each model and the first `LATE_LOOKED_AT` of those that are late wherever they go. It stops once the cost is above
    *most*, and returns infinity.

    Of groups in time that wait, time moves all indices of a model alike, so the one with the greatest `key` stays the best
    until it is late or taken; the others are looked at only where it is late, or one that is late could be better.
    """
    models, queues, kappa, by_swap = terms.first.size - 1, terms.kind.size, terms.kappa[0], 1.0 / swap_s
    for queue in range(queues):
        listing.time[queue], listing.loaded[queue], listing.heap[queue] = terms.free[queue], terms.loaded[queue], queue
    for at in range(queues - 1, -1, -1):
        _sift(listing, at)
    for model in range(models):
        first, listing.by_near[model] = terms.first[model], 1.0 / near_s[model]
        for kind in range(listing.key.shape[0]):
            for rank in range(first, terms.first[model + 1]):
                listing.key[kind, rank] = -np.inf
                if listing.value[kind, rank] > -np.inf:
                    listing.key[kind, rank] = (
                        listing.value[kind, rank] + listing.offset[kind, rank] * listing.by_near[model]
                    )
            listing.best[0, kind, model] = listing.best[1, kind, model] = -1
        listing.size[model], listing.following[model], listing.expires[model] = (
            0,
            first,
            -np.inf,
        )  # filled at the first look
        listing.late_first[model] = listing.late_end[model] = first
    count, cost = 0, 0.0
    while count < terms.movable.size:
        queue = listing.heap[0]
        now_s = listing.time[queue]
        if now_s == np.inf:
            return count, np.inf
        kind, loaded = terms.kind[queue], listing.loaded[queue]
        best, best_model, highest = -1, -1, -np.inf
        for k in range(models):
            model = (max(loaded, 0) + k) % models  # first the one that is loaded, which is the best mostly
            change_s = terms.change[kind, loaded + 1, model]
            if change_s == np.inf:
                continue
            if now_s > listing.expires[model]:
                _leave_late(terms, listing, model, now_s)
            start_s = now_s + change_s
            base = affinity[kind, model] - change_s * by_swap
            rank = listing.best[1, kind, model]
            if rank >= 0 and base + listing.value[kind, rank] - give_up > highest:
                best, best_model, highest = rank, model, base + listing.value[kind, rank] - give_up
            if base + listing.highest[kind, model] + max(0.0, -give_up) <= highest:
                continue
            in_time = base + start_s * listing.by_near[model]
            rank, greatest = listing.best[0, kind, model], -np.inf
            if rank >= 0 and start_s + listing.offset[kind, rank] <= 0.0:
                greatest = in_time + listing.key[kind, rank]
            if start_s > listing.in_time[kind, model] and greatest < base + listing.highest[kind, model] - give_up:
                for slot in range(listing.size[model]):
                    other = listing.window[model, slot]
                    if start_s + listing.offset[kind, other] <= 0.0:
                        index = in_time + listing.key[kind, other]
                    else:
                        index = base + listing.value[kind, other] - give_up
                    if index > greatest:
                        rank, greatest = other, index
            if greatest > highest:
                best, best_model, highest = rank, model, greatest
        if best < 0:
            listing.time[queue] = np.inf
            _sift(listing, 0)
            continue
        _take(terms, listing, best_model, best, now_s)
        chosen = terms.movable[best]
        group = terms.group[kind, chosen]
        start_s = now_s + terms.change[kind, loaded + 1, best_model]
        late_s = start_s + group.offset
        if late_s > 0.0:
            cost += group.weight * (late_s + kappa)
            if cost > most:
                return count, np.inf
        listing.time[queue], listing.loaded[queue] = start_s + group.service, best_model
        _sift(listing, 0)
        listing.chosen[count], listing.queue[count] = chosen, queue
        count += 1
    return count, cost


def best_listing(terms: Terms, listing: Listing, goes_on: Callable[[int], bool], seed: int) -> Order | None:
    """The best of the orders listed while *goes_on*(orders listed); None if none could place every group."""
    queues, (types, models) = terms.kind.size, (terms.service.shape[0], terms.first.size - 1)
    random = np.random.default_rng([seed, 7])
    served = np.maximum(terms.service, 1e-6)
    moved = served[:, terms.movable]
    mean_s = float(moved[np.isfinite(moved)].mean()) if np.isfinite(moved).any() else 1.0
    swaps = terms.change[np.isfinite(terms.change) & (terms.change > 0)]
    swap_s = float(swaps.mean()) if swaps.size else 1.0
    best: Order | None = None
    least, kept = math.inf, np.zeros(0)
    attempt = 0
    while goes_on(attempt):
        # Parameters: log of the scale of slack by model, log of that of swaps, what a late group loses, affinities.
        if attempt < len(GRID) or best is None:
            near, swap, give_up = GRID[attempt % len(GRID)]
            tried = np.zeros(models + 2 + types * models)
            tried[:models], tried[models], tried[models + 1] = math.log(near), math.log(swap), give_up
        else:
            step = STEP * math.exp(random.standard_normal())
            tried = kept + step * random.standard_normal(kept.size) * (random.random(kept.size) < CHANGED)
            tried[: models + 1] += STEP * random.standard_normal() * (random.random() < CHANGED)
        count, cost = list_groups(
            terms,
            listing,
            tried[models + 2 :].reshape(types, models),
            np.exp(tried[:models]) * mean_s,
            float(np.exp(tried[models])) * swap_s,
            float(tried[models + 1]),
            least,
        )
        if cost < least and count == terms.movable.size:
            best, least, kept = order_listed(listing, count, queues), cost, tried
        attempt += 1
    return best
