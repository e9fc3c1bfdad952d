"""List scheduling: orders that are built group by group, for the queue that is free first or is done first.

`list_groups` is a parametrised list scheduling by a composite index (ATCS: apparent tardiness cost with setups; Lee,
Bhaskaran and Pinedo 1997), whose parameters are found for each problem by a (1+1) evolution strategy: an order takes a third
of a millisecond to build, so a hundred are tried.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.sequences import Terms

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
"""Standard deviation of a mutation."""


class Listing(NamedTuple):
    """An order as it is built: the groups in the order they were chosen in, and their queues; and room to work."""

    chosen: Ints
    """(movable groups,)"""
    queue: Ints
    """(movable groups,)"""
    time: Floats
    """(Q,)"""
    loaded: Ints
    """(Q,)"""
    after: Ints
    """(N,): next group of its model that waits, by deadline; -1 for none."""
    head: Ints
    """(2, M): first group of a model that waits; second row, that is late whatever happens."""
    tail: Ints
    """(M,): the last of those that are late."""


def allocate_listing(terms: Terms) -> Listing:
    size, queues, models = terms.movable.size, terms.kind.size, terms.first.size - 1
    return Listing(
        chosen=np.empty(size, np.int64),
        queue=np.empty(size, np.int64),
        time=np.empty(queues),
        loaded=np.empty(queues, np.int64),
        after=np.empty(terms.model.size, np.int64),
        head=np.empty((2, models), np.int64),
        tail=np.empty(models, np.int64),
    )


def order_listed(listing: Listing, count: int, queues: int) -> Order:
    """The first *count* choices as an order of *queues* queues."""
    queue = listing.queue[:count]
    first = np.searchsorted(queue[by := np.argsort(queue, kind="stable")], np.arange(queues + 1))
    return Order(first.astype(np.int64), listing.chosen[:count][by])


@compiled
def earliest_completion(terms: Terms, listing: Listing, ranked: Ints) -> int:
    """Give the groups *ranked*, one after another, to the queue that is done with each first; how many could be given."""
    count = 0
    for queue in range(terms.kind.size):
        listing.time[queue], listing.loaded[queue] = terms.free[queue], terms.loaded[queue]
    for k in range(ranked.size):
        group = ranked[k]
        model, best, least_s = terms.model[group], -1, np.inf
        for queue in range(terms.kind.size):
            kind = terms.kind[queue]
            end_s = (
                listing.time[queue] + terms.change[kind, listing.loaded[queue] + 1, model] + terms.service[kind, group]
            )
            if end_s < least_s:
                best, least_s = queue, end_s
        if best >= 0:
            listing.time[best], listing.loaded[best] = least_s, model
            listing.chosen[count], listing.queue[count] = group, best
            count += 1
    return count


@compiled
def first_free(terms: Terms, listing: Listing, ranked: Ints) -> int:
    """The queue that is free first takes the first of the groups *ranked* that it can serve; how many were taken."""
    count, left = 0, ranked.size
    for queue in range(terms.kind.size):
        listing.time[queue], listing.loaded[queue] = terms.free[queue], terms.loaded[queue]
    for group in range(terms.model.size):
        listing.after[group] = 0  # 1 once it is taken
    begin = 0
    while left > 0:
        queue = 0
        for other in range(1, terms.kind.size):
            if listing.time[other] < listing.time[queue]:
                queue = other
        if listing.time[queue] == np.inf:
            break  # nobody can serve the rest
        kind = terms.kind[queue]
        while begin < ranked.size and listing.after[ranked[begin]] == 1:
            begin += 1
        taken = False
        for k in range(begin, ranked.size):
            group = ranked[k]
            if listing.after[group] == 1:
                continue
            model = terms.model[group]
            end_s = (
                listing.time[queue] + terms.change[kind, listing.loaded[queue] + 1, model] + terms.service[kind, group]
            )
            if end_s < np.inf:
                listing.time[queue], listing.loaded[queue] = end_s, model
                listing.chosen[count], listing.queue[count] = group, queue
                listing.after[group] = 1
                count, left, taken = count + 1, left - 1, True
                break
        if not taken:
            listing.time[queue] = np.inf
    return count


@compiled
def list_groups(
    terms: Terms,
    listing: Listing,
    value: Floats,
    affinity: Floats,
    near_s: Floats,
    swap_s: float,
    give_up: float,
    most: float,
) -> tuple[int, float]:
    """The queue that is free first takes the group with the largest index; (how many were taken, cost).

    The index of a group is value (T, N), log of its requests by second of service, plus affinity (T, M), less the time until
    it can begin by *swap_s*, less its slack by *near_s* (M,), less *give_up* if it is late. It stops once the cost is above
    *most*, and returns infinity.
    """
    models, queues, kappa = terms.first.size - 1, terms.kind.size, terms.kappa[0]
    types = terms.service.shape[0]
    for queue in range(queues):
        listing.time[queue], listing.loaded[queue] = terms.free[queue], terms.loaded[queue]
    for model in range(models):
        first, end = terms.first[model], terms.first[model + 1]
        for k in range(first, end):
            listing.after[terms.movable[k]] = terms.movable[k + 1] if k + 1 < end else -1
        listing.head[0, model] = terms.movable[first] if end > first else -1
        listing.head[1, model] = -1
    count, cost = 0, 0.0
    while count < terms.movable.size:
        queue = 0
        for other in range(1, queues):
            if listing.time[other] < listing.time[queue]:
                queue = other
        now_s = listing.time[queue]
        if now_s == np.inf:
            return count, np.inf
        kind, loaded = terms.kind[queue], listing.loaded[queue]
        best, best_before, best_list, highest = -1, -1, 0, -np.inf
        for model in range(models):
            change_s = terms.change[kind, loaded + 1, model]
            if change_s == np.inf:
                continue
            base = affinity[kind, model] - change_s / swap_s
            before, group, looked = -1, listing.head[0, model], 0
            while group >= 0 and looked < LOOKED_AT:
                after = listing.after[group]
                least = terms.offset[0, group]
                for other in range(1, types):
                    least = min(least, terms.offset[other, group])
                if now_s + least > 0.0:  # late wherever it goes, for no queue is free sooner
                    if before >= 0:
                        listing.after[before] = after
                    else:
                        listing.head[0, model] = after
                    if listing.head[1, model] < 0:
                        listing.head[1, model] = group
                    else:
                        listing.after[listing.tail[model]] = group
                    listing.tail[model], listing.after[group] = group, -1
                    group = after
                    continue
                looked += 1
                slack_s = -(now_s + change_s + terms.offset[kind, group])
                index = base + value[kind, group]
                index -= slack_s / near_s[model] if slack_s >= 0.0 else give_up
                if index > highest and terms.service[kind, group] < np.inf:
                    best, best_before, best_list, highest = group, before, 0, index
                before, group = group, after
            before, group, looked = -1, listing.head[1, model], 0
            while group >= 0 and looked < LATE_LOOKED_AT:
                index = base + value[kind, group] - give_up
                if index > highest and terms.service[kind, group] < np.inf:
                    best, best_before, best_list, highest = group, before, 1, index
                before, group, looked = group, listing.after[group], looked + 1
        if best < 0:
            listing.time[queue] = np.inf
            continue
        model = terms.model[best]
        if best_before >= 0:
            listing.after[best_before] = listing.after[best]
        else:
            listing.head[best_list, model] = listing.after[best]
        if best_list == 1 and listing.tail[model] == best:
            listing.tail[model] = best_before
        start_s = now_s + terms.change[kind, loaded + 1, model]
        late_s = start_s + terms.offset[kind, best]
        if late_s > 0.0:
            cost += terms.weight[best] * (late_s + kappa)
            if cost > most:
                return count, np.inf
        listing.time[queue], listing.loaded[queue] = start_s + terms.service[kind, best], model
        listing.chosen[count], listing.queue[count] = best, queue
        count += 1
    return count, cost


def best_listing(terms: Terms, listing: Listing, goes_on: Callable[[int], bool], seed: int) -> Order | None:
    """The best of the orders listed while *goes_on*(orders listed); None if none could place every group."""
    queues, (types, models) = terms.kind.size, (terms.service.shape[0], terms.first.size - 1)
    random = np.random.default_rng([seed, 7])
    served = np.maximum(terms.service, 1e-6)
    value = np.log(np.maximum(terms.weight, 1.0)) - np.log(served)
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
            tried = kept + STEP * random.standard_normal(kept.size) * (random.random(kept.size) < CHANGED)
            tried[: models + 1] += STEP * random.standard_normal() * (random.random() < CHANGED)
        count, cost = list_groups(
            terms,
            listing,
            value,
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
