"""Plain twins of the RWT estimator's kernels, from the definitions: requests ahead and the mean wait."""

import math
from collections.abc import Sequence


def ahead(
    waiting: Sequence[tuple[float, int]], expected: Sequence[tuple[float, float, float]], slot: int
) -> tuple[float, float, float, float]:
    """Return (requests, mean, variance, error) before *slot*, or of all for -1; *waiting* holds (key, sequence)."""
    before = [other for other, place in enumerate(waiting) if slot < 0 or place < waiting[slot]]
    columns = [math.fsum(expected[other][column] for other in before) for column in range(3)]
    return float(len(before)), columns[0], columns[1], columns[2]


def wait_s(
    requests: float,
    tokens: float,
    in_flight: float,
    sequences: float,
    mean: float,
    variance: float,
    batch: float,
    tokens_per_s: float,
) -> float:
    """Return the mean wait.

    Tokens ahead and in flight, less those in flight at dispatch; or, if sooner, the time until one more of the running
    *sequences* has ended than requests wait before it.
    """
    second_moment = variance + mean * mean
    residual = second_moment / (2 * mean)
    relaxed = 1 - math.exp(-requests / (2 * batch * max(1, residual / mean)))
    all_end_s = max(0, tokens + in_flight - relaxed * max(batch - 1, 0) * residual) / tokens_per_s
    if requests + 1 > sequences:
        return all_end_s
    from scipy.stats import genpareto  # imported here: it takes a second, and every test process imports this module

    squared = variance / mean**2
    shape = min((1 - 1 / squared) / 2, 0.4) if squared > 1e-3 else -500.0
    left = genpareto(shape, scale=(1 - shape) * in_flight / sequences)
    return min(all_end_s, left.ppf((requests + 1) / (sequences + 1)) * sequences / tokens_per_s)
