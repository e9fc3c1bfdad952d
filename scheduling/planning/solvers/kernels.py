"""Repair and local search over whole plans, compiled. They change `Tally` in place, one instance or a few at a time."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_aside
from scheduling.planning.problem import Problem

LARGEST = 3
"""Most instances of one kind that a move takes away or adds."""


class Terms(NamedTuple):
    """A `Problem` as the kernels read it; l, r, g as there."""

    capability: NDArray[np.float64]
    """(l, g)"""
    gpus: NDArray[np.int64]
    """(l, g)"""
    instance_usd: NDArray[np.float64]
    """(l, g)"""
    same_usd: NDArray[np.float64]
    """(l, g): start from the model's own spot."""
    other_usd: NDArray[np.float64]
    """(l, r, g): start on GPUs that another model had."""
    new_usd: NDArray[np.float64]
    """(g,): more for every unit acquired."""
    instances: NDArray[np.int64]
    """(l, r, g)"""
    spot: NDArray[np.int64]
    """(l, r, g)"""
    acquired: NDArray[np.int64]
    """(r, g)"""
    capacity: NDArray[np.int64]
    """(r, g)"""
    least: NDArray[np.int64]
    """(l, r)"""
    most: NDArray[np.int64]
    """(l, r)"""
    need: NDArray[np.float64]
    """(l, r)"""
    need_total: NDArray[np.float64]
    """(l,)"""
    home_weight: NDArray[np.float64]
    """(l,): price of a token a second missing in its own region."""
    total_weight: NDArray[np.float64]
    """(l,): price of a token a second missing everywhere."""
    instance_weight: NDArray[np.float64]
    """(l,): price of an instance below the minimum."""
    beyond_half: NDArray[np.float64]
    """(1,): see `problem.BEYOND_HALF`."""


class Tally(NamedTuple):
    """A plan and the sums over it that rows are made of."""

    targets: NDArray[np.int64]
    """(l, r, g)"""
    served: NDArray[np.float64]
    """(l, r)"""
    total: NDArray[np.float64]
    """(l,)"""
    held: NDArray[np.int64]
    """(l, r)"""
    used: NDArray[np.int64]
    """(r, g)"""
    settled: NDArray[np.int64]
    """(l,): 1 when nothing better was found for a model since it last changed."""


def allocate_tally(problem: Problem) -> Tally:
    """A plan without instances."""
    n, r, g = problem.shape
    return Tally(
        targets=np.zeros((n, r, g), np.int64),
        served=np.zeros((n, r)),
        total=np.zeros(n),
        held=np.zeros((n, r), np.int64),
        used=np.zeros((r, g), np.int64),
        settled=np.zeros(n, np.int64),
    )


@compiled
def add_up(terms: Terms, tally: Tally) -> None:
    """Write the sums of `tally.targets` afresh."""
    models, regions, types = tally.targets.shape
    tally.used[:, :] = 0
    for i in range(models):
        tally.total[i] = 0.0
        for j in range(regions):
            tally.served[i, j] = 0.0
            tally.held[i, j] = 0
            for k in range(types):
                found = tally.targets[i, j, k]
                tally.served[i, j] += terms.capability[i, k] * found
                tally.held[i, j] += found
                tally.used[j, k] += terms.gpus[i, k] * found
            tally.total[i] += tally.served[i, j]


@compiled_aside
def missing(need: float, served: float, beyond_half: float) -> float:
    """What is missing of *need*, the second half of it weighing *beyond_half* times as much. 0 but for rounding."""
    short = need - served
    if short <= 1e-9 * need:
        return 0.0
    return short + (beyond_half - 1.0) * max(0.0, short - 0.5 * need)


