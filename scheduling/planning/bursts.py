"""Bursts: how uneven arrivals are, and how many instances beyond their mean load keep a promise under them.

Square-root staffing: n instances under one queue keep a promise at a load of R instances' worth while

    n - reserve * cv * sqrt(n) >= R

with cv the coefficient of variation of arrivals and *reserve* a number that depends on the promise, its percentile and the
instance (`scheduling.planning.simulated_capability` measures it). Work that comes in a given time varies by cv times the
root of its mean, so ten instances need only about three times the reserve of one. Figures are in docs/planner.md.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_SHARE = 0.02
"""Share of an instance's rate below which a few instances are not planned to be used: at the root's end it would be 0."""
LEAST_MINUTES = 20
"""Pairs of neighbouring minutes with requests from which on their unevenness is believed."""
SPLIT = 0.1
"""Power of the number of regions by which their reserve grows: 0 if they were one queue, a half if each stood alone."""
POISSON_CV = 1.0
HIGHEST_CV = 20.0


def arrival_cv(counts: ArrayLike) -> float:
    """CV of the gaps between arrivals, as their *counts* by minute (or any equal step) show it, oldest first; NaN is a gap.

    The root of the index of dispersion: variance of the counts by their mean, which for independent gaps tends to their
    CV squared, and for others counts also how they follow each other. The variance is half the mean square of the change
    from one step to the next, so that the course of the day is not taken for bursts. Poisson (1) while few steps are known.
    """
    count = np.asarray(counts, np.float64)
    pairs = np.stack([count[:-1], count[1:]])
    pairs = pairs[:, np.isfinite(pairs).all(axis=0) & (pairs.sum(axis=0) > 0)]
    if pairs.shape[1] < LEAST_MINUTES:
        return POISSON_CV
    variance = float(((pairs[1] - pairs[0]) ** 2).mean()) / 2.0
    return min(HIGHEST_CV, math.sqrt(variance / float(pairs.mean())))


def pooled_reserve(reserve: float, shares: ArrayLike) -> float:
    """*reserve* of instances in several regions, with the *shares* of demand of each: they take each other's bursts, but
    only once they see them, so together they are not quite one queue."""
    share = np.asarray(shares, np.float64)
    return float(reserve * (share.sum() ** 2 / (share**2).sum()) ** SPLIT)


def usable_instances(instances: ArrayLike, reserve: float, cv: float = POISSON_CV) -> NDArray[np.float64]:
    """R: the load, in instances' worth, at which *instances* keep their promise; a small share of them at least."""
    n = np.asarray(instances, np.float64)
    return np.asarray(np.maximum(n - reserve * cv * np.sqrt(n), LEAST_SHARE * n))


def instances_for(load: ArrayLike, reserve: float, cv: float = POISSON_CV) -> NDArray[np.float64]:
    """n, not rounded: how many keep their promise at a *load* of so many instances' worth. The inverse of the above."""
    r = np.asarray(load, np.float64)
    k = reserve * cv
    n = ((k + np.sqrt(k * k + 4.0 * r)) / 2.0) ** 2
    return np.asarray(np.where(r > 0, np.minimum(n, r / LEAST_SHARE), 0.0))


def highest_load_kept(load: ArrayLike, broken: ArrayLike, allowed: ArrayLike, requests: ArrayLike) -> float:
    """The highest *load* up to which promises are kept, of windows of which *broken* of *requests* broke theirs.

    *allowed* may, in the same unit as *broken*. The share that breaks is taken to rise with load (isotonic regression by
    pooled neighbours, weighted by requests), so a lucky window at a high load does not count alone, as it does where the
    highest kept window is taken, nor an unlucky one at a low load. 0 where no load keeps them.
    """
    order = np.argsort(np.asarray(load, np.float64), kind="stable")
    loads, excess, weight = (
        np.asarray(value, np.float64)[order]
        for value in (load, np.asarray(broken, np.float64) - np.asarray(allowed, np.float64), requests)
    )
    pools: list[tuple[float, float, float]] = []  # sum of excess, requests, highest load
    for at in range(loads.size):
        pool = (float(excess[at]), float(weight[at]), float(loads[at]))
        while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = before[0] + pool[0], before[1] + pool[1], pool[2]
        pools.append(pool)
    return max((highest for total, _, highest in pools if total <= 0), default=0.0)
