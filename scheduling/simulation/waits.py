"""Expected waits in a simulation: `control.waits` hears of what was placed, has ended or waits since it was last asked."""

from typing import Any

import numpy as np

from scheduling.control.waits import Waits
from scheduling.simulation.cluster.world import DONE, FAILED, REFUSED, RUNNING, WAITING
from scheduling.simulation.engine.state import GIVEN
from scheduling.simulation.simulated_fleet import SimulatedFleet
from scheduling.simulation.state.placing import Fork
from scheduling.simulation.workload.requests import Requests


class SimulatedWaits:
    """Call `refresh` before `control` is asked."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet, self.control = fleet, Waits(fleet)
        self._released_s: dict[int, float] = {}
        """When the queue manager released a request that waits: it began to wait at an endpoint then."""
        self._learned = np.zeros(fleet.requests.count, np.bool_)
        self._oldest = self._given = self._ended = 0

    def resume(self, fork: Fork) -> None:
        """Continue with what the fleet of *fork* had learned."""
        self.refresh()
        waiting = ((row, one.waits) for row, one in fork.waiting if row >= 0 and one.waits is not None)
        self.control.resume(fork.state.ended, (one.waits for one in fork.endpoints), waiting)

    def refresh(self) -> None:
        """Learn from what was placed or has ended, and count what waits since."""
        fleet = self.fleet
        fleet.simulation.control()
        self._learn()
        self.control.make_room()
        waiting, world = fleet.waiting, fleet.simulation.world
        fresh = np.flatnonzero((waiting.position >= 0) & (self.control.counted != waiting.sequence))
        for slot in fresh[np.argsort(waiting.sequence[fresh])].tolist():
            row = int(world.held[slot])
            self.control.begin(row, slot, again=bool(world.outcomes["attempts"][row] > 0))

    def released(self, row: int) -> None:
        """Estimate the wait of the request of *row*, which the queue manager has just released."""
        if self.fleet.slot(row) >= 0:  # else an instance took it
            self.refresh()
            self._released_s[row] = self.fleet.now_s
            self.control.estimated(row)
            self.control.mark_overtaken(row)

    def _learn(self) -> None:
        """Learn at each call what the live fleet learns as it happens."""
        simulation, world = self.fleet.simulation, self.fleet.simulation.world
        given, ended = world.engines.counters.item(GIVEN), world.run_state["ended"].item()
        if given != self._given or ended != self._ended:
            self._learn_waits(world.outcomes, simulation.requests)
        if ended != self._ended:
            self._learn_lengths(world.outcomes, simulation.requests, simulation.arrived)
        self._given, self._ended = given, ended

    def _learn_waits(self, outcomes: Any, requests: Requests) -> None:
        control = self.control
        rows = np.array(list(control.estimates), np.int64)
        state, queue_s = outcomes["state"][rows], outcomes["queue_s"][rows]
        failed = outcomes["attempts"][rows] - outcomes["evictions"][rows] > 1
        was_placed = (state != WAITING) & np.isfinite(queue_s)
        for row in rows[(state == REFUSED) | (state == FAILED) | was_placed & failed].tolist():
            control.forget(row)
        rows = rows[was_placed]
        placed_s = queue_s[was_placed] + requests.arrival_s[rows]
        for at in np.argsort(placed_s).tolist():
            row = int(rows[at])
            since_s = self._released_s.pop(row, float(requests.arrival_s[row]))
            control.placed(row, int(outcomes["instance"][row]), since_s, float(placed_s[at]))

    def _learn_lengths(self, outcomes: Any, requests: Requests, arrived: int) -> None:
        window = slice(self._oldest, arrived)
        state = outcomes["state"][window]
        done = self._oldest + np.flatnonzero((state == DONE) & ~self._learned[window])
        ended_s = outcomes["e2e_s"][done] + requests.arrival_s[done]
        order = np.argsort(ended_s)
        done, ended_s = done[order], ended_s[order]
        columns = (ended_s, requests.prompt_tokens[done], requests.output_tokens[done], requests.predicted_tokens[done])
        rows = zip(
            done.tolist(), outcomes["endpoint"][done].tolist(), *(each.tolist() for each in columns), strict=True
        )
        for row, endpoint, *lengths in rows:
            self.control.ended(endpoint, self.fleet.slo_class(row), *lengths)
        self._learned[done] = True
        still = np.flatnonzero(state <= RUNNING)
        self._oldest += int(still[0]) if still.size else state.size
