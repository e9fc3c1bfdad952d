"""Which queue serves which model, from begin to end: orders with no swap but the first, made model by model.

Annealing hardly ever ends with another allotment than it began with, as much of a queue has to change over before anything
is gained. So queues are apportioned to models first; then how the groups of each model are listed is tuned.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_without_gil
from scheduling.queueing.reordering.problem import Order
from scheduling.queueing.reordering.search.annealing import draw, part
from scheduling.queueing.reordering.search.apportioning import allocate_apportionment, apportion, drawn_model, models_of
from scheduling.queueing.reordering.search.listing import Listing, order_listed
from scheduling.queueing.reordering.search.model_listing import (
    CHEAPER,
    GIVE_UP,
    NEARS,
    Allotment,
    begin_allotment,
    list_model,
)
from scheduling.queueing.reordering.search.sequences import Terms

APPORTIONED: Final = 0.7
"""Share of the search in which queues are apportioned to models."""
APPORTIONED_BY: Final = (0.1, 0.2, 0.4)
"""Scales of slack that groups are listed by meanwhile, in mean service times."""
HOT: Final = 0.01
"""Temperature that this begins with, by cost; it falls to nothing."""
HOT_UNTIL: Final = 0.8
"""Share of it after which only what is cheaper is kept."""
SETTLED: Final = 2000
"""Changes of an apportionment in a row that need no new listing after which it is taken as it is."""
STEP: Final = 1.0
"""The most that tuning changes the logarithms of a model's scale of slack and of what a late group loses by."""
TRIES: Final = 50
"""Changes of how groups are listed between two looks at the clock."""
MOVES: Final = 20
"""The same of an apportionment, each of which may list three models: two milliseconds for 1,000 groups."""


@compiled_without_gil
def tune(terms: Terms, listing: Listing, allotment: Allotment, random: NDArray[np.uint64], tries: int) -> None:
    """Try *tries* changes of how the groups of a model are listed, and keep what makes them cheaper."""
    near, give_up, cost = allotment.near, allotment.give_up, allotment.cost
    for _ in range(tries):
        model, bits = drawn_model(terms, draw(random)), draw(random)
        near_before, give_up_before = near[model], give_up[model]
        near[model] = near_before * math.exp(STEP * (part(bits, 0) + part(bits, 16) - 1.0))
        give_up[model] = give_up_before * math.exp(STEP * (part(bits, 32) + part(bits, 48) - 1.0))
        _, costs = list_model(terms, listing, allotment, model, 0, cost[model])
        if costs < cost[model] * CHEAPER:
            cost[model] = costs
        else:
            near[model], give_up[model] = near_before, give_up_before


def allocate_allotment(terms: Terms) -> tuple[Allotment, float]:
    """An allotment that is to be written, and the mean service time that its scales of slack are multiples of."""
    queues, models = terms.kind.size, terms.first.size - 1
    served = terms.service[:, terms.movable]
    served = served[np.isfinite(served)]
    span_s = float(terms.free.max()) + float(served.sum())
    allotment = Allotment(
        model=np.full(queues, -1, np.int64),
        near=np.empty(models),
        give_up=np.empty(models),
        cost=np.empty(models),
        unserved=np.array([terms.kappa[0] + span_s]),
        queues=np.empty(queues, np.int64),
    )
    return allotment, max(1e-9, float(served.mean()) if served.size else 1.0)


def list_by(allotment: Allotment, near: float, mean_s: float) -> None:
    """Groups of all models are listed by a scale of slack of *near* mean service times."""
    allotment.near[:], allotment.give_up[:] = near * mean_s, GIVE_UP / math.sqrt(near)


def tuned(
    terms: Terms,
    listing: Listing,
    allotment: Allotment,
    done: Callable[[int], float],
    listed: int,
    random: NDArray[np.uint64],
) -> Allotment:
    """A copy of *allotment*, which has costs, with how the groups of each model are listed tuned until *done*(*listed* and
    the listings that it takes) is 1."""
    its = allotment._replace(
        **{name: getattr(allotment, name).copy() for name in ("near", "give_up", "cost", "queues")}
    )
    while done(listed) < 1.0 and terms.movable.size:
        tune(terms, listing, its, random, TRIES)
        listed += TRIES
    return its


def order_allotted(terms: Terms, listing: Listing, allotment: Allotment) -> Order:
    """The order of *allotment*; groups that no queue of their model can serve are not in it."""
    count = 0
    for model in range(allotment.cost.size):
        count, _ = list_model(terms, listing, allotment, model, count, np.inf)
    return order_listed(listing, count, terms.kind.size)


def best_of(allotments: list[Allotment]) -> Allotment:
    """Of *allotments* of the same queues to the same models, for each model how it is listed where that is cheapest."""
    best = allotments[0]
    for other in allotments[1:]:
        cheaper = other.cost < best.cost
        for name in ("near", "give_up", "cost"):
            getattr(best, name)[cheaper] = getattr(other, name)[cheaper]
    return best


def best_allotment(terms: Terms, listing: Listing, done: Callable[[int], float], seed: int, number: int = 0) -> Order:
    """The order of the allotment found until the share *done*(listings) of the search is 1; groups that no queue of their
    model can serve are not in it.

    Searches of another *number* list groups otherwise while they apportion queues to models.
    """
    allotment, mean_s = allocate_allotment(terms)
    list_by(allotment, APPORTIONED_BY[number % len(APPORTIONED_BY)], mean_s)
    apportionment, random = allocate_apportionment(terms, terms.loaded), begin_random(seed)
    tried = settled = listed = 0
    while (share := done(listed) / APPORTIONED) < 1.0 and tried - settled < SETTLED and terms.movable.size:
        cost = float(apportionment.cost[:-1].sum()) if tried else 0.0
        hot = HOT * cost * max(0.0, 1.0 - share / HOT_UNTIL)
        apportion(terms, listing, allotment, apportionment, random, MOVES, hot)
        tried += MOVES
        if apportionment.listed[0] > listed:
            listed, settled = int(apportionment.listed[0]), tried
    allotment.model[:] = models_of(terms, apportionment)
    begin_allotment(terms, listing, allotment, np.array(NEARS) * mean_s)
    return order_allotted(terms, listing, tuned(terms, listing, allotment, done, listed, random))


def begin_random(seed: int) -> NDArray[np.uint64]:
    return np.array([(seed * 2654435761 + 1442695040888963407) % (2**64 - 1) + 1], np.uint64)
