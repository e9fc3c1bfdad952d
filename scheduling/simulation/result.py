"""The result of a simulation."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.workload.requests import Requests
from scheduling.simulation.workload.runs import RunOutcomes


@dataclass(frozen=True, slots=True)
class MadeMove:
    """A move of instances that was carried out."""

    time_s: float
    endpoint: int
    wanted: int
    done: int
    """Instances moved, limited by how many were available; same sign as *wanted*."""
    reason: str
    by: str
    """`scaling.endpoint.Mover`."""


@dataclass(frozen=True, slots=True)
class Result:
    """Times are seconds; arrays of records are NumPy structured arrays."""

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
    asked_class: NDArray[np.int16] | None = None
    """SLO class that a request was degraded from at the door, -1 for none; None where no class has its promise judged."""
    refused_at_door: NDArray[np.bool_] | None = None
    runs: RunOutcomes | None = None
    """Of application runs, where there are any."""
    admitted_late: NDArray[np.bool_] | None = None
    """Requests admitted in their own class although its promise was unreachable."""
    strategy: str = ""
    """Empty if nothing scales."""
    moves: list[MadeMove] = field(default_factory=list)
    """Moves of a strategy that decides at ticks; those of the trigger on arrivals are among the changes."""

    @property
    def output_tokens(self) -> NDArray[np.int32]:
        """Output tokens by request; 0 where the model pools, whose requests end with their prefill."""
        if not self.cluster.pooling:
            return self.requests.output_tokens
        pools = np.array([name in self.cluster.pooling for name in self.cluster.models])
        return np.where(pools[self.requests.model], 0, self.requests.output_tokens).astype(np.int32)
