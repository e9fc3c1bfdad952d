"""Corrections of estimated waits, learned from actual ones."""

import math
from typing import ClassVar

from msgspec import Struct


class Correction(Struct):
    """Factor by which requests wait longer than the profile says, fitted from estimated and actual waits.

    A regression through the origin of actual on estimated seconds that forgets old pairs; long waits weigh most,
    because they are estimated best. Evidence counts in batches: requests of one batch wait for the same tokens and say
    the same. *guess* is how many batches the uncorrected estimate is worth: 0 if the profile was not measured.
    """

    GUESS: ClassVar[float] = 4.0
    RATE: ClassVar[float] = 0.02
    PRIOR_VARIANCE: ClassVar[float] = 0.0625
    MOST: ClassVar[float] = 50.0

    guess: float = GUESS
    batches: float = 0.0
    estimated2: float = 0.0
    """Weighted sums of the squares of estimated and actual seconds, and of their products."""
    product: float = 0.0
    actual2: float = 0.0

    def learn(self, estimated_s: float, actual_s: float, batch: float) -> None:
        """Learn from one wait; *estimated_s* is by the profile alone, *batch* the number of requests that run at once."""
        if estimated_s <= 0.0 or actual_s < 0.0:
            return
        weight = 1.0 / max(batch, 1.0)
        kept = (1.0 - self.RATE) ** weight
        self.batches = self.batches * kept + weight
        self.estimated2 = self.estimated2 * kept + weight * estimated_s * estimated_s
        self.product = self.product * kept + weight * estimated_s * actual_s
        self.actual2 = self.actual2 * kept + weight * actual_s * actual_s

    @property
    def known(self) -> bool:
        """Whether the profile or measured waits give an estimate."""
        return self.guess > 0 or self.batches > 0

    @property
    def factor(self) -> float:
        if not self.batches:
            return 1.0
        trust = 1.0 - math.exp(-self.batches / self.guess) if self.guess else 1.0
        return 1.0 + (min(max(self.product / self.estimated2, 1.0 / self.MOST), self.MOST) - 1.0) * trust

    @property
    def relative_variance(self) -> float:
        """Return the relative variance of throughput: the mean square error after correction, as a share of the wait."""
        if not self.batches:
            return self.PRIOR_VARIANCE
        factor = self.factor
        squares = max(0.0, self.actual2 - 2.0 * factor * self.product + factor * factor * self.estimated2)
        left = squares / (factor * factor * self.estimated2)
        prior = max(self.guess, 1.0)
        return (prior * self.PRIOR_VARIANCE + self.batches * left) / (prior + self.batches)
