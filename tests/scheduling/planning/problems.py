"""Problems to plan for: of any size, small ones for hypothesis, and a checker that knows nothing of the planners."""

import numpy as np
from hypothesis import strategies as st

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem, StartCosts

HORIZON_S = 3600.0


def synthetic(models, regions, gpu_types, seed, room=0.3):
    """Return a problem like SageServe's section 7, at any size; nothing in it was measured."""
    random = np.random.default_rng(seed)
    price = np.sort(random.uniform(20, 100, gpu_types))
    size = random.lognormal(0, 0.6, models)
    exponent = random.uniform(0.85, 1.25, (models, 1))
    theta = 4000 * size[:, None] * (price / 50) ** exponent * random.uniform(0.8, 1.25, (models, gpu_types))
    theta = np.round(theta)
    theta[(random.random((models, gpu_types)) < 0.15) & (np.arange(gpu_types) > 0)] = 0
    mean = size[:, None] * 4000 * random.lognormal(np.log(15), 0.7, (models, regions))
    demand = mean[:, :, None] * random.uniform(0.6, 1.3, (models, regions, 6))
    present = np.zeros((models, regions, gpu_types), int)
    for i, j in np.ndindex(models, regions):
        k = random.choice(np.flatnonzero(theta[i] > 0))
        present[i, j, k] = max(1, int(random.uniform(0.5, 1.3) * mean[i, j] / theta[i, k]))
    spot = random.integers(0, 3, (models, regions, gpu_types)) * (present > 0)
    wanted = np.zeros((regions, gpu_types))
    for i in range(models):
        usable = np.flatnonzero(theta[i] > 0)
        wanted[:, usable] += demand[i].max(axis=1)[:, None] / theta[i, usable] / usable.size
    capacity = np.ceil(np.maximum((present + spot).sum(axis=0), wanted * (1 + room))).astype(int)
    return Problem(
        models=[f"model-{i}" for i in range(models)],
        regions=[f"region-{j}" for j in range(regions)],
        gpu_types=[f"gpu-{k}" for k in range(gpu_types)],
        instances=present,
        capability_tokens_per_s=theta,
        demand_tokens_per_s=demand,
        vm_cost_usd=price,
        start_cost_usd=StartCosts.paid_while_starting(
            price, HORIZON_S, models, other_spot_s=random.uniform(300, 900, (models, 1))
        ),
        min_instances=1,
        max_instances=1000,
        capacity=capacity,
        spot=spot,
        weights_local=random.random((models, regions)) > 0.2,
        buffer_tokens_per_s=0.05 * mean,
    )


@st.composite
def small_problems(draw, most=(3, 2, 3), most_instances=4):
    """Draw problems of up to *most* models, regions and types with few instances; rows may be infeasible together."""
    shape = n, r, g = tuple(draw(st.integers(1, size)) for size in most)

    def numbers(size, least, greatest):
        values = draw(st.lists(st.integers(least, greatest), min_size=int(np.prod(size)), max_size=int(np.prod(size))))
        return np.array(values).reshape(size)

    price = numbers((g,), 5, 60) / 4
    same = numbers((n, g), 0, 8) / 16
    least = numbers((n, r), 0, 1)
    gpus = numbers((n, g), 1, 2)
    present, spot = numbers(shape, 0, 2), numbers(shape, 0, 1)
    held = (gpus[:, None, :] * (present + spot)).sum(axis=0)
    return Problem(
        models=[f"m{i}" for i in range(n)],
        regions=[f"r{j}" for j in range(r)],
        gpu_types=[f"g{k}" for k in range(g)],
        instances=present,
        capability_tokens_per_s=numbers((n, g), 0, 12) * 10,
        demand_tokens_per_s=numbers((n, r, 2), 0, 30) * 10,
        vm_cost_usd=price,
        start_cost_usd=StartCosts(
            same, same + numbers((n, g), 0, 16) / 8, numbers(shape, 0, 20) / 8, numbers((g,), 0, 8) / 8
        ),
        min_instances=least,
        max_instances=least + numbers((n, r), 0, most_instances),
        # Sometimes fewer than are held, as after the loss of nodes.
        capacity=np.maximum(held + numbers((r, g), -2, 6), 0),
        spot=spot,
        gpus=gpus,
        weights_local=numbers((n, r), 0, 1) == 1,
        epsilon=draw(st.sampled_from([0.5, 0.8, 1.0])),
        buffer_tokens_per_s=numbers((n, r), 0, 3) * 5,
        load_tokens_per_s=numbers((n, r), 0, 30) * draw(st.sampled_from([0, 10])),
    )


