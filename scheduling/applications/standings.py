"""Standings of application runs: what each still needs, as its calls arrive and end (Hermes sections 3.2 and 3.3).

The live dispatcher and the simulator report every call of a run to the same `Standings`, and order what waits by the same
keys (`ordering.run_key`). What a run needs is drawn again when a call arrives: the demands of the steps before it are known
by then, and so is its own input. In between its rank is refreshed once its attained service goes past the end of a bucket.

Calls become steps as in `recording`: those of a unit that run at once are one step, caused by the step that ended last.
While further ones may be on their way (`GATHERS_S`), how many they will be is drawn too. Service is that of the endpoints
which the run's calls go to. A run without a demand graph, or with a unit that its graph does not know, needs what its open
calls are predicted to need.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend, DemandGraph, ServiceRate, UnitOutlook
from scheduling.applications.gittins import BUCKETS, MEAN, buckets, gittins_ranks
from scheduling.applications.predictor import Demand, DemandPredictor, Floats, Opening, Shown
from scheduling.applications.recording import IDLE_S, SESSION_IDLE_S, SESSION_UNITS, TOGETHER_S
from scheduling.applications.remaining import (
    DEMAND_BUCKETS,
    FEWEST_MATCHES,
    PARALLELISM,
    UNKNOWN,
    GraphArrays,
    Position,
    Remaining,
    build,
    remaining,
)
from scheduling.compiled import uncompiled
from scheduling.policy import EndpointPolicy
from scheduling.queueing.groups import BY_RANK, GROUP_ORDERS
from scheduling.queueing.ordering import BY_RUN, ORDERINGS, QLM, Standing, run_key

SAMPLES: Final = 200
"""Walks of the demand graph when a call arrives."""
GATHERS_S: Final = 0.25
"""So long after a call of a step another one of it may be on its way: 98 % of the demo's do within 0.14 s, under load."""
MOST_RUNS: Final = 100_000
"""Runs followed at once; a further one pushes out the one that was heard of least lately."""

FIRST_S: Final = -5e8
"""When a run began and is due, for its order, that an operator has moved first: before all others of its class, and behind
none by its rank (`ordering.LONGEST_STRETCHED_S`)."""
LATE_S: Final = 1e8
"""Added to when a late run is due, where late runs are last: behind all that can still be in time."""


class KnownGraph(NamedTuple):
    """What is known of an application: its demand graph as arrays."""

    units: Mapping[str, int]
    arrays: GraphArrays
    recorded: Remaining
    """Recorded runs."""
    whole: bool = False
    """Whether a run is predicted by these alone, whatever it has done so far."""
    predictor: DemandPredictor | None = None
    outlooks: Mapping[str, UnitOutlook] = {}
    backends: Mapping[str, Backend] = {}

    @classmethod
    def of(
        cls,
        graph: DemandGraph,
        rates: Mapping[str, ServiceRate],
        *,
        refined: bool = True,
        whole: bool = False,
        by: str = "learned",
    ) -> "KnownGraph":
        """Return what *graph* says: without correlations unless *refined*, only of *whole* runs if that is set, and with the
        predictor that runs are drawn *by*, or a lesser one (`RUN_DEMANDS`).

        Fewer than `FEWEST_MATCHES` records do not say what to warm. Raises ValueError if nothing is recorded.
        """
        units = {name: number for number, name in enumerate(graph.units)}
        recorded = Remaining(
            np.array([graph.service_s(record, rates) for record in graph.records]),
            np.array([graph.path_s(record, rates) for record in graph.records]),
        )
        outlooks = graph.outlooks() if len(graph.records) >= FEWEST_MATCHES else {}
        predictor = None
        if by != "graph" and refined and not whole and graph.records:
            predictor = DemandPredictor(graph, rates, learned=by == "learned")
        return cls(units, build(graph, rates, refined=refined), recorded, whole, predictor, outlooks, graph.units)

    def most_at_once(self, unit: str) -> int:
        """Return the most requests that a recorded step of *unit* had."""
        least, width = (of[self.units[unit], PARALLELISM] for of in (self.arrays.low, self.arrays.width))
        return round(float(least + DEMAND_BUCKETS * width))

    def at(self, rates: Mapping[str, ServiceRate]) -> GraphArrays:
        """Return the arrays with the *rates* of models, where these are known."""
        known = self.arrays.rate.copy()
        for unit, backend in self.backends.items():
            if backend.kind == "llm" and (rate := rates.get(backend.name)) is not None:
                known[self.units[unit]] = rate.base_s, rate.input_s, rate.output_s
        return self.arrays._replace(rate=known)


