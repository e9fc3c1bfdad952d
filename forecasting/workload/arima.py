"""ARIMA, plain and seasonal, with orders and coefficients from pmdarima.

The search for orders (Hyndman and Khandakar 2008, stepwise by AICc) is done once; later fits estimate the coefficients
alone, and a window that follows moves the model on by its own recursion, without estimating anything.

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
    """y = harmonics + u, where the differences w of u follow w[t] = c + sum a[i] w[t-i] + e[t] + sum b[j] e[t-j]."""

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
        self.constant = 0.0
        self.ar: Values = np.empty(0)  # a, seasonal terms multiplied out
        self.ma: Values = np.empty(0)  # b
        self.difference: Values = np.empty(0)  # w[t] = u[t] - sum difference[i] u[t-1-i]
        self.u: Values = np.empty(0)  # the last ones, newest last, as many as the difference needs
        self.w: Values = np.empty(0)
        self.e: Values = np.empty(0)

    @classmethod
    def least(cls, season: int) -> int:
        return max(LEAST_WINDOWS, 2 * season) if cls.seasonal else LEAST_WINDOWS

    def fit(self, values: Values, season: int) -> None:
        known = values[~np.isnan(values)]
        mean = float(known.mean()) if known.size else 0.0
        self.scale = mean if mean > LEAST_RATE else 1.0
        self.season, self.index = season, 0
        y = filled(values) / self.scale
        if self.order is None and float(np.ptp(y)) > 1e-9:
            self._search(y[-SEARCH_WINDOWS:])
        self._estimate(y)

    def prepare(self) -> None:
        import pmdarima  # noqa: F401

    def append(self, value: float) -> None:
        """Move on by one window; a gap counts as the model's own expectation, an error of 0."""
        expected = self._expected_w()
        u_expected = expected + float(self.difference @ self.u[::-1]) if len(self.u) else expected
        seasonal = float(self._harmonic(np.array([self.index]))[0] @ self.beta) if self.harmonics else 0.0
        u = u_expected if np.isnan(value) else value / self.scale - seasonal
        self._push(u, u - u_expected + expected, u - u_expected)
        self.index += 1

    def path(self, horizon: int) -> Values:
        u, w, e = self.u, self.w, self.e
        path = np.empty(horizon)
        difference, ar, ma = self.difference, self.ar, self.ma
        u_long = np.concatenate([u, np.empty(horizon)])
        w_long = np.concatenate([w, np.empty(horizon)])
        e_long = np.concatenate([e, np.zeros(horizon)])
        for step in range(horizon):
            expected = self.constant
            if len(ar):
                expected += float(ar @ w_long[step : step + len(w)][::-1])
            if len(ma):
                expected += float(ma @ e_long[step : step + len(e)][::-1])
            w_long[step + len(w)] = expected
            if len(difference):
                expected += float(difference @ u_long[step : step + len(u)][::-1])
            u_long[step + len(u)] = path[step] = expected
        if self.harmonics:
            path = path + self._harmonic(self.index + np.arange(horizon)) @ self.beta
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
        """Estimate coefficients for the found orders, and the state of the recursion at the end of *y*."""
        self.beta, self.constant = np.zeros(2 * self.harmonics), 0.0
        self.ar = self.ma = np.empty(0)
        self.difference = np.ones(1)  # a random walk, unless there is more
        errors = self._take_coefficients(y) if self.order is not None else np.empty(0)
        u = y - self._harmonic(np.arange(len(y))) @ self.beta if self.harmonics else y
        w = np.convolve(u, np.concatenate([[1.0], -self.difference]), mode="valid")
        self.u, self.w, self.e = _last(u, len(self.difference)), _last(w, len(self.ar)), _last(errors, len(self.ma))
        self.index = len(y)

    def _take_coefficients(self, y: Values) -> Values:
        """Return one-step errors over the windows of the estimate; none without coefficients."""
        import pmdarima

        assert self.order is not None
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
            except (ValueError, np.linalg.LinAlgError):  # no likelihood for these values: a random walk
                return np.empty(0)
        self.ar = -np.real(np.atleast_1d(result.polynomial_reduced_ar))[1:]
        self.ma = np.real(np.atleast_1d(result.polynomial_reduced_ma))[1:]
        named = dict(zip(result.model.param_names, np.asarray(result.params), strict=True))
        self.constant = float(named.get("intercept", 0.0))
        self.beta = np.array([named[name] for name in result.model.exog_names or []]) if self.harmonics else self.beta
        _, d, _ = self.order
        _, seasonal_d, _, m = self.seasonal_order
        polynomial = np.array([1.0])
        for _ in range(d):
            polynomial = np.convolve(polynomial, [1.0, -1.0])
        for _ in range(seasonal_d):
            polynomial = np.convolve(polynomial, np.concatenate([[1.0], np.zeros(m - 1), [-1.0]]))
        self.difference = -polynomial[1:]
        return np.asarray(result.resid, dtype=np.float64)

    def _expected_w(self) -> float:
        expected = self.constant
        if len(self.ar):
            expected += float(self.ar @ self.w[::-1])
        if len(self.ma):
            expected += float(self.ma @ self.e[::-1])
        return expected

    def _push(self, u: float, w: float, e: float) -> None:
        for memory, value in ((self.u, u), (self.w, w), (self.e, e)):
            if len(memory):
                memory[:-1] = memory[1:]
                memory[-1] = value

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.order is not None:  # JSON has lists only
            p, d, q = self.order
            self.order = p, d, q
        seasonal_p, seasonal_d, seasonal_q, m = self.seasonal_order
        self.seasonal_order = seasonal_p, seasonal_d, seasonal_q, m


def _last(values: Values, count: int) -> Values:
    """Return the last *count* of *values*, preceded by zeros if there are fewer."""
    return np.concatenate([np.zeros(max(0, count - len(values))), values[len(values) - min(count, len(values)) :]])


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
