"""Held work in a simulation: which requests are held as they arrive, and when `control.holding` acts next."""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.control.holding import Holding
from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.promises import ClassTerms
from scheduling.queueing.release_rule import AT_ONCE
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import World
from scheduling.simulation.simulated_fleet import SimulatedFleet
from scheduling.simulation.state.placing import Fork

ROUNDING_S: Final = 1e-9


def held_where_held(terms: ClassTerms) -> int:
    """Return `Requests.held` of a class on *terms* where a queue manager holds it (`models_held`)."""
    if terms.interactive:
        return 0
    return HELD + OPPORTUNISTIC * terms.opportunistic + ENDS_ON_RECLAIM * terms.ends_on_reclaim


def models_held(cluster: Cluster) -> set[str]:
    """Return the models whose work that is not interactive is held: their first endpoint does not take it at once."""
    first = {model: cluster.policy((model, region)).niw.by for model, region in reversed(cluster.endpoints)}
    return {model for model, by in first.items() if by != AT_ONCE}


class HeldArrivals:
    """Holds requests of *fleet* that arrive. Call `act` at `next_s`."""

    def __init__(self, fleet: SimulatedFleet, fork: Fork | None = None) -> None:
        """*fork*: what the simulation begins with."""
        cluster, requests = fleet.simulation.cluster, fleet.requests
        self.fleet = fleet
        backlogs = fork.state.backlogs if fork else ()
        self.holding = Holding(fleet, (one for one in backlogs if one.model in cluster.models))
        self._first_s = fork.state.look_s if fork else 0.0
        """When it acts first."""
        self._rows: NDArray[np.int64] = np.flatnonzero(requests.held & HELD)
        if fork:
            later = self._rows[self._rows >= fork.requests.count]
            self._rows = np.concatenate([np.array(fork.held, np.int64), later])
        self._next = 0
        self._scaled_s = np.full(len(cluster.endpoints), -np.inf)
        self._nearest = cluster.nearest()
        self._served = [[cluster.candidates(model, *each) for each in cluster.origins] for model in cluster.models]

    def held_as(self, row: int, terms: ClassTerms) -> int:
        """Return `Requests.held` of a request that is degraded to *terms*."""
        holds = self.holding.holds(self.fleet.models[self.fleet.requests.model[row]])
        return held_where_held(terms) & (~0 if holds else ~HELD)

    def hold(self, row: int, endpoint: int) -> None:
        """Hold a request that waited at *endpoint* until it was degraded."""
        self.holding.hold(row, self.fleet.endpoints[endpoint])

    def next_s(self, world: World, now_s: float) -> float:
        """Return when `act` is due; infinity where nothing would be released for ever."""
        if not len(self.holding):
            if self._next == self._rows.size:
                return math.inf
            arrival_s = float(self.fleet.requests.arrival_s[self._rows[self._next]])
            return self._after(max(arrival_s, now_s))
        next_s = self._after(now_s)
        if world.events.time_s.item(1) == np.inf and int(world.run_state["arrived"][0]) == self.fleet.requests.count:
            return next_s if self.holding.work.next_change_s(now_s) < math.inf else math.inf
        return next_s

    def _after(self, now_s: float) -> float:
        times = math.floor((now_s - self._first_s) / LOOK_S + ROUNDING_S) + 1
        return max(self._first_s, self._first_s + times * LOOK_S)

    def act(self, world: World) -> None:
        """Hold what arrived, and release what is due."""
        arrived, requests = int(world.run_state["arrived"][0]), self.fleet.requests
        while self._next < self._rows.size and (row := int(self._rows[self._next])) < arrived:
            if world.outcomes[row]["endpoint"] < 0:  # else a donated instance had room for it
                model, origin = int(requests.model[row]), int(requests.region[row])
                if self._served[model][origin]:
                    self.hold(row, self._nearest[model][origin])
                else:
                    self.fleet.refuse(row)
            self._next += 1
        scaled_s = world.policies["scaled_s"][: self._scaled_s.size]
        for at in np.flatnonzero(scaled_s != self._scaled_s).tolist():
            self._scaled_s[at] = scaled_s[at]
            endpoint = self.fleet.endpoints[at]
            self.holding.work.scaled(endpoint.model, endpoint.region, float(scaled_s[at]))
        self.holding.release_due()
