"""Pace of a batch and its expected end, from samples of how many of its lines were done when.

Pure: no clock and no I/O. Moments are epoch seconds.
"""

from collections.abc import Sequence

from msgspec import Struct

SAMPLE_EVERY_S = 5.0
"""Least time between two samples."""
MAX_SAMPLES = 32
"""Samples kept of a batch: beyond them every second one is dropped, so that they cover the whole run."""
RECENT_SHARE = 0.5
"""Share of the run, its later part, that the pace is measured over."""
FIRST_SHARE, FIRST_LINES = 0.01, 100
"""Lines that must be done before an end is expected: this share of all, or this many."""

Sample = tuple[float, int]
"""Moment and lines done."""


class Pace(Struct, frozen=True):
    lines_per_s: float
    left_s: float
    """Expected time until the last line is done."""


def with_sample(samples: Sequence[Sample], now_s: float, done: int) -> list[Sample] | None:
    """Return *samples* with one of *now_s*, thinned to `MAX_SAMPLES`; None while the last one is too recent."""
    if samples and now_s - samples[-1][0] < max(SAMPLE_EVERY_S, (now_s - samples[0][0]) / MAX_SAMPLES):
        return None
    longer = [*samples, (now_s, done)]
    return longer if len(longer) <= MAX_SAMPLES else [*longer[:-1:2], longer[-1]]


def pace(samples: Sequence[Sample], now_s: float, done: int, total: int) -> Pace | None:
    """Return the pace over the later part of a run of *total* lines; None while too few of them are done."""
    if not samples or done < min(FIRST_LINES, max(1.0, FIRST_SHARE * total)):
        return None
    since_s = now_s - max(12 * SAMPLE_EVERY_S, RECENT_SHARE * (now_s - samples[0][0]))
    begin_s, begin_done = next((each for each in reversed(samples) if each[0] < since_s), samples[0])
    if done <= begin_done or now_s <= begin_s:
        return None
    rate = (done - begin_done) / (now_s - begin_s)
    return Pace(rate, max(0, total - done) / rate)