@compiled_aside
def change(terms: Terms, tally: Tally, i: int, j: int, k: int, by: int) -> float:
    """By how much the plan's price changes with *by* more instances of model i in region j on type k; infinity: not allowed.

    The price is the cost plus the weighed shortages.
    """
    before = tally.targets[i, j, k]
    after = before + by
    units = terms.gpus[i, k] * by
    used = tally.used[j, k]
    if after < 0:
        return np.inf
    if by > 0 and (
        terms.capability[i, k] <= 0.0 or tally.held[i, j] + by > terms.most[i, j] or used + units > terms.capacity[j, k]
    ):
        return np.inf
    present, spot = terms.instances[i, j, k], terms.spot[i, j, k]
    started = max(0, after - present) - max(0, before - present)
    redeployed = max(0, after - present - spot) - max(0, before - present - spot)
    same = terms.same_usd[i, k]
    price = terms.instance_usd[i, k] * by + same * started + (terms.other_usd[i, j, k] - same) * redeployed
    acquired = terms.acquired[j, k]
    price += terms.new_usd[k] * (max(0, used + units - acquired) - max(0, used - acquired))

    gained = terms.capability[i, k] * by
    half = terms.beyond_half[0]
    need, served = terms.need[i, j], tally.served[i, j]
    price += terms.home_weight[i] * (missing(need, served + gained, half) - missing(need, served, half))
    need, served = terms.need_total[i], tally.total[i]
    price += terms.total_weight[i] * (missing(need, served + gained, half) - missing(need, served, half))
    least, count = terms.least[i, j], tally.held[i, j]
    price += terms.instance_weight[i] * (max(0, least - count - by) - max(0, least - count))
    return float(price)


@compiled_aside
def apply(terms: Terms, tally: Tally, i: int, j: int, k: int, by: int) -> None:
    """Make the change that `change` prices."""
    tally.targets[i, j, k] += by
    tally.served[i, j] += terms.capability[i, k] * by
    tally.total[i] += terms.capability[i, k] * by
    tally.held[i, j] += by
    tally.used[j, k] += terms.gpus[i, k] * by
    tally.settled[i] = 0


@compiled_aside
def best_addition(
    terms: Terms, tally: Tally, i: int, first: int, last: int, below: float, largest: int, found: NDArray[np.int64]
) -> None:
    """The cheapest change that adds up to *largest* instances of model i in regions *first* to *last*, if under *below*.

    Region, type and number are written to *found*; the type is -1 when there is none.
    """
    best = below
    found[1] = -1
    for j in range(first, last + 1):
        for k in range(terms.capability.shape[1]):
            for by in range(1, largest + 1):
                price = change(terms, tally, i, j, k, by)
                if price < best:
                    best = price
                    found[0], found[1], found[2] = j, k, by
                if price == np.inf:
                    break


@compiled_aside
def displace(
    terms: Terms, tally: Tally, i: int, first: int, last: int, found: NDArray[np.int64], least_gain: float
) -> bool:
    """Make room for an instance of model i in regions *first* to *last*, where another model can move to other GPUs."""
    models, regions, types = tally.targets.shape
    for j in range(first, last + 1):
        for k in range(types):
            for other in range(models):
                if other == i or terms.capability[i, k] <= 0.0 or tally.held[i, j] >= terms.most[i, j]:
                    continue
                was_settled = tally.settled[other]
                for fewer in range(1, min(LARGEST, tally.targets[other, j, k]) + 1):
                    price = change(terms, tally, other, j, k, -fewer)
                    apply(terms, tally, other, j, k, -fewer)
                    price += change(terms, tally, i, j, k, 1)
                    if price < np.inf:
                        apply(terms, tally, i, j, k, 1)
                        at_home = tally.served[other, j] < terms.need[other, j] * (1.0 - 1e-9)
                        at_home = at_home or tally.held[other, j] < terms.least[other, j]
                        start, end = (j, j) if at_home else (0, regions - 1)
                        best_addition(terms, tally, other, start, end, -least_gain - price, LARGEST, found)
                        if found[1] >= 0:
                            apply(terms, tally, other, found[0], found[1], found[2])
                            return True
                        if price < -least_gain:
                            return True
                        apply(terms, tally, i, j, k, -1)
                    apply(terms, tally, other, j, k, fewer)
                    tally.settled[other] = was_settled
                    if price < np.inf:
                        break
    return False


@compiled_aside
def fill(terms: Terms, tally: Tally, i: int, j: int, found: NDArray[np.int64], least_gain: float) -> int:
    """Add instances of model i while that makes the plan better: in region j, else, for the sum of all, anywhere."""
    regions, moves = terms.need.shape[1], 0
    while True:
        short_home = tally.served[i, j] < terms.need[i, j] * (1.0 - 1e-9) or tally.held[i, j] < terms.least[i, j]
        short_total = tally.total[i] < terms.need_total[i] * (1.0 - 1e-9)
        if not (short_home or short_total):
            return moves
        first, last = (j, j) if short_home else (0, regions - 1)
        best_addition(terms, tally, i, first, last, -least_gain, 1, found)
        if found[1] >= 0:
            apply(terms, tally, i, found[0], found[1], found[2])
        elif not displace(terms, tally, i, first, last, found, least_gain):
            return moves
        moves += 1


