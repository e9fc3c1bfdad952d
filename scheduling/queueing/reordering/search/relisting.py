"""What a warm search begins with where there is time: models whose groups cost less in a new list are listed anew.

After an order was annealed for long, groups that are put into it cost so much that a new list is often the better start.
With one model to a queue each model may have its own. Now and then a queue has to go to another model as well.
"""

from typing import Final

import numpy as np

from scheduling.queueing.reordering.problem import Floats, Ints, Order
from scheduling.queueing.reordering.search.allotting import allocate_allotment, list_by, order_allotted
from scheduling.queueing.reordering.search.apportioning import allocate_apportionment, models_of, price_shifts
from scheduling.queueing.reordering.search.listing import Listing
from scheduling.queueing.reordering.search.model_listing import CHEAPER, NEARS, Allotment, begin_allotment
from scheduling.queueing.reordering.search.parts import served_most
from scheduling.queueing.reordering.search.sequences import Sequences, Terms

SHIFTED_BY: Final = (0.1, 0.2)
"""Scales of slack, in mean service times, that groups are listed by to price that a queue goes to another model."""
LEAST_SHIFT: Final = 0.01
"""Share of the cost that this must save."""


def relisted(terms: Terms, listing: Listing, order: Order, state: Sequences, allotment: Allotment) -> Order:
    """*order*, which *state* has in rows, with the models listed anew that are cheaper as *allotment* has them.

    Groups that are in a queue of another model, or cannot be served, may be missing.
    """
    begins, model, anew = served_most(terms, order), allotment.model, order_allotted(terms, listing, allotment)
    costs = np.bincount(terms.model, group_costs(terms, state), minlength=allotment.cost.size)
    cheaper = allotment.cost < CHEAPER * costs
    gone = (begins >= 0) & (model != begins)
    cheaper[model[gone]] = cheaper[begins[gone]] = True
    rows = [
        new
        if model[queue] >= 0 and cheaper[model[queue]]
        else [group for group in old if not cheaper[terms.model[group]]]
        for queue, (old, new) in enumerate(zip(order.queues(), anew.queues(), strict=True))
    ]
    return Order.of(rows)


def group_costs(terms: Terms, state: Sequences) -> Floats:
    """(N,): what each group costs where it is."""
    inside = np.arange(state.row.shape[1]) < state.length[:, None]
    late_s, groups, costs = state.row["late"][inside], state.row["group"][inside], np.zeros(terms.weight.size)
    costs[groups] = np.where(late_s > 0.0, terms.weight[groups] * (late_s + terms.kappa[0]), 0.0)
    return costs


def shifted(terms: Terms, listing: Listing, begins: Ints) -> tuple[Allotment, int]:
    """The allotment that each queue *begins* with (Q,), or with one queue at another model where that saves enough, and what
    it costs; and the listings that it took to find that."""
    models, types = terms.first.size - 1, terms.service.shape[0]
    price, cost, listed = np.zeros((models, models, types)), 0.0, 0
    price[np.arange(models), np.arange(models)] = np.inf
    allotment, mean_s = allocate_allotment(terms)
    for near in SHIFTED_BY:
        list_by(allotment, near, mean_s)
        apportionment = allocate_apportionment(terms, begins)
        cost += price_shifts(terms, listing, allotment, apportionment, price)
        listed += int(apportionment.listed[0])
    giver, taker, kind = (int(at) for at in np.unravel_index(price.argmin(), price.shape))
    if -price[giver, taker, kind] > LEAST_SHIFT * cost:
        apportionment.best[giver, kind] -= 1
        apportionment.best[taker, kind] += 1
    allotment.model[:] = models_of(terms, apportionment)
    begin_allotment(terms, listing, allotment, np.array(NEARS) * mean_s)
    return allotment, listed
