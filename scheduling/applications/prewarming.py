"""Prewarming (Hermes section 3.4): backends are warm before the calls that use them, whatever their kind (`Warmable`).

What will be used is known from two sources: requests that wait, and runs of applications, whose demand graphs say what is
likely to follow a unit and when it ends. What was used least recently leaves for what is prewarmed, as for all else.

- `lru`: no prewarming; a backend is warmed by the call that uses it.
- `epwq`: what the first waiting requests use is warmed, and kept (CachedAttention's eviction and prefetching by the
  waiting queue, the paper's baseline).
- `hermes`: this, and what the calls use that runs will probably make next.

`likely_calls_of` with `start_in_s` is the rule for every kind; `scheduling.control.prewarming` acts on it.

The paper's text and its formula differ. By the formula, p_e = p_s P(t_c > t_s + t_p) (equation 3), the probability that the
call comes and finds its backend warm falls as the start t_s is put off: with a smaller K prewarming starts later, and there
may be no start with p_e = K although p_s >= K. By the text a smaller K is to prewarm more aggressively, for more significant
tenants, prewarming is not triggered if p_s < K and otherwise "at the time such that p_e = K", and figure 14 has faster
completion and more waste for it. All of this holds if the inequality is turned, p_e = p_s P(t_c <= t_s + t_p): we start at
the first moment with that p_e >= K.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend
from scheduling.applications.standings import KnownGraph, Run, RunCall
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.routing.adapters import NOT_LOADED

PrewarmBy = Literal["lru", "epwq", "hermes"]
LRU: Final = "lru"
HERMES: Final = "hermes"
WarmKind = Literal["adapter", "prefix", "model", "container", "dnn"]
USUAL_K: Final = 0.5
"""The paper's default."""
PERIOD_S: Final = 1.0
"""Period of prewarming: a start that is due before the next time is made now."""
USUAL_SHARE: Final = 0.05
AGAIN_S: Final = 60.0
"""After a model was woken, or a prompt could not be warmed, until the same is tried again."""
OPEN_S: Final = 600.0
"""After which what was warmed and not used counts as waste."""
MOST_WAITING: Final = 32
"""First waiting requests of an endpoint for which adapters and system prompts are prewarmed."""


def start_in_s(ends_in_s: NDArray[np.float64], probability: float, warm_s: float, k: float) -> float | None:
    """Return seconds until prewarming for a call should start, None for never (Hermes equation 3, by the paper's text).

    *ends_in_s* are samples of when the unit before it ends, ascending; the call follows with *probability* and its backend
    takes *warm_s* to warm. It starts at the earliest moment for which the call comes with a probability of *k* before its
    backend is warm.
    """
    if not probability or probability < k or not ends_in_s.size:
        return None
    enough = max(1, math.ceil(k / probability * ends_in_s.size - 1e-9))
    return max(0.0, float(ends_in_s[enough - 1]) - warm_s)


class Warmable(NamedTuple):
    """A backend that a call finds warm or cold, of one of the paper's kinds (Hermes section 3.4).

    | kind | name | endpoint | warm when |
    |---|---|---|---|
    | `adapter` | LoRA adapter, by number | its instances | it is on the GPU |
    | `prefix` | system prompt, by digest | its instances | its keys and values are in the prefix cache |
    | `model` | model | its instances | one of them is awake |
    | `container`, `dnn` | image or DNN model | -1 | one is started and free, or has room |
    """

    kind: WarmKind
    name: Hashable
    endpoint: int = -1


Needs = Callable[[RunCall, str, Backend], Iterable[tuple[Warmable, float]]]
"""Returns what a call of a unit that follows the given one at a backend needs, each with the seconds that it takes to warm.
All that differs between kinds is here: a kind that a clock cannot warm is not among them, nor a model that is awake.
"""


class LikelyCall(NamedTuple):
    """A call that a run will probably make: what it needs, and when to start warming it."""

    target: Warmable
    start_in_s: float
    """0: at once."""
    run: int = -1
    """Number of the run (`Standings.by_number`)."""
    unit: str = ""
    """The likeliest of its units that need *target* next."""
    calls: int = 1
    """Calls of it at once: as many containers are needed."""


