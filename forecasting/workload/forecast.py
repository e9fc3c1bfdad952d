"""What a forecaster answers, and what every forecaster can do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.workload.series import Series

LEVELS: Final = (0.80, 0.95)  # shares of the outcomes that the two bands should hold


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens a second expected in each of the next windows, with bands; arrays of (horizon,), none below 0.

    `mean` is the one number to plan with. It is the middle of what is expected, not inflated for safety: for that there
    are the upper ends.
    """

    start_s: float  # seconds since 1970 (UTC) of the first window's begin
    window_s: float
    mean: NDArray[np.float64]
    lower_80: NDArray[np.float64]
    upper_80: NDArray[np.float64]
    lower_95: NDArray[np.float64]
    upper_95: NDArray[np.float64]
    forecaster: str
    note: str = ""  # why a simpler model stood in, if one did

    def __len__(self) -> int:
        return len(self.mean)


class Forecaster(Protocol):
    """One series, one forecaster: fit it on what is known, give it what followed, ask it at any time."""

    name: ClassVar[str]

    def fit(self, series: Series) -> None:
        """Learn from *series*, which may hold gaps, be short or be empty. What is costly to find (orders of a model) is
        found once: an object that was fitted before, or loaded, keeps it."""
        ...

    def update(self, tokens_per_s: NDArray[np.float64]) -> None:
        """Take in the windows that followed, oldest first; NaN for those that are not known. Once a day's worth of windows
        has come, the forecaster fits itself again."""
        ...

    def predict(self, horizon: int) -> Forecast:
        """The next *horizon* windows. Changes nothing: asked twice, it answers the same."""
        ...

    def state(self) -> dict[str, Any]:
        """All that it knows, as numbers, texts, lists, dicts and arrays."""
        ...

    @classmethod
    def load(cls, state: dict[str, Any] | Path) -> Self:
        """The forecaster of a `state`, or of a file that `save` wrote."""
        ...

    def save(self, path: Path) -> None:
        """Write `state` to the file *path* (NumPy's .npz), with the version of its format."""
        ...
