"""Gittins rank of a run (Hermes equation 1): the least price of a completion, by service; the lowest rank runs first.

X is the service of the whole application in seconds, summed over parallel requests and units; a is the service it has had,
not the time since it began. X is held in buckets, and the infimum over budgets is taken over bucket ends: only there is the
share that ends within a budget known. A rank is refreshed when a goes past a bucket (Hermes section 3.3).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline

Floats = NDArray[np.float64]

BUCKETS: Final = 10
"""Hermes section 5.1; figure 15b: more of them cost time and win nothing."""


LOW, MEAN, HIGH = 0, 1, 2


def buckets(samples: Floats, count: int = BUCKETS) -> Floats:
    """Return (3, count): least, mean and largest of *samples* (n,) in buckets of equal probability, ascending.

    Buckets of equal width, as the paper has them, put nine tenths of a long-tailed distribution into the first one. Raises
    ValueError for no samples.
    """
    if not samples.size:
        raise ValueError("no samples")
    ordered = np.sort(samples)
    if ordered.size % count:  # each bucket holds the same probability
        ordered = np.repeat(ordered, count)
    parts = ordered.reshape(count, -1)
    return np.stack([parts[:, 0], parts.mean(axis=1), parts[:, -1]])


@compiled
def gittins_ranks(service_s: Floats, attained_s: Floats, weight: Floats, rank: Floats, refresh_s: Floats) -> None:
    """Write the rank (R,) of runs, and the attained service (R,) from which each is to be refreshed.

    *service_s* (R, 3, B): `buckets` of the whole service. *weight* (R,): of the tenant; a rank is divided by it. Of a bucket
    that the run is in, what is left counts as uniform. A run that needs nothing more has rank 0; one with more service than
    any record ranks by what it has had, as with a Pareto tail.
    """
    for run in range(attained_s.size):
        attained, left = attained_s[run], 0.0
        refresh_s[run] = np.inf
        for bucket in range(service_s.shape[2]):
            high = service_s[run, HIGH, bucket]
            if high > attained:
                refresh_s[run] = min(refresh_s[run], high)
                left += share_left(service_s[run, LOW, bucket], high, attained)
        if left == 0.0:
            beyond = attained > service_s[run, HIGH, service_s.shape[2] - 1] * (1.0 + 1e-9)
            rank[run] = attained / weight[run] if beyond else 0.0
            continue
        best, spent, done = np.inf, 0.0, 0.0
        for bucket in range(service_s.shape[2]):
            low, high = service_s[run, LOW, bucket], service_s[run, HIGH, bucket]
            if high <= attained:
                continue
            share = share_left(low, high, attained)
            mean = service_s[run, MEAN, bucket] if share == 1.0 else 0.5 * (attained + high)
            done += share
            spent += share * (mean - attained)
            best = min(best, (spent + (left - done) * (high - attained)) / done)
        rank[run] = best / weight[run]


@compiled_inline
def share_left(low: float, high: float, attained: float) -> float:
    """Share of a bucket above *attained*, which is below its end."""
    return 1.0 if attained <= low else (high - attained) / (high - low)