def due(likely: Iterable[LikelyCall], *kinds: str) -> list[LikelyCall]:
    """Return the calls whose warming starts within `PERIOD_S`, the first to start first."""
    now = [call for call in likely if call.target.kind in kinds and call.start_in_s <= PERIOD_S]
    return sorted(now, key=lambda call: (call.start_in_s, call.run))


def likely_calls_of(
    run: Run,
    graph: KnownGraph | None,
    produced: Callable[[int], int],
    needs: Needs,
    k: float,
    now_s: float,
) -> list[LikelyCall]:
    """Return the calls that *run* will probably make next by the *graph* of its application, one for each backend needed.

    They follow its open steps, and where none is open, its last one; units that are no LLM may come between.
    *produced* gives the output tokens so far of an open call, *needs* what is needed and how long it takes to warm; *k* is
    divided by the weight of its tenant. A step is taken to end with its call that has produced least, and a call to
    run alone: under load it ends later, and what the next one needs waits. When it ends is counted from its beginning, so
    that a start is not put off while it runs.
    """
    if graph is None:
        return []
    least = min(1.0, k / run.weight)
    starts: dict[Warmable, tuple[float, str]] = {}
    for before, unit, ends_in_s, there in _unfinished(run, graph, produced, now_s):
        outlook = graph.outlooks[unit]
        columns: dict[tuple[Warmable, float], list[int]] = {}
        for at, following in enumerate(outlook.next_units):
            for need in needs(before, following, graph.backends[following]):
                columns.setdefault(need, []).append(at)
        for (target, warm_s), of in columns.items():
            comes_s = ends_in_s + outlook.gap_s[:, of].min(axis=1)
            follows = np.isfinite(comes_s)
            may_be = comes_s >= 0.0 if there is None else there
            probability = float(follows[may_be].mean()) if may_be.any() else 0.0
            start_s = start_in_s(np.sort(comes_s[follows]), probability, warm_s, least)
            if start_s is not None and (target not in starts or start_s < starts[target][0]):
                starts[target] = start_s, outlook.next_units[of[0]]
    return [
        LikelyCall(
            target,
            start_s,
            run.number,
            unit,
            graph.outlooks[unit].parallelism if unit in graph.outlooks else 1,
        )
        for target, (start_s, unit) in starts.items()
    ]


Floats = NDArray[np.float64]


def _unfinished(
    run: Run, graph: KnownGraph, produced: Callable[[int], int], now_s: float
) -> Iterator[tuple[RunCall, str, Floats, NDArray[np.bool_] | None]]:
    """Yield for each open step, or the last one, the run's latest call, the unit, the seconds until its recorded steps would
    have ended (0 if before now), and which of them may be like it; None: those whose next call is still to come.
    """
    slowest: dict[int, tuple[float, RunCall, str]] = {}
    for request, (step, call) in run.calls.items():
        if (backend := graph.backends.get(step.unit)) is None or step.unit not in graph.outlooks:
            continue
        made = float(produced(request)) if backend.kind == "llm" else now_s - step.began_s
        if id(step) not in slowest or made < slowest[id(step)][0]:
            slowest[id(step)] = made, call, step.unit
    for made, call, unit in slowest.values():
        outlook, rate, latest = graph.outlooks[unit], call.rate, run.latest or call
        there = outlook.output > made
        begins_s = 0.0 if made else rate.base_s + rate.input_s * call.prompt_tokens
        if not there.any():  # it is longer than any that was recorded
            there[:] = True
        yield latest, unit, np.maximum(0.0, begins_s + rate.output_s * (outlook.output - made)), there
    unit = run.last
    if not slowest and run.latest is not None and unit in graph.outlooks:
        passed_s = np.nextafter(now_s - run.last_s, math.inf)  # what follows at once has not come
        yield run.latest, unit, np.full(graph.outlooks[unit].output.size, -passed_s), None


def load_time_s(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> float:
    """Return the time to load an adapter on an instance of *endpoint*, the slowest; 0 without one."""
    members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]]
    return float(fleet.adapter_load_s[members, NOT_LOADED].max(initial=0.0))


def nearest(fleet: FleetArrays, near: Mapping[int, int]) -> int:
    """Return the instance that warms an adapter or a system prompt: where it is *near* most, by instance, then where the
    fewest requests run, which have the fewest tokens left.
    """
    return min(near, key=lambda at: (-near[at], int(fleet.running[at]), int(fleet.remaining_tokens[at]), at))
