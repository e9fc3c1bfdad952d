"""Plain twins of the global scheduler's kernels: an order served step by step, its objective, and the best of all orders."""

import itertools
import math


def served(problem, order):
    """{group: (start, lateness)} of *order*, a list of lists, and the number of swaps."""
    times, swaps = {}, 0
    for queue, groups in enumerate(order):
        kind, now, loaded = int(problem.queue_type[queue]), float(problem.free_s[queue]), int(problem.loaded[queue])
        for group in groups:
            model = int(problem.model[group])
            if model != loaded:
                swaps += 1
                now += float(problem.drain_s[kind, loaded]) if loaded >= 0 else 0.0
                now += float(problem.swap_s[kind, model])
            now = max(now, float(problem.hold_s[group]))
            times[group] = (now, now + float(problem.own_s[group, kind]) - float(problem.due_s[group]))
            now += float(problem.service_s[group, kind])
            loaded = model
    return times, swaps


def objective(problem, order, kappa_s):
    """sum of n (max(0, L) + kappa 1(L > 0)); infinity for an order that cannot be carried out."""
    times, _ = served(problem, order)
    if any(not math.isfinite(start) for start, _ in times.values()):
        return math.inf
    return sum(float(problem.requests[group]) * (late + kappa_s) for group, (_, late) in times.items() if late > 0.0)


def all_orders(groups, queues):
    """Every order of *groups* over *queues* queues: (groups + queues - 1)! / (queues - 1)! of them."""
    for permutation in itertools.permutations(groups):
        for cuts in itertools.combinations_with_replacement(range(len(permutation) + 1), queues - 1):
            bounds = [0, *cuts, len(permutation)]
            yield [list(permutation[start:end]) for start, end in itertools.pairwise(bounds)]


def least_objective(problem, kappa_s):
    """The least objective of all orders of all groups (fixed ones and holds are not looked at)."""
    queues = int(problem.queue_type.size)
    return min(objective(problem, order, kappa_s) for order in all_orders(range(problem.requests.size), queues))
