"""Backtests: errors of forecasters on known data.

Rolling origin: each forecaster is fitted on the first windows, then before every further window it forecasts the next
few, and is updated with the actual one. It refits once a day, as it does live. It never sees windows after an origin.

APE is |forecast - actual| / actual, as in PreServe (section 5.2.1, Table 1), over windows in which something was asked
for: where nothing was, it is not defined. So where a window was empty, what ranks forecasters is WAPE, the sum of
absolute errors as a share of the sum of rates. Bands are judged on empty windows too. Windows that are gaps are not
judged.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.forecaster import Forecast, Forecaster
from forecasting.workload.series import Series

PINBALL_LEVELS: Final = (0.025, 0.1, 0.5, 0.9, 0.975)

Values = NDArray[np.float64]


def backtest(
    series: Series,
    forecasters: Mapping[str, Callable[[], Forecaster]],
    fit_windows: int,
    horizon: int = 2,
    *,
    test_windows: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each of *forecasters*, fitted on the first *fit_windows* of *series*, judged *horizon* windows
    ahead.

    *test_windows* after the fit are judged (all that there are, if None). *progress* is called with (forecaster, done,
    all).

    Keys of a row; errors and shares are fractions of 1:
    - `series`, `forecaster`, `windows` (with demand), `zero_windows` (without: bands only), `note`, `parameters`
    - `error`, `error_by_horizon`: mean APE, or WAPE if a window of the test part was empty: it ranks forecasters
    - `mean_ape`, `max_ape`: over all horizons up to *horizon*
    - `one_origin_mean_ape`, `one_origin_max_ape`: of one forecast of the whole test part, made at its start without updates
    - `pinball`: mean pinball loss over `PINBALL_LEVELS`, divided by the mean rate of all known windows
    - `coverage_80`, `coverage_95`
    - `fit_s` (the first fit), `update_s` (mean by window, daily fits included), `predict_s` (mean)

    Raises ValueError if there is nothing to fit on or nothing to judge.
    """
    end = len(series) if test_windows is None else min(len(series), fit_windows + test_windows)
    if fit_windows < 1 or horizon < 1:
        raise ValueError("at least one window to fit on and a horizon of at least one window")
    if end <= fit_windows:
        raise ValueError(f"{len(series)} windows in all, {fit_windows} to fit on: none is left to judge")
    actual = series.tokens_per_s[fit_windows:end]
    judged = ~np.isnan(actual) & (actual > 0)
    if not judged.any():
        raise ValueError("no window of the test part has a known rate above 0")
    rows = []
    for name, make in forecasters.items():
        forecaster = make()
        forecaster.prepare()
        started_s = time.perf_counter()
        forecaster.fit(series.part(0, fit_windows))
        fit_s = time.perf_counter() - started_s
        once = forecaster.predict(end - fit_windows).mean
        forecasts, update_s, predict_s = _roll(forecaster, series.part(0, end), fit_windows, horizon, progress)
        rows.append({
            "series": series.name,
            "forecaster": name,
            "windows": int(judged.sum()),
            "zero_windows": int(np.count_nonzero(actual == 0)),
            "note": forecasts[-1].note,
            "parameters": forecaster.describe(),
            **_errors(forecasts, actual, horizon),
            "one_origin_mean_ape": float(np.mean(_ape(once, actual)[judged])),
            "one_origin_max_ape": float(np.max(_ape(once, actual)[judged])),
            "fit_s": round(fit_s, 4),
            "update_s": round(update_s, 6),
            "predict_s": round(predict_s, 6),
        })  # fmt: skip
    return rows


def _roll(
    forecaster: Forecaster,
    series: Series,
    fit_windows: int,
    horizon: int,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[list[Forecast], float, float]:
    """Return the forecast made before each window of the test part; mean seconds of an update and of a prediction."""
    forecasts: list[Forecast] = []
    updating_s = predicting_s = 0.0
    count = len(series) - fit_windows
    for index in range(count):
        started_s = time.perf_counter()
        forecasts.append(forecaster.predict(horizon))
        predicted_s = time.perf_counter()
        if index + 1 < count:  # the last window is judged, and nothing follows it
            forecaster.update(series.tokens_per_s[fit_windows + index : fit_windows + index + 1])
        predicting_s += predicted_s - started_s
        updating_s += time.perf_counter() - predicted_s
        if progress:
            progress(forecaster.name, index + 1, count)
    return forecasts, updating_s / max(1, count - 1), predicting_s / count


def _errors(forecasts: list[Forecast], actual: Values, horizon: int) -> dict[str, Any]:
    """Return all measures, from the forecast made before each window and the *actual* windows."""
    fields = ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
    said = {name: np.full((horizon, len(actual)), np.nan) for name in fields}  # by horizon and target window
    for origin, forecast in enumerate(forecasts):
        reach = min(horizon, len(actual) - origin)
        targets = origin + np.arange(reach)
        for name in fields:
            said[name][np.arange(reach), targets] = getattr(forecast, name)[:reach]
    usable = ~np.isnan(actual) & ~np.isnan(said["mean"])  # (horizon, windows)
    ape = np.where(usable & (actual > 0), _ape(said["mean"], actual), np.nan)
    truth = np.broadcast_to(actual, ape.shape)
    rate = float(truth[usable].mean())
    error = np.where(usable, np.abs(said["mean"] - truth) / rate, np.nan) if (actual == 0).any() else ape
    inside = {
        level: np.where(usable, (truth >= said[f"lower_{level}"]) & (truth <= said[f"upper_{level}"]), np.nan)
        for level in (80, 95)
    }
    quantiles = ("lower_95", "lower_80", "mean", "upper_80", "upper_95")
    pinball = [
        np.where(truth >= said[name], level * (truth - said[name]), (1 - level) * (said[name] - truth))
        for level, name in zip(PINBALL_LEVELS, quantiles, strict=True)
    ]
    return {
        "error": float(np.nanmean(error)),
        "error_by_horizon": [None if np.isnan(row).all() else float(np.nanmean(row)) for row in error],
        "mean_ape": float(np.nanmean(ape)),
        "max_ape": float(np.nanmax(ape)),
        "pinball": float(np.mean([loss[usable].mean() for loss in pinball]) / rate),
        "coverage_80": float(np.nanmean(inside[80])),
        "coverage_95": float(np.nanmean(inside[95])),
    }


def _ape(said: Values, actual: Values) -> Values:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.abs(said - actual) / actual)
