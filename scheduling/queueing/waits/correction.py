"""What waits teach of their estimates: how much longer requests wait than the performance profile says."""

import math
from typing import Final


class Correction:
    """By what factor requests wait longer than the profile says, fitted from estimated and actual waits.

    The regression through the origin of actual on estimated seconds, old pairs forgotten; long waits weigh most, as they are
    estimated best. What is learned counts in batches: requests of one batch wait for the same tokens, and say the same.
    *guess* is how many batches the uncorrected estimate is worth: 0 where the profile was not measured.

    A class that others overtake waits for those that come after it as well, of whom nothing is known when it comes: with
    *overtaken*, the regression has a constant too, where that leaves much less of the error.
    """

    GUESS: Final = 4.0
    RATE: Final = 0.02
    PRIOR_VARIANCE: Final = 0.0625
    MOST: Final = 50.0
    WORTH: Final = 0.7
    """Share of the error through the origin that a constant may leave to be believed."""

    def __init__(self, guess: float = GUESS, *, overtaken: bool = False) -> None:
        self.guess, self.overtaken = guess, overtaken
        self.batches = 0.0
        self._e = self._a = self._ee = self._ea = self._aa = 0.0

    def learn(self, estimated_s: float, actual_s: float, batch: float) -> None:
        """One wait; *estimated_s* by the profile alone, where *batch* requests run at once."""
        if estimated_s <= 0.0 or actual_s < 0.0:
            return
        weight = 1.0 / max(batch, 1.0)
        kept = (1.0 - self.RATE) ** weight
        self.batches = self.batches * kept + weight
        self._e = self._e * kept + weight * estimated_s
        self._a = self._a * kept + weight * actual_s
        self._ee = self._ee * kept + weight * estimated_s * estimated_s
        self._ea = self._ea * kept + weight * estimated_s * actual_s
        self._aa = self._aa * kept + weight * actual_s * actual_s

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return self.guess > 0 or self.batches > 0

    @property
    def _line(self) -> tuple[float, float]:
        """(constant, slope) of the regression; the constant is 0 where it is not worth it."""
        through_origin = min(max(self._ea / self._ee, 1.0 / self.MOST), self.MOST)
        spread = self._ee - self._e * self._e / self.batches
        if not self.overtaken or self.batches <= max(self.guess, 2.0) or spread <= 1e-9 * self._ee:
            return 0.0, through_origin
        slope = (self._ea - self._e * self._a / self.batches) / spread
        slope = min(max(slope, 1.0 / self.MOST), self.MOST)
        constant_s = (self._a - slope * self._e) / self.batches
        if constant_s <= 0.0 or self._left(constant_s, slope) > self.WORTH * self._left(0.0, through_origin):
            return 0.0, through_origin
        return constant_s, slope

    def _left(self, constant_s: float, slope: float) -> float:
        """Sum of the squared errors of that line."""
        squares = self._aa - 2.0 * slope * self._ea + slope * slope * self._ee
        squares += constant_s * (constant_s * self.batches - 2.0 * self._a + 2.0 * slope * self._e)
        return max(0.0, squares)

    @property
    def factor(self) -> float:
        if not self.batches:
            return 1.0
        trust = 1.0 - math.exp(-self.batches / self.guess) if self.guess else 1.0
        return 1.0 + (self._line[1] - 1.0) * trust

    @property
    def overtaken_s(self) -> float:
        """What a request waits for those that overtake it, however few are ahead when it comes."""
        return self._line[0] if self.batches else 0.0

    @property
    def relative_variance(self) -> float:
        """Of throughput: the mean square error of what the correction leaves, in shares of the wait."""
        if not self.batches:
            return self.PRIOR_VARIANCE
        factor, constant_s = self.factor, self.overtaken_s
        waits = factor * factor * self._ee + constant_s * (constant_s * self.batches + 2.0 * factor * self._e)
        left = self._left(constant_s, factor) / waits
        prior = max(self.guess, 1.0)
        return (prior * self.PRIOR_VARIANCE + self.batches * left) / (prior + self.batches)


class Blend:
    """How far a request is served by the pool of instances that may take it, rather than by its own queue alone.

    Both are estimated; the share of the pool is fitted to what was then waited, beginning with a half. What is learned
    counts in batches, as in `Correction`.
    """

    PRIOR: Final = 2.0
    """Batches that the half is worth, whose estimates differ as those seen do."""

    def __init__(self) -> None:
        self.batches = self._dd = self._da = 0.0

    def learn(self, own_s: float, pool_s: float, actual_s: float, batch: float) -> None:
        """One wait, and what its own queue and the pool had said of it."""
        weight, gap_s = 1.0 / max(batch, 1.0), pool_s - own_s
        kept = (1.0 - Correction.RATE) ** weight
        self.batches = self.batches * kept + weight
        self._dd = self._dd * kept + weight * gap_s * gap_s
        self._da = self._da * kept + weight * gap_s * (actual_s - own_s)

    @property
    def share(self) -> float:
        """Of the pool, 0 to 1."""
        if self._dd <= 0.0:
            return 0.5
        prior = self.PRIOR * self._dd / self.batches
        return min(1.0, max(0.0, (self._da + 0.5 * prior) / (self._dd + prior)))
