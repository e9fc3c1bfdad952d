"""The planner of last resort: no solver, plain NumPy. It keeps what runs, drops what must go, and adds what serves cheapest.

Its plans are then improved by the same local search as those of the fast method.
"""

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem


def greedy_targets(problem: Problem) -> NDArray[np.int64]:
    """A plan (l, r, g) that breaks no hard row; demand is met as long as instances fit."""
    theta, gpus = problem.capability_tokens_per_s, problem.gpus
    targets = np.where(problem.usable, problem.instances, 0).astype(np.int64)
    drop_what_does_not_fit(problem, targets)
    used, count = problem.used_units(targets), targets.sum(axis=2)
    served = problem.served_tokens_per_s(targets)
    rate = np.where(theta > 0, problem.instance_cost_usd / np.where(theta > 0, theta, 1.0), np.inf)

    def add(model: int, regions: NDArray[np.int64]) -> bool:
        """One more instance of *model* where a token costs least; False when none fits."""
        fits = (used[regions] + gpus[model] <= problem.capacity[regions]) & (theta[model] > 0)
        fits &= (count[model, regions] < problem.max_instances[model, regions])[:, None]
        started = targets[model, regions] - problem.instances[model, regions]
        starting = np.where(started < 0, 0.0, problem.redeploy_cost_usd[model, regions])
        price = np.where(fits, rate[model] + starting / np.where(theta[model] > 0, theta[model], 1.0), np.inf)
        at, k = np.unravel_index(int(np.argmin(price)), price.shape)
        if not np.isfinite(price[at, k]):
            return False
        j = regions[at]
        targets[model, j, k] += 1
        used[j, k] += gpus[model, k]
        count[model, j] += 1
        served[model, j] += theta[model, k]
        return True

    models, regions, _ = problem.shape
    for model in range(models):
        for region in range(regions):
            here = np.array([region])
            short = served[model, region] < problem.need_tokens_per_s[model, region]
            while (short or count[model, region] < problem.least_instances[model, region]) and add(model, here):
                short = served[model, region] < problem.need_tokens_per_s[model, region]
    for model in range(models):
        while served[model].sum() < problem.need_total_tokens_per_s[model] and add(model, np.arange(regions)):
            pass
    return targets


def drop_what_does_not_fit(problem: Problem, targets: NDArray[np.int64]) -> None:
    """Take instances away, the dearest by token first, until maxima and capacity hold."""
    theta, gpus = problem.capability_tokens_per_s, problem.gpus
    too_many = np.argwhere(targets.sum(axis=2) > problem.max_instances)
    if too_many.size:
        rate = np.where(theta > 0, problem.instance_cost_usd / np.where(theta > 0, theta, 1.0), np.inf)
    for i, j in too_many:
        while targets[i, j].sum() > problem.max_instances[i, j]:
            targets[i, j, np.argmax(np.where(targets[i, j] > 0, rate[i], -np.inf))] -= 1
    for j, k in np.argwhere(problem.used_units(targets) > problem.capacity):
        # One by one, from the model with most there, so that no model loses all of its instances first.
        while (gpus[:, k] * targets[:, j, k]).sum() > problem.capacity[j, k]:
            targets[np.argmax(targets[:, j, k]), j, k] -= 1