class RunCall(NamedTuple):
    """A call of a run that arrives. *request* identifies it until it ends."""

    request: int
    application: Hashable
    run: Hashable
    unit: str
    prompt_tokens: int
    predicted_tokens: int
    rate: ServiceRate
    """Of the endpoint that will serve it."""
    due_in_s: float = np.inf
    """After the run began; infinity for never. That of its first call counts."""
    weight: float = 1.0
    """Of its tenant."""
    total_s: float | None = None
    """Service of the whole run, where an oracle knows it."""
    adapter: int = -1
    """LoRA adapter, -1 for none."""
    endpoint: int = -1
    """The one that will probably serve its next call; -1 for a unit that is no LLM."""


class PastCall(NamedTuple):
    """A call of a run that ended before the run was followed. Moments are seconds of the caller's clock."""

    unit: str
    began_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: float | None
    """Seconds of a unit that is no LLM. None: it failed."""
    rate: ServiceRate = ServiceRate()
    model: str = ""
    """As in the ledger; empty of a unit that is no LLM."""
    region: str = ""
    """Of its caller."""


@dataclass(slots=True)
class _Step:
    unit: str
    before: tuple[str, Demand]
    """The LLM step that ended last before it."""
    began_s: float
    came_s: float
    """When its last call came."""
    calls: int = 0
    open: int = 0
    input_tokens: int = 0
    output_tokens: float = 0
    """Of the calls that ended; seconds of a unit that is no LLM."""
    service_s: float = 0.0

    @property
    def demand(self) -> Demand:
        """Return the mean input and output, and the parallelism."""
        ended = self.calls - self.open
        return self.input_tokens / self.calls, self.output_tokens / max(1, ended), float(self.calls)

    def gathers(self, now_s: float, graph: KnownGraph) -> bool:
        """Whether further calls may be on their way: it has just arrived, none has ended, and recorded ones had more."""
        just_came = now_s < self.came_s + GATHERS_S and self.open == self.calls
        return just_came and self.calls < graph.most_at_once(self.unit)


