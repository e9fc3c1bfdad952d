"""What a warm start begins with: an existing order as far as it can be kept, and new groups where they cost least there."""

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.queueing.reordering.problem import Floats, Ints
from scheduling.queueing.reordering.search.sequences import Sequences, Terms, least_shift_cost, refresh, shift_cost


@compiled
def insert(terms: Terms, state: Sequences, groups: Ints, change: Floats) -> int:
    """Put each of *groups* where it raises the cost least; how many could be placed. Adds cost and balance to *change* (2,).

    A row that is full takes none. Groups that may not begin yet make their queue wait, so they go where it is busy anyway.
    """
    queues, width = state.length.size, state.row.shape[1] - 1
    placed, kappa = 0, terms.kappa[0]
    for k in range(groups.size):
        group = groups[k]
        model, hold_s = terms.model[group], terms.hold[group]
        best, best_at, least, least_cost = -1, 0, np.inf, 0.0
        for queue in range(queues):
            kind, length = terms.kind[queue], state.length[queue]
            old_s = state.end[queue]
            if terms.service[kind, group] == np.inf or length == width:
                continue
            for at in range(length, -1, -1):
                here = state.row[queue, at]
                start_s = max(here.ready + terms.change[kind, here.loaded + 1, model], hold_s)
                if not start_s < np.inf:
                    continue
                late_s, cost = start_s + terms.offset[kind, group], 0.0
                if late_s > 0.0:
                    cost = terms.weight[group] * (late_s + kappa)
                end_s, shift_s = start_s + terms.service[kind, group], 0.0
                if at < length:
                    wanted = terms.model[here.group]
                    shift_s = end_s + terms.change[kind, model + 1, wanted] - here.start
                    end_s = old_s + shift_s
                    if not end_s < np.inf:
                        continue
                balance = terms.balance[0] * (end_s - old_s) * (end_s + old_s)
                if cost + balance + least_shift_cost(terms, state, queue, at, shift_s) >= least:
                    continue
                cost += shift_cost(terms, state, queue, at, shift_s)
                if cost + balance < least:
                    best, best_at, least, least_cost = queue, at, cost + balance, cost
        if best < 0:
            continue
        for position in range(state.length[best], best_at, -1):
            state.row[best, position].group = state.row[best, position - 1].group
        state.row[best, best_at].group = group
        state.length[best] += 1
        refresh(terms, state, best, best_at)
        change[0] += least_cost
        change[1] += least - least_cost
        placed += 1
    return placed


@compiled
def keep(terms: Terms, first: Ints, groups: Ints, kept_first: Ints, kept: Ints, lacking: NDArray[np.bool_]) -> None:
    """Write what can be kept of the order *first*, *groups* (`Order`) into *kept_first* and *kept*.

    That is each group that is *lacking*, which it is no more then, and that its queue can serve there. Numbers of groups may
    be any, *first* must rise from 0 on to no more than there are.
    """
    count = 0
    for queue in range(terms.kind.size):
        kept_first[queue] = count
        kind, model = terms.kind[queue], terms.loaded[queue]
        for at in range(first[queue], first[queue + 1]) if queue + 1 < first.size else range(0):
            group = groups[at]
            if group < 0 or group >= lacking.size or not lacking[group]:
                continue
            wanted = terms.model[group]
            if terms.change[kind, model + 1, wanted] + terms.service[kind, group] < np.inf:
                kept[count], lacking[group], model = group, False, wanted
                count += 1
    kept_first[terms.kind.size] = count
