"""Corrections of estimated waits, learned from actual ones."""

import math
from typing import ClassVar

from msgspec import Struct


class Correction(Struct):
    """Factor by which requests wait longer than the profile says, fitted from estimated and actual waits.

    A regression through the origin of actual on estimated seconds that forgets old pairs; long waits weigh most,
    because they are estimated best. Evidence counts in batches: requests of one batch wait for the same tokens and say
    the same. *guess* is how many batches the uncorrected estimate is worth: 0 if the profile was not measured.

    A class that others overtake also waits for requests that arrive after it, about which nothing is known on arrival.
    With *overtaken*, the regression also has a constant if that leaves much less of the error.
    """

    GUESS: ClassVar[float] = 4.0
    RATE: ClassVar[float] = 0.02
    PRIOR_VARIANCE: ClassVar[float] = 0.0625
    MOST: ClassVar[float] = 50.0
    WORTH: ClassVar[float] = 0.7
    """Largest share of the error through the origin that may remain for a constant to be used."""

    guess: float = GUESS
    overtaken: bool = False
    batches: float = 0.0
    estimated: float = 0.0
    """Weighted sums of estimated and actual seconds, of their squares and of their products."""
    actual: float = 0.0
    estimated2: float = 0.0
    product: float = 0.0
    actual2: float = 0.0

    def learn(self, estimated_s: float, actual_s: float, batch: float) -> None:
        """Learn from one wait; *estimated_s* is by the profile alone, *batch* the number of requests that run at once."""
        if estimated_s <= 0.0 or actual_s < 0.0:
            return
        weight = 1.0 / max(batch, 1.0)
        kept = (1.0 - self.RATE) ** weight
        self.batches = self.batches * kept + weight
        self.estimated = self.estimated * kept + weight * estimated_s
        self.actual = self.actual * kept + weight * actual_s
        self.estimated2 = self.estimated2 * kept + weight * estimated_s * estimated_s
        self.product = self.product * kept + weight * estimated_s * actual_s
        self.actual2 = self.actual2 * kept + weight * actual_s * actual_s

    @property
    def known(self) -> bool:
        """Whether the profile or measured waits give an estimate."""
        return self.guess > 0 or self.batches > 0

    @property
    def _line(self) -> tuple[float, float]:
        """Return (constant, slope) of the regression; the constant is 0 if it is not worth using."""
        through_origin = min(max(self.product / self.estimated2, 1.0 / self.MOST), self.MOST)
        spread = self.estimated2 - self.estimated * self.estimated / self.batches
        if not self.overtaken or self.batches <= max(self.guess, 2.0) or spread <= 1e-9 * self.estimated2:
            return 0.0, through_origin
        slope = (self.product - self.estimated * self.actual / self.batches) / spread
        slope = min(max(slope, 1.0 / self.MOST), self.MOST)
        constant_s = (self.actual - slope * self.estimated) / self.batches
        if constant_s <= 0.0 or self._left(constant_s, slope) > self.WORTH * self._left(0.0, through_origin):
            return 0.0, through_origin
        return constant_s, slope

    def _left(self, constant_s: float, slope: float) -> float:
        """Return the sum of the squared errors of that line."""
        squares = self.actual2 - 2.0 * slope * self.product + slope * slope * self.estimated2
        squares += constant_s * (constant_s * self.batches - 2.0 * self.actual + 2.0 * slope * self.estimated)
        return max(0.0, squares)

    @property
    def factor(self) -> float:
        if not self.batches:
            return 1.0
        trust = 1.0 - math.exp(-self.batches / self.guess) if self.guess else 1.0
        return 1.0 + (self._line[1] - 1.0) * trust

    @property
    def overtaken_s(self) -> float:
        """Return the wait for requests that overtake, independent of the number ahead on arrival."""
        return self._line[0] if self.batches else 0.0

    @property
    def relative_variance(self) -> float:
        """Return the relative variance of throughput: the mean square error after correction, as a share of the wait."""
        if not self.batches:
            return self.PRIOR_VARIANCE
        factor, constant_s = self.factor, self.overtaken_s
        waits = factor * factor * self.estimated2 + constant_s * (
            constant_s * self.batches + 2.0 * factor * self.estimated
        )
        left = self._left(constant_s, factor) / waits
        prior = max(self.guess, 1.0)
        return (prior * self.PRIOR_VARIANCE + self.batches * left) / (prior + self.batches)
