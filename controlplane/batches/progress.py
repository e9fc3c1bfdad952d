"""Pace of a batch and its expected end, from samples of how many of its lines were done when.

Pure: no clock and no I/O. Moments are epoch seconds.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

SAMPLE_EVERY_S = 5.0
"""Least time between two samples."""
MOST_SAMPLES = 32
"""Samples kept of a batch: beyond them every second one is dropped, so that they cover the whole run."""
RECENT_SHARE = 0.5
"""Share of the run, its later part, that the pace is measured over."""
FIRST_SHARE, FIRST_LINES = 0.01, 100
"""Lines that must be done before an end is expected: this share of all, or this many."""
Z80 = 1.2816
"""Standard deviations on either side of an 80% interval."""

Sample = tuple[float, int]
"""Moment and lines done."""


class Pace(Struct, frozen=True):
    """Measured pace and what it says of the end, counted from the moment of the measurement."""

    lines_per_s: float
    left_s: float
    """Expected time until the last line is done."""
    margin_s: float
    """Half of the 80% interval of *left_s*."""


def with_sample(samples: Sequence[Sample], now_s: float, done: int) -> list[Sample] | None:
    """Return *samples* with one of *now_s*, thinned to `MOST_SAMPLES`; None while the last one is too recent."""
    if samples and now_s - samples[-1][0] < max(SAMPLE_EVERY_S, (now_s - samples[0][0]) / MOST_SAMPLES):
        return None
    longer = [*samples, (now_s, done)]
    return longer if len(longer) <= MOST_SAMPLES else [*longer[:-1:2], longer[-1]]


def pace(samples: Sequence[Sample], now_s: float, done: int, total: int) -> Pace | None:
    """Return the pace over the later part of a run of *total* lines; None while too few of them are done.

    Lines done in an interval are counts with a variance of so many times their mean (quasi-Poisson), which the samples
    give. The remaining time varies with the lines still to come and with the error of the pace itself.
    """
    if not samples or done < min(FIRST_LINES, max(1.0, FIRST_SHARE * total)):
        return None
    began_s = samples[0][0]
    since_s = now_s - max(12 * SAMPLE_EVERY_S, RECENT_SHARE * (now_s - began_s))
    recent = [one for one in samples if one[0] >= since_s] or [samples[-1]]
    earlier = [one for one in samples if one[0] < since_s]
    points = [*earlier[-1:], *recent]
    lines, passed_s = done - points[0][1], now_s - points[0][0]
    if lines <= 0 or passed_s <= 0:
        return None
    rate = lines / passed_s
    left = max(0, total - done)
    if now_s - points[-1][0] >= SAMPLE_EVERY_S:
        points.append((now_s, done))
    relative = math.sqrt(_dispersion(points, rate) * (1 / left + 1 / lines)) if left else 0.0
    return Pace(rate, left / rate, Z80 * relative * left / rate)


def _dispersion(points: Sequence[Sample], rate: float) -> float:
    """Return the variance of the counts between *points* over their mean; at least 1, as of a Poisson process."""
    steps = [
        (after[1] - before[1], rate * (after[0] - before[0]))
        for before, after in pairwise(points)
        if after[0] > before[0]
    ]
    if len(steps) < 2:
        return 1.0
    return max(1.0, sum((lines - mean) ** 2 / mean for lines, mean in steps) / (len(steps) - 1))
