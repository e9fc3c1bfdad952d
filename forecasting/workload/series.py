"""Demand as a series of windows: the prompt or output tokens requested a second in each.

A window that was not measured is a gap (NaN), which is not the same as a window without demand (0).
Three things make gaps: minutes in which nothing was written down at all, windows of which too little is known, and
windows next to a gap that were only partly collected (`without_partial`).
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.workload.calendar import Calendar

Values = NDArray[np.float64]

LEAST_RATE: Final = 1e-6  # tokens a second; a mean below it is none, and nothing is divided by it
DAY_S: Final = 86_400.0
QUANTITIES: Final = ("prompt", "output")

MOST_WINDOWS: Final = 4_000_000  # of a series; beyond it a time stamp is wrong
KNOWN_SHARE: Final = 0.5  # of a wider window that must be known for its mean to count
PARTIAL_SHARE: Final = 0.05  # of the usual rate, under which a window next to a gap is taken as partly collected


@dataclass(frozen=True, slots=True)
class Series:
    """Tokens a second by window; `tokens_per_s` has one element a window, NaN where nothing is known.

    Raises ValueError for a window that is not above 0 s, for rates below 0 or infinite, and for more than one dimension.
    """

    start_s: float  # seconds since 1970 (UTC) of the first window's begin
    window_s: float
    tokens_per_s: NDArray[np.float64]
    name: str = ""
    calendar: Calendar | None = None
    """Local clock and kinds of days, where they are known."""

    def __post_init__(self) -> None:
        values = np.array(self.tokens_per_s, dtype=np.float64)
        values.flags.writeable = False
        object.__setattr__(self, "tokens_per_s", values)
        if not 0 < self.window_s < float("inf"):
            raise ValueError(f"a window takes more than 0 s, not {self.window_s!r}")
        if values.ndim != 1:
            raise ValueError(f"a series has one dimension, not {values.ndim}")
        if np.isinf(values).any() or (values < 0).any():
            raise ValueError("a rate is a finite number from 0 up, or NaN where nothing is known")

    def __len__(self) -> int:
        return len(self.tokens_per_s)

    @property
    def end_s(self) -> float:
        """End of the last window, seconds since 1970."""
        return self.start_s + len(self) * self.window_s

    @property
    def known(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.tokens_per_s)

    def part(self, begin: int, end: int | None = None) -> "Series":
        """Return the windows from *begin* up to *end*, counted from the first."""
        begin, end, _ = slice(begin, end).indices(len(self))
        start_s = self.start_s + begin * self.window_s
        return replace(self, start_s=start_s, tokens_per_s=self.tokens_per_s[begin:end])


def windows_in_a_day(window_s: float) -> int:
    """Return the number of windows until the same time of the next day; at least 1."""
    return max(1, round(DAY_S / window_s))


def from_trace(
    arrival_s: ArrayLike,
    tokens: ArrayLike,
    window_s: float,
    *,
    name: str = "",
) -> Series:
    """Return the series of requests that came *arrival_s* seconds after the start, each with that many *tokens*.

    The last window is not over yet, so it is left out unless it is the only one.
    """
    arrivals, counts = np.asarray(arrival_s, np.float64), np.asarray(tokens, np.float64)
    if arrivals.shape != counts.shape or arrivals.ndim != 1:
        raise ValueError(f"{arrivals.shape} arrivals and {counts.shape} token counts: one of each a request")
    if arrivals.size and (not np.isfinite(arrivals).all() or arrivals.min() < 0):
        raise ValueError("arrivals are finite seconds from 0 up")
    index = (arrivals // window_s).astype(np.int64)
    windows = int(index.max()) + 1 if arrivals.size else 0
    if windows > MOST_WINDOWS:
        raise ValueError(f"{windows:,} windows of {window_s:g} s: more than {MOST_WINDOWS:,}")
    rate = np.bincount(index, weights=counts, minlength=windows)[:windows] / window_s
    return Series(0.0, window_s, rate[:-1] if windows > 1 else rate, name)


def aggregate(series: Series, window_s: float, *, known_share: float = KNOWN_SHARE) -> Series:
    """Return *series* in wider windows that begin at whole multiples of *window_s* since 1970.

    A wide window has the mean rate of its known narrow ones, if they are at least *known_share* of it; else it is a
    gap, and so are the parts before the series begins. A last window that is not over yet is left out. Raises
    ValueError unless *window_s* is a whole multiple of the series' own.
    """
    factor = round(window_s / series.window_s)
    if factor < 1 or abs(factor * series.window_s - window_s) > 1e-6 * window_s:
        raise ValueError(f"windows of {window_s:g} s are no whole number of windows of {series.window_s:g} s")
    if factor == 1:
        return series
    start_s = window_s * np.floor(series.start_s / window_s)
    lead = round((series.start_s - start_s) / series.window_s)
    padded = np.concatenate([np.full(lead, np.nan), series.tokens_per_s])
    wide = padded[: len(padded) // factor * factor].reshape(-1, factor)
    known = ~np.isnan(wide)
    enough = known.sum(axis=1) >= max(1.0, known_share * factor)
    mean = np.where(known, wide, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    values = np.where(enough, mean, np.nan)
    return replace(series, start_s=float(start_s), window_s=window_s, tokens_per_s=values)


def without_partial(series: Series) -> Series:
    """Return *series* with partly collected windows turned into gaps.

    A run of windows that touches a gap, with a rate under `PARTIAL_SHARE` of the median of the known windows of the day
    before and after, is the work of a collector that stops or starts, not demand. Low windows that touch no gap stay.
    """
    values = np.array(series.tokens_per_s)
    gap = np.isnan(values)
    if not gap.any() or gap.all():
        return series
    reach = windows_in_a_day(series.window_s)
    low = gap.copy()
    # The median is only needed where a window is far below the highest: most are not.
    for index in np.flatnonzero(~gap & (values < PARTIAL_SHARE * np.nanmax(values))):
        around = values[max(0, index - reach) : index + reach + 1]
        low[index] = values[index] < PARTIAL_SHARE * float(np.nanmedian(around))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], low, [False]]).astype(np.int8)))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if gap[begin:end].any():
            values[begin:end] = np.nan
    return replace(series, tokens_per_s=values)
