"""What no order can give: a lower bound on the work that falls due, which says when only more instances help."""

from typing import NamedTuple

import numpy as np

from scheduling.queueing.reordering.problem import Ints, Problem


class Shortage(NamedTuple):
    """Service that falls due before the fleet can have done it, whatever the order."""

    seconds: float
    """Of one queue (of the type that the bound counts as 1), by `due_s`; 0 when the bound finds none."""
    due_s: float
    """The deadline until which most is missing; infinity for none."""
    instances: Ints
    """(T,): so many more queues of the type, from now on, at least, if all are of that type; 0 when nothing is missing."""


def shortage(problem: Problem) -> Shortage:
    """The shortage of *problem*, by pooled capacity and no swaps: never more than there is.

    For any prices of a queue-second of each type, groups due by d need at least the sum of their cheapest own_s until then,
    and all queues together have the sum of their prices x (d - free_s). They need as well the sum of their cheapest
    service_s, less what of the last group of each queue may come after d, service_s - own_s. Tried are equal prices, and
    for each model those at which all types are as good for it. Groups whose deadline is over are late under any fleet and
    are left out.
    """
    types, models = problem.swap_s.shape
    order = np.argsort(problem.due_s, kind="stable")
    can = np.isfinite(problem.service_s).any(axis=1) & (problem.due_s > 0.0) & np.isfinite(problem.due_s)
    order = order[can[order]]
    nothing = Shortage(0.0, np.inf, np.zeros(types, np.int64))
    if not order.size:
        return nothing
    due_s, own_s, service_s = problem.due_s[order], problem.own_s[order], problem.service_s[order]
    rest_s = np.where(np.isfinite(service_s), service_s, 0.0) - np.where(np.isfinite(own_s), own_s, 0.0)
    rest_s = np.maximum.accumulate(rest_s, axis=0)
    queues = np.bincount(problem.queue_type, minlength=types)
    room_s = np.zeros((order.size, types))
    for kind, free_s in zip(problem.queue_type.tolist(), problem.free_s.tolist(), strict=True):
        room_s[:, kind] += np.maximum(0.0, due_s - free_s)
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
            with np.errstate(invalid="ignore"):
                needed = np.where(np.isfinite(needed_s), needed_s * price, np.inf).min(axis=1)
            missing = np.cumsum(needed) - (room_s + queues * after_s) @ price
            at = int(missing.argmax())
            if missing[at] > most:
                most, worst = float(missing[at]), float(due_s[at])
            for kind in np.flatnonzero(price > 0.0).tolist():
                more = int(np.ceil(missing / (price[kind] * (due_s + after_s[:, kind])) - 1e-9).max())
                instances[kind] = max(instances[kind], more)
    return Shortage(most, worst, instances) if most > 0.0 else nothing
