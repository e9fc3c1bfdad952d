"""Cost of the default forecaster for one series of a week: a fit, an update by one window, a forecast of an hour.

A synthetic week with a daily wave, noise and gaps, in windows of ten minutes and of one minute. The top-level figures
are the ten-minute ones of `forecasting.workload.BEST`; the live system pays one update per window and one fit per day,
for every model, region and kind of tokens. Libraries are imported before timing. `fit_cpu_s` is processor time, which
excludes other load on the machine.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from forecasting.workload import BEST, FORECASTERS, Series

DAYS = 7
HOUR_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forecasters", nargs="+", choices=list(FORECASTERS), default=[BEST], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="fits timed; the median is reported")
    parser.add_argument("--updates", type=int, default=50, help="windows told one by one after each fit")


def week(window_s: float) -> Series:
    """Return a daily wave around 1000 tokens a second with bursts, and one window in fifty a gap."""
    random = np.random.default_rng(0)
    count = round(DAYS * 86_400 / window_s)
    wave = np.sin(2 * np.pi * np.arange(count) * window_s / 86_400)
    rate = 1000 * np.exp(0.5 * wave + 0.1 * random.standard_t(4, count))
    rate[random.random(count) < 0.02] = np.nan
    return Series(0.0, window_s, rate)


def cost(name: str, window_s: float, repeats: int, updates: int) -> dict[str, float]:
    series = week(window_s)
    known, following = series.part(0, len(series) - updates), series.tokens_per_s[len(series) - updates :]
    horizon = round(HOUR_S / window_s)
    fits_s, fits_cpu_s, updates_s, predictions_s = [], [], [], []
    for _ in range(repeats):
        forecaster = FORECASTERS[name]()
        getattr(forecaster, "prepare", lambda: None)()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        forecaster.fit(known)
        fits_cpu_s.append(time.process_time() - started_cpu_s)
        fits_s.append(time.perf_counter() - started_s)
        for index in range(updates):
            started_s = time.perf_counter()
            forecaster.update(following[index : index + 1])
            updated_s = time.perf_counter()
            forecaster.predict(horizon)
            updates_s.append(updated_s - started_s)
            predictions_s.append(time.perf_counter() - updated_s)
    return {
        "fit_s": round(statistics.median(fits_s), 4),
        "fit_cpu_s": round(statistics.median(fits_cpu_s), 4),
        "update_ms": round(1000 * statistics.median(updates_s), 3),
        "predict_ms": round(1000 * statistics.median(predictions_s), 3),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    by_forecaster: dict[str, Any] = {
        name: {
            f"windows_{round(window_s)}_s": cost(name, window_s, options.repeats, options.updates)
            for window_s in (600.0, 60.0)
        }
        for name in options.forecasters
    }
    first = by_forecaster[options.forecasters[0]]["windows_600_s"]
    return {"forecaster": options.forecasters[0], **first, "by_forecaster": by_forecaster}
