"""Bands around a forecast, learned from its recent errors, and bounded by the range of the series.

Two rules give ends; each end is their mean, weighted by their recent pinball loss at that horizon.

*Errors*: adaptive conformal intervals. An error is the logarithm of actual over forecast, divided by the size that such
errors had lately, so that a calm night and a bursty afternoon share one memory of scores. For each horizon the band's
ends are quantiles of the scores in memory (split conformal prediction, with its (n + 1) / n), and the quantile that is
asked for moves after every hit and miss as in Gibbs and Candes, "Adaptive conformal inference under distribution shift"
(NeurIPS 2021): no model of the noise is needed, and the share of outcomes inside goes to what was promised while the
demand changes.

*Levels*: quantiles of the rates of the last two days, whatever is forecast. Where most windows are empty and a few are
not, errors as logarithms are either nothing or enormous and say little of the next; how often the series is busy says
more.

No end lies above `GROWTH` times the highest rate that was seen.
"""

from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.files import StateError
from forecasting.workload.series import LEAST_RATE

LEVELS: Final = (0.80, 0.95)  # shares of the outcomes that the two bands should hold
MEMORY: Final = 216  # scores kept by horizon
STEP: Final = 0.015  # by which a quantile moves after a miss
SCALE_DECAY: Final = 0.95  # of the mean size of errors, by window
POWER: Final = 0.6  # of that size by which errors are divided: between one size for all times and the last one
SCALE_FLOOR: Final = 0.005  # errors under half a per cent count as that
OFFSET_SHARE: Final = 0.01  # of the mean rate; added to both sides so that a rate of 0 has a logarithm
PRIOR_SCALE: Final = 0.3  # until errors were seen: a third off
PRIOR_SCORES: Final = 32  # as many quantiles of a normal distribution stand in memory at first
WIDEST: Final = 4.0  # how much wider, at most, bands get beyond the last horizon that is learned from
LARGEST: Final = 12.0  # in logarithms: further from the forecast no end is ever put
GROWTH: Final = 2.0  # neither a forecast nor an end is above this many times the highest rate that was seen
FIRST_WINDOWS: Final = 4  # beyond this horizon, nothing is expected to be more uncertain before any error was seen
SLOW_DECAY: Final = 0.995  # of the size that errors have in the long run
SLOW_SHARE: Final = 0.25  # of that size, under which a calm spell does not bring the present one
LEVELS_MEMORY: Final = 288  # rates of which the levels are quantiles
LEAST_LEVELS: Final = 48  # known rates, with fewer of which levels say nothing
LOSS_DECAY: Final = 0.98  # of the pinball losses of both rules, by window
EAGERNESS: Final = 8.0  # how fast weight leaves the rule that is worse: exp(-8) at twice the loss of the other

TARGETS: Final = np.array([share for level in LEVELS for share in ((1 - level) / 2, (1 - level) / 2)])
"""Share of outcomes beyond each end: lower 80, upper 80, lower 95, upper 95."""


