"""Bursts: the burstiness of arrivals, and the instances beyond their mean load that keep an SLO under it.

Square-root staffing: n instances under one queue keep an SLO at a load worth R instances while

n - reserve * cv * sqrt(n) >= R

with cv the coefficient of variation of arrivals and *reserve* a number that depends on the SLO, its percentile and the
instance (`scheduling.planning.simulated_capability` measures it). Work that arrives in a given time varies by cv times
the root of its mean, so ten instances need only about three times the reserve of one. Figures are in docs/papers/planner.md.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_SHARE = 0.02
"""Least usable share of an instance's rate for a few instances: the formula would reach 0."""
LEAST_MINUTES = 20
"""Pairs of neighbouring minutes with requests from which on their burstiness is used."""
SPLIT = 0.1
"""Power of the number of regions by which their reserve grows: 0 for one queue, a half for separate ones."""
POISSON_CV = 1.0
HIGHEST_CV = 20.0
UNEVEN_CV = 3.0
"""CV of arrivals from which on the reserves that no formula gives are held in full."""


def arrival_cv(counts: ArrayLike) -> float:
    """Return the CV of interarrival gaps from *counts* per minute (or any equal step), oldest first; NaN is a gap.

    It is the root of the index of dispersion, variance over mean of the counts, which for independent gaps tends to
    their squared CV, and otherwise includes their correlation. The variance is half the mean square of the change
    between steps, so that the daily cycle is not taken for bursts. 1 (Poisson) while few steps are known.
    """
    count = np.asarray(counts, np.float64)
    pairs = np.stack([count[:-1], count[1:]])
    pairs = pairs[:, np.isfinite(pairs).all(axis=0) & (pairs.sum(axis=0) > 0)]
    if pairs.shape[1] < LEAST_MINUTES:
        return POISSON_CV
    variance = float(((pairs[1] - pairs[0]) ** 2).mean()) / 2.0
    return min(HIGHEST_CV, math.sqrt(variance / float(pairs.mean())))


def unevenness(cv: float) -> float:
    """Return the share of such a reserve for arrivals of *cv*: 0 for Poisson and calmer ones, 1 from `UNEVEN_CV` on."""
    return min(max((cv - POISSON_CV) / (UNEVEN_CV - POISSON_CV), 0.0), 1.0)


def pooled_reserve(reserve: float, shares: ArrayLike) -> float:
    """Return the *reserve* of instances in several regions, with the *shares* of demand of each.

    Regions absorb each other's bursts only once they notice them, so together they are not quite one queue.
    """
    share = np.asarray(shares, np.float64)
    return float(reserve * (share.sum() ** 2 / (share**2).sum()) ** SPLIT)


def usable_instances(instances: ArrayLike, reserve: float, cv: float = POISSON_CV) -> NDArray[np.float64]:
    """Return R, the load in instances at which *instances* keep their SLO; at least a small share of them."""
    n = np.asarray(instances, np.float64)
    return np.asarray(np.maximum(n - reserve * cv * np.sqrt(n), LEAST_SHARE * n))


def instances_for(load: ArrayLike, reserve: float, cv: float = POISSON_CV) -> NDArray[np.float64]:
    """Return n, not rounded, the instances that keep their SLO at *load*: the inverse of the above."""
    r = np.asarray(load, np.float64)
    k = reserve * cv
    n = ((k + np.sqrt(k * k + 4.0 * r)) / 2.0) ** 2
    return np.asarray(np.where(r > 0, np.minimum(n, r / LEAST_SHARE), 0.0))


def highest_load_kept(load: ArrayLike, broken: ArrayLike, allowed: ArrayLike, requests: ArrayLike) -> float:
    """Return the highest *load* up to which SLOs are kept, given windows in which *broken* of *requests* violated them.

    *allowed* may, in the unit of *broken*. The violated share is assumed to rise with load (isotonic regression by
    pooled neighbours, weighted by requests), so neither a lucky window at a high load nor an unlucky one at a low load
    decides alone. 0 if no load keeps them.
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
