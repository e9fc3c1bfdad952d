"""Plans in words: binding and violated constraints, and the reason for each change."""

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.planner import Plan
from scheduling.planning.problem import TOLERANCE


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tok/s"


def _count(number: int) -> str:
    return f"{number} instance" if number == 1 else f"{number} instances"


def binding_rows(plan: Plan) -> list[str]:
    """Return the rows that bind in whole instances: with one fewer (for upper bounds, one more) the row would break."""
    problem, targets = plan.problem, plan.targets
    theta = problem.capability_tokens_per_s
    counts, served, used = targets.sum(axis=2), problem.served_tokens_per_s(targets), problem.used_units(targets)
    # The smallest instance that a row could lose.
    smallest = np.where(targets > 0, theta[:, None, :], np.inf).min(axis=2)

    def binds(able: float, loss: float, need: float) -> bool:
        return able >= need * (1 - TOLERANCE) > able - loss

    rows = []
    for i, model in enumerate(problem.models):
        need, able = float(problem.need_total_tokens_per_s[i]), float(served[i].sum())
        if binds(able, float(smallest[i].min()), need):
            what = "what is asked for now needs" if need <= problem.load_tokens_per_s[i].sum() else "peak demand is"
            rows.append(f"{model}, all regions: {what} {_rate(need)}, capacity {_rate(able)}")
    for i, j in np.ndindex(counts.shape):
        name = f"{problem.models[i]} in {problem.regions[j]}"
        able = float(served[i, j])
        if binds(able, float(smallest[i, j]), float(problem.need_tokens_per_s[i, j])):
            share, peak = problem.epsilon[i, j], float(problem.peak_tokens_per_s[i, j])
            what = f"{share:.0%} of its peak of {_rate(peak)} must be served in the region"
            if share * peak < problem.guarded_tokens_per_s[i, j]:
                now = _rate(float(problem.load_tokens_per_s[i, j]))
                what = f"what is asked for now needs {now}, and no plan goes below it"
            rows.append(f"{name}: {what}, where capacity is {_rate(able)}")
        if 0 < counts[i, j] == problem.min_instances[i, j]:
            rows.append(f"{name}: at its minimum of {_count(counts[i, j])}")
        if 0 < counts[i, j] == problem.max_instances[i, j]:
            rows.append(f"{name}: at its maximum of {_count(counts[i, j])}")
    least = np.where(theta > 0, problem.gpus, np.iinfo(np.int64).max).min(axis=0)
    for j, k in np.argwhere((problem.capacity - used < least) & (used > 0)).tolist():
        rows.append(
            f"{problem.gpu_types[k]} in {problem.regions[j]}: {used[j, k]} of {problem.capacity[j, k]} are in use,"
            " no further instance fits"
        )
    return rows


def short_rows(plan: Plan) -> list[str]:
    """Return the rows that could not hold, and by how much."""
    problem, missing = plan.problem, plan.problem.shortage(plan.targets)
    served = problem.served_tokens_per_s(plan.targets)
    rows = []
    for (i,) in np.argwhere(missing.total_tokens_per_s > 0).tolist():
        rows.append(
            f"{problem.models[i]}, all regions: {_rate(served[i].sum())} of {_rate(problem.need_total_tokens_per_s[i])}"
            f" can be served, {_rate(missing.total_tokens_per_s[i])} cannot{_cause(plan, i, None)}"
        )
    for i, j in np.argwhere(missing.own_region_tokens_per_s > 0).tolist():
        need, short = problem.need_tokens_per_s[i, j], missing.own_region_tokens_per_s[i, j]
        rows.append(
            f"{problem.models[i]} in {problem.regions[j]}: {_rate(served[i, j])} of the {_rate(need)} required"
            f" in the region can be served, {_rate(short)} cannot{_cause(plan, i, j)}"
        )
    for i, j in np.argwhere(missing.instances > 0).tolist():
        rows.append(
            f"{problem.models[i]} in {problem.regions[j]}: {plan.targets[i, j].sum()} of at least"
            f" {_count(problem.min_instances[i, j])}{_cause(plan, i, j)}"
        )
    return rows


