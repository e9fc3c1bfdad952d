"""Cuts: rows that hold for every whole plan and bring the relaxation nearer to it (mixed-integer rounding).

A demand row sums theta_k x_k >= b over whole numbers x. For any u > 0, with f the fraction of b / u and
F(t) = floor(t) + min(1, fraction(t) / f), the row F(theta_k / u) x_k >= ceil(b / u) holds too. Each region has such a row,
and so has the sum over all regions.
"""

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem
from scheduling.planning.solvers.exact import Cut

PARTS = 4
"""Rows are divided by each type's theta over 1 to this."""
LEAST_FRACTION = 1e-3
"""Below it the rounding gains nothing and divides by a number near zero."""
LEAST_VIOLATION = 1e-3
"""Distance of the relaxation's optimum from a cut that is worth adding."""


def violated_cuts(problem: Problem, shares: NDArray[np.float64]) -> list[Cut]:
    """For each demand row the cut that *shares* (l, r, g), instances that may be split, violate most; if any is."""
    n, r, g = problem.shape
    theta = problem.capability_tokens_per_s
    split = np.concatenate([shares.reshape(n * r, g), shares.sum(axis=1)])
    need = np.concatenate([problem.need_tokens_per_s.ravel(), problem.need_total_tokens_per_s])
    rates = np.concatenate([np.repeat(theta, r, axis=0), theta])

    divisors = np.concatenate([rates / part for part in range(1, PARTS + 1)], axis=1)
    usable = divisors > 0
    divisors = np.where(usable, divisors, 1.0)
    scaled = need[:, None] / divisors
    # What lies a rounding error above a whole number counts as that number; the cut is then a little weaker, never wrong.
    least = np.ceil(scaled - 1e-7)
    fraction = scaled - (least - 1.0)
    usable &= (fraction > LEAST_FRACTION) & (fraction < 1.0 - 1e-9) & (least > 0)
    fraction = np.where(usable, fraction, 1.0)
    ratio = rates[:, None, :] / divisors[:, :, None]
    whole = np.floor(ratio + 1e-9)
    coefficients = whole + np.minimum(1.0, np.maximum(ratio - whole, 0.0) / fraction[:, :, None])
    missing = least - np.einsum("ruk,rk->ru", coefficients, split)
    distance = np.where(usable, missing / np.maximum(np.linalg.norm(coefficients, axis=2), 1e-9), -1.0)

    cuts_found = []
    worst = distance.argmax(axis=1)
    for row in np.flatnonzero(distance[np.arange(worst.size), worst] > LEAST_VIOLATION).tolist():
        model, region = divmod(row, r) if row < n * r else (row - n * r, -1)
        at = worst[row]
        cuts_found.append(Cut(model, region, coefficients[row, at], float(least[row, at])))
    return cuts_found
