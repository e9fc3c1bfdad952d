"""Histograms and ended requests on a page of vLLM's metrics; differences and quantiles of histograms."""

import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Histogram:
    """`bounds` are upper bounds, the last one infinite; `counts` are cumulative, one for each bound."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum: float = 0.0
    count: float = 0.0


class Ended(NamedTuple):
    """What a server has ended since its start, summed over its engines."""

    success_total: dict[str, float]
    """By finished_reason."""
    generation_tokens_total: float
    ttft_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram


def ended(page: str | bytes) -> Ended:
    """Read a page of metrics."""
    text = page.decode() if isinstance(page, bytes) else page
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sums(name: str, label: str = "") -> defaultdict[str, float]:
        found = defaultdict[str, float](float)
        for one in samples:
            if one.name == f"vllm:{name}":
                found[one.labels[label] if label else ""] += one.value
        return found

    def histogram(name: str) -> Histogram:
        counts = {float(bound): count for bound, count in sums(f"{name}_bucket", "le").items()}
        bounds = tuple(sorted(counts))
        count, total = sums(f"{name}_count")[""], sums(f"{name}_sum")[""]
        return Histogram(bounds, tuple(counts[bound] for bound in bounds), total, count)

    names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    success, tokens = dict(sums("request_success_total", "finished_reason")), sums("generation_tokens_total")[""]
    return Ended(success, tokens, *map(histogram, names))


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
