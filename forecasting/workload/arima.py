"""ARIMA, plain and seasonal, with orders and coefficients from pmdarima.

The search for orders (Hyndman and Khandakar 2008, stepwise by AICc) is done once; later fits estimate the coefficients
alone, and a window that follows moves statsmodels' filtered state on, without estimating anything.

The seasonal model follows the length of the day in windows m. Up to 24 it is SARIMA(p,d,q)(P,D,Q)m. Beyond, where the
state of a SARIMA would have hundreds of elements, the day is a sum of sines and cosines with ARIMA errors, which is
what pmdarima advises for long seasons (dynamic harmonic regression).
"""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.forecaster import Forecaster, PointModel, filled
from forecasting.workload.series import LEAST_RATE, Values

LEAST_WINDOWS: Final = 30
SEARCH_WINDOWS: Final = 432  # the last ones, on which orders are searched
FIT_WINDOWS: Final = 2016  # the last ones, on which coefficients are estimated
LONGEST_SARIMA: Final = 24  # windows a day
HARMONICS: Final = 4  # tried at most
FALLBACK: Final = (0, 1, 1)  # exponential smoothing, where the search fails
ITERATIONS: Final = 30  # of the likelihood's maximiser


class ArimaModel(PointModel):
    """y = harmonics + design · state, whose next is transition · state + drift + gain · error (a Kalman filter)."""

    seasonal: ClassVar[bool] = False

    def __init__(self) -> None:
        self.order: tuple[int, int, int] | None = None
        self.seasonal_order: tuple[int, int, int, int] = (0, 0, 0, 0)
        self.intercept = True
        self.harmonics = 0
        self.scale = 1.0
        self.season = 1
        self.index = 0  # of the next window since the first that was fitted on; gives the phase of the harmonics
        self.beta: Values = np.empty(0)
        self.state_vector: Values = np.zeros(1)
        self.transition: Values = np.ones((1, 1))
        self.design: Values = np.ones(1)
        self.drift: Values = np.zeros(1)
        self.gain: Values = np.ones(1)

    @classmethod
    def least(cls, season: int) -> int:
        return max(LEAST_WINDOWS, 2 * season) if cls.seasonal else LEAST_WINDOWS

    def fit(self, values: Values, season: int) -> None:
        known = values[~np.isnan(values)]
        mean = float(known.mean()) if known.size else 0.0
        self.scale = mean if mean > LEAST_RATE else 1.0
        self.season = season
        y = filled(values) / self.scale
        if self.order is None and float(np.ptp(y)) > 1e-9:
            self._search(y[-SEARCH_WINDOWS:])
        self._estimate(y)

    def prepare(self) -> None:
        import pmdarima  # noqa: F401

    def append(self, value: float) -> None:
        """Move on by one window; a gap counts as the model's own expectation, an error of 0."""
        expected = float(self.design @ self.state_vector)
        seasonal = float(self._harmonic(np.array([self.index]))[0] @ self.beta) if self.harmonics else 0.0
        error = 0.0 if np.isnan(value) else value / self.scale - seasonal - expected
        self.state_vector = self.transition @ self.state_vector + self.drift + self.gain * error
        self.index += 1

    def path(self, horizon: int) -> Values:
        path, state = np.empty(horizon), self.state_vector
        for step in range(horizon):
            path[step] = self.design @ state
            state = self.transition @ state + self.drift
        if self.harmonics:
            path += self._harmonic(self.index + np.arange(horizon)) @ self.beta
        return self.scale * path

    def tried(self) -> Sequence[str]:
        if self.order is None:
            return ("no orders: the series is constant",)
        words = [f"ARIMA{self.order}".replace(" ", "")]
        if self.seasonal_order[3]:
            words[0] += f"{self.seasonal_order}".replace(" ", "")
        if self.harmonics:
            words.append(f"{self.harmonics} harmonics of {self.season} windows")
        return words

    def _search(self, y: Values) -> None:
        """Find orders by pmdarima's stepwise search; for long seasons, first the number of harmonics by AICc."""
        import pmdarima

        season = self.season if self.seasonal and 1 < self.season <= LONGEST_SARIMA else 1
        self.harmonics = self._count_harmonics(y) if self.seasonal and self.season > LONGEST_SARIMA else 0
        if self.harmonics:
            columns = self._harmonic(np.arange(len(y)))
            y = y - columns @ np.linalg.lstsq(columns, y - y.mean(), rcond=None)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # orders that do not converge lose the search; that is what it is for
            try:
                model = pmdarima.auto_arima(
                    y,
                    seasonal=season > 1,
                    m=season,
                    max_p=3,
                    max_q=3,
                    max_P=1,
                    max_Q=1,
                    stepwise=True,
                    information_criterion="aicc",
                    suppress_warnings=True,
                    error_action="ignore",
                    maxiter=ITERATIONS,
                )
            except (ValueError, np.linalg.LinAlgError):  # its tests of stationarity give up on some regular series
                self.order, self.intercept = FALLBACK, False
                return
        self.order = tuple(model.order)
        self.seasonal_order = tuple(model.seasonal_order)
        self.intercept = bool(model.with_intercept)

    def _count_harmonics(self, y: Values) -> int:
        """Return the number of sine and cosine pairs with the smallest AICc under least squares."""
        best, chosen = np.inf, 1
        n = len(y)
        for count in range(1, min(HARMONICS, self.season // 2) + 1):
            self.harmonics = count
            columns = np.column_stack([np.ones(n), self._harmonic(np.arange(n))])
            residual = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
            parameters = columns.shape[1] + 1
            aicc = n * np.log(float(residual @ residual) / n + 1e-12) + 2 * parameters * n / max(1, n - parameters - 1)
            if aicc < best:
                best, chosen = aicc, count
        return chosen

    def _harmonic(self, index: NDArray[np.int64]) -> Values:
        """Return sines and cosines at windows *index*: (len(index), 2 harmonics)."""
        angle = 2 * np.pi * np.outer(index % self.season, np.arange(1, self.harmonics + 1)) / self.season
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)

    def _estimate(self, y: Values) -> None:
        """Estimate coefficients for the found orders, and the state at the end of *y*: a random walk without any."""
        import pmdarima

        self.index, self.beta = len(y), np.zeros(2 * self.harmonics)
        self.transition, self.design, self.drift, self.gain = np.ones((1, 1)), np.ones(1), np.zeros(1), np.ones(1)
        self.state_vector = y[-1:].copy()
        if self.order is None:
            return
        begin = max(0, len(y) - FIT_WINDOWS)
        exogenous = self._harmonic(np.arange(begin, len(y))) if self.harmonics else None
        model = pmdarima.ARIMA(
            self.order,
            seasonal_order=self.seasonal_order,
            with_intercept=self.intercept,
            suppress_warnings=True,
            maxiter=ITERATIONS,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a likelihood that is still rising after maxiter steps is good enough
            try:
                result = model.fit(y[begin:], X=exogenous).arima_res_
            except (ValueError, np.linalg.LinAlgError):  # no likelihood for these values
                return
        filtered = result.filter_results
        named = dict(zip(result.model.param_names, np.asarray(result.params), strict=True))
        self.beta = np.array([named[name] for name in result.model.exog_names or []])
        self.state_vector = filtered.predicted_state[:, -1].copy()
        self.transition, self.design = filtered.transition[:, :, -1].copy(), filtered.design[0, :, -1].copy()
        self.drift = filtered.state_intercept[:, -1].copy()
        self.gain = filtered.kalman_gain[:, 0, -1].copy()  # it is constant after some windows

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.order is not None:  # JSON has lists only
            p, d, q = self.order
            self.order = p, d, q
        seasonal_p, seasonal_d, seasonal_q, m = self.seasonal_order
        self.seasonal_order = seasonal_p, seasonal_d, seasonal_q, m


class SeasonalArimaModel(ArimaModel):
    seasonal = True


class Arima(Forecaster):
    slow_to_fit = True
    name = "arima"
    model_class = ArimaModel


class SeasonalArima(Forecaster):
    slow_to_fit = True
    name = "seasonal_arima"
    model_class = SeasonalArimaModel
