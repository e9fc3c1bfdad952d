"""Putting a length model right for each (model, tenant) while it is used, and noticing when it has lost its hold.

A model is trained on other requests than those that it meets. Per (model, tenant) a `Calibration` learns two things from
finished requests, both in logarithms, so that a factor too long weighs as much as a factor too short:

- one shift, which centres the prediction: a mean of errors, each bounded (Huber), shrunk to nothing while few were seen;
- one further shift for each quantile, moved a little up when the real length was above it and a little down when it was
  below, in the proportion that the quantile promises (the pinball loss's gradient, as in Gibbs and Candes, NeurIPS 2021), so
  that 90 % of lengths come to lie below the 0.9 quantile whatever their distribution.

One request moves either by a bounded step, and both stay within `MOST_SHIFT`: neither an outlier nor a tenant who wants to
can carry them away. A `DriftAlarm` is three Page-Hinkley tests (Page, Biometrika 1954) on the error of the model before it
was put right: longer than it used to be, shorter, and wilder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from forecasting.lengths.query import QUANTILES

MOST_SHIFT: Final = math.log(16.0)
"""A prediction is put right by at most a factor of 16 either way."""
BOUND: Final = math.log(2.0)
"""An error further than a factor of two from the shift so far counts as one of two."""
SHRINK: Final = 5.0
"""Requests' worth of belief that nothing is to be put right."""
RATE: Final = 0.02
"""Least weight of a new error: the last 50 requests are what a shift stands on."""
QUANTILE_RATE: Final = 0.05
"""Step of a quantile's own shift, in logarithms, after many requests."""

FIRST: Final = 120
"""Requests whose errors say what is usual."""
SLACK: Final = 0.3
"""A change of the mean error that is none, in usual distances of an error from the mean."""
LIMIT: Final = 30.0
"""How far the errors' sum, less the slack, must leave what is usual: one usual distance more takes some 43 requests."""
LEAST_DISTANCE: Final = 0.2
"""A usual distance is at least this, in logarithms: for a model that is nearly always right a tenth is no drift."""
MOST_ERROR: Final = math.log(32.0)
"""One error counts as at most a factor of 32, and one excess as at most `MOST_EXCESS` usual distances."""
MOST_EXCESS: Final = 4.0
QUIET: Final = 400
"""Requests after which an alarm goes out."""


def log_ratio(real: float, predicted: float) -> float:
    """Logarithm of *real* over *predicted*, both at least 1 token."""
    return math.log(max(real, 1.0) / max(predicted, 1.0))


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))


@dataclass(slots=True)
class Calibration:
    """Of one (model, tenant)."""

    seen: float = 0.0
    level: float = 0.0
    """Bounded mean error, before shrinking."""
    quantiles: list[float] = field(default_factory=lambda: [0.0] * len(QUANTILES))

    @property
    def shift(self) -> float:
        return _within(self.level * self.seen / (self.seen + SHRINK), MOST_SHIFT)

    def apply(self, tokens: float, quantiles: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """(tokens, quantiles) put right; each at least 1, the quantiles ascending."""
        shift = self.shift
        ends, least = [], 1.0
        for quantile, own in zip(quantiles, self.quantiles, strict=True):
            least = max(least, quantile * math.exp(_within(shift + own, MOST_SHIFT)))
            ends.append(least)
        return max(1.0, tokens * math.exp(shift)), tuple(ends)

    def learn(self, tokens: float, quantiles: Sequence[float], real: float, *, cut: bool = False) -> None:
        """A request whose length the model took for (*tokens*, *quantiles*) came to *real* tokens.

        One that was *cut* by its limit is known to be at least as long: it moves nothing down.
        """
        _, served = self.apply(tokens, quantiles)
        error = log_ratio(real, tokens)
        if cut and error < self.shift:
            return
        step = max(RATE, 1.0 / (self.seen + 1.0))
        # The first errors may be far from nothing, and are: the bound is on how far one is from what the others say.
        bound = BOUND if self.seen >= SHRINK else MOST_SHIFT
        self.level = _within(self.level + step * _within(error - self.level, bound), MOST_SHIFT)
        self.seen += 1.0
        step = max(QUANTILE_RATE, 0.5 / math.sqrt(self.seen))
        for index, (promised, quantile) in enumerate(zip(QUANTILES, served, strict=True)):
            if real > quantile:
                self.quantiles[index] = _within(self.quantiles[index] + step * promised, MOST_SHIFT)
            elif not cut:
                self.quantiles[index] = _within(self.quantiles[index] - step * (1.0 - promised), MOST_SHIFT)


@dataclass(slots=True)
class DriftAlarm:
    """Whether errors of one (model, tenant) are still what they were.

    `raised` is "", "longer", "shorter" or "wilder". After an alarm the tests start anew on what errors are now, and it goes
    out after `QUIET` requests without another.
    """

    raised: str = ""
    raised_at: float = 0.0
    """In the caller's clock."""
    _seen: int = 0
    _since: int = 0
    _usual: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, error: float, now: float) -> bool:
        """Take in one logarithm of real over predicted; True if it raised an alarm."""
        self._since += 1
        if self.raised and self._since > QUIET:
            self.raised = ""
        error = _within(error, MOST_ERROR)
        usual = self._usual
        distance_now = abs(error - usual[0])
        if self._seen < FIRST:
            self._seen += 1
            usual[0] += (error - usual[0]) / self._seen
            usual[1] += (distance_now - usual[1]) / self._seen
            return False
        sums = self._sums
        distance = max(usual[1], LEAST_DISTANCE)
        for index, excess in enumerate((error - usual[0], usual[0] - error, distance_now - usual[1])):
            sums[index] = max(0.0, sums[index] + _within(excess / distance, MOST_EXCESS) - SLACK)
        if max(sums) <= LIMIT:
            return False
        what = ("longer", "shorter", "wilder")[sums.index(max(sums))]
        self.restart()
        self.raised = what
        self.raised_at = now
        return True

    def restart(self) -> None:
        """Learn anew what is usual; an alarm that is out is out."""
        self.raised = ""
        self._seen = self._since = 0
        self._usual, self._sums = [0.0, 0.0], [0.0, 0.0, 0.0]
