"""Differences and quantiles of Prometheus histograms."""

import math
from bisect import bisect_left

from workers.vllm.metrics import Histogram


def since(later: Histogram, earlier: Histogram | None) -> Histogram:
    """Return what *later* counted since *earlier*: everything after a restart (any count went down)."""
    if earlier is None or earlier.bounds != later.bounds or later.count < earlier.count:
        return later
    counts = tuple(now - before for now, before in zip(later.counts, earlier.counts, strict=True))
    if any(count < 0 for count in counts):
        return later
    return Histogram(later.bounds, counts, later.sum - earlier.sum, later.count - earlier.count)


def quantile(histogram: Histogram, q: float) -> float | None:
    """Return the *q* quantile (0..1), linear inside its bucket as in Prometheus; None without observations.

    In the last, open bucket it is the largest finite bound, a lower bound of the true value.
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
