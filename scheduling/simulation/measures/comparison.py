"""Futures compared over their seeds: intervals and verdicts.

An interval is Student's over seeds; with one seed, that of Wilson (1927) for a share of so many requests, and none for other
numbers. Bootstrapping few seeds covers less than it says (Hesterberg, The American Statistician 69(4), 2015, section 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5th percentile of Student's distribution by degrees of freedom, from 1."""
Z_975: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval over seeds."""

    mean: float
    low: float
    high: float

    def widened(self, error: float, least: float = -inf, most: float = inf) -> "Interval":
        """Return the interval widened by an *error* of the simulation in its unit, within *least* and *most*."""
        return Interval(self.mean, max(least, self.low - error), min(most, self.high + error))


def t_975(freedom: int) -> float:
    """Return Student's 97.5th percentile; beyond the table by the first terms of Fisher's expansion in 1/freedom."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    second = (5 * Z_975**5 + 16 * Z_975**3 + 3 * Z_975) / 96
    return Z_975 + (Z_975**3 + Z_975) / (4 * freedom) + second / freedom**2


def over_seeds(values: ArrayLike) -> Interval | None:
    """Return the interval of *values*, one a seed, without NaN; None for none. A single one has no width."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    mean = float(known.mean())
    half = t_975(known.size - 1) * float(known.std(ddof=1)) / sqrt(known.size) if known.size > 1 else 0.0
    return Interval(mean, mean - half, mean + half)


def of_shares(kept: Sequence[int], judged: Sequence[int]) -> Interval | None:
    """Return the interval of the shares *kept* of *judged* requests, one a seed; None where nothing was judged."""
    shares = [met / among for met, among in zip(kept, judged, strict=True) if among]
    if len(shares) != 1:
        interval = over_seeds(shares)
        return None if interval is None else interval.widened(0.0, 0.0, 1.0)
    among = max(judged)
    share, z2 = shares[0], Z_975**2
    middle = (share + z2 / (2 * among)) / (1 + z2 / among)
    half = Z_975 / (1 + z2 / among) * sqrt(share * (1 - share) / among + z2 / (4 * among**2))
    return Interval(share, middle - half, middle + half).widened(0.0, 0.0, 1.0)


def to_decide(values: Sequence[float], than: float = 0.0, error: float = 0.0, most: int = 100) -> int | None:
    """Return how many repetitions in all, at least those of *values* and at most *most*, leave *than* out of the 95 %
    interval of their mean, widened by an *error* of the simulation; None where none do, or *values* are too few to know.

    It takes mean and deviation to stay as they are.
    """
    if len(values) < 2:
        return None
    away, deviation = abs(float(np.mean(values)) - than) - error, float(np.std(values, ddof=1))
    decided = (n for n in range(len(values), most + 1) if t_975(n - 1) * deviation / sqrt(n) < away)
    return next(decided, None)


class Verdict(StrEnum):
    """Verdict on promises: of one class, or of all."""

    CHEAPEST = "Keeps them, cheapest"
    MEETS = "Keeps its promises"
    CLOSE = "Too close to call"
    MISSES = "Misses a promise"
    UNKNOWN = "Nothing promised"


def verdict(slo_met: Interval | None, target: float) -> Verdict:
    """Return the verdict on one class of a future."""
    if slo_met is None:
        return Verdict.UNKNOWN
    if slo_met.low >= target:
        return Verdict.MEETS
    return Verdict.MISSES if slo_met.high < target else Verdict.CLOSE


def verdicts(of: Mapping[str, Sequence[Verdict]], cost: Mapping[str, float]) -> dict[str, Verdict]:
    """Return the verdict on each future, that of its worst class; of those that keep all promises, the one with the least
    *cost* is the cheapest. *of* has the verdicts on the classes by future."""
    order = (Verdict.MISSES, Verdict.CLOSE, Verdict.MEETS)
    made = {name: next((each for each in order if each in own), Verdict.UNKNOWN) for name, own in of.items()}
    meeting = [name for name, one in made.items() if one == Verdict.MEETS]
    if meeting:
        made[min(meeting, key=lambda name: cost[name])] = Verdict.CHEAPEST
    return made
