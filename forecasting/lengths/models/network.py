"""A small network of quantiles: known n-grams, measures and names into the log-length's median and steps away from it.

A measure is held within the range that it had in training and scaled by how it varied there, so that no prompt is further
out than what the network has seen; one that never varied weighs nothing. Asking is a few small products in NumPy.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.query import MEDIAN
from forecasting.lengths.text import kernels
from forecasting.lengths.text.features import Features

Weights = dict[str, NDArray[np.float32]]

MOST_TOKENS: Final = 32768.0
"""Above it no length is predicted, whatever a network says."""
LARGE_STEP: Final = 30.0  # above it softplus is the identity
LEAST_SPREAD: Final = 1e-2
"""A measure with a smaller standard deviation does not vary."""
FURTHEST: Final = 4.0
"""Standard deviations from the mean beyond which a measure counts as so far."""


class Scaling:
    """How measures are brought to one size. Of what was seen so far: means, variances, bounds, and of how many samples."""

    def __init__(
        self,
        mean: NDArray[np.float64],
        variance: NDArray[np.float64],
        low: NDArray[np.float64],
        high: NDArray[np.float64],
        seen: float,
    ) -> None:
        self.mean, self.variance, self.low, self.high, self.seen = mean, variance, low, high, seen
        spread = np.sqrt(variance)
        self.scale = np.where(spread >= LEAST_SPREAD, 1.0 / np.maximum(spread, LEAST_SPREAD), 0.0)

    @classmethod
    def of(cls, measures: NDArray[np.float32]) -> "Scaling":
        """Of (n, measures)."""
        table = measures.astype(float)
        mean, variance = table.mean(axis=0), table.var(axis=0)
        reach = FURTHEST * np.sqrt(variance)
        low, high = np.maximum(table.min(axis=0), mean - reach), np.minimum(table.max(axis=0), mean + reach)
        return cls(mean, variance, low, high, float(len(table)))

    def with_more(self, other: "Scaling") -> "Scaling":
        """Of both; what was seen before counts at most as much as *other*, so that a scale can follow a change."""
        before = min(self.seen, other.seen) / (min(self.seen, other.seen) + other.seen)
        mean = before * self.mean + (1.0 - before) * other.mean
        within = before * self.variance + (1.0 - before) * other.variance
        between = before * (1.0 - before) * (self.mean - other.mean) ** 2
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Scaling(mean, within + between, low, high, self.seen + other.seen)

    def __call__(self, measures: NDArray[np.float32]) -> NDArray[np.float32]:
        """*measures*, one row or many, within their bounds and to one size."""
        scaled: NDArray[np.float32] = ((np.clip(measures, self.low, self.high) - self.mean) * self.scale).astype(
            np.float32
        )
        return scaled

    def moved(self, weights: Weights, other: "Scaling") -> Weights:
        """*weights* that say under *other* what they say under this one; of what did not vary before they say nothing."""
        ratio = np.divide(self.scale, other.scale, out=np.zeros_like(self.scale), where=other.scale > 0)
        offset = self.scale * (other.mean - self.mean)
        moved = dict(weights)
        count = len(self.mean)
        for name, bias in (("first", "first_bias"), ("straight", "heads_bias")):
            table = weights[name].copy()
            moved[bias] = (weights[bias] + offset @ table[:count]).astype(np.float32)
            table[:count] *= ratio[:, None]
            moved[name] = table.astype(np.float32)
        return moved

    def state(self) -> dict[str, object]:
        return {"mean": self.mean, "variance": self.variance, "low": self.low, "high": self.high, "seen": self.seen}


def answer(
    weights: Weights, scaled: NDArray[np.float32], read: Features, model: int, tenant: int
) -> NDArray[np.float64]:
    """Log-quantiles, ascending, of one prompt; *model* and *tenant* are rows of the tables of names."""
    table = weights["table"]
    width, inputs = table.shape[1], len(scaled)
    row = np.empty(inputs + 2 * width + weights["models"].shape[1] + weights["tenants"].shape[1], np.float32)
    row[:inputs] = scaled
    kernels.gather(table, read.ids, row[inputs : inputs + width])
    kernels.gather(table, read.opening, row[inputs + width : inputs + 2 * width])
    at = inputs + 2 * width
    names = weights["models"][model]
    row[at : at + len(names)] = names
    row[at + len(names) :] = weights["tenants"][tenant]
    hidden = np.maximum(row @ weights["first"] + weights["first_bias"], 0.0)
    hidden = np.maximum(hidden @ weights["second"] + weights["second_bias"], 0.0)
    heads = hidden @ weights["heads"] + row @ weights["straight"] + weights["heads_bias"]
    return ascending(heads.astype(float))


def ascending(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-quantiles from a network's *heads*: the median as it is, every other a positive step away from its neighbour."""
    steps = np.where(heads > LARGE_STEP, heads, np.log1p(np.exp(np.minimum(heads, LARGE_STEP))))
    logs = np.empty_like(heads)
    logs[MEDIAN] = min(max(float(heads[MEDIAN]), 0.0), float(np.log1p(MOST_TOKENS)))
    for index in range(MEDIAN - 1, -1, -1):
        logs[index] = logs[index + 1] - steps[index]
    for index in range(MEDIAN + 1, len(heads)):
        logs[index] = logs[index - 1] + steps[index]
    return np.clip(logs, 0.0, np.log1p(MOST_TOKENS))
