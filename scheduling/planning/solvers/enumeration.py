"""Branch and bound of our own for small problems, compiled: the cheapest plan, proved, in a fraction of a millisecond.

Models that share no GPUs have nothing to do with each other, so each set of models that do is solved by itself. Of such a
set the *choices* of every endpoint are written down: each number of instances by GPU type that holds the endpoint's own
rows, cheapest first. The search takes one choice an endpoint, model by model, and leaves a branch where no choices of the
endpoints to come can hold the rows of the model's total, or be cheap enough. What cannot be searched through, and what
cannot hold all rows, is left to `relaxation` and `exact`.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.planning.problem import TOLERANCE, Problem
from scheduling.planning.solvers.kernels import Terms

MOST_CHOICES: Final = 2_000
"""Of all endpoints together."""
MOST_BRANCHES: Final = 20_000
"""Of one set of models: about a millisecond. Beyond it the other methods take over."""
LEAST_GAIN: Final = 1e-12
"""Share of a plan's cost by which another must be cheaper, so that rounding of floats decides nothing."""
SOLVED, NONE_HOLDS, TOO_LARGE = 0, 1, 2


class Choices(NamedTuple):
    """Numbers of instances that endpoints may have, endpoint by endpoint, cheapest first."""

    first: NDArray[np.int64]
    """(endpoints + 1,)"""
    instances: NDArray[np.int64]
    """(choices, g)"""
    cost: NDArray[np.float64]
    """Without that of units acquired anew."""
    tokens: NDArray[np.float64]
    """A second."""


class Scratch(NamedTuple):
    """What the kernels work in; l, r, g as in `Terms`, endpoints in the order in which they are searched."""

    choices: Choices
    most: NDArray[np.int64]
    """(g,)"""
    taken: NDArray[np.int64]
    """(g,)"""
    members: NDArray[np.int64]
    """(l,): models that are solved together."""
    seen: NDArray[np.int64]
    """(l,)"""
    used: NDArray[np.int64]
    """(r, g)"""
    picked: NDArray[np.int64]
    """(endpoints,): the choice of each."""
    best: NDArray[np.int64]
    """(endpoints,)"""
    cost: NDArray[np.float64]
    """(endpoints + 1,): of all before."""
    tokens: NDArray[np.float64]
    """(endpoints + 1,): of the same model's before."""
    after: NDArray[np.float64]
    """(endpoints + 1,): least cost from this one on."""
    after_own: NDArray[np.float64]
    """(endpoints + 1,): the same of the same model alone."""
    most_tokens: NDArray[np.float64]
    """(endpoints + 1,): of the same model from this one on."""
    token_usd: NDArray[np.float64]
    """(endpoints + 1,): least cost of a token of the same model from this one on."""


def allocate_scratch(shape: tuple[int, int, int], most_choices: int) -> Scratch:
    """For problems of the *shape* (l, r, g)."""
    models, regions, types = shape
    endpoints = models * regions
    return Scratch(
        choices=Choices(
            first=np.zeros(endpoints + 1, np.int64),
            instances=np.zeros((most_choices, types), np.int64),
            cost=np.zeros(most_choices),
            tokens=np.zeros(most_choices),
        ),
        most=np.zeros(types, np.int64),
        taken=np.zeros(types, np.int64),
        members=np.zeros(models, np.int64),
        seen=np.zeros(models, np.int64),
        used=np.zeros((regions, types), np.int64),
        picked=np.zeros(endpoints, np.int64),
        best=np.zeros(endpoints, np.int64),
        cost=np.zeros(endpoints + 1),
        tokens=np.zeros(endpoints + 1),
        after=np.zeros(endpoints + 1),
        after_own=np.zeros(endpoints + 1),
        most_tokens=np.zeros(endpoints + 1),
        token_usd=np.zeros(endpoints + 1),
    )