def _cause(plan: Plan, i: int, j: int | None) -> str:
    """Return what keeps model i from more instances in region j (None: in any)."""
    problem, targets = plan.problem, plan.targets
    theta = problem.capability_tokens_per_s[i]
    if not np.any(theta > 0):
        return "; no GPU type can serve the model"
    regions = range(len(problem.regions)) if j is None else (j,)
    used = problem.used_units(targets)
    at_most = [region for region in regions if targets[i, region].sum() >= problem.max_instances[i, region]]
    if len(at_most) == len(regions):
        return "; its maximum of instances is reached"
    full = [
        f"{problem.gpu_types[k]} in {problem.regions[region]}"
        for region in regions
        if region not in at_most
        for k in np.flatnonzero(theta > 0).tolist()
        if used[region, k] + problem.gpus[i, k] > problem.capacity[region, k]
    ]
    if not full:
        return ""
    listed = ", ".join(full[:4]) + (f" and {len(full) - 4} more" if len(full) > 4 else "")
    return f"; no room on {listed}"


def reasons(plan: Plan) -> dict[tuple[int, int, int], str]:
    """Return the reasons by place (i, j, k) whose number of instances changes."""
    problem, delta = plan.problem, plan.delta
    served, present = problem.served_tokens_per_s(plan.targets), problem.served_tokens_per_s(problem.instances)
    texts = {}
    for i, j, k in np.argwhere(delta != 0).tolist():
        change = int(delta[i, j, k])
        why = _why_more(plan, i, j, k, present) if change > 0 else _why_fewer(plan, i, j, k, served)
        texts[i, j, k] = f"{change:+d} {problem.models[i]} on {problem.gpu_types[k]} in {problem.regions[j]}: {why}"
    return texts


def _sources(plan: Plan, i: int, j: int, k: int) -> str:
    """Return the sources of started instances and the cost of the start. Acquired units are divided by units started."""
    problem = plan.problem
    change = int(plan.delta[i, j, k])
    own = min(change, int(problem.spot[i, j, k]))
    other = change - own
    cost = problem.start_cost_usd.same_spot[i, k] * own + problem.redeploy_cost_usd[i, j, k] * other
    parts = []
    if own:
        parts.append(f"{own} back from its own spot")
    if other:
        others = np.maximum(plan.delta[:, j, k] - problem.spot[:, j, k], 0) * problem.gpus[:, k]
        acquired = max(0, int(problem.used_units(plan.targets)[j, k] - problem.acquired_units[j, k]))
        share = acquired / int(others.sum())
        cost += problem.start_cost_usd.new_vm[k] * share * others[i]
        where = (
            "newly acquired"
            if share >= 1
            else "of other models, in part newly acquired"
            if share > 0
            else "of other models"
        )
        remote = "" if problem.weights_local[i, j] else ", weights from another region"
        parts.append(f"{other} on GPUs {where}{remote}")
    return f" ({', '.join(parts)}; start ${cost:,.2f})"


def _why_more(plan: Plan, i: int, j: int, k: int, present: NDArray[np.float64]) -> str:
    """Return *present* (l, r): what present instances serve."""
    problem = plan.problem
    need, own_region = float(problem.need_tokens_per_s[i, j]), float(present[i, j])
    total = problem.need_total_tokens_per_s[i]
    others_fall = [problem.gpu_types[at] for at in np.flatnonzero(plan.delta[i, j] < 0).tolist()]
    sources = _sources(plan, i, j, k)
    if own_region < need * (1 - TOLERANCE):
        return f"{_rate(need)} required in the region, present instances serve {_rate(own_region)}{sources}"
    if problem.instances[i, j].sum() < problem.min_instances[i, j]:
        return f"below the minimum of {_count(problem.min_instances[i, j])}{sources}"
    if present[i].sum() < total * (1 - TOLERANCE):
        now = _rate(present[i].sum())
        return f"{_rate(total)} required in all regions, present instances serve {now}; it costs least here{sources}"
    if others_fall:
        return f"replaces {', '.join(others_fall)}, which costs more for as much{sources}"
    return f"replaces instances in other regions, where they cost more{sources}"


def _why_fewer(plan: Plan, i: int, j: int, k: int, served: NDArray[np.float64]) -> str:
    problem = plan.problem
    if not problem.usable[i, j, k]:
        return "the GPU type cannot serve the model"
    if problem.instances[i, j].sum() > problem.max_instances[i, j]:
        return f"above the maximum of {_count(problem.max_instances[i, j])}"
    if problem.used_units(problem.instances)[j, k] > problem.capacity[j, k]:
        return f"only {problem.capacity[j, k]} {problem.gpu_types[k]} exist"
    grown = [problem.gpu_types[at] for at in np.flatnonzero(plan.delta[i, j] > 0).tolist()]
    if grown:
        return f"replaced by {', '.join(grown)}, which costs less for as much"
    need = problem.need_tokens_per_s[i, j]
    return (
        f"leaves {_rate(served[i, j])} in the region ({_rate(need)} required), {_rate(served[i].sum())} in all regions"
    )
