"""Exponential smoothing in state-space form (ETS), with coefficients from statsmodels.

Three forms with additive errors compete once, by AICc: a level; a level with damped trend; both with a daily season.
Later fits estimate the coefficients of the winner alone, and windows that follow move level, trend and season by the
recursion. Hyndman, Koehler, Ord and Snyder, "Forecasting with Exponential Smoothing" (2008).
"""

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from forecasting.workload.forecaster import Forecaster, PointModel, filled
from forecasting.workload.series import LEAST_RATE, Values

LEAST_WINDOWS: Final = 20
FIT_WINDOWS: Final = 2016  # the last ones
FORMS: Final = ("level", "damped trend", "damped trend and season")
SEASON, TREND = "season", "trend"


class EtsModel(PointModel):
    """expected = level + phi trend + season; then level, trend and season each move by their share of the error."""

    def __init__(self) -> None:
        self.form = ""
        self.scale = 1.0
        self.alpha, self.beta, self.gamma, self.phi = 1.0, 0.0, 0.0, 0.0
        self.level, self.trend = 0.0, 0.0
        self.seasons: Values = np.zeros(1)  # next window's first

    @classmethod
    def least(cls, season: int) -> int:
        return LEAST_WINDOWS

    def fit(self, values: Values, season: int) -> None:
        known = values[~np.isnan(values)]
        mean = float(known.mean()) if known.size else 0.0
        self.scale = mean if mean > LEAST_RATE else 1.0
        y = (filled(values) / self.scale)[-FIT_WINDOWS:]
        if float(np.ptp(y)) <= 1e-9:  # constant: nothing to estimate
            self.alpha, self.beta, self.gamma, self.phi = 1.0, 0.0, 0.0, 0.0
            self.level, self.trend, self.seasons = float(y[-1]), 0.0, np.zeros(1)
            return
        seasonal = season > 1 and len(y) >= 2 * season  # windows of a day or more have no season within it
        forms = [self.form] if self.form else [form for form in FORMS if SEASON not in form or seasonal]
        if SEASON in self.form and not seasonal:
            forms = [FORMS[1]]
        best = np.inf
        for form in forms:
            criterion, estimate = self._estimate(y, form, season)
            if criterion < best:
                best, self.form = criterion, form
                self.alpha, self.beta, self.gamma, self.phi, self.level, self.trend, self.seasons = estimate

    def prepare(self) -> None:
        import statsmodels.tsa.exponential_smoothing.ets  # noqa: F401

    def append(self, value: float) -> None:
        expected = self.level + self.phi * self.trend + self.seasons[0]
        error = 0.0 if np.isnan(value) else value / self.scale - expected
        self.level, self.trend = (
            self.level + self.phi * self.trend + self.alpha * error,
            self.phi * self.trend + self.beta * error,
        )
        first = self.seasons[0] + self.gamma * error
        self.seasons = np.append(self.seasons[1:], first)

    def path(self, horizon: int) -> Values:
        steps = np.arange(1, horizon + 1)
        damped = np.cumsum(self.phi**steps) * self.trend
        return self.scale * (self.level + damped + self.seasons[(steps - 1) % len(self.seasons)])

    def tried(self) -> Sequence[str]:
        return (f"ETS: {self.form or 'constant'}",)

    @staticmethod
    def _estimate(y: Values, form: str, season: int) -> tuple[float, tuple[Any, ...]]:
        """Return AICc, and alpha, beta, gamma, phi, level, trend and seasons at the end of *y*."""
        from statsmodels.tsa.exponential_smoothing.ets import ETSModel

        seasonal, trending = SEASON in form, TREND in form
        model = ETSModel(
            y,
            error="add",
            trend="add" if trending else None,
            damped_trend=trending,
            seasonal="add" if seasonal else None,
            seasonal_periods=season if seasonal else None,
            # Estimating a whole day of first seasons would take minutes and gain nothing over a week of windows.
            initialization_method="heuristic",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what does not converge has a worse criterion
            result = model.fit(disp=False, maxiter=200)
        named = dict(zip(model.param_names, np.asarray(result.params), strict=True))
        n, parameters = len(y), 2 + 2 * trending + (season if seasonal else 0)
        squares = float(np.sum((y - np.asarray(result.fittedvalues)) ** 2))
        # statsmodels does not count states that it did not estimate; they were learned from the data all the same.
        criterion = n * np.log(squares / n + 1e-12) + 2 * parameters * n / max(1, n - parameters - 1)
        states = np.asarray(result.states)
        seasons = np.zeros(1)
        if seasonal:
            seasons = np.asarray(result.season)[-season:].copy()
        return criterion, (
            float(named["smoothing_level"]),
            float(named.get("smoothing_trend", 0.0)),
            float(named.get("smoothing_seasonal", 0.0)),
            float(named.get("damping_trend", 0.0)),
            float(states[-1, 0]),
            float(states[-1, 1]) if trending else 0.0,
            seasons,
        )


class Ets(Forecaster):
    name = "ets"
    model_class = EtsModel
