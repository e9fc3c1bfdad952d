"""Promises of SLO classes in a simulation: `control.admission` judges requests that were just queued."""

from typing import Final

import numpy as np

from scheduling.control.admission import AdmissionControl
from scheduling.simulation.cluster.loop import change
from scheduling.simulation.cluster.state_changes import WITHDRAW
from scheduling.simulation.waits import SimulatedWaits

CHANGED: Final = ("priority", "deadline_s", "end_s", "hold_s", "judged", "held", "slo_class")
"""Columns of requests that change."""


class JudgedArrivals:
    def __init__(self, waits: SimulatedWaits) -> None:
        self.waits, self.fleet = waits, waits.fleet
        self.control = AdmissionControl(waits.fleet, waits.control)
        count = self.fleet.requests.count
        self.asked_class = np.full(count, -1, np.int16)
        """Class that a degraded request asked for, by request; -1: not degraded."""
        self.refused = np.zeros(count, bool)
        self.late = np.zeros(count, bool)
        """Requests admitted in their own class although its promise was unreachable."""

    def judge(self, row: int) -> None:
        """Decide on the request of *row*, which has just been queued."""
        world, own = self.fleet.simulation.world, int(self.fleet.requests.slo_class[row])
        world.arrivals.judged[row] = 0
        verdict = self.control.judge(row)
        if self.fleet.requests.slo_class[row] != own:
            self.asked_class[row] = own
        if verdict.refused:
            self.refused[row] = True
            change(self.fleet.simulation.world, WITHDRAW, self.fleet.slot(row), 1)
        else:
            self.late[row] = verdict.late_s > 0.0 and self.asked_class[row] < 0

    def counters(self) -> dict[str, int]:
        return {
            "degraded": int(np.count_nonzero((self.asked_class >= 0) & ~self.refused)),
            "refused_at_door": int(np.count_nonzero(self.refused)),
            "admitted_late": int(np.count_nonzero(self.late)),
        }
