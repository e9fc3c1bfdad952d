"""The queue manager for non-interactive work in a simulation: twice a second it looks at the fleet and releases, as live."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.fleet.state import BacklogState
from scheduling.queueing.held_work import LOOK_S, Held, HeldWork, Signal, service_s
from scheduling.queueing.promises import ClassTerms
from scheduling.queueing.release_rule import AT_ONCE
from scheduling.routing.regions import first_with_room
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.occupancy import COLUMNS, occupancy
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.workload.requests import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC, Requests

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


class Holding:
    """Call `look` at `next_s`."""

    def __init__(
        self,
        cluster: Cluster,
        requests: Requests,
        begun: int = 0,
        held: Sequence[int] = (),
        backlogs: Sequence[BacklogState] = (),
        first_s: float = 0.0,
    ) -> None:
        """*begun*: requests of a fork, of which *held* are held at the start; *first_s*: its first look."""
        self.work = HeldWork()
        self.work.resume(one for one in backlogs if one.model in cluster.models)
        self._first_s = first_s
        self.released = 0
        self._cluster, self._requests = cluster, requests
        self._other = requests.held != 0
        later = np.flatnonzero(requests.held & HELD)
        self._rows: NDArray[np.int64] = np.concatenate([np.array(held, np.int64), later[later >= begun]])
        self._next = 0
        self._scaled_s = np.full(len(cluster.endpoints), -np.inf)
        self._occupancy = direct(occupancy)
        self._with_room = direct(first_with_room)
        self._rows_of = np.zeros((0, COLUMNS), np.int64)
        self._free = np.zeros(0, np.bool_)
        self._references = [cluster.reference_engine(key) for key in cluster.endpoints]
        self._keys = {key: at for at, key in enumerate(cluster.endpoints)}
        self._usual = cluster.nearest()
        self._models_held = models_held(cluster)
        for model, region in reversed(cluster.endpoints):
            self.work.follow(model, cluster.policy((model, region)).niw)

    def held_as(self, row: int, terms: ClassTerms) -> int:
        """Return `Requests.held` of a request that is degraded to *terms*."""
        holds = self._cluster.models[self._requests.model[row]] in self._models_held
        return held_where_held(terms) & (~0 if holds else ~HELD)

    def hold(self, row: int, endpoint: int) -> None:
        """Hold a request that waited at *endpoint* until it was degraded."""
        self._other[row] = True
        self.work.hold(self._held(row, endpoint % len(self._keys)))

    def next_s(self, world: World, now_s: float) -> float:
        """Return when the next look is due; infinity where nothing would be released for ever."""
        if not len(self.work):
            if self._next == self._rows.size:
                return math.inf
            arrival_s = float(self._requests.arrival_s[self._rows[self._next]])
            return self._after(max(arrival_s, now_s))
        next_s = self._after(now_s)
        if world.events.time_s.item(1) == np.inf and int(world.run_state["arrived"][0]) == self._requests.count:
            changes_s = self.work.next_change_s(now_s)
            return next_s if changes_s < math.inf else math.inf
        return next_s

    def _after(self, now_s: float) -> float:
        """Return the first look after *now_s*."""
        looks = math.floor((now_s - self._first_s) / LOOK_S + ROUNDING_S) + 1
        return max(self._first_s, self._first_s + looks * LOOK_S)

    def look(self, world: World, now_s: float, join: Callable[[int, int], object]) -> None:
        """Hold what arrived, give up what is too late, and *join* what is released, (endpoint, request)."""
        arrived = int(world.run_state["arrived"][0])
        while self._next < self._rows.size and (row := int(self._rows[self._next])) < arrived:
            if world.outcomes[row]["endpoint"] < 0:  # else a donated instance had room for it
                at = self._usual[self._requests.model[row]][self._requests.region[row]]
                self.work.hold(self._held(row, at))
            self._next += 1
        run_state: Any = world.run_state[0]
        for row in self.work.expired(now_s):
            world.outcomes[row]["state"] = Outcome.REFUSED
            for count in ("refused", "expired", "ended"):
                run_state[count] += 1
        if not len(self.work):
            return
        for at in np.flatnonzero(world.policies["scaled_s"][: self._scaled_s.size] != self._scaled_s).tolist():
            self._scaled_s[at] = world.policies["scaled_s"][at]
            self.work.scaled(*self._cluster.endpoints[at], float(self._scaled_s[at]))
        for release in self.work.pull(self._signals(world), now_s):
            priority = int(self._requests.priority[release.number])
            world.arrivals.priority[release.number] = release.priority and max(1, priority)
            join(self._keys[release.model, release.region], release.number)
            self.released += 1
        if world.policies.size > len(self._keys):
            for model in self._cluster.models:
                for held, endpoint in self.work.to_spot(model, lambda row: self._spot_with_room(world, row)):
                    join(endpoint, held.number)
                    self.released += 1

    def _spot_with_room(self, world: World, row: int) -> int | None:
        """Return `choices.spot_with_room`; None for none."""
        first, regions = world.candidate_first, len(self._cluster.regions)
        at = (first.size - 1) // 2 + int(self._requests.model[row]) * regions + int(self._requests.region[row])
        lent = world.candidates[first[at] : (first[at] + first[at + 1]) // 2]  # the first half
        endpoint = int(self._with_room(world.fleet, world.endpoints, lent, world.waiting.size))
        return None if endpoint < 0 else endpoint

    def _held(self, row: int, at: int) -> Held:
        """Return a request as the queue manager sees it; its service time is that at endpoint *at*."""
        requests = self._requests
        arrived_s, held_s = float(requests.arrival_s[row]), float(requests.hold_s[row])
        prompt, output = int(requests.prompt_tokens[row]), int(requests.predicted_tokens[row])
        return Held(
            number=row,
            model=self._cluster.endpoints[at][0],
            arrived_s=arrived_s,
            due_s=arrived_s + min(float(requests.end_s[row]), held_s),
            expires_s=arrived_s + held_s,
            service_s=service_s(self._references[at].profile, prompt, output),
            tokens=prompt + output,
            opportunistic=bool(requests.held[row] & OPPORTUNISTIC),
        )

    def _signals(self, world: World) -> list[Signal]:
        """Return the signal of every endpoint whose model has held requests."""
        if self._free.size != world.engines.sequences.size:
            self._free = np.zeros(world.engines.sequences.size, np.bool_)
            self._rows_of = np.zeros((world.policies.size, COLUMNS), np.int64)
        self._occupancy(world, self._other, self._free, self._rows_of)
        rows = zip(self._keys.items(), self._rows_of.tolist(), world.waiting.size.tolist(), strict=False)
        return [
            Signal(
                model=model,
                region=region,
                capacity_tokens=capacity_tokens,
                sequences=sequences,
                interactive_tokens=interactive_tokens,
                other_tokens=other_tokens,
                interactive_requests=interactive_requests,
                other_requests=other_requests,
                waiting=waiting,
                instances=instances,
                prompt_tokens=prompt_tokens // max(given, 1),
                output_tokens=output_tokens // max(given, 1),
                profile=self._references[at].profile,
                front_end=self._references[at].front_end,
            )
            for ((model, region), at), (
                capacity_tokens, sequences, interactive_tokens, other_tokens, interactive_requests, other_requests,
                instances, given, prompt_tokens, output_tokens,
            ), waiting in rows
            if self.work.waiting[model]
        ]  # fmt: skip
