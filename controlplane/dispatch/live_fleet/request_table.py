"""Open requests as rows: the live `scheduling.control.fleet.RequestTable`."""

import math

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.topology import Request
from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC
from scheduling.queueing.ordering import hold_s

COLUMNS = {
    "arrival_s": np.float64,
    "since_s": np.float64,
    "prompt_tokens": np.int64,
    "predicted_tokens": np.int64,
    "priority": np.int64,
    "end_s": np.float64,
    "hold_s": np.float64,
    "held": np.int8,
}


class LiveRequests:
    """Columns by row, and the request of each. A row is used again after its request has ended."""

    arrival_s: NDArray[np.float64]
    since_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    predicted_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]
    end_s: NDArray[np.float64]
    hold_s: NDArray[np.float64]
    held: NDArray[np.int8]

    def __init__(self, rows: int = 1024) -> None:
        self.of: list[Request | None] = []
        self._free: list[int] = []
        self._rows = np.zeros(0, list(COLUMNS.items()))
        self._grow(rows)

    def open(self, request: Request) -> None:
        """Give *request*, which arrives, a row."""
        if not self._free:
            self._grow(2 * len(self.of))
        request.row = self._free.pop()
        self.of[request.row] = request
        self.write(request)

    def write(self, request: Request) -> None:
        """Write the row of *request* again. Call whenever what it asks for has changed."""
        asked, endpoint = request.asked, request.endpoint
        kind = 0
        if not asked.interactive:
            kind = HELD + OPPORTUNISTIC * asked.opportunistic + ENDS_ON_RECLAIM * asked.ends_on_reclaim
        longest_s = hold_s(math.inf if asked.deadline_s is None else asked.deadline_s, endpoint.spec.tuned.MAX_HOLD_S)
        self._rows[request.row] = (
            asked.arrived_s,
            asked.arrived_s - asked.age_s,
            asked.prompt_tokens,
            request.predicted_tokens,
            asked.priority,
            math.inf if asked.end_s is None else asked.end_s,
            longest_s,
            kind,
        )

    def close(self, request: Request) -> None:
        """Take back the row of *request*, which has ended."""
        self.of[request.row] = None
        self._free.append(request.row)

    def _grow(self, rows: int) -> None:
        before = len(self.of)
        self._rows = np.concatenate([self._rows, np.zeros(rows - before, self._rows.dtype)])
        for name in COLUMNS:
            setattr(self, name, self._rows[name])
        self.of += [None] * (rows - before)
        self._free += range(rows - 1, before - 1, -1)
