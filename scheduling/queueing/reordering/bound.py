"""Lower bound on the work that falls due before any order can serve it: when only more instances help."""

from typing import NamedTuple

import numpy as np

from scheduling.queueing.reordering.problem import Ints, Problem


class Shortage(NamedTuple):
    """Service that falls due before the fleet can have done it, in any order."""

    seconds: float
    """Of one queue (of the type that the bound counts as 1), by `due_s`; 0 if the bound shows no shortage."""
    due_s: float
    """The deadline with the largest shortage; infinity for none."""
    instances: Ints
    """(T,): least number of further queues of the type, from now on, if all are of that type; 0 without a shortage."""


def nothing_missing(problem: Problem) -> Shortage:
    """Return the shortage of a *problem* whose groups can all be in time."""
    return Shortage(0.0, np.inf, np.zeros(problem.swap_s.shape[0], np.int64))


def shortage(problem: Problem) -> Shortage:
    """Return the shortage of *problem*, by pooled capacity and no swaps: never more than the actual one.

    For any prices of a queue-second of each type, groups due by d need at least the sum of their cheapest own_s until
    then, and all queues together have the sum of their prices x (d - free_s). They also need the sum of their cheapest
    service_s, less the part of each queue's last group that may come after d, service_s - own_s. Tried are equal
    prices, and for each model those at which all types serve it equally well. Groups past their deadline are late under
    any fleet and are left out.
    """
    types, models = problem.swap_s.shape
    order = np.argsort(problem.due_s, kind="stable")
    can = np.isfinite(problem.service_s).any(axis=1) & (problem.due_s > 0.0) & np.isfinite(problem.due_s)
    order = order[can[order]]
    if not order.size:
        return nothing_missing(problem)
    # By type, then group: the computations below run along groups.
    due_s, own_s, service_s = problem.due_s[order], problem.own_s[order].T, problem.service_s[order].T
    served = np.isfinite(service_s)
    service_s, own_s = np.where(served, service_s, 0.0), np.where(served, own_s, 0.0)
    never_s = np.where(served, 0.0, np.inf)
    rest_s = np.maximum.accumulate(service_s - own_s, axis=1)
    queues = np.bincount(problem.queue_type, minlength=types)
    room_s = np.zeros(served.shape)
    for kind in range(types):
        free_s = np.sort(problem.free_s[problem.queue_type == kind])
        free = np.searchsorted(free_s, due_s)
        room_s[kind] = free * due_s - np.concatenate([[0.0], np.cumsum(free_s)])[free]
    prices = [np.ones(types)]
    for model in range(models):
        served = problem.service_s[problem.model == model]
        if served.size:
            mean_s = served.mean(axis=0)
            least_s = mean_s.min()
            if not np.isfinite(least_s):
                continue
            prices.append(np.where(np.isfinite(mean_s), (least_s + 1e-9) / (mean_s + 1e-9), 0.0))
    most, worst, instances = 0.0, np.inf, np.zeros(types, np.int64)
    for price in prices:
        for needed_s, after_s in ((own_s, np.zeros_like(rest_s)), (service_s, rest_s)):
            needed = (needed_s * price[:, None] + never_s).min(axis=0)
            missing = np.cumsum(needed) - price @ (room_s + queues[:, None] * after_s)
            at = int(missing.argmax())
            if missing[at] > most:
                most, worst = float(missing[at]), float(due_s[at])
            for kind in np.flatnonzero(price > 0.0).tolist():
                more = int(np.ceil(missing / (price[kind] * (due_s + after_s[kind])) - 1e-9).max())
                instances[kind] = max(instances[kind], more)
    return Shortage(most, worst, instances) if most > 0.0 else nothing_missing(problem)
