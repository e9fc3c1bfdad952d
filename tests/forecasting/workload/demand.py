"""Series that look like demand: days, noise, bursts, gaps."""

import numpy as np

from forecasting.workload.series import Series


def daily(days: float, window_s: float = 3600.0, *, noise: float = 0.05, gaps: float = 0.0, seed: int = 0) -> Series:
    """Return a daily wave around 1000 tokens a second, with multiplicative noise and a share of gaps."""
    random = np.random.default_rng(seed)
    season = round(86_400 / window_s)
    index = np.arange(round(days * season))
    wave = 1000.0 * np.exp(0.6 * np.sin(2 * np.pi * index / season))
    values = wave * np.exp(noise * random.standard_normal(len(index)))
    values[random.random(len(index)) < gaps] = np.nan
    return Series(1_750_000_000.0 // window_s * window_s, window_s, values, "daily")
