"""What can be read off a Prometheus histogram: what was observed between two readings, and quantiles."""

import math
from bisect import bisect_left

from workers.vllm.metrics import Histogram


def since(later: Histogram, earlier: Histogram | None) -> Histogram:
    """What *later* has beyond *earlier*. After a restart (any count went down) that is all of it."""
    if earlier is None or earlier.bounds != later.bounds or later.count < earlier.count:
        return later
    counts = tuple(now - before for now, before in zip(later.counts, earlier.counts, strict=True))
    if any(count < 0 for count in counts):
        return later
    return Histogram(later.bounds, counts, later.sum - earlier.sum, later.count - earlier.count)


def quantile(histogram: Histogram, q: float) -> float | None:
    """The *q* quantile (0..1), linear inside its bucket as Prometheus does; None when nothing was observed.

    In the last, open bucket it is the largest finite bound: the true value is at least that.
    """
    bounds, counts = histogram.bounds, histogram.counts
    if histogram.count <= 0 or not bounds:
        return None
    rank = q * counts[-1]
    bucket = min(bisect_left(counts, rank), len(bounds) - 1)
    if math.isinf(bounds[bucket]):
        return bounds[bucket - 1] if bucket else None
    below = counts[bucket - 1] if bucket else 0.0
    lower = bounds[bucket - 1] if bucket else 0.0
    inside = counts[bucket] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return lower + (bounds[bucket] - lower) * share
