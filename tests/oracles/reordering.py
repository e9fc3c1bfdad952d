"""Plain twins of the global scheduler's kernels: evaluation of an order, its objective, and the optimum."""

import itertools
import math


def served(problem, order):
    """Return {group: (start, lateness)} of *order*, a list of lists, and the number of swaps."""
    times, swaps = {}, 0
    for queue, groups in enumerate(order):
        kind, now, loaded = int(problem.queue_type[queue]), float(problem.free_s[queue]), int(problem.loaded[queue])
        for group in groups:
            model = int(problem.model[group])
            if model != loaded:
                swaps += 1
                now += float(problem.drain_s[kind, loaded]) if loaded >= 0 else 0.0
                now += float(problem.swap_s[kind, model])
            times[group] = (now, now + float(problem.own_s[group, kind]) - float(problem.due_s[group]))
            now += float(problem.service_s[group, kind])
            loaded = model
    return times, swaps


def objective(problem, order, kappa_s):
    """Return sum of n (max(0, L) + kappa 1(L > 0)); infinity for an infeasible order."""
    times, _ = served(problem, order)
    if any(not math.isfinite(start) for start, _ in times.values()):
        return math.inf
    return sum(float(problem.requests[group]) * (late + kappa_s) for group, (_, late) in times.items() if late > 0.0)


def all_orders(groups, queues):
    """Yield every order of *groups* over *queues* queues: (groups + queues - 1)! / (queues - 1)! of them."""
    for permutation in itertools.permutations(groups):
        for cuts in itertools.combinations_with_replacement(range(len(permutation) + 1), queues - 1):
            bounds = [0, *cuts, len(permutation)]
            yield [list(permutation[start:end]) for start, end in itertools.pairwise(bounds)]


def least_objective(problem, kappa_s):
    """Return the least objective over all orders of all groups; fixed groups and holds are ignored."""
    queues = int(problem.queue_type.size)
    return min(objective(problem, order, kappa_s) for order in all_orders(range(problem.requests.size), queues))


def least_below(problem, kappa_s, most):
    """Return `least_objective` if it is below *most*, else *most*.

    Fills one queue after another and abandons an order once it costs as much as the best so far: later groups only add
    cost. Nine groups take a second.
    """
    requests, due = problem.requests.tolist(), problem.due_s.tolist()

    def best_of(left, queue, now, loaded, cost, best):
        if not left:
            return cost
        kind = int(problem.queue_type[queue])
        for group in left:
            model = int(problem.model[group])
            start = now
            if model != loaded:
                start += float(problem.drain_s[kind, loaded]) if loaded >= 0 else 0.0
                start += float(problem.swap_s[kind, model])
            late = start + float(problem.own_s[group, kind]) - due[group]
            dearer = cost + (requests[group] * (late + kappa_s) if late > 0.0 else 0.0)
            end = start + float(problem.service_s[group, kind])
            if dearer < best and end < math.inf:
                best = best_of(tuple(g for g in left if g != group), queue, end, model, dearer, best)
        if queue + 1 < problem.queue_type.size:
            best = best_of(
                left, queue + 1, float(problem.free_s[queue + 1]), int(problem.loaded[queue + 1]), cost, best
            )
        return best

    whole = tuple(range(problem.requests.size))
    return best_of(whole, 0, float(problem.free_s[0]), int(problem.loaded[0]), 0.0, most)


def listed(terms, near_s, swap_s, give_up, in_time, late, unserved):
    """List scheduling by the index described in `listing.list_groups`: [(group, queue)], cost.

    *unserved*: cost of a request that no queue serves.
    """
    models = terms.first.size - 1
    waiting = [terms.movable[terms.first[m] : terms.first[m + 1]].tolist() for m in range(models)]
    passed = [set() for _ in range(models)]  # groups up to the first that can be in time
    time, loaded = terms.free.tolist(), terms.loaded.tolist()
    chosen, cost = [], 0.0
    while len(chosen) < terms.movable.size:
        queue, now = min(enumerate(time), key=lambda each: each[1], default=(-1, math.inf))
        if now == math.inf:
            return chosen, cost + unserved * sum(terms.weight[group] for groups in waiting for group in groups)
        best, kind = (-math.inf, -1, 0.0), int(terms.kind[queue])
        for model in [(max(loaded[queue], 0) + k) % models for k in range(models)]:
            for group in waiting[model]:
                if group in passed[model]:
                    continue
                if min(now + terms.offset[:, group]) <= 0.0:
                    break
                passed[model].add(group)
            change = terms.change[kind, loaded[queue] + 1, model]
            if change == math.inf:
                continue
            behind = [group for group in waiting[model] if group in passed[model]][:late]
            for group in behind + [group for group in waiting[model] if group not in passed[model]][:in_time]:
                if terms.service[kind, group] == math.inf:
                    continue
                slack = -(now + change + terms.offset[kind, group])
                index = math.log(max(terms.weight[group], 1.0)) - math.log(max(terms.service[kind, group], 1e-6))
                index -= change / swap_s
                index -= slack / near_s[model] if slack >= 0.0 else give_up
                if index > best[0]:
                    best = (index, group, now + change)
        if best[1] < 0:
            time[queue] = math.inf
            continue
        _, group, start = best
        model = int(terms.model[group])
        waiting[model].remove(group)
        lateness = start + terms.offset[kind, group]
        if lateness > 0.0:
            cost += terms.weight[group] * (lateness + terms.kappa[0])
        chosen.append((group, queue))
        time[queue], loaded[queue] = start + terms.service[kind, group], model
    return chosen, cost