@compiled_internal
def _choose(terms: Terms, i: int, j: int, begin: int, scratch: Scratch) -> int:
    """Write the choices of model i in region j from place *begin* on: where they end, or -1 if there is no room for them."""
    types, end = terms.gpus.shape[1], begin
    choices, most, taken = scratch.choices, scratch.most, scratch.taken
    for k in range(types):
        most[k] = taken[k] = 0
        if terms.capability[i, k] > 0.0:
            most[k] = min(terms.most[i, j], terms.capacity[j, k] // terms.gpus[i, k])
    while True:
        count, cost, tokens = 0, 0.0, 0.0
        for k in range(types):
            count += taken[k]
            tokens += terms.capability[i, k] * taken[k]
            started = max(0, taken[k] - terms.instances[i, j, k])
            own = min(started, terms.spot[i, j, k])
            cost += terms.instance_usd[i, k] * taken[k]
            cost += terms.same_usd[i, k] * own + terms.other_usd[i, j, k] * (started - own)
        holds = tokens >= terms.need[i, j] * (1.0 - TOLERANCE)
        if holds and terms.least[i, j] <= count <= terms.most[i, j]:
            if end == choices.cost.size:
                return -1
            at = end  # behind those that are as cheap
            while at > begin and choices.cost[at - 1] > cost:
                choices.cost[at], choices.tokens[at] = choices.cost[at - 1], choices.tokens[at - 1]
                for k in range(types):
                    choices.instances[at, k] = choices.instances[at - 1, k]
                at -= 1
            choices.cost[at], choices.tokens[at] = cost, tokens
            for k in range(types):
                choices.instances[at, k] = taken[k]
            end += 1
        k = 0
        while k < types:
            taken[k] += 1
            if taken[k] <= most[k]:
                break
            taken[k] = 0
            k += 1
        if k == types:
            return end


@compiled_internal
def _together(terms: Terms, start: int, members: NDArray[np.int64], seen: NDArray[np.int64]) -> int:
    """Write the models that share GPUs with *start*, directly or not, to *members*, and mark them as *seen*: how many."""
    models, regions, types = terms.instances.shape
    members[0], count, at = start, 1, 0
    seen[start] = 1
    while at < count:
        i = members[at]
        at += 1
        for other in range(models):
            if seen[other]:
                continue
            for k in range(types):
                if terms.capability[i, k] <= 0.0 or terms.capability[other, k] <= 0.0:
                    continue
                shared = False
                for j in range(regions):
                    shared = shared or terms.capacity[j, k] > 0
                if shared:
                    members[count], seen[other] = other, 1
                    count += 1
                    break
    return count


@compiled_internal
def _bound(terms: Terms, endpoints: int, scratch: Scratch) -> bool:
    """Write what the choices from each endpoint on cost and serve at the best; False if they cannot hold all rows."""
    regions = terms.acquired.shape[0]
    models, choices, after, after_own = scratch.members, scratch.choices, scratch.after, scratch.after_own
    most_tokens, token_usd = scratch.most_tokens, scratch.token_usd
    after[endpoints] = 0.0
    for at in range(endpoints - 1, -1, -1):
        i, last = models[at // regions], (at + 1) % regions == 0
        begin, end = choices.first[at], choices.first[at + 1]
        if begin == end:
            return False
        of_token, highest = np.inf, 0.0
        for choice in range(begin, end):
            highest = max(highest, choices.tokens[choice])
            if choices.tokens[choice] > 0.0:
                of_token = min(of_token, choices.cost[choice] / choices.tokens[choice])
        after_own[at] = choices.cost[begin] + (0.0 if last else after_own[at + 1])
        most_tokens[at] = highest + (0.0 if last else most_tokens[at + 1])
        token_usd[at] = of_token if last else min(of_token, token_usd[at + 1])
        after[at] = choices.cost[begin] + after[at + 1]
        if at % regions == 0:
            need = terms.need_total[i] * (1.0 - TOLERANCE)
            if most_tokens[at] < need:
                return False
            after[at] = after[at + regions] + max(after_own[at], need * token_usd[at] if need > 0.0 else 0.0)
    return True


@compiled_internal
def _search(terms: Terms, endpoints: int, scratch: Scratch, most_branches: int, targets: NDArray[np.int64]) -> int:
    """Write the cheapest choices of the first *endpoints* to *targets*."""
    regions, types = terms.acquired.shape
    models, choices, after, after_own = scratch.members, scratch.choices, scratch.after, scratch.after_own
    most_tokens, token_usd, cost, tokens = scratch.most_tokens, scratch.token_usd, scratch.cost, scratch.tokens
    used, picked, best = scratch.used, scratch.picked, scratch.best
    used[:, :] = 0
    best_usd, branches, at = np.inf, 0, 0
    picked[0], cost[0] = choices.first[0], 0.0
    while at >= 0:
        if at == endpoints:
            best_usd = cost[at]
            for one in range(endpoints):
                best[one] = picked[one]
            at -= 1
            j, choice = at % regions, picked[at]
            for k in range(types):
                used[j, k] -= terms.gpus[models[at // regions], k] * choices.instances[choice, k]
            picked[at] += 1
            continue
        i, j, choice = models[at // regions], at % regions, picked[at]
        last = (at + 1) % regions == 0
        over = best_usd * (1.0 - LEAST_GAIN)
        leaves = choice == choices.first[at + 1]
        if not leaves:
            next_model = (at // regions + 1) * regions
            least = after[next_model] + (0.0 if last else after_own[at + 1])
            leaves = cost[at] + choices.cost[choice] + least >= over
        if leaves:
            at -= 1
            if at >= 0:
                j, choice = at % regions, picked[at]
                for k in range(types):
                    used[j, k] -= terms.gpus[models[at // regions], k] * choices.instances[choice, k]
                picked[at] += 1
            continue
        branches += 1
        if branches > most_branches:
            return TOO_LARGE
        with_it = (0.0 if j == 0 else tokens[at]) + choices.tokens[choice]
        missing = terms.need_total[i] * (1.0 - TOLERANCE) - with_it
        then = cost[at] + choices.cost[choice]
        fits = missing <= (0.0 if last else most_tokens[at + 1])
        for k in range(types):
            units = used[j, k] + terms.gpus[i, k] * choices.instances[choice, k]
            fits = fits and units <= terms.capacity[j, k]
            anew = max(0, units - terms.acquired[j, k]) - max(0, used[j, k] - terms.acquired[j, k])
            then += terms.new_usd[k] * anew
        if fits:
            rest = 0.0
            if not last:
                rest = after_own[at + 1]
                if missing > 0.0:
                    rest = max(rest, missing * token_usd[at + 1])
            fits = then + rest + after[(at // regions + 1) * regions] < over
        if not fits:
            picked[at] += 1
            continue
        for k in range(types):
            used[j, k] += terms.gpus[i, k] * choices.instances[choice, k]
        at += 1
        cost[at], tokens[at] = then, with_it
        if at < endpoints:
            picked[at] = choices.first[at]
    if best_usd == np.inf:
        return NONE_HOLDS
    for at in range(endpoints):
        for k in range(types):
            targets[models[at // regions], at % regions, k] = choices.instances[best[at], k]
    return SOLVED


@compiled
def _solve(terms: Terms, scratch: Scratch, most_branches: int, targets: NDArray[np.int64]) -> int:
    """Write the cheapest plan to *targets* (l, r, g): SOLVED, or why there is none."""
    models, regions = terms.least.shape
    scratch.seen[:] = 0
    for start in range(models):
        if scratch.seen[start]:
            continue
        endpoints, end = regions * _together(terms, start, scratch.members, scratch.seen), 0
        for at in range(endpoints):
            scratch.choices.first[at] = end
            end = _choose(terms, scratch.members[at // regions], at % regions, end, scratch)
            if end < 0:
                return TOO_LARGE
        scratch.choices.first[endpoints] = end
        if not _bound(terms, endpoints, scratch):
            return NONE_HOLDS
        ended = _search(terms, endpoints, scratch, most_branches, targets)
        if ended != SOLVED:
            return ended
    return SOLVED


def cheapest(problem: Problem, terms: Terms, most_branches: int = MOST_BRANCHES) -> NDArray[np.int64] | None:
    """The cheapest plan (l, r, g) that holds all rows of *problem*, whose *terms* are given; None if there is none, or too
    much to search through."""
    rooms = np.minimum(problem.max_instances[:, :, None], problem.capacity // problem.gpus[:, None, :])
    rooms = np.where(problem.usable, rooms, 0)
    choices = int(np.minimum(np.prod(rooms + 1.0, axis=2).sum(), MOST_CHOICES + 1))
    if choices > MOST_CHOICES:
        return None
    targets = np.zeros(problem.shape, np.int64)
    return (
        targets if _solve(terms, allocate_scratch(problem.shape, choices), most_branches, targets) == SOLVED else None
    )
