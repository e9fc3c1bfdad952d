"""Bands around a forecast, learned from how wrong its last forecasts were: adaptive conformal intervals.

An error is the logarithm of actual over forecast, divided by the size that such errors had lately, so that a calm night and
a bursty afternoon share one memory of scores. For each horizon the band's ends are quantiles of the scores in memory
(split conformal prediction, with its (n + 1) / n), and the quantile that is asked for moves after every hit and miss as in
Gibbs and Candes, "Adaptive conformal inference under distribution shift" (NeurIPS 2021): no model of the noise is needed,
and the share of outcomes inside goes to what was promised even while the demand changes its ways.
"""

from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.forecast import LEVELS
from forecasting.workload.forecasters.points import LEAST_RATE

MEMORY: Final = 216  # scores kept by horizon
STEP: Final = 0.015  # by which a quantile moves after a miss
SCALE_DECAY: Final = 0.95  # of the mean size of errors, by window
POWER: Final = 0.6  # of that size by which errors are divided: between one size for all times and the last one
SCALE_FLOOR: Final = 0.005  # errors under half a per cent count as that
OFFSET_SHARE: Final = 0.01  # of the mean rate; added to both sides so that a rate of 0 has a logarithm
PRIOR_SCALE: Final = 0.3  # until errors were seen: a third off
PRIOR_SCORES: Final = 16  # as many quantiles of a normal distribution stand in memory at first
WIDEST: Final = 4.0  # how much wider, at most, bands get beyond the last horizon that is learned from
LARGEST: Final = 12.0  # in logarithms: further from the forecast no end is ever put

TARGETS: Final = np.array([share for level in LEVELS for share in ((1 - level) / 2, (1 - level) / 2)])
"""Share of outcomes beyond each end: lower 80, upper 80, lower 95, upper 95."""


class Bands:
    """Scores of one forecaster on one series, by horizon from 1 to *reach* windows."""

    def __init__(self, reach: int, mean_rate: float) -> None:
        self.reach = reach
        self.offset = OFFSET_SHARE * mean_rate if mean_rate > LEAST_RATE else 1.0
        prior = [NormalDist().inv_cdf((k + 0.5) / PRIOR_SCORES) for k in range(PRIOR_SCORES)]
        # Errors of |normal| size have mean 0.8; the scale is that mean, so prior scores are divided by it.
        self.scores = np.full((reach, MEMORY), np.nan)
        self.scores[:, :PRIOR_SCORES] = np.array(prior) / 0.8
        self.written = PRIOR_SCORES  # columns ever written
        self.scale = PRIOR_SCALE * np.sqrt(np.arange(1, reach + 1))
        self.tails = np.tile(TARGETS, (reach, 1))
        self.origin = 0  # windows learned since the beginning
        self.asked = np.full((reach, reach), np.nan)  # log of the forecast, by origin modulo reach and horizon
        self.asked_scale = np.ones((reach, reach))
        self.asked_ends = np.full((reach, reach, 4), np.nan)

    def ends(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lower 80, upper 80, lower 95 and upper 95 around *path*: (horizon, 4), ordered and none below 0."""
        horizon = len(path)
        reach = min(horizon, self.reach)
        quantiles = self._quantiles(reach)
        scale = self.scale[:reach] ** POWER
        if horizon > reach:
            wider = np.minimum(WIDEST, np.sqrt(np.arange(reach + 1, horizon + 1) / reach))
            quantiles = np.concatenate([quantiles, np.repeat(quantiles[-1:], horizon - reach, axis=0)])
            scale = np.concatenate([scale, scale[-1] * wider])
        away = np.clip(quantiles * scale[:, None], -LARGEST, LARGEST)
        ends = np.maximum((path + self.offset)[:, None] * np.exp(away) - self.offset, 0.0)
        ends[:, 0] = np.minimum(ends[:, 0], path)
        ends[:, 1] = np.maximum(ends[:, 1], path)
        ends[:, 2] = np.minimum(ends[:, 2], ends[:, 0])
        ends[:, 3] = np.maximum(ends[:, 3], ends[:, 1])
        return ends

    def ask(self, path: NDArray[np.float64]) -> None:
        """Remember the forecast *path* of the next `reach` windows, to compare it with what comes."""
        row = self.origin % self.reach
        self.asked[row] = np.log(path + self.offset)
        self.asked_scale[row] = self.scale**POWER
        self.asked_ends[row] = self.ends(path)

    def learn(self, actual: float) -> None:
        """Take in the next window; NaN moves on without learning."""
        horizons = np.arange(self.reach)
        rows = (self.origin - horizons) % self.reach
        self.origin += 1
        if np.isnan(actual):
            self._forget(rows, horizons)
            return
        error = np.log(actual + self.offset) - self.asked[rows, horizons]
        known = ~np.isnan(error)
        column = self.written % MEMORY
        self.scores[:, column] = np.where(known, error / self.asked_scale[rows, horizons], np.nan)
        self.written += 1
        size = np.maximum(np.abs(error), SCALE_FLOOR)
        self.scale[known] = SCALE_DECAY * self.scale[known] + (1 - SCALE_DECAY) * size[known]
        ends = self.asked_ends[rows, horizons]
        missed = np.empty((self.reach, 4))
        missed[:, 0::2] = actual < ends[:, 0::2]
        missed[:, 1::2] = actual > ends[:, 1::2]
        moved = np.clip(self.tails + STEP * (TARGETS - missed), 0.0, 0.5)
        self.tails = np.where(known[:, None], moved, self.tails)
        self._forget(rows, horizons)

    def _forget(self, rows: NDArray[np.int64], horizons: NDArray[np.int64]) -> None:
        self.asked[rows, horizons] = np.nan

    def _quantiles(self, reach: int) -> NDArray[np.float64]:
        """Scores at the four tails, by horizon: (reach, 4)."""
        ordered = np.sort(self.scores[:reach], axis=1)  # NaN goes to the end
        count = (~np.isnan(ordered)).sum(axis=1)
        tails = self.tails[:reach].copy()
        tails[:, 1::2] = 1.0 - tails[:, 1::2]
        # The k-th smallest of n scores is the quantile k / (n + 1).
        place = np.clip(tails * (count[:, None] + 1) - 1, 0.0, np.maximum(count[:, None] - 1, 0))
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(count[:, None] - 1, 0))
        rows = np.arange(reach)[:, None]
        low, high = ordered[rows, below], ordered[rows, above]
        return np.asarray(np.nan_to_num(low + (place - below) * (high - low)))

    def state(self) -> dict[str, Any]:
        return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Bands":
        bands = cls(int(state["reach"]), 1.0)
        for name, value in state.items():
            setattr(bands, name, np.array(value) if isinstance(value, np.ndarray) else value)
        return bands
