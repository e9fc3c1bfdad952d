"""What a model of a series has to do to become a forecaster, and the two models that work with next to no data.

A `PointModel` gives one number a window; `calibrated` puts bands around it, keeps it fitted and lets a simpler
one stand in while there is too little to learn from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

LEAST_RATE: Final = 1e-6  # tokens a second; a mean below it is none, and nothing is divided by it
LEVEL_WINDOWS: Final = 6  # whose mean is the present level


class PointModel(ABC):
    """One series' model. Values are tokens a second, NaN for gaps; `season` is the windows of a day."""

    reach: ClassVar[int] = 36
    """Windows ahead for which bands are learned."""

    @classmethod
    @abstractmethod
    def least(cls, season: int) -> int:
        """Known windows that it needs."""

    @abstractmethod
    def fit(self, values: Values, season: int) -> None:
        """Learn from all *values*, oldest first. Fitted before, it keeps what is costly to find."""

    @abstractmethod
    def append(self, value: float) -> None:
        """Take in the window that followed, without learning anew."""

    @abstractmethod
    def path(self, horizon: int) -> Values:
        """The next *horizon* windows; what is below 0 or not finite is mended by the caller."""

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Import what takes long, so that it is not counted as fitting."""

    def walk(self, values: Values) -> Values:
        """Take in *values* one after another: the `reach` windows that were forecast before each, (len(values), reach)."""
        paths = np.empty((len(values), self.reach))
        for index, value in enumerate(values):
            paths[index] = self.path(self.reach)
            self.append(float(value))
        return paths

    def tried(self) -> Sequence[str]:
        """Words on what was found, such as the orders of a model."""
        return ()

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None: ...


class Level(PointModel):
    """The mean of the last known windows, flat: all that a handful of points can carry. Without any, 0."""

    def __init__(self) -> None:
        self.recent: list[float] = []

    @classmethod
    def least(cls, season: int) -> int:
        return 0

    def fit(self, values: Values, season: int) -> None:
        self.recent = [float(value) for value in values[~np.isnan(values)][-LEVEL_WINDOWS:]]

    def append(self, value: float) -> None:
        if not np.isnan(value):
            self.recent = [*self.recent[1 - LEVEL_WINDOWS :], value]

    def path(self, horizon: int) -> Values:
        return np.full(horizon, np.mean(self.recent) if self.recent else 0.0)

    def state(self) -> dict[str, Any]:
        return {"recent": list(self.recent)}

    def restore(self, state: dict[str, Any]) -> None:
        self.recent = [float(value) for value in state["recent"]]


class SeasonalNaive(PointModel):
    """What was measured at this time of day the last time it was; where it never was, the latest known window."""

    def __init__(self) -> None:
        self.day: Values = np.empty(0)  # the last known value by time of day
        self.at = 0  # time of day of the next window
        self.latest = 0.0

    @classmethod
    def least(cls, season: int) -> int:
        return season

    def fit(self, values: Values, season: int) -> None:
        self.day, self.at, self.latest = np.full(season, np.nan), 0, 0.0
        for value in values:
            self.append(float(value))

    def append(self, value: float) -> None:
        if not np.isnan(value):
            self.day[self.at] = self.latest = value
        self.at = (self.at + 1) % len(self.day)

    def path(self, horizon: int) -> Values:
        path = self.day[(self.at + np.arange(horizon)) % len(self.day)]
        return np.where(np.isnan(path), self.latest, path)

    def state(self) -> dict[str, Any]:
        return {"day": self.day.copy(), "at": self.at, "latest": self.latest}

    def restore(self, state: dict[str, Any]) -> None:
        self.day, self.at, self.latest = np.array(state["day"]), int(state["at"]), float(state["latest"])


def filled(values: Values) -> Values:
    """*values* with gaps bridged by straight lines; before the first known window, that one's value. All gaps: zeros."""
    known = ~np.isnan(values)
    if not known.any():
        return np.zeros(len(values))
    index = np.arange(len(values))
    return np.interp(index, index[known], values[known])
