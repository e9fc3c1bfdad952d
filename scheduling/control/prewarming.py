"""Prewarming of what waiting requests and runs use next: adapters, system prompts, models (Hermes section 3.4).

The rules are `scheduling.applications.prewarming`. Containers and DNN models are warmed by others, who ask `due`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend
from scheduling.applications.prewarming import (
    AGAIN_S,
    HERMES,
    MOST_WAITING,
    OPEN_S,
    LikelyCall,
    PrewarmBy,
    Warmable,
    due,
    likely_calls_of,
    load_time_s,
    nearest,
)
from scheduling.applications.standings import Run, RunCall
from scheduling.control.fleet import Fleet
from scheduling.control.runs import Runs
from scheduling.control.system_prompts import PromptPrewarming
from scheduling.fleet.arrays import MEMORY_SLOTS
from scheduling.queueing.waiting_set import in_order
from scheduling.routing.adapters import NOT_LOADED, ON_GPU, takes_adapter, tier_of, use_adapter

SLICE_S: Final = 0.002
"""Longest time at a stretch for likely calls, ten times a second: those of 1,000 runs in progress take 0.1 s in all."""


@dataclass(slots=True)
class Woken:
    """An endpoint of which an instance was woken."""

    at_s: float
    awake: bool = False
    """It was seen awake, or on its way, since."""
    unused: bool = True
    """No request has used it, and one may."""


class Prewarming:
    """Call `act` every `PERIOD_S`, `refresh_likely` in between, and `placed` when an instance is given a request.

    `counts` has, by kind, what was `warmed`, what of it was `used` by a call afterwards, and what was `wasted`: it left
    without, or ten minutes have passed.
    """

    def __init__(self, fleet: Fleet, runs: Runs, by: PrewarmBy = HERMES) -> None:
        self.fleet, self.runs, self.by = fleet, runs, by
        self.prompts = PromptPrewarming(fleet)
        self.counts = {kind: Counter[str](warmed=0, used=0, wasted=0) for kind in ("adapter", "model")}
        self.counts["prefix"] = self.prompts.counts
        self.sleeping: Mapping[int, float] = {}
        """`Fleet.sleeping`, of this second."""
        self._likely: dict[int, tuple[int, list[LikelyCall]]] = {}
        """By run: its `reports` when they were determined."""
        self._runs_left: list[Run] = []
        """Those whose likely calls are to be determined, the first one last."""
        self._unused: set[tuple[int, int]] = set()
        """Instances and adapters that were brought onto their GPUs."""
        self._woken: dict[int, Woken] = {}

    def act(self) -> None:
        """Warm what waiting requests and likely calls need."""
        self.sleeping = self.fleet.sleeping()
        self.prompts.begin()
        if self.by != HERMES or not (self.fleet.any_cold or self.sleeping or self.prompts.any_known):
            self._likely, self._runs_left = {}, []
        elif not self._runs_left:
            runs = self.runs.standings.by_number
            self._likely = {number: likely for number, likely in self._likely.items() if number in runs}
            self._runs_left = list(reversed(runs.values()))
            self.refresh_likely()
        self._warm_adapters()
        self.prompts.act(self.due("prefix"))
        self._settle_models()

    def placed(self, instance: int, adapter: int, prompt: Hashable | None) -> None:
        """Record that *instance* was given a request with *adapter* (-1 for none) and the system prompt *prompt*."""
        if (instance, adapter) in self._unused:
            self._unused.remove((instance, adapter))
            self.counts["adapter"]["used"] += 1
        if prompt is not None:
            self.prompts.settle(instance, prompt, used=True)

    # Likely calls

    def refresh_likely(self) -> None:
        """Determine the likely calls of the next runs, within `SLICE_S`. Call ten times a second."""
        until_s, known = self.fleet.now_s + SLICE_S, self.runs.standings.by_number
        produced = self.fleet.produced() if self._runs_left else None
        while self._runs_left and produced is not None:
            run = self._runs_left.pop()
            if run.number in known:
                graph, now_s = self.runs.standings.graphs.get(run.application), self.fleet.now_s
                calls = likely_calls_of(run, graph, produced, self._needs, self.fleet.prewarm_k, now_s)
                self._likely[run.number] = run.reports, calls
            if self.fleet.now_s >= until_s:
                break

    @property
    def likely(self) -> list[LikelyCall]:
        """Return the likely calls of runs in progress.

        A run of which a call arrived or ended since they were determined has none: what was likely may have arrived.
        """
        runs = self.runs.standings.by_number
        return [
            call
            for number, (reports, calls) in self._likely.items()
            if number in runs and runs[number].reports == reports
            for call in calls
        ]

    def due(self, *kinds: str) -> list[LikelyCall]:
        """Return the likely calls whose *kinds* of backends are to be warmed now."""
        return due(self.likely, *kinds)

    def _needs(self, call: RunCall, unit: str, backend: Backend) -> Iterator[tuple[Warmable, float]]:
        """Yield what a call of *unit* that follows *call* at *backend* needs, with the seconds to warm it."""
        if backend.kind in ("container", "dnn"):
            warm_s = self.fleet.warm_s(backend.kind, backend.name)
            if warm_s is not None:
                yield Warmable(backend.kind, backend.name), warm_s
            return
        if backend.kind != "llm":
            return
        if call.adapter >= 0:
            load_s = load_time_s(self.fleet.instances, self.fleet.members, call.endpoint)
            yield Warmable("adapter", call.adapter, call.endpoint), load_s
        endpoint = self._endpoint(call, backend.name)
        if endpoint in self.sleeping:
            yield Warmable("model", backend.name, endpoint), self.sleeping[endpoint]
        elif endpoint >= 0 and (cold := self.prompts.cold_after((call.application, unit), endpoint)) is not None:
            name, prefill_s = cold
            yield Warmable("prefix", name, endpoint), prefill_s

    def _endpoint(self, call: RunCall, model: str) -> int:
        """Return the endpoint of *model* that the caller of *call* prefers; -1 without one."""
        own = self.fleet.endpoints[call.endpoint] if call.endpoint >= 0 else None
        if own is not None and own.model == model:
            return call.endpoint
        return self.fleet.preferred(model, own.region if own is not None else "")

    # Adapters

    def _warm_adapters(self) -> None:
        fleet, waiting = self.fleet.instances, self.fleet.waiting
        gone = {each for each in self._unused if tier_of(fleet, *each) == NOT_LOADED}
        self._unused -= gone
        self.counts["adapter"]["wasted"] += len(gone)
        with_adapter, of = waiting.adapter >= 0, defaultdict[int, list[int]](list)
        for call in self.due("adapter"):
            of[call.target.endpoint].append(call.target.name)  # type: ignore[arg-type]
        for endpoint in range(len(self.fleet.endpoints)) if of or with_adapter.any() else ():
            first = in_order(waiting, endpoint, MOST_WAITING, with_adapter)
            members = self.fleet.members.members[slice(*self.fleet.members.first[endpoint : endpoint + 2])]
            room = int(fleet.adapter_slots[members, MEMORY_SLOTS].sum())
            soonest = list(dict.fromkeys([*waiting.adapter[first].tolist(), *of[endpoint]]))[:room]
            for adapter in reversed(soonest):  # what is used first is made the most recently used one last
                self._warm_adapter(members, endpoint, adapter)

    def _warm_adapter(self, members: NDArray[np.int32], endpoint: int, adapter: int) -> None:
        """Bring *adapter* onto the GPU of one of *members*, the `nearest`."""
        fleet = self.fleet.instances
        able = [at for at in members.tolist() if fleet.accepting[at] and takes_adapter(fleet, at, adapter)]
        if not able:
            return
        tiers = {at: int(tier_of(fleet, at, adapter)) for at in able}
        instance = nearest(fleet, tiers)
        leaves = int(use_adapter(fleet, instance, adapter, 0))
        if tiers[instance] != ON_GPU:
            self.counts["adapter"]["warmed"] += 1
            self._unused.add((instance, adapter))
            again = tiers[instance] != NOT_LOADED
            self.fleet.warm(instance, Warmable("adapter", adapter, endpoint), leaves, again=again)

    # Sleeping models

    def wakes(self, endpoint: int) -> LikelyCall | None:
        """Return the call for which an instance of *endpoint*, where none is awake, wakes now; None to let it sleep."""
        one = self._woken.get(endpoint, Woken(-math.inf, unused=False))
        if one.unused or self.fleet.now_s < one.at_s + AGAIN_S:
            return None
        return next((call for call in self.due("model") if call.target.endpoint == endpoint), None)

    def woken(self, endpoint: int) -> None:
        """Record that an instance of *endpoint* is being woken."""
        self._woken[endpoint] = Woken(self.fleet.now_s)
        self.counts["model"]["warmed"] += 1

    def _settle_models(self) -> None:
        """Count those that requests used, and give up those that sleep again, or are long awake."""
        for endpoint, one in self._woken.items():
            one.awake |= endpoint not in self.sleeping
            used = self.fleet.members.asked_at_s[endpoint] > one.at_s
            over = self.fleet.now_s - one.at_s >= OPEN_S or (one.awake and endpoint in self.sleeping)
            if one.unused and (used or over):
                one.unused = False
                self.counts["model"]["used" if used else "wasted"] += 1
