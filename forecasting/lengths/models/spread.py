"""Quantiles around a model that gives one number: how far real lengths lay from its predictions, in logarithms."""

from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.models.length_model import bounded
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions

BANDS: Final = 5  # of predictions from short to long, each with a spread of its own
LEAST_IN_BAND: Final = 20


class Spread:
    """Log-ratios of real to predicted lengths, by bands of the predicted one."""

    def __init__(self) -> None:
        self.edges: NDArray[np.float64] = np.zeros(0)
        self.steps: NDArray[np.float64] = np.zeros((1, len(QUANTILES)))

    def fit(self, real: ArrayLike, predicted: ArrayLike) -> Self:
        """Learn from predictions for samples that the model was not fitted to, if there are any."""
        truth, guess = np.asarray(real, float), np.maximum(np.asarray(predicted, float), 1.0)
        bands = max(1, min(BANDS, len(truth) // LEAST_IN_BAND))
        self.edges = (
            np.unique(np.percentile(guess, np.linspace(0, 100, bands + 1)[1:-1])) if len(guess) else np.zeros(0)
        )
        ratios = np.log(np.maximum(truth, 1.0) / guess)
        place = np.searchsorted(self.edges, guess, side="right")
        whole = np.quantile(ratios, QUANTILES) if len(ratios) else np.zeros(len(QUANTILES))
        self.steps = np.stack(
            [
                np.quantile(ratios[place == band], QUANTILES) if (place == band).sum() >= LEAST_IN_BAND else whole
                for band in range(len(self.edges) + 1)
            ]
        )
        return self

    def around(self, tokens: ArrayLike, queries: Sequence[LengthQuery]) -> Predictions:
        """Predictions within what *queries* allow; *tokens* stay the single figure."""
        guess = np.maximum(np.asarray(tokens, float), 1.0)
        steps = self.steps[np.searchsorted(self.edges, guess, side="right")]
        return bounded(guess, guess[:, None] * np.exp(steps), queries)

    def state(self) -> dict[str, Any]:
        return {"edges": self.edges, "steps": self.steps}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        spread = cls()
        spread.edges, spread.steps = np.asarray(state["edges"]), np.asarray(state["steps"])
        return spread
