"""Application runs to come: each is a record of steps, whose requests come once the steps before them have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend, RunRecord
from scheduling.applications.standings import KnownGraph


class ApplicationToCome(NamedTuple):
    name: str
    units: dict[str, Backend]
    graph: KnownGraph | None
    """What a dispatcher knows of it; None for nothing."""


class RunToCome(NamedTuple):
    application: int
    """Index in `RunsToCome.applications`."""
    began_s: float
    due_in_s: float
    """After it began, infinity for never."""
    record: RunRecord


@dataclass(frozen=True, slots=True)
class RunsToCome:
    """All runs of a simulation; run r has the requests with `Requests.run == r`, in the order of steps."""

    applications: Sequence[ApplicationToCome]
    runs: Sequence[RunToCome]
    exact: bool = False
    """Whether orders know the whole service of every run (an oracle)."""


@dataclass(frozen=True, slots=True)
class RunOutcomes:
    """How the runs of a simulation ended; one element each, in the order of `RunsToCome.runs`."""

    names: Sequence[str]
    """Of applications."""
    application: NDArray[np.int64]
    began_s: NDArray[np.float64]
    due_s: NDArray[np.float64]
    """Absolute, infinity for never."""
    ended_s: NDArray[np.float64]
    """NaN for one that was abandoned or still runs."""
    abandoned: NDArray[np.bool_]
    """One of its requests was refused or failed."""

    @property
    def completion_s(self) -> NDArray[np.float64]:
        """Return the duration of each; NaN for one that did not end."""
        return self.ended_s - self.began_s


NOT_ENDED: Final = np.nan
