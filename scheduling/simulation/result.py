"""What came out of a simulation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.workload.requests import Requests


@dataclass(frozen=True, slots=True)
class Result:
    """What came out. Times are seconds; arrays of records are NumPy structured arrays."""

    cluster: Cluster
    requests: Requests
    outcomes: NDArray[Any]
    """`world.OUTCOME` by request."""
    state_s: NDArray[np.float64]
    """instances x `State`: seconds spent in each up to `end_s`."""
    counters: dict[str, int]
    series: dict[str, NDArray[Any]] | None
    decisions: NDArray[Any] | None
    """`world.DECISION` in order of time."""
    changes: NDArray[Any]
    """`world.CHANGE` in order of time."""
    end_s: float
