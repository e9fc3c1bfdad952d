"""Prewarming (Hermes section 3.4): LoRA adapters come onto the GPU of an instance before the requests that use them.

What will be used is known from two sources: requests that wait, and runs of applications, whose demand graphs say what is
likely to follow a call and when it ends. The least recently used adapters leave for those that are prewarmed, as for others.

- `lru`: no prewarming; an adapter is loaded with the request that uses it.
- `epwq`: adapters of the first waiting requests are loaded, and kept (CachedAttention's eviction and prefetching by the
  waiting queue, the paper's baseline).
- `hermes`: these, and those of the calls that runs will probably make next.

The paper's text and its formula differ: a smaller K is to prewarm more aggressively, and prewarming starts "at the time such
that p_e = K". But the effectiveness p_e = p_s P(t_c > t_s + t_p) (equation 3), the probability that the call comes and finds
its backend warm, falls as the start t_s is put off. We start at the latest moment with p_e >= K; at once if p_e is below K
already while p_s >= K, since the call is likely, and a backend that is warm too late is still sooner than a cold one; and
not at all if p_s < K. So a smaller K prewarms less likely calls, and starts later.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.standings import Run, RunCall, Standings
from scheduling.fleet.arrays import MEMORY_SLOTS, EndpointArrays, FleetArrays
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.adapters import NOT_LOADED, ON_GPU, takes_adapter, tier_of, use_adapter

Prewarming = Literal["lru", "epwq", "hermes"]
LRU: Final = "lru"
EPWQ: Final = "epwq"
HERMES: Final = "hermes"
USUAL_K: Final = 0.5
"""The paper's default."""
LOOK_S: Final = 1.0
"""Period of `AdapterPrewarming.look`: a start that is due before the next look is made now."""
MOST_WAITING: Final = 32
"""First waiting requests of an endpoint whose adapters are prewarmed."""


def start_in_s(ends_in_s: NDArray[np.float64], probability: float, warm_s: float, k: float) -> float | None:
    """Return seconds until prewarming for a call should start, None for never (Hermes equation 3).

    *ends_in_s* are samples of when the unit before it ends, ascending; the call follows with *probability* and its backend
    takes *warm_s* to warm. *k* is the least effectiveness.
    """
    if probability < k or not ends_in_s.size:
        return None
    enough = math.ceil(k / probability * ends_in_s.size) if k > 0 else 1
    return max(0.0, float(ends_in_s[ends_in_s.size - enough]) - warm_s)


class LikelyCall(NamedTuple):
    """A call that a run will probably make: for an endpoint, with an adapter, and when to start prewarming."""

    endpoint: int
    adapter: int
    start_in_s: float


def likely_calls(
    standings: Standings, produced: Callable[[int], int], warm_s: Callable[[int], float], k: float, now_s: float
) -> list[LikelyCall]:
    """Return the calls that runs will probably make next, with the adapters of their latest ones.

    After each open call, and where none is open, after the last one: other units may come between. *produced* gives the
    output tokens so far of an open call, *warm_s* the time to load an adapter at an endpoint; *k* is divided by the weight
    of a run's tenant. A call is taken to run alone: under load it ends later, and the adapter of the next one waits.
    """
    calls = []
    for run in standings.runs.values():
        graph = standings.graphs.get(run.application)
        last = run.last_call
        starts: dict[tuple[int, int], float] = {}

        def note(
            call: RunCall,
            comes_in_s: NDArray[np.float64],
            run: Run = run,
            starts: dict[tuple[int, int], float] = starts,
        ) -> None:
            comes_s = np.sort(comes_in_s[np.isfinite(comes_in_s)])
            probability = comes_s.size / max(1, comes_in_s.size)
            start_s = start_in_s(comes_s, probability, warm_s(call.endpoint), min(1.0, k / run.weight))
            if start_s is not None:  # a step ends with the last of its calls
                key = call.endpoint, call.adapter
                starts[key] = max(starts.get(key, 0.0), start_s)

        if graph is None:
            continue
        for request, (step, call, rate) in run.calls.items():
            if call.adapter < 0 or (outlook := graph.outlooks.get(step.unit)) is None:
                continue
            made = produced(request)
            there = outlook.output_tokens > made
            if there.any():
                begins_s = 0.0 if made else rate.base_s + rate.input_s * call.prompt_tokens
                note(call, begins_s + rate.output_s * (outlook.output_tokens[there] - made) + outlook.gap_s[there])
            else:  # it is longer than any that was recorded
                note(call, outlook.gap_s)
        open_llm = any(step.unit in graph.outlooks for step, _, _ in run.calls.values())
        if not open_llm and last is not None and last.unit in graph.outlooks:
            gap_s = graph.outlooks[last.unit].gap_s - (now_s - run.last_call_s)
            note(last, gap_s[gap_s > 0.0])
        calls += [LikelyCall(endpoint, adapter, start_s) for (endpoint, adapter), start_s in starts.items()]
    return calls


