"""Instances needed soon: the second of two plans, window by window, each computed when needed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.places import Endpoint, Planned
from scheduling.planning.planner import solve
from scheduling.planning.programme import SolverLost

Floats = NDArray[np.float64]
STARTS_AHEAD = 2.0
"""Starts whose time the plan for adding covers: one that is requested now, and some to spare."""


@dataclass(slots=True)
class Soon:
    """Instances for the demand *asked* from a window until `STARTS_AHEAD` starts after it, by window.

    Never more than *targets*, which are kept: more would only be removed again. Models without two plans take
    part with all of their demand, since they take GPUs. A window is computed when needed: the next plan
    usually arrives before the second.
    """

    asked: Mapping[Endpoint, Floats]
    planned: Planned
    fixed: Collection[Endpoint]
    targets: NDArray[np.int64]
    after: Mapping[str, int]
    """Windows beyond the first, by model; only models with two plans."""
    steps: int
    gap: float
    time_limit_s: float
    _by_need: dict[bytes, NDArray[np.int64]] = field(default_factory=dict, init=False)
    _by_window: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False)

    def at(self, window: int) -> NDArray[np.int64]:
        """Return target instances (models, regions) of *window*, computed on first access."""
        if window not in self._by_window:
            self._by_window[window] = np.minimum(self._solved(window), self.targets)
        return self._by_window[window]

    def _solved(self, window: int) -> NDArray[np.int64]:
        problem = self.planned.asking(
            {
                endpoint: each[window : window + 1 + self.after[endpoint[0]]] if endpoint[0] in self.after else each
                for endpoint, each in self.asked.items()
            },
            self.fixed,
        )
        # Of the same fleet, problems with the same needs are one.
        need = problem.need_tokens_per_s.tobytes() + problem.need_total_tokens_per_s.tobytes()
        if need not in self._by_need:
            try:
                self._by_need[need] = solve(problem, gap=self.gap, time_limit_s=self.time_limit_s).by_endpoint
            except SolverLost:  # add what is kept
                self._by_need[need] = self.targets
        return self._by_need[need]


@dataclass(frozen=True, slots=True)
class SoonAt(Sequence[int]):
    """Those of one endpoint."""

    soon: Soon
    at: tuple[int, int]
    """Model and region."""

    def __len__(self) -> int:
        return self.soon.steps

    @overload
    def __getitem__(self, window: int) -> int: ...
    @overload
    def __getitem__(self, window: slice) -> list[int]: ...
    def __getitem__(self, window: int | slice) -> int | list[int]:
        windows = range(self.soon.steps)[window]
        if isinstance(windows, range):
            return [int(self.soon.at(one)[self.at]) for one in windows]
        return int(self.soon.at(windows)[self.at])