@dataclass(slots=True, eq=False)
class Run:
    """A run in progress."""

    number: int
    application: Hashable
    name: Hashable
    began_s: float
    due_s: float
    """Absolute; NaN until a call says it, for a run that was resumed."""
    weight: float
    total_s: float | None
    heard_s: float
    steps: list[_Step] = field(default_factory=list)
    """Open ones, and those that ended last and may still lead to others."""
    calls: dict[int, tuple[_Step, RunCall]] = field(default_factory=dict)
    """Open ones, by request."""
    last: str = ""
    """Unit of the step that ended last."""
    last_s: float = 0.0
    """When it ended."""
    latest: RunCall | None = None
    """The LLM call that came last."""
    idle_s: float = IDLE_S
    """Without an open call for so long it has ended."""
    first: bool = False
    """An operator has moved it first."""
    shown: Shown = field(default_factory=Shown)
    """By ended steps that are in `steps` no more."""
    rates: dict[str, ServiceRate] = field(default_factory=dict)
    """Of the latest call of each unit."""
    done_s: float = 0.0
    """Service of steps that are in `steps` no more."""
    whole_s: NDArray[np.float64] | None = None
    """`buckets` of its whole service."""
    path_s: NDArray[np.float64] | None = None
    """Samples of its longest path from where it is, the open steps whole, ascending."""
    refresh_s: float = np.inf
    """Attained service at which its rank is to be refreshed."""
    late_s: float = np.inf
    """When it can no longer be in time; infinity once it is late."""
    gathered_s: float = np.inf
    """When its open step that has just begun has gathered its calls; infinity for none."""
    draws: int = 0
    reports: int = 0
    """Of calls that came or ended."""
    drawn_by: str = ""
    changed: bool = True
    """Whether a step has ended since its service was drawn."""

    def arrive(self, call: RunCall, now_s: float) -> None:
        """Take in *call*, which opens a step or joins one."""
        if call.unit in SESSION_UNITS:
            self.idle_s = SESSION_IDLE_S
        step = next((one for one in self.steps if one.unit == call.unit and one.open), None)
        if step is None:
            for ended in [one for one in self.steps if not one.open]:  # one of them led to it, the others to nothing
                self.steps.remove(ended)
                self.done_s += ended.service_s
                self.shown.add(ended.unit, ended.demand)
            step = _Step(call.unit, self.shown.last, now_s, now_s)
            self.steps.append(step)
        step.calls += 1
        step.open += 1
        step.came_s = now_s
        self.rates[call.unit] = call.rate
        step.input_tokens += call.prompt_tokens
        self.calls[call.request] = step, call
        self.changed = True
        self.reports += 1
        if call.endpoint >= 0:
            self.latest = call

    def end(self, request: int, output_tokens: float | None, now_s: float) -> None:
        """Take in the end of an open call; without *output_tokens* it failed, and teaches nothing."""
        step, call = self.calls.pop(request)
        step.open -= 1
        self.changed = True
        self.reports += 1
        if output_tokens is None:
            step.calls -= 1
            step.input_tokens -= call.prompt_tokens
            if not step.calls:
                self.steps.remove(step)
                return
        else:
            step.output_tokens += output_tokens
            step.service_s += _service_s(call, output_tokens)
        if not step.open:
            self.last, self.last_s = step.unit, now_s

    def attained_s(self, produced: Callable[[int], int] | None = None) -> float:
        """Return its service so far; *produced* gives the output tokens of an open call."""
        attained_s = self.done_s + sum(step.service_s for step in self.steps)
        if produced is not None:
            for request, (_, call) in self.calls.items():
                if tokens := produced(request):
                    attained_s += _service_s(call, tokens)
        return attained_s

    def path_had_s(self, produced: Callable[[int], int] | None = None) -> float:
        """Return what its open steps have had of their paths, the least of them; a step, by its call that has had least."""
        had_s: dict[int, float] = {}
        for request, (step, call) in self.calls.items():
            tokens = produced(request) if produced is not None else 0
            call_s = _service_s(call, tokens) if tokens else 0.0
            had_s[id(step)] = min(call_s, had_s.get(id(step), math.inf))
        return min(had_s.values(), default=0.0)

    def path_left_s(self, share: float, produced: Callable[[int], int] | None = None) -> float:
        """Return the quantile *share* of the path that it has left, by what was drawn last."""
        assert self.path_s is not None
        at = max(0, math.ceil(share * self.path_s.size) - 1)
        return max(0.0, float(self.path_s[at]) - self.path_had_s(produced))

    def _predicted(self) -> Remaining:
        """Return what it takes if nothing follows the open calls, its service whole."""
        calls_s = [_service_s(call, call.predicted_tokens) for _, call in self.calls.values()]
        return Remaining(np.array([self.attained_s() + sum(calls_s)]), np.array([max(calls_s, default=0.0)]))

    def _learned(
        self, graph: KnownGraph, by: str, now_s: float, rate: Floats, walks: Remaining | None
    ) -> Remaining | None:
        """Return what it takes by the predictor; None where that has not seen the unit of the step that began last."""
        assert graph.predictor is not None
        step = max(self.steps, key=lambda one: one.began_s)
        calls = [call for one, call in self.calls.values() if one is step]
        predicted = sum(call.predicted_tokens for call in calls) + step.output_tokens
        more = step.unit in graph.outlooks and step.gathers(now_s, graph)
        count = max(step.calls, graph.outlooks[step.unit].parallelism if more else 0)
        opening = Opening(step.unit, step.input_tokens / step.calls, predicted / step.calls, count)
        ended, learned = not step.open, by == "learned"
        left = graph.predictor.draw(self.shown, opening, rate, SAMPLES, walks, learned, ended=ended)
        if left is None:
            return None
        others = [(one, call) for one, call in self.calls.values() if one is not step]  # of branches that began before
        others_s = [_service_s(call, call.predicted_tokens) for _, call in others]
        had_s = sum(one.service_s for one in self.steps if one is not step or not step.open)
        path_s = np.maximum(left.path_s, max(others_s, default=0.0))
        return Remaining(left.service_s + sum(others_s) + had_s, path_s)

    def draw(self, graph: KnownGraph | None, now_s: float, bucket_count: int = BUCKETS, by: str = "graph") -> None:
        """Draw its whole service and the path that it has left, given what is known of it, *by* a knob of the policy."""
        self.draws += 1
        self.drawn_by = by
        self.changed = False
        self.gathered_s = np.inf
        if self.total_s is not None:
            service_s, path_s = np.array([self.total_s]), np.array([self.total_s - self.attained_s()])
        elif graph is None or any(step.unit not in graph.units for step in self.steps):
            service_s, path_s = self._predicted()
        elif graph.whole or not self.steps:
            service_s, path_s = graph.recorded
        else:
            seed = (self.number + 1) * 1_000_003 + self.draws
            models = {graph.backends[unit].name: rate for unit, rate in self.rates.items() if unit in graph.backends}
            gathers = [step.gathers(now_s, graph) for step in self.steps]
            self.gathered_s = min(
                (step.came_s + GATHERS_S for step, each in zip(self.steps, gathers, strict=True) if each),
                default=np.inf,
            )
            there = graph.at(models)
            left = walks = None
            predictor = graph.predictor if by != "graph" else None
            if predictor is None or (by == "learned" and predictor.weights[2]):
                walks = remaining(there, self._position(graph, gathers), SAMPLES, seed)
            if predictor is not None:
                left = self._learned(graph, by, now_s, there.rate, walks)
            left = left or walks or remaining(there, self._position(graph, gathers), SAMPLES, seed)
            service_s, path_s = left.service_s + self.done_s, left.path_s
        self.whole_s, self.path_s = buckets(service_s, bucket_count), np.sort(path_s)

    def _position(self, graph: KnownGraph, gathers: list[bool]) -> Position:
        units, unknown = graph.units, len(graph.units)
        known = np.array([step.demand for step in self.steps])
        known[[step.open > 0 for step in self.steps], 1] = UNKNOWN
        known[gathers, 2] *= UNKNOWN
        visits = np.zeros(unknown, np.int64)
        for unit, count in self.shown.visits.items():
            if unit in units:
                visits[units[unit]] = count
        return Position(
            unit=np.array([units[step.unit] for step in self.steps], np.int64),
            before=np.array([units.get(step.before[0], unknown) for step in self.steps], np.int64),
            known=known,
            known_before=np.array([step.before[1] for step in self.steps]),
            visits=visits,
        )

    def standing(self, now_s: float, reading: "Reading", produced: Callable[[int], int] | None = None) -> Standing:
        """Return its standing by what was drawn last, and note when it is to be refreshed."""
        assert self.whole_s is not None
        attained_s, rank, refresh = self.attained_s(produced), np.empty(1), np.empty(1)
        gittins_ranks(self.whole_s[None], np.array([attained_s]), np.array([self.weight]), rank, refresh)
        self.refresh_s = float(refresh[0])
        mean_s = max(0.0, float(self.whole_s[MEAN].mean()) - attained_s)
        least_s, worst_s = (self.path_left_s(share, produced) for share in (0.0, reading.worst))
        began_s, due_s, self.late_s = self.began_s, self.due_s, np.inf
        if self.first:
            began_s, due_s = FIRST_S, FIRST_S
        elif reading.late_last and now_s > due_s - least_s:
            due_s += LATE_S
        elif reading.late_last:
            self.late_s = due_s - least_s
        return Standing(began_s, due_s, float(rank[0]), mean_s / self.weight, worst_s, attained_s)