def load_time_s(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> float:
    """Return the time to load an adapter on an instance of *endpoint*, the slowest; 0 without one."""
    members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]]
    return float(fleet.adapter_load_s[members, NOT_LOADED].max(initial=0.0))


class Warmed(NamedTuple):
    """An adapter that is brought onto the GPU of an instance."""

    instance: int
    adapter: int
    leaves: int
    """Adapter to unload for it, -1 for none."""
    again: bool
    """Whether it is in CPU memory."""


class AdapterPrewarming:
    """Prewarming on the arrays of one clock; call `look` every `LOOK_S`, and `use` when an instance is given a request.

    `counts` has the adapters `warmed`, those of them `used` by a request afterwards, and those `wasted`: they left
    without.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(warmed=0, used=0, wasted=0)
        self._unused: set[tuple[int, int]] = set()

    def use(self, instance: int, adapter: int) -> None:
        """Record that a request with *adapter* was given to *instance*."""
        if (instance, adapter) in self._unused:
            self._unused.remove((instance, adapter))
            self.counts["used"] += 1

    def look(
        self,
        fleet: FleetArrays,
        endpoints: EndpointArrays,
        waiting: WaitingArrays,
        by: Callable[[int], str],
        likely: Iterable[LikelyCall] = (),
    ) -> list[Warmed]:
        """Return the adapters to load now, which are counted as loaded; *by* is the prewarming of each endpoint."""
        self._note_waste(fleet)
        warmed: list[Warmed] = []
        of: dict[int, list[LikelyCall]] = {}
        for call in likely:
            if by(call.endpoint) == HERMES and call.start_in_s <= LOOK_S:
                of.setdefault(call.endpoint, []).append(call)
        for endpoint in range(endpoints.cursor.size):
            if by(endpoint) == LRU or endpoint >= waiting.size.size:
                continue
            # What is used first is made the most recently used one last.
            calls = sorted(of.get(endpoint, ()), key=lambda call: (call.start_in_s, call.adapter))
            adapters = [*first_adapters(waiting, endpoint), *(call.adapter for call in calls)]
            members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]]
            room = int(fleet.adapter_slots[members, MEMORY_SLOTS].sum())
            soonest = list(dict.fromkeys(adapters))[:room]
            warmed += [one for each in reversed(soonest) if (one := self._warm(fleet, members, each)) is not None]
        return warmed

    def _warm(self, fleet: FleetArrays, members: NDArray[np.int32], adapter: int) -> Warmed | None:
        """Bring *adapter* onto the GPU of one of *members*: where it is nearest, then where the fewest requests run."""
        able = [at for at in members.tolist() if fleet.accepting[at] and takes_adapter(fleet, at, adapter)]
        if not able:
            return None
        tiers = {at: int(tier_of(fleet, at, adapter)) for at in able}
        instance = min(able, key=lambda at: (-tiers[at], int(fleet.running[at]), at))
        leaves = int(use_adapter(fleet, instance, adapter, 0))
        if tiers[instance] == ON_GPU:
            return None
        self.counts["warmed"] += 1
        self._unused.add((instance, adapter))
        return Warmed(instance, adapter, leaves, tiers[instance] != NOT_LOADED)

    def _note_waste(self, fleet: FleetArrays) -> None:
        gone = {each for each in self._unused if tier_of(fleet, *each) == NOT_LOADED}
        self._unused -= gone
        self.counts["wasted"] += len(gone)


def first_adapters(waiting: WaitingArrays, endpoint: int) -> list[int]:
    """Return the adapters of the first requests that wait for *endpoint*, in order."""
    slots = waiting.heap[endpoint, : waiting.size[endpoint]]
    slots = slots[waiting.adapter[slots] >= 0]
    order = np.lexsort((waiting.sequence[slots], waiting.key[slots]))[:MOST_WAITING]
    adapters: list[int] = waiting.adapter[slots[order]].tolist()
    return adapters
