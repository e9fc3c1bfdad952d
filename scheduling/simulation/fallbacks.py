"""Fallbacks of models in a simulation: `control.fallbacks` is asked about requests that arrive, wait or have failed."""

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.control.fallbacks import Fallbacks
from scheduling.queueing.waiting_set import in_order
from scheduling.routing.models import RULES, ModelRule
from scheduling.scaling.view import demand_seconds
from scheduling.simulation.waits import SimulatedWaits

CHANGED: Final = ("model", "output_tokens", "predicted_tokens", "asked", "judged")
"""Columns of requests that change where the fallback of its model serves one."""


class SimulatedFallbacks:
    def __init__(self, waits: SimulatedWaits) -> None:
        self.waits, self.fleet, self.simulation = waits, waits.fleet, waits.fleet.simulation
        self.control = Fallbacks(waits.fleet, waits.control)
        self._failed_before: Counter[int] = Counter()
        """Attempts of a request that failed at its own model."""
        self._demand: list[tuple[int, int, int]] = []
        """Tokens redirected to fallbacks because the requested model had no instance: (second, endpoint, tokens)."""

    def decide(self, row: int) -> None:
        """Decide on the request of *row*, which arrives, and which its own model does not take now."""
        asks = self.fleet.fallback_of(row)
        self.waits.refresh()
        chosen = None if asks is None else self.control.choose(asks, full=True)
        if chosen is not None:
            self.fleet.become(row, chosen[1])
            requests = self.simulation.requests
            classes, number = self.simulation.cluster.classes, int(requests.slo_class[row])
            if not classes or classes[number].interactive:
                tokens = int(requests.prompt_tokens[row]) + int(requests.predicted_tokens[row])
                self._demand.append((int(self.simulation.now_s), chosen[0], tokens))

    def queued(self, row: int) -> bool:
        """Whether the fallback serves the request of *row*, which has just been queued: it is queued there then."""
        return self.fleet.slot(row) >= 0 and self.control.serve_late(row)

    def sweep(self, endpoint: int) -> None:
        """Decide on all requests that wait for *endpoint*, in order."""
        world = self.simulation.world
        self.simulation.control(source=int(world.run_state["sweep_node"][0]))
        self.waits.refresh()
        for row in world.held[in_order(world.waiting, endpoint)].tolist():
            if self.control.serve_late(row):
                self.waits.refresh()  # an instance may have room for it, and teach of that wait

    def failed(self, row: int) -> bool:
        """Whether the fallback serves the request of *row*, whose instance failed before its first token."""
        world, before = self.simulation.world, self._failed_before[row]
        failures, model = self.attempts(row), self.simulation.requests.model[row]
        elsewhere = bool(((world.fleet.model == model) & (world.fleet.accepting != 0)).any())
        self._failed_before[row] += failures
        if not self.control.serve_failed(row, failures, elsewhere=elsewhere):
            self._failed_before[row] = before
            return False
        return True

    def attempts(self, row: int) -> int:
        """Return how often instances of the model that serves the request of *row* had it, without those that gave it up."""
        outcome = self.simulation.world.outcomes[row]
        return int(outcome["attempts"]) - int(outcome["evictions"]) - self._failed_before[row]

    def demand_tokens(self, now_s: float, endpoints: int) -> NDArray[np.float64]:
        """Return the tokens of the last minute that were asked of each endpoint as a fallback."""
        first, last = demand_seconds(now_s)
        self._demand = [each for each in self._demand if each[0] >= first]
        tokens = np.zeros(endpoints)
        for second, endpoint, count in self._demand:
            tokens[endpoint] += count if second < last else 0
        return tokens

    def counters(self) -> dict[str, int]:
        rules = self.simulation.world.outcomes["model_rule"]
        return {
            f"fell_back_{rule}": int(np.count_nonzero(rules == RULES.index(rule)))
            for rule in ModelRule
            if rule is not ModelRule.WEIGHTS
        }
