"""A forecaster with simpler ones behind it: if it fails, the next one stands in, and its forecasts say so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.ets import Ets
from forecasting.workload.forecaster import Forecast, Forecaster, Naive
from forecasting.workload.series import Series

SIMPLER: Final[tuple[type[Forecaster], ...]] = (Ets, Naive)
"""Substitutes, in this order."""


class Fallback:
    """One series' *forecaster*, replaced by the next of `SIMPLER` when it raises.

    The failures are listed in `failed` and in the note of every forecast. A substitute stays until the caller makes a new
    object, so that a failing forecaster is not fitted again for every window. The error of the simplest is raised.
    """

    def __init__(self, forecaster: Forecaster, failed: Sequence[str] = ()) -> None:
        self.forecaster = forecaster
        self.failed = list(failed)
        self.error: Exception | None = None
        """The last exception; None if none occurred since this object was made."""

    def fit(self, series: Series) -> None:
        while True:
            try:
                self.forecaster.fit(series)
                return
            except Exception as error:
                self._replace(error)

    def refit(self, series: Series) -> None:
        """See `Forecaster.refit`."""
        try:
            self.forecaster.refit(series)
        except Exception as error:
            self._replace(error)
            self.fit(series)

    def update(self, tokens_per_s: NDArray[np.float64]) -> None:
        known = self.forecaster.series
        values = np.concatenate([known.tokens_per_s, np.asarray(tokens_per_s, np.float64)])
        after = Series(known.start_s, known.window_s, values)  # here, since a failed update may have taken some in
        try:
            self.forecaster.update(tokens_per_s)
        except Exception as error:
            self._replace(error)
            self.fit(after)

    def predict(self, horizon: int) -> Forecast:
        if horizon < 1:
            raise ValueError(f"a horizon is at least one window, not {horizon}")
        while True:
            try:
                made = self.forecaster.predict(horizon)
                break
            except Exception as error:
                series = self.forecaster.series
                self._replace(error)
                self.fit(series)
        if not self.failed:
            return made
        note = f"{'; '.join(self.failed)}: {self.forecaster.name} stands in"
        return replace(made, note=f"{note}; {made.note}" if made.note else note)

    def _replace(self, error: Exception) -> None:
        """Switch to the next simpler forecaster, not fitted yet; raise *error* if there is none."""
        kind = type(self.forecaster)
        place = SIMPLER.index(kind) + 1 if kind in SIMPLER else 0
        if place == len(SIMPLER):
            raise error
        self.error = error
        self.failed.append(f"{self.forecaster.name} failed ({type(error).__name__}: {error})")
        self.forecaster = SIMPLER[place]()
