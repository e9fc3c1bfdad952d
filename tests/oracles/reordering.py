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


def least_below(problem, kappa_s, most):
    """`least_objective` if it is below *most*, else *most*: one queue is filled after another, and an order is given up as
    soon as it costs as much as the best so far, for no group that follows makes it cheaper. Nine groups take a second."""
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


def by_due_time(problem, order, kappa_s):
    """*order* with groups of each model, from first to last start, exchanged one pair after another as `ties` does."""
    order, cost = [list(groups) for groups in order], objective(problem, order, kappa_s)
    most = cost + 1e-9 * (cost + 1.0)
    for model in sorted(set(problem.model.tolist())):
        times, _ = served(problem, order)
        ranked = [group for groups in order for group in groups if problem.model[group] == model]
        ranked.sort(key=lambda group: times[group][0])
        at = 0
        while at < len(ranked) - 1:
            before, after = ranked[at : at + 2]
            if problem.due_s[before] > problem.due_s[after]:
                other = {before: after, after: before}
                exchanged = [[other.get(group, group) for group in groups] for groups in order]
                if objective(problem, exchanged, kappa_s) <= most:
                    order, ranked[at], ranked[at + 1] = exchanged, after, before
                    at = max(at - 1, 0)
                    continue
            at += 1
    return order


def listed(terms, affinity, near_s, swap_s, give_up, looked_at, late_looked_at):
    """List scheduling by the index that `listing.list_groups` describes: [(group, queue)], cost."""
    models, types = terms.first.size - 1, terms.service.shape[0]
    waiting = [terms.movable[terms.first[m] : terms.first[m + 1]].tolist() for m in range(models)]
    late = [[] for _ in range(models)]
    time, loaded = terms.free.tolist(), terms.loaded.tolist()
    chosen, cost = [], 0.0
    while len(chosen) < terms.movable.size:
        queue = min(range(len(time)), key=lambda q: (time[q], q))
        now, kind = time[queue], int(terms.kind[queue])
        if now == math.inf:
            return chosen, math.inf
        best = (-math.inf, -1, None, None)
        for model in range(models):
            change = terms.change[kind, loaded[queue] + 1, model]
            if change == math.inf:
                continue
            window = []
            for group in list(waiting[model]):
                if len(window) == looked_at:
                    break
                if all(now + terms.offset[other, group] > 0.0 for other in range(types)):
                    waiting[model].remove(group)
                    late[model].append(group)
                else:
                    window.append((group, waiting[model]))
            for group, row in window + [(group, late[model]) for group in late[model][:late_looked_at]]:
                if terms.service[kind, group] == math.inf:
                    continue
                slack = -(now + change + terms.offset[kind, group])
                index = math.log(max(terms.weight[group], 1.0)) - math.log(max(terms.service[kind, group], 1e-6))
                index += affinity[kind, model] - change / swap_s
                index -= slack / near_s[model] if slack >= 0.0 and row is waiting[model] else give_up
                if index > best[0]:
                    best = (index, group, row, now + change)
        if best[1] < 0:
            time[queue] = math.inf
            continue
        _, group, row, start = best
        row.remove(group)
        lateness = start + terms.offset[kind, group]
        if lateness > 0.0:
            cost += terms.weight[group] * (lateness + terms.kappa[0])
        chosen.append((group, queue))
        time[queue], loaded[queue] = start + terms.service[kind, group], int(terms.model[group])
    return chosen, cost


def listed_by_model(terms, served_by, model, near_s, give_up, unserved, looked_at):
    """The groups of *model* on the queues that serve nothing else, as `allotting.list_model`: [(group, queue)], cost."""
    queues = [queue for queue, its in enumerate(served_by) if its == model]
    time = {q: terms.free[q] + terms.change[terms.kind[q], terms.loaded[q] + 1, model] for q in queues}
    waiting = terms.movable[terms.first[model] : terms.first[model + 1]].tolist()
    chosen, cost = [], 0.0
    while waiting:
        queue = min((q for q in queues if time[q] < math.inf), key=lambda q: (time[q], q), default=None)
        if queue is None:
            return chosen, cost + sum(terms.weight[group] * unserved for group in waiting)
        kind, best = int(terms.kind[queue]), (-math.inf, None)
        for group in waiting[:looked_at]:
            if terms.service[kind, group] < math.inf:
                slack = -(time[queue] + terms.offset[kind, group])
                index = math.log(max(terms.weight[group], 1.0)) - math.log(max(terms.service[kind, group], 1e-6))
                index -= slack / near_s if slack >= 0.0 else give_up
                if index > best[0]:
                    best = (index, group)
        if best[1] is None:
            time[queue] = math.inf
            continue
        group = best[1]
        waiting.remove(group)
        late = time[queue] + terms.offset[kind, group]
        if late > 0.0:
            cost += terms.weight[group] * (late + terms.kappa[0])
        time[queue] += terms.service[kind, group]
        chosen.append((group, queue))
    return chosen, cost