def plain_cost(problem, targets):
    """Return the objective, instance by instance."""
    n, r, g = problem.shape
    start, cost = problem.start_cost_usd, 0.0
    for j in range(r):
        for k in range(g):
            held = taken = 0
            for i in range(n):
                units = problem.gpus[i, k]
                held += units * (problem.instances[i, j, k] + problem.spot[i, j, k])
                taken += units * targets[i, j, k]
                cost += problem.vm_cost_usd[k] * units * targets[i, j, k]
                own = problem.spot[i, j, k]
                for _ in range(targets[i, j, k] - problem.instances[i, j, k]):
                    if own > 0:
                        cost, own = cost + start.same_spot[i, k], own - 1
                        continue
                    cost += start.other_spot[i, k]
                    if not problem.weights_local[i, j]:
                        cost += start.remote_weights[i, j, k]
            cost += start.new_vm[k] * max(0, taken - held)
    return cost


def plain_rows(problem, targets):
    """(hard rows that *targets* break, missing by (i, j), missing by i, instances missing by (i, j)), each row by itself."""
    n, r, g = problem.shape
    broken, own_region, total, few = [], {}, {}, {}
    for i in range(n):
        able = 0.0
        windows = problem.demand_tokens_per_s.shape[2]
        for j in range(r):
            here = sum(problem.capability_tokens_per_s[i, k] * targets[i, j, k] for k in range(g))
            able += here
            peak = max(problem.demand_tokens_per_s[i, j, w] + problem.buffer_tokens_per_s[i, j] for w in range(windows))
            present = sum(problem.capability_tokens_per_s[i, k] * problem.instances[i, j, k] for k in range(g))
            need = max(problem.epsilon[i, j] * peak, min(problem.load_tokens_per_s[i, j], present))
            if need - here > 1e-6 * need:
                own_region[i, j] = need - here
            count = sum(targets[i, j])
            if count < problem.min_instances[i, j]:
                few[i, j] = problem.min_instances[i, j] - count
            if count > problem.max_instances[i, j]:
                broken.append(f"maximum of {i} in {j}")
            broken += [f"negative {i}, {j}, {k}" for k in range(g) if targets[i, j, k] < 0]
            for k in range(g):
                if targets[i, j, k] > 0 and problem.capability_tokens_per_s[i, k] == 0:
                    broken.append(f"unusable {i}, {j}, {k}")
        peak = max(
            sum(problem.demand_tokens_per_s[i, j, w] + problem.buffer_tokens_per_s[i, j] for j in range(r))
            for w in range(windows)
        )
        need = max(peak, sum(problem.load_tokens_per_s[i]))
        if need - able > 1e-6 * need:
            total[i] = need - able
    for j in range(r):
        used = [sum(problem.gpus[i, k] * targets[i, j, k] for i in range(n)) for k in range(g)]
        broken += [f"capacity of {k} in {j}" for k in range(g) if used[k] > problem.capacity[j, k]]
    return broken, own_region, total, few


def shortage_usd(problem, targets):
    """The weight of what falls short under *targets*, which the programme minimises before any cost."""

    def weighed(missing, need):
        return missing + (SECOND_HALF_WEIGHT - 1.0) * np.maximum(missing - need / 2.0, 0.0)

    short = problem.shortage(targets)
    own_region = weighed(short.own_region_tokens_per_s, problem.need_tokens_per_s).sum(axis=1)
    total = weighed(short.total_tokens_per_s, problem.need_total_tokens_per_s)
    tokens = (problem.shortage_weight_usd * (OWN_REGION_SHARE * own_region + total)).sum()
    return float(tokens + (problem.instance_weight_usd * short.instances.sum(axis=1)).sum())
