"""How long answers take, and how many come in time."""

from typing import Final

import numpy as np

KEPT: Final = 4096
"""Answers over which percentiles are taken, the newest."""


class Timing:
    """Of one length model, or of the whole service."""

    def __init__(self) -> None:
        self.asked = self.in_time = 0
        self._ms = np.zeros(KEPT, np.float32)
        self._timed = 0

    def took(self, seconds: float) -> None:
        """One answer came after *seconds*, waits included, in time or not."""
        self._ms[self._timed % KEPT] = seconds * 1000
        self._timed += 1

    def percentiles(self) -> tuple[float | None, float | None]:
        """p50 and p99 in ms; None before the first answer."""
        timed = self._ms[: min(self._timed, KEPT)]
        if not timed.size:
            return None, None
        p50_ms, p99_ms = np.percentile(timed, [50, 99]).tolist()
        return round(p50_ms, 3), round(p99_ms, 3)

    def report(self) -> dict[str, float | None]:
        """For the published summary."""
        p50_ms, p99_ms = self.percentiles()
        return {"asked": self.asked, "in_time": self.in_time, "p50_ms": p50_ms, "p99_ms": p99_ms}
