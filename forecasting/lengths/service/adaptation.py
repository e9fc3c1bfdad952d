"""How a tenant's requests differ, learned from its own finished ones: a linear correction of the log-length.

Per tenant, recursive least squares on the measures of the prompt (Plackett, Biometrika 1950) learn what the length model is
off by: from the prompts at hand, and for all served models together, since what makes an answer long is the same for them.
The belief that nothing is to be corrected weighs as much as `BELIEF` requests. Measures are bounded (`Student.scaled`), so
are errors and the correction, so one request moves little and a tenant can spoil its own predictions alone.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

BELIEF: Final = 100.0
"""Requests' worth of belief in no correction, for a measure one standard deviation from its mean."""
MOST: Final = math.log(4.0)
"""A correction is a factor of at most 4."""
BOUND: Final = math.log(2.0)
"""An error further than a factor of two from the correction so far counts as one of two."""
MEMORY: Final = 1.0 / 5000.0
"""What one more request takes of the weight of all before: some thousands of requests are what a correction stands on."""
LEAST_VARIANCE: Final = 1e-5
WEIGHT: Final = 0.5
"""Of a measure: there are dozens, and many small corrections add up."""
TENANTS: Final = 512
"""That are remembered, the lately used ones: some 20 kB each."""

Measures = NDArray[np.float32]


class Adaptation:
    """Of one tenant."""

    __slots__ = ("_covariance", "_weights")

    def __init__(self) -> None:
        self._weights: NDArray[np.float64] | None = None
        self._covariance: NDArray[np.float64] = np.zeros((0, 0))

    def correction(self, measures: Measures) -> float:
        """To be added to the logarithm of a predicted length."""
        if self._weights is None:
            return 0.0
        return max(-MOST, min(MOST, WEIGHT * float(self._weights @ measures)))

    def learn(self, measures: Measures, error: float) -> None:
        """The logarithm of a length was *error* above the corrected prediction."""
        if self._weights is None:
            self._weights = np.zeros(len(measures))
            self._covariance = np.eye(len(measures)) / BELIEF
        row = WEIGHT * measures.astype(float)
        moved = self._covariance @ row
        gain = moved / (1.0 + row @ moved)
        self._weights += gain * max(-BOUND, min(BOUND, error))
        self._covariance -= np.outer(gain, moved)
        # Forgetting adds to what is uncertain, but never more than there was in the beginning.
        diagonal = self._covariance.diagonal()
        self._covariance[np.diag_indices_from(self._covariance)] = np.clip(
            diagonal + MEMORY * (1.0 / BELIEF - diagonal), LEAST_VARIANCE, None
        )
