"""Futures compared over their seeds: intervals, verdicts, regret, and the prices of a miss at which the best one changes.

An interval is Student's over seeds; with one seed, that of Wilson (1927) for a share of so many requests, and none for other
numbers. Bootstrapping few seeds covers less than it says (Hesterberg, The American Statistician 69(4), 2015, section 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5th percentile of Student's distribution by degrees of freedom, from 1."""
Z_975: Final = 1.959964
MOST_POINTS: Final = 100
"""Of a curve."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval over seeds, and the wider one with the error of the simulation in it."""

    mean: float
    low: float
    high: float
    wide_low: float
    wide_high: float

    def widened(self, error: float, least: float = -inf, most: float = inf) -> "Interval":
        """Return the interval widened by an *error* of the simulation in its unit, within *least* and *most*."""
        return Interval(
            self.mean,
            max(least, self.low),
            min(most, self.high),
            max(least, self.low - error),
            min(most, self.high + error),
        )


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
    return Interval(mean, mean - half, mean + half, mean - half, mean + half)


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
    return Interval(share, middle - half, middle + half, middle - half, middle + half).widened(0.0, 0.0, 1.0)


class Verdict(StrEnum):
    """Verdict of the wider interval on the SLO."""

    CHEAPEST = "Meets it, cheapest"
    MEETS = "Meets it"
    CLOSE = "Too close to call"
    MISSES = "Misses the SLO"
    UNKNOWN = "Nothing to judge"


def verdict(slo_met: Interval | None, target: float) -> Verdict:
    """Return the verdict on one future by itself."""
    if slo_met is None:
        return Verdict.UNKNOWN
    if slo_met.wide_low >= target:
        return Verdict.MEETS
    return Verdict.MISSES if slo_met.wide_high < target else Verdict.CLOSE


def verdicts(slo_met: Mapping[str, Interval | None], cost: Mapping[str, float], target: float) -> dict[str, Verdict]:
    """Return the verdict on each future; of those that meet the *target* the one with the least *cost* is the cheapest."""
    made = {name: verdict(interval, target) for name, interval in slo_met.items()}
    meeting = [name for name, one in made.items() if one == Verdict.MEETS]
    if meeting:
        made[min(meeting, key=lambda name: cost[name])] = Verdict.CHEAPEST
    return made


@dataclass(frozen=True, slots=True)
class Regret:
    """Dollars above the best future of each seed; rows as *names*, the least mean first."""

    names: list[str]
    usd: NDArray[np.float64]
    """(futures, seeds)."""
    best: str
    best_in: int
    """Seeds of which it is the best."""
    holds_above: float
    """The price of a miss, in dollars, from which on it stays the best; 0 for any."""
    holds_below: float
    """The price of a miss up to which it stays the best; infinity for any."""
    below: str
    """Which is the best under `holds_above`; empty for none."""
    above: str
    """Which is the best over `holds_below`; empty for none."""


def regret(cost: Mapping[str, ArrayLike], missed: Mapping[str, ArrayLike], usd_per_miss: float) -> Regret:
    """Return the regret of the futures in *cost*: dollars, and requests *missed*, by seed. Raise ValueError for none."""
    names = list(cost)
    if not names:
        raise ValueError("There is no future to compare.")
    costs, misses = (np.array([np.asarray(of[name], np.float64) for name in names]) for of in (cost, missed))
    total = costs + usd_per_miss * misses
    over = total - total.min(axis=0)
    order = np.argsort(over.mean(axis=1), kind="stable")
    best = int(order[0])
    low, high, below, above = _holds(costs.mean(axis=1), misses.mean(axis=1), best)
    return Regret(
        [names[at] for at in order],
        over[order],
        names[best],
        int((over[best] == 0).sum()),
        low,
        high,
        "" if below is None else names[below],
        "" if above is None else names[above],
    )


def _holds(
    cost: NDArray[np.float64], missed: NDArray[np.float64], best: int
) -> tuple[float, float, int | None, int | None]:
    """Return the prices of a miss between which *best* costs the least, and the best one beyond each end."""
    low, high, below, above = 0.0, inf, None, None
    for other in range(cost.size):
        fewer = missed[other] - missed[best]
        if other == best or fewer == 0:
            continue
        price = (cost[best] - cost[other]) / fewer
        if fewer > 0 and price > low:
            low, below = float(price), other
        elif fewer < 0 and price < high:
            high, above = float(price), other
    return low, high, below, above


def curve(edges: ArrayLike, counts: ArrayLike, requests: int) -> list[tuple[float, float]]:
    """Return (value, share of *requests* up to it) at most MOST_POINTS times, from the first filled bin to the last."""
    ends, inside = np.asarray(edges, np.float64), np.asarray(counts, np.int64)
    filled = np.flatnonzero(inside)
    if not filled.size or not requests:
        return []
    first, last = int(filled[0]), int(filled[-1])
    shares = np.concatenate([[0.0], np.cumsum(inside) / requests])
    at = np.unique(np.linspace(first, last + 1, min(MOST_POINTS, last + 2 - first)).round().astype(np.int64))
    return [(float(ends[each]), float(shares[each])) for each in at]
