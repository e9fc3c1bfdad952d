"""The fast planner: the relaxation rounded at several thresholds, repaired, and improved by local search."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem
from scheduling.planning.solvers.greedy import drop_what_does_not_fit
from scheduling.planning.solvers.kernels import Tally, Terms, allocate_tally, improve

THRESHOLDS = (0.02, 0.2, 0.4, 0.6, 0.8, 1.0)
"""From which fraction on a share is rounded up; 1 rounds every one down."""
PASSES = 30
"""More passes than any problem was seen to need; each goes over the whole plan."""
LEAST_GAIN = 1e-7
"""Share of an instance's cost that a move must save, so that rounding of floats cannot keep the search going."""
SHORTAGE_PRICE = 1e6
"""USD by USD of shortage in the search: no saving is worth a shortage of a thousandth of an instance."""


def terms_of(problem: Problem) -> Terms:
    """*problem* as the kernels read it."""
    start = problem.start_cost_usd
    weight = SHORTAGE_PRICE * problem.shortage_weight_usd
    terms = Terms(
        capability=problem.capability_tokens_per_s,
        gpus=problem.gpus,
        instance_usd=problem.instance_cost_usd,
        same_usd=start.same_spot,
        other_usd=problem.redeploy_cost_usd,
        new_usd=start.new_vm,
        instances=problem.instances,
        spot=problem.spot,
        acquired=problem.acquired_units,
        capacity=problem.capacity,
        least=problem.least_instances,
        most=problem.max_instances,
        need=problem.need_tokens_per_s,
        need_total=problem.need_total_tokens_per_s,
        own_region_weight=OWN_REGION_SHARE * weight,
        total_weight=weight,
        instance_weight=SHORTAGE_PRICE * problem.instance_weight_usd,
        second_half_weight=np.array([SECOND_HALF_WEIGHT]),
    )
    # Copies, all writable and in C order: kernels are compiled once more for arrays that are read-only or lie otherwise.
    copies: list[Any] = [np.array(array, order="C") for array in terms]
    return Terms(*copies)


def price_usd(problem: Problem, targets: NDArray[np.int64]) -> float:
    """What the search makes small: the cost, and shortages at a price that goes before it."""
    return problem.cost_usd(targets) + SHORTAGE_PRICE * problem.shortage_usd(problem.shortage(targets))


def search(problem: Problem, starts: list[tuple[NDArray[np.float64], float]]) -> NDArray[np.int64]:
    """The best plan (l, r, g) found from *starts*: shares of instances and the threshold to round them at."""
    terms, addition = terms_of(problem), np.zeros(3, np.int64)
    least_gain = LEAST_GAIN * max(float(problem.instance_cost_usd.max()), 1e-9)
    best: Tally | None = None
    cheapest = np.inf
    begun, ended = set[bytes](), set[bytes]()
    for shares, threshold in starts:
        rounded = np.where(problem.usable, np.floor(shares + (1.0 - threshold + 1e-7)), 0.0)
        if rounded.tobytes() in begun:
            continue  # with few instances, several thresholds are one
        begun.add(rounded.tobytes())
        tally = allocate_tally(problem)
        tally.targets[...] = rounded
        drop_what_does_not_fit(problem, tally.targets)
        improve(terms, tally, PASSES, 0, least_gain, addition)
        if tally.targets.tobytes() in ended:
            continue
        ended.add(tally.targets.tobytes())
        price = price_usd(problem, tally.targets)
        if price < cheapest:
            best, cheapest = tally, price
    assert best is not None, "there is at least one start"
    improve(terms, best, PASSES, 1, least_gain, addition)
    return best.targets