def _quantiles_of(tails: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantile of each end, from the share of outcomes beyond it (..., 4)."""
    return np.where(np.arange(len(TARGETS)) % 2, 1.0 - tails, tails)


QUANTILES: Final = _quantiles_of(TARGETS)


class Bands:
    """Scores of one forecaster on one series, by horizon from 1 to *reach* windows.

    *history* are the rates known before the first forecast, oldest first; NaN for gaps.
    """

    def __init__(self, reach: int, history: NDArray[np.float64]) -> None:
        self.reach = reach
        known = history[~np.isnan(history)]
        mean_rate = float(known.mean()) if known.size else 0.0
        self.offset = OFFSET_SHARE * mean_rate if mean_rate > LEAST_RATE else 1.0
        self.highest = float(known.max()) if known.size else 0.0
        self.rates = np.full(LEVELS_MEMORY, np.nan)
        last = known[-LEVELS_MEMORY:]
        self.rates[: len(last)] = last
        self.rates_written = len(last)
        prior = [NormalDist().inv_cdf((k + 0.5) / PRIOR_SCORES) for k in range(PRIOR_SCORES)]
        # Errors of |normal| size have mean 0.8; the scale is that mean, so prior scores are divided by it.
        self.scores = np.full((reach, MEMORY), np.nan)
        self.scores[:, :PRIOR_SCORES] = np.array(prior) / 0.8 * PRIOR_SCALE ** (1 - POWER)
        self.written = PRIOR_SCORES  # columns ever written
        self.scale = PRIOR_SCALE * np.sqrt(np.minimum(np.arange(1, reach + 1), FIRST_WINDOWS))
        self.slow_scale = self.scale.copy()
        self.tails = np.tile(TARGETS, (reach, 1))
        self.losses = np.zeros((2, reach, 4))  # of errors and of levels
        self.origin = 0  # windows learned since the beginning
        self.asked = np.full((reach, reach), np.nan)  # log of the forecast, by origin modulo reach and horizon
        self.asked_scale = np.ones((reach, reach))
        self.asked_ends = np.full((reach, reach, 4), np.nan)
        self.asked_by_rule = np.full((2, reach, reach, 4), np.nan)

    def ends(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return lower 80, upper 80, lower 95 and upper 95 around *path*: (horizon, 4), ordered and none below 0."""
        return self._mixed(path, self._by_errors(path), self._by_levels())

    def _mixed(
        self, path: NDArray[np.float64], by_errors: NDArray[np.float64], by_levels: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        rows = np.minimum(np.arange(len(path)), self.reach - 1)  # beyond the last horizon, as at it
        share = np.where(np.isnan(by_levels), 0.0, self._share_of_levels())[rows]
        ends = (1 - share) * by_errors + share * np.nan_to_num(by_levels)[rows]
        ends[:, 0] = np.minimum(ends[:, 0], path)
        ends[:, 1] = np.maximum(ends[:, 1], path)
        ends[:, 2] = np.minimum(ends[:, 2], ends[:, 0])
        ends[:, 3] = np.maximum(ends[:, 3], ends[:, 1])
        return ends

    def _share_of_levels(self) -> NDArray[np.float64]:
        """Return the weight of the levels in each end: (reach, 4)."""
        errors, levels = self.losses
        best = np.maximum(np.minimum(errors, levels), LEAST_RATE)
        away = np.clip(EAGERNESS * (levels - errors) / best, -50.0, 50.0)
        return np.asarray(1.0 / (1.0 + np.exp(away)))

    def _by_levels(self) -> NDArray[np.float64]:
        """Return quantiles of the last rates at the four tails: (reach, 4); NaN while there are too few."""
        known = self.rates[: min(self.rates_written, LEVELS_MEMORY)]
        if len(known) < LEAST_LEVELS:
            return np.full((self.reach, len(TARGETS)), np.nan)
        return np.asarray(np.quantile(known, _quantiles_of(self.tails)))

    def _by_errors(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ends by recent errors, before they are ordered: (horizon, 4)."""
        horizon = len(path)
        reach = min(horizon, self.reach)
        quantiles = self._quantiles(reach)
        scale = self._size()[:reach]
        if horizon > reach:
            wider = np.minimum(WIDEST, np.sqrt(np.arange(reach + 1, horizon + 1) / reach))
            quantiles = np.concatenate([quantiles, np.repeat(quantiles[-1:], horizon - reach, axis=0)])
            scale = np.concatenate([scale, scale[-1] * wider])
        away = np.clip(quantiles * scale[:, None], -LARGEST, LARGEST)
        ends = (path + self.offset)[:, None] * np.exp(away) - self.offset
        return np.asarray(np.clip(ends, 0.0, max(GROWTH * self.highest, LEAST_RATE)))

    def _size(self) -> NDArray[np.float64]:
        """Return the divisor of errors, by horizon."""
        return np.asarray(np.maximum(self.scale, SLOW_SHARE * self.slow_scale) ** POWER)

    def ask(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """Remember the forecast *path* of the next `reach` windows, to compare it with the outcome; return its `ends`."""
        row = self.origin % self.reach
        self.asked[row] = np.log(path + self.offset)
        self.asked_scale[row] = self._size()
        by_errors, by_levels = self._by_errors(path), self._by_levels()
        self.asked_ends[row] = self._mixed(path, by_errors, by_levels)
        self.asked_by_rule[0, row] = by_errors
        self.asked_by_rule[1, row] = by_levels
        ends: NDArray[np.float64] = self.asked_ends[row].copy()
        return ends

    def learn(self, actual: float) -> None:
        """Learn from the next window; NaN moves on without learning."""
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
        self.slow_scale[known] = SLOW_DECAY * self.slow_scale[known] + (1 - SLOW_DECAY) * size[known]
        self._weigh(actual, rows, horizons)
        self.highest = max(self.highest, actual)
        self.rates[self.rates_written % LEVELS_MEMORY] = actual
        self.rates_written += 1
        ends = self.asked_ends[rows, horizons]
        missed = np.empty((self.reach, 4))
        missed[:, 0::2] = actual < ends[:, 0::2]
        missed[:, 1::2] = actual > ends[:, 1::2]
        moved = np.clip(self.tails + STEP * (TARGETS - missed), 0.0, 0.5)
        self.tails = np.where(known[:, None], moved, self.tails)
        self._forget(rows, horizons)

    def _weigh(self, actual: float, rows: NDArray[np.int64], horizons: NDArray[np.int64]) -> None:
        """Add the loss of each rule's ends, where both had some."""
        off = actual - self.asked_by_rule[:, rows, horizons]
        loss = np.maximum(QUANTILES * off, (QUANTILES - 1) * off)
        both = ~np.isnan(loss).any(axis=0)
        self.losses[:, both] = LOSS_DECAY * self.losses[:, both] + loss[:, both]

    def _forget(self, rows: NDArray[np.int64], horizons: NDArray[np.int64]) -> None:
        self.asked[rows, horizons] = np.nan

    def _quantiles(self, reach: int) -> NDArray[np.float64]:
        """Return scores at the four tails, by horizon: (reach, 4)."""
        ordered = np.sort(self.scores[:reach], axis=1)  # NaN goes to the end
        count = (~np.isnan(ordered)).sum(axis=1)
        tails = _quantiles_of(self.tails[:reach])
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
        bands = cls(int(state["reach"]), np.empty(0))
        if state.keys() != vars(bands).keys():
            raise StateError("bands of another version: fit the forecaster again")
        for name, value in state.items():
            setattr(bands, name, np.array(value) if isinstance(value, np.ndarray) else value)
        return bands
