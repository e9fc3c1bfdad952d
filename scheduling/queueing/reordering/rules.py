"""Orders by simple rules: baselines and fallbacks of the global scheduler.

Groups are numbered by arrival. Only `earliest_completion` considers the cost of a swap before it makes one.
"""

import heapq
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from scheduling.compiled import compiled
from scheduling.queueing.reordering.listing import Listing, allocate_listing, order_listed
from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.rows import Terms


@compiled
def earliest_completion(terms: Terms, listing: Listing, ranked: Ints) -> int:
    """Give each of the groups *ranked* in order to the queue that completes it first; return the number placed."""
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
    """Let the queue that is free first take the first of the groups *ranked* that it can serve; return the number placed."""
    count, left = 0, ranked.size
    for queue in range(terms.kind.size):
        listing.time[queue], listing.loaded[queue] = terms.free[queue], terms.loaded[queue]
    for group in range(terms.model.size):
        listing.taken[group] = 0
    begin = 0
    while left > 0:
        queue = 0
        for other in range(1, terms.kind.size):
            if listing.time[other] < listing.time[queue]:
                queue = other
        if listing.time[queue] == np.inf:
            break  # no queue can serve the rest
        kind = terms.kind[queue]
        while begin < ranked.size and listing.taken[ranked[begin]] == 1:
            begin += 1
        taken = False
        for k in range(begin, ranked.size):
            group = ranked[k]
            if listing.taken[group] == 1:
                continue
            model = terms.model[group]
            end_s = (
                listing.time[queue] + terms.change[kind, listing.loaded[queue] + 1, model] + terms.service[kind, group]
            )
            if end_s < np.inf:
                listing.time[queue], listing.loaded[queue] = end_s, model
                listing.chosen[count], listing.queue[count] = group, queue
                listing.taken[group] = 1
                count, left, taken = count + 1, left - 1, True
                break
        if not taken:
            listing.time[queue] = np.inf
    return count


def by_deadline(terms: Terms) -> Ints:
    """Return movable groups, the earliest deadline first; ties by arrival."""
    return np.asarray(terms.movable[np.lexsort((terms.movable, terms.due[terms.movable]))], np.int64)


def in_order_of(terms: Terms, key: Floats | Ints) -> Order:
    """Let the queue that is free first take the group with the lowest key (N,) that it can serve; ties by arrival."""
    listing = allocate_listing(terms)
    ranked = np.asarray(terms.movable[np.lexsort((terms.movable, key[terms.movable]))], np.int64)
    return order_listed(listing, first_free(terms, listing, ranked), terms.kind.size)


def fcfs(terms: Terms) -> Order:
    """First come, first served, as vLLM behind one queue for all instances."""
    return in_order_of(terms, np.arange(terms.model.size))


def sjf(terms: Terms) -> Order:
    """Shortest job first: by the service time of a request in its fastest queue."""
    least_s = terms.service.min(axis=0, initial=np.inf)
    return in_order_of(terms, least_s / np.maximum(terms.weight, 1.0))


def edf(terms: Terms) -> Order:
    """Earliest deadline first over all queues."""
    return in_order_of(terms, terms.due)


def edf_per_queue(terms: Terms) -> Order:
    """EDF within each queue; groups are dealt on arrival in equal numbers to the queues that can serve them."""
    queues: list[list[int]] = [[] for _ in range(terms.kind.size)]
    dealt, groups = np.zeros(terms.kind.size), np.sort(terms.movable)
    takes_s = terms.change[:, 0, :][terms.kind][:, terms.model[groups]] + terms.service[terms.kind][:, groups]
    never = np.where(np.isfinite(takes_s), 0.0, np.inf).T
    for group, cannot in zip(groups.tolist(), never, strict=True):
        least = int((dealt + cannot).argmin())
        if cannot[least] == 0.0:
            queues[least].append(group)
            dealt[least] += 1
    for queue in queues:
        queue.sort(key=lambda group: (terms.due[group], group))
    return Order.of(queues)


def edf_earliest_completion(terms: Terms) -> Order:
    """By deadline, each group to the queue that completes it first, swaps included."""
    listing = allocate_listing(terms)
    return order_listed(listing, earliest_completion(terms, listing, by_deadline(terms)), terms.kind.size)


def shepherd(terms: Terms) -> Order:
    """After SHEPHERD's FLEX: the queue that is free first takes the model of which it can serve most requests in time.

    For each model it counts, by deadline, the groups that it can serve one after another in time, at most `BATCH_GROUPS` of
    them, and serves the largest such batch. If nothing can be in time it takes the earliest deadline. Approximates FLEX,
    which serves batches of requests of one length; not the authors' code.
    """
    models, queues = terms.first.size - 1, terms.kind.size
    waiting = [terms.movable[terms.first[m] : terms.first[m + 1]].tolist() for m in range(models)]
    order: list[list[int]] = [[] for _ in range(queues)]
    weight, due, change = terms.weight.tolist(), terms.due.tolist(), terms.change.tolist()
    service, offset = terms.service.tolist(), terms.offset.tolist()
    loaded = terms.loaded.tolist()
    free = [(free_s, queue) for queue, free_s in enumerate(terms.free.tolist())]
    heapq.heapify(free)
    while free and any(waiting):
        now_s, queue = heapq.heappop(free)
        kind = int(terms.kind[queue])
        largest, batch, first_due = 0.0, list[int](), math.inf
        for model in range(models):
            start_s = now_s + change[kind][loaded[queue] + 1][model]
            if not start_s < math.inf:
                continue
            time_s, requests, chosen, servable = start_s, 0.0, list[int](), -1
            for group in waiting[model]:
                if service[kind][group] == math.inf:
                    continue
                servable = group if servable < 0 else servable
                if time_s + offset[kind][group] <= 0.0:
                    chosen.append(group)
                    requests += weight[group]
                    time_s += service[kind][group]
                    if len(chosen) == BATCH_GROUPS:
                        break
            if requests > largest:
                largest, batch = requests, chosen
            elif largest == 0.0 and servable >= 0 and (due[servable] < first_due or not batch):
                batch, first_due = [servable], due[servable]
        if not batch:
            continue  # this queue can serve none of the waiting groups
        model = int(terms.model[batch[0]])
        taken = set(batch)
        waiting[model] = [group for group in waiting[model] if group not in taken]
        now_s += change[kind][loaded[queue] + 1][model] + sum(service[kind][group] for group in batch)
        loaded[queue] = model
        order[queue] += batch
        heapq.heappush(free, (now_s, queue))
    return Order.of(order)


BATCH_GROUPS: Final = 4

RULES: Final[dict[str, Callable[[Terms], Order]]] = {
    "fcfs": fcfs,
    "sjf": sjf,
    "edf": edf,
    "edf-per-queue": edf_per_queue,
    "edf-earliest-completion": edf_earliest_completion,
    "shepherd": shepherd,
}
"""By the name in scenarios, settings and results. Strict priority is `in_order_of` with priorities as keys."""

CANDIDATES: Final = ("edf-earliest-completion", "edf-per-queue", "edf", "sjf", "fcfs")
"""Rules that the search must beat every time; ties go to the first.

`shepherd` is left out: at a thousand groups it takes as long as a search.
"""

SEARCH: Final = "search"
PROGRAMME: Final = "programme"
REORDERINGS: Final = (SEARCH, PROGRAMME, *RULES)
"""Methods of the global scheduler: the search, the search and then the programme if groups are few, or a rule."""