@compiled_aside
def lighten(terms: Terms, tally: Tally, i: int, j: int, k: int, found: NDArray[np.int64], least_gain: float) -> bool:
    """Take up to LARGEST instances of model i in region j off type k, and make up for them where it costs less."""
    regions = terms.need.shape[1]
    for by in range(1, min(LARGEST, tally.targets[i, j, k]) + 1):
        price = change(terms, tally, i, j, k, -by)
        apply(terms, tally, i, j, k, -by)
        if price < -least_gain:
            return True
        at_home = tally.served[i, j] < terms.need[i, j] * (1.0 - 1e-9) or tally.held[i, j] < terms.least[i, j]
        first, last = (j, j) if at_home else (0, regions - 1)
        best_addition(terms, tally, i, first, last, -least_gain - price, LARGEST, found)
        if found[1] >= 0:
            apply(terms, tally, i, found[0], found[1], found[2])
            return True
        apply(terms, tally, i, j, k, by)
    return False


@compiled_aside
def saving(terms: Terms, i: int, j: int, k: int) -> float:
    """The most that one instance fewer of model i in region j on type k can save."""
    return float(terms.instance_usd[i, k] + terms.other_usd[i, j, k] + terms.new_usd[k] * terms.gpus[i, k])


@compiled_aside
def rearrange(terms: Terms, tally: Tally, i: int, j: int, least_gain: float) -> bool:
    """Change three types of model i in region j at once: fewer of one, more of a second, and of a third what then pays."""
    types = terms.capability.shape[1]
    for out in range(types):
        for fewer in range(1, min(LARGEST, tally.targets[i, j, out]) + 1):
            first = change(terms, tally, i, j, out, -fewer)
            apply(terms, tally, i, j, out, -fewer)
            for into in range(types):
                if into == out or terms.capability[i, into] <= 0.0:
                    continue
                for more in range(1, LARGEST + 1):
                    second = first + change(terms, tally, i, j, into, more)
                    if second == np.inf:
                        break
                    apply(terms, tally, i, j, into, more)
                    # What is still short needs more of the third, what is over allows less.
                    short = tally.served[i, j] < terms.need[i, j] * (1.0 - 1e-9)
                    short = short or tally.total[i] < terms.need_total[i] * (1.0 - 1e-9)
                    sign = 1 if short or tally.held[i, j] < terms.least[i, j] else -1
                    left = fewer * saving(terms, i, j, out) - more * terms.instance_usd[i, into]
                    for third in range(types):
                        if third in (out, into):
                            continue
                        for by in range(1, LARGEST + 1):
                            if sign > 0 and left <= by * terms.instance_usd[i, third]:
                                break
                            if sign < 0 and left + by * saving(terms, i, j, third) <= 0.0:
                                continue
                            price = second + change(terms, tally, i, j, third, sign * by)
                            if price < -least_gain:
                                apply(terms, tally, i, j, third, sign * by)
                                return True
                            if price == np.inf:
                                break
                    apply(terms, tally, i, j, into, -more)
            apply(terms, tally, i, j, out, fewer)
    return False


@compiled
def improve(terms: Terms, tally: Tally, passes: int, deep: int, least_gain: float, found: NDArray[np.int64]) -> int:
    """Fill what is short, then look for cheaper moves until none is left or *passes* are done; the number of moves.

    A move is taken when it makes the plan cheaper by more than *least_gain* USD. Moves of three types at once, which take
    longest to look for, are tried if *deep* is not 0, and when others are exhausted. *found* is work space of three.
    """
    models, regions, types = tally.targets.shape
    moves = 0
    tally.settled[:] = 0
    for _ in range(passes):
        add_up(terms, tally)
        before = moves
        for i in range(models):
            if tally.settled[i] != 0:
                continue
            changed = 0
            for j in range(regions):
                changed += fill(terms, tally, i, j, found, least_gain)
            for j in range(regions):
                for k in range(types):
                    while lighten(terms, tally, i, j, k, found, least_gain):
                        changed += 1
            if deep != 0 and changed == 0:
                for j in range(regions):
                    while rearrange(terms, tally, i, j, least_gain):
                        changed += 1
            if changed == 0:
                tally.settled[i] = 1
            moves += changed
        if moves == before:
            break
    return moves