class Reading(NamedTuple):
    """How standings are read from samples of what runs need."""

    buckets: int = BUCKETS
    """Of a run's service, for its Gittins rank."""
    worst: float = 1.0
    """Quantile of a run's path that is its worst case in equation 2; 1, the supremum."""
    late_last: bool = False
    """Whether runs that can no longer be in time, even by the shortest path, are behind all others by deadline and slack."""


USUAL_READING: Final = Reading()


def _service_s(call: RunCall, output_tokens: float) -> float:
    return call.rate.base_s + call.rate.input_s * call.prompt_tokens + call.rate.output_s * output_tokens


class Standings:
    """All runs in progress. *graphs* are the known demand graphs by application, which may change meanwhile."""

    def __init__(self, graphs: Mapping[Hashable, KnownGraph], reading: Reading = USUAL_READING) -> None:
        self.graphs, self.reading = graphs, reading
        self.runs: dict[tuple[Hashable, Hashable], Run] = {}
        """By application and name."""
        self.by_number: dict[int, Run] = {}
        self._of_call: dict[int, Run] = {}
        self._numbers = 0

    def arrive(self, call: RunCall, now_s: float) -> Run:
        """Return the run of *call*, which arrives; its service is to be drawn (`refreshed`)."""
        if (known := self._of_call.get(call.request)) is not None:
            return known  # it waits again
        key = call.application, call.run
        run = self.runs.get(key)
        if run is None:
            if len(self.runs) >= MOST_RUNS:
                self._forget(min(self.runs.values(), key=lambda each: each.heard_s))
            due_s = now_s + call.due_in_s
            run = Run(self._numbers, call.application, call.run, now_s, due_s, call.weight, call.total_s, now_s)
            self.runs[key] = self.by_number[run.number] = run
            self._numbers += 1
        if math.isnan(run.due_s):
            run.due_s, run.weight = run.began_s + call.due_in_s, call.weight
        run.arrive(call, now_s)
        run.heard_s = now_s
        self._of_call[call.request] = run
        return run

    def resume(self, application: Hashable, name: Hashable, calls: Sequence[PastCall]) -> Run | None:
        """Follow a run in progress whose *calls* ended before, as after a restart; return None if nothing was learned.

        Its open calls, which came since, are those of the next step. A run that has ended a step since is left as it is. The
        due time and the weight are those of its next call, if none is open.
        """
        known = self.runs.get((application, name))
        if not calls or (known is not None and (known.done_s > 0.0 or known.last)):
            return None
        began_s, heard_s = min(one.began_s for one in calls), max(one.ended_s for one in calls)
        run = Run(self._numbers, application, name, began_s, math.nan, 1.0, None, heard_s)
        if known is None:
            if len(self.runs) >= MOST_RUNS:
                return None
            self._numbers += 1
        else:
            run.number, run.weight, run.total_s, run.heard_s = known.number, known.weight, known.total_s, known.heard_s
            run.due_s = began_s + known.due_s - known.began_s
        # A call that began slightly before an answer ended was sent after it (`recording`). Of equal moments ends are first.
        moments = [(one.began_s, 1, at) for at, one in enumerate(calls)]
        for at, one in enumerate(calls):
            ended_s = one.ended_s - TOGETHER_S
            moments.append((ended_s, 0, at) if ended_s > one.began_s else (one.began_s, 2, at))
        for moment_s, kind, at in sorted(moments):
            one = calls[at]
            if kind == 1:
                past = RunCall(-1 - at, application, name, one.unit, one.prompt_tokens, 0, one.rate)
                run.arrive(past, moment_s)
            else:
                run.end(-1 - at, one.output_tokens, one.ended_s)
        for request, (step, call) in known.calls.items() if known is not None else ():
            run.arrive(call, step.began_s)
            self._of_call[request] = run
        self.runs[application, name] = self.by_number[run.number] = run
        return run

    def end(self, request: int, output_tokens: float | None, now_s: float) -> None:
        """End the call *request*, if it is one of a run; without *output_tokens* it failed.

        The output of a unit that is no LLM is its duration in seconds.
        """
        if (run := self._of_call.pop(request, None)) is not None:
            run.end(request, output_tokens, now_s)
            run.heard_s = now_s

    def close(self, application: Hashable, name: Hashable) -> None:
        """Forget a run that its tenant has closed, unless a call of it is open."""
        run = self.runs.get((application, name))
        if run is not None and not run.calls:
            self._forget(run)

    @property
    def any_open(self) -> bool:
        """Whether any call is open."""
        return bool(self._of_call)

    def refreshed(
        self, run: Run, now_s: float, produced: Callable[[int], int] | None = None, by: str = "graph"
    ) -> Standing:
        """Return the standing of *run* *by* the knob `run_demand`, drawn again if a call came or ended since, or if its step
        has gathered its calls.
        """
        if run.changed or run.whole_s is None or now_s >= run.gathered_s or run.drawn_by != by:
            run.draw(self.graphs.get(run.application), now_s, self.reading.buckets, by)
        return run.standing(now_s, self.reading, produced)

    def is_stale(self, run: Run, now_s: float, produced: Callable[[int], int]) -> bool:
        """Whether the standing of *run* is to be refreshed: a step has gathered its calls or ended, a bucket was passed, or
        it is late."""
        passed = now_s >= run.gathered_s or now_s > run.late_s
        return run.changed or passed or run.attained_s(produced) >= run.refresh_s

    def forget(self, now_s: float) -> None:
        """Forget runs that have been idle for `Run.idle_s`."""
        for run in [each for each in self.runs.values() if not each.calls and now_s - each.heard_s > each.idle_s]:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        del self.runs[run.application, run.name], self.by_number[run.number]
        for request in run.calls:
            del self._of_call[request]


def follows_runs(policy: EndpointPolicy) -> bool:
    """Whether an endpoint of *policy* orders by application run: its requests, or those inside request groups."""
    ordering = ORDERINGS[policy.ordering]
    return ordering in BY_RUN or (ordering == QLM and GROUP_ORDERS[policy.group_order] == BY_RANK)


def most_learned(demands: Iterable[str]) -> str:
    """Return that of *demands*, values of the knob `run_demand`, which needs the most to be known of an application."""
    return max(demands, key=("graph", "table", "learned").index, default="graph")


def key_in_run(ordering: int, standing: Standing, priority: int, stretch: float) -> float:
    """Return the queue key of a request whose run has that *standing*."""
    began_s, due_s, rank_s, mean_s, worst_s, _ = standing
    return uncompiled(run_key)(ordering, began_s, due_s, priority, rank_s, mean_s, worst_s, stretch)
