"""Application runs in a simulation: requests come once the steps before them have ended, and runs are ranked as live."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from scheduling.applications.demand_graph import Backend, ServiceRate, step_service_s
from scheduling.applications.prewarming import LikelyCall, Warmable, due, likely_calls, load_time_s
from scheduling.applications.standings import KnownGraph, RunCall, Standings, follows_runs, rekey_run, runs_waiting
from scheduling.applications.system_prompts import Prompt, PromptPrewarming
from scheduling.applications.warm_pool import WarmBackend, WarmPool
from scheduling.routing.adapters import ON_GPU, tier_of
from scheduling.routing.prefix_affinity import recorded
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.engine.prefix_cache import cached_blocks
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use
from scheduling.simulation.workload.requests import Requests
from scheduling.simulation.workload.runs import NOT_ENDED, RunOutcomes, RunsToCome

LOOK_S: Final = 1.0
"""Ranks are refreshed as often as live queues are swept."""


class ApplicationRuns:
    """Call `release_next` at `next_s`, `record_completions` when requests have ended, and `refresh_ranks` every `LOOK_S`."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: RunsToCome, world: World) -> None:
        self._cluster, self._requests, self._runs = cluster, requests, runs
        graphs: dict[Hashable, KnownGraph] = {at: one.graph for at, one in enumerate(runs.applications) if one.graph}
        self._standings = Standings(graphs, runs.reading)
        self._rates = [ServiceRate.of(cluster.reference_profile(key)) for key in cluster.endpoints]
        self._usual = cluster.nearest()
        codes = world.policies["ordering"].astype(np.int64)
        self._orderings, self._stretches = codes, world.policies["ordering_stretch"].astype(np.float64)
        within = world.waiting.groups.within
        self._at_run_order = np.array(
            [follows_runs(*each) for each in zip(codes.tolist(), within.tolist(), strict=True)]
        )
        rows: dict[int, list[int]] = defaultdict(list)
        for row in np.flatnonzero(requests.run >= 0).tolist():
            rows[int(requests.run[row])].append(row)
        self._rows = [self._rows_of_steps(number, rows[number]) for number in range(len(runs.runs))]
        self._step_of = {
            row: (run, at) for run, steps in enumerate(self._rows) for at, each in steps.items() for row in each
        }
        self._children = [each.record.children() for each in runs.runs]
        self._open: list[dict[int, int]] = [{} for _ in runs.runs]
        """By run: open requests of each step that has begun."""
        self._steps_left = [len(each.record.steps) for each in runs.runs]
        self._due: list[tuple[float, int, int, int]] = []
        """Heap of steps to come, (moment, order, run, step)."""
        self._pushed = 0
        count = len(runs.runs)
        self.ended_s, self.abandoned = np.full(count, NOT_ENDED), np.zeros(count, np.bool_)
        self._coming: list[int] = []
        """Requests that come now, last first."""
        self.pools = {
            kind: WarmPool(terms.capacity, terms.keep_alive_s, shared=kind == "dnn")
            for kind, terms in cluster.backends.items()
        }
        """Non-LLM backends (containers, DNN models), by kind; those of a kind without a pool are always warm."""
        self.prompts: dict[tuple[str, int], int] = {}
        """A request with each system prompt that calls share, by the prompt and its version."""
        self._block_tokens = min(cluster.cached_block_sizes(), default=0)
        if requests.prefix_first.size and self._block_tokens:
            for row in np.flatnonzero((requests.run >= 0) & (np.diff(requests.prefix_first) > 0)).tolist():
                self.prompts.setdefault(self.prompt_of(row), row)
        self.known_prompts = PromptPrewarming()
        """What calls have shown of the prompts of units, and where these are warmed."""
        self.came: Counter[str] = Counter()
        """Calls that need an adapter or share a system prompt, and those that had it warm when they came."""
        self._others: dict[tuple[int, int], list[tuple[int, WarmBackend | None]]] = {}
        """Calls of steps in progress whose units are no LLM, with their backends."""
        self._other_calls = 0
        for number, run in enumerate(runs.runs):
            self._begin_steps(number, [at for at, step in enumerate(run.record.steps) if step.parent < 0], run.began_s)

    def _rows_of_steps(self, number: int, rows: list[int]) -> dict[int, list[int]]:
        """Return the requests of each LLM step of run *number*. Raises ValueError if there are not as many as it has."""
        run, given = self._runs.runs[number], iter(rows)
        units = self._runs.applications[run.application].units
        steps = {
            at: [row for _, row in zip(range(step.parallelism), given, strict=False)]
            for at, step in enumerate(run.record.steps)
            if units[step.unit].kind == "llm"
        }
        if sum(map(len, steps.values())) != len(rows) or any(
            len(steps[at]) != run.record.steps[at].parallelism for at in steps
        ):
            raise ValueError(f"run {number} has {len(rows)} requests, not one for each call of its record")
        return steps

    @property
    def by_run(self) -> bool:
        """Whether any endpoint orders by run."""
        return bool(self._at_run_order.any())

    @property
    def active(self) -> bool:
        """Whether any request of a run waits or runs."""
        return self._standings.any_open

    def next_s(self) -> float:
        """Return when the next request comes, or the next other unit begins or ends; infinity for never."""
        return -math.inf if self._coming else self._due[0][0] if self._due else math.inf

    def _begin_steps(self, run: int, steps: list[int], now_s: float) -> None:
        for at in steps:
            heapq.heappush(self._due, (now_s, self._pushed, run, at))
            self._pushed += 1

    def release_next(self, world: World, now_s: float, arrive: Callable[[int], None]) -> None:
        """Release one request that is due, or begin or end one other unit."""
        if not self._coming:
            _, _, run, at = heapq.heappop(self._due)
            if at not in self._rows[run]:
                self._other_step(run, at, now_s)
                return
            if self.abandoned[run]:
                return
            rows = self._rows[run][at]
            self._open[run][at] = len(rows)
            self._coming = rows[::-1]
        request = self._coming.pop()
        self._note_warm(world, request)
        self._note_prompt(request)
        self._update_standing(world, request, now_s)
        arrive(request)

    def _note_warm(self, world: World, request: int) -> None:
        """Count whether *request*, which comes now, has its adapter on a GPU and its system prompt in a cache."""
        adapter, first = int(self._requests.adapter[request]), self._requests.prefix_first
        blocks = int(first[request + 1] - first[request]) if self.prompts else 0
        if adapter < 0 and not blocks:
            return
        endpoint, endpoints = self._endpoint(request), world.endpoints
        members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]].tolist()
        if adapter >= 0:
            self.came["adapter_came"] += 1
            self.came["adapter_came_warm"] += any(tier_of(world.fleet, at, adapter) == ON_GPU for at in members)
        if blocks:
            cached = (cached_blocks(world.engines, at, int(first[request]), blocks) for at in members)
            self.came["prefix_came"] += 1
            self.came["prefix_came_warm"] += any(each == blocks for each in cached)

    def _note_prompt(self, request: int) -> None:
        """Note the system prompt of *request*, which comes now. Each version counts as another application."""
        if not self.prompts or (known := self.prompts.get(name := self.prompt_of(request))) is None:
            return
        number, at = self._step_of[request]
        run, first = self._runs.runs[number], self._requests.prefix_first
        blocks = recorded(self._requests.prefix_hashes[first[known] : first[known + 1]])
        if blocks:
            model = self._cluster.models[int(self._requests.model[request])]
            prompt = Prompt(blocks, self._block_tokens, model, int(self._requests.adapter[request]))
            unit = run.application, run.prompts, run.record.steps[at].unit
            self.known_prompts.come(name, prompt, unit)

    def end_other_units(self, until_s: float) -> None:
        """End the units that are no LLM and end before *until_s*, once there is no further request."""
        while self._due and self._due[0][0] < until_s:
            moment_s, _, run, at = heapq.heappop(self._due)
            self._other_step(run, at, moment_s)

    def _other_step(self, run: int, at: int, now_s: float) -> None:
        """Begin or end a step of a unit that is no LLM, as its tenant would report it: after its cold start, if any."""
        to_come = self._runs.runs[run]
        step = to_come.record.steps[at]
        backend = self._runs.applications[to_come.application].units[step.unit]
        pool = self.pools.get(backend.kind)
        if (calls := self._others.pop((run, at), None)) is not None:
            for number, taken in calls:
                self._standings.end(number, step.duration_s, now_s)
                if pool is not None and taken is not None:
                    pool.give_back(taken, now_s)
            if not self.abandoned[run]:
                self._end_step(run, at, now_s)
            return
        if self.abandoned[run]:
            return
        self._open[run][at] = 0
        calls, ready_s = [], now_s
        call = self._with_run(RunCall(0, to_come.application, run, step.unit, 0, 0, ServiceRate()), run)
        for _ in range(step.parallelism):
            self._other_calls += 1
            self._standings.come(call._replace(request=-self._other_calls), now_s)
            taken = None
            if pool is not None:
                taken = pool.take(backend.name, self._cluster.backends[backend.kind].warm_s(backend.name), now_s)
                ready_s = max(ready_s, taken.ready_s)
            calls.append((-self._other_calls, taken))
        self._others[run, at] = calls
        heapq.heappush(self._due, (ready_s + step.duration_s, self._pushed, run, at))
        self._pushed += 1

    def _with_run(self, call: RunCall, run: int) -> RunCall:
        """Return *call* with what is known of its *run*: when it is due, its weight, and to an oracle its service."""
        requests, to_come = self._requests, self._runs.runs[run]
        request = next((rows[0] for rows in self._rows[run].values()), None)
        if request is None:
            return call._replace(due_in_s=to_come.due_in_s)
        weights, tenant = self._cluster.tenant_weights, int(requests.tenant[request])
        total_s = None
        if self._runs.exact:
            units, region = self._runs.applications[to_come.application].units, int(requests.region[request])
            total_s = sum(
                step_service_s(step, unit, self._rate(unit, region))
                for step in to_come.record.steps
                for unit in (units[step.unit],)
            )
        weight = weights[tenant] if tenant < len(weights) else 1.0
        return call._replace(due_in_s=to_come.due_in_s, weight=weight, total_s=total_s)

    def _rate(self, unit: Backend, region: int) -> ServiceRate:
        """Return the rate at which *unit* is served for callers in *region*."""
        if unit.kind != "llm":
            return ServiceRate()
        return self._rates[self._usual[self._cluster.models.index(unit.name)][region]]

    def _endpoint(self, request: int) -> int:
        """Return the endpoint that the caller of *request* prefers."""
        return int(self._usual[self._requests.model[request]][self._requests.region[request]])

    def _update_standing(self, world: World, request: int, now_s: float) -> None:
        """Write the progress of the run of *request*, which arrives now; its other waiting requests follow."""
        requests, (number, at) = self._requests, self._step_of[request]
        to_come, endpoint = self._runs.runs[number], self._endpoint(request)
        call = RunCall(
            request,
            to_come.application,
            number,
            to_come.record.steps[at].unit,
            int(requests.prompt_tokens[request]),
            int(requests.predicted_tokens[request]),
            self._rates[endpoint],
            adapter=int(requests.adapter[request]),
            endpoint=endpoint,
        )
        run = self._standings.come(self._with_run(call, number), now_s)
        if not self.by_run:
            return
        standing = self._standings.stand(run, now_s, _produced(world, list(run.calls)).__getitem__)
        world.standings[request] = standing[:5]
        rekey_run(world.waiting, number, standing, self._orderings, self._stretches)

    def record_completions(self, world: World, now_s: float) -> int:
        """Record the requests that ended; return how many requests will never arrive, of runs that are abandoned by it."""
        run_state: Any = world.run_state[0]
        ended = world.ended_in_runs[run_state.seen_in_runs : run_state.ended_in_runs].tolist()
        run_state.seen_in_runs = run_state.ended_in_runs
        dropped = 0
        for request in ended:
            run, at = self._step_of[request]
            done = world.outcomes[request]["state"] == Outcome.DONE
            self._standings.end(request, int(self._requests.output_tokens[request]) if done else None, now_s)
            if not done:
                dropped += self._abandon(world, run)
            elif not self.abandoned[run]:
                self._open[run][at] -= 1
                if not self._open[run][at]:
                    self._end_step(run, at, now_s)
        return dropped

    def _end_step(self, run: int, at: int, now_s: float) -> None:
        self._steps_left[run] -= 1
        self._begin_steps(run, self._children[run][at], now_s)
        if not self._steps_left[run]:
            self.ended_s[run] = now_s

    def _abandon(self, world: World, run: int) -> int:
        """Give up *run*: the steps that have not begun never come. Return their requests."""
        if self.abandoned[run]:
            return 0
        self.abandoned[run] = True
        later = [row for at, rows in self._rows[run].items() if at not in self._open[run] for row in rows]
        later += [row for row in self._coming if self._step_of[row][0] == run]
        self._coming = [row for row in self._coming if self._step_of[row][0] != run]
        world.outcomes["state"][later] = Outcome.REFUSED
        return len(later)

    def refresh_ranks(self, world: World, now_s: float) -> list[int]:
        """Refresh the ranks of runs that wait; return the endpoints whose order may have changed."""
        self._standings.forget(now_s)
        if not self.by_run:
            return []
        produced, changed = _produced(world).__getitem__, False
        for number in runs_waiting(world.waiting, self._at_run_order):
            run = self._standings.runs[self._runs.runs[number].application, number]
            if self._standings.is_stale(run, now_s, produced):
                standing = self._standings.stand(run, now_s, produced)
                changed |= rekey_run(world.waiting, number, standing, self._orderings, self._stretches) > 0
        return np.flatnonzero(self._at_run_order & (world.waiting.size > 0)).tolist() if changed else []

    def prompt_of(self, request: int) -> tuple[str, int]:
        """Return the system prompt of *request*, a call of a run, and its version."""
        number, at = self._step_of[request]
        run = self._runs.runs[number]
        return self._runs.applications[run.application].units[run.record.steps[at].unit].prompt, run.prompts

    def _endpoint_after(self, before: RunCall, model: str) -> int:
        """Return the endpoint of *model* that the caller of *before* prefers; -1 where nothing is known of that."""
        own = before.endpoint
        if own < 0 or self._cluster.endpoints[own][0] == model or model not in self._cluster.models:
            return own
        region = self._cluster.regions.index(self._cluster.endpoints[own][1])
        return self._usual[self._cluster.models.index(model)][region]

    def likely_calls(self, world: World, now_s: float, sleeping: Mapping[int, float]) -> list[LikelyCall]:
        """Return likely next calls (`prewarming.likely_calls`); *sleeping*: seconds to wake endpoints without one."""

        def needs(before: RunCall, unit: str, backend: Backend) -> Iterator[tuple[Warmable, float]]:
            if backend.kind == "llm" and before.adapter >= 0:
                load_s = load_time_s(world.fleet, world.endpoints, before.endpoint)
                yield Warmable("adapter", before.adapter, before.endpoint), load_s
            endpoint = self._endpoint_after(before, backend.name) if backend.kind == "llm" else -1
            if endpoint in sleeping:
                yield Warmable("model", backend.name, endpoint), sleeping[endpoint]
            elif (
                endpoint >= 0
                and isinstance(before.run, int)
                and int(world.policies[endpoint]["routing"]) == LEAST_DELAY
            ):
                name = prompts.of_unit((before.application, self._runs.runs[before.run].prompts, unit))
                if name is not None and prompts.is_cold(fleet, endpoints, world.affinity, endpoint, name):
                    profile = self._cluster.reference_profile(self._cluster.endpoints[endpoint])
                    yield Warmable("prefix", name, endpoint), prompts.known[name].prefill_s(profile)
            elif backend.kind in ("container", "dnn") and backend.kind in self.pools:
                terms = self._cluster.backends[backend.kind]
                yield Warmable(backend.kind, backend.name), terms.warm_s(backend.name)

        prompts, fleet, endpoints = self.known_prompts, world.fleet, world.endpoints
        k, produced = self._cluster.prewarm_k, _produced(world).__getitem__
        return likely_calls(self._standings, produced, needs, k, now_s)

    def prewarm(self, likely: Iterable[LikelyCall], now_s: float) -> None:
        """Warm as many containers and DNN models as *likely* calls need."""
        for kind, pool in self.pools.items():
            wanted = Counter[str]()
            for call in due(likely, kind):
                wanted[str(call.target.name)] += call.calls
            for name, count in wanted.items():
                pool.warm(name, self._cluster.backends[kind].warm_s(name), now_s, count)

    def counters(self, now_s: float) -> dict[str, int]:
        """Return warm hits of calls, and outcomes of prewarmed containers and DNN models."""
        counts = dict(self.came)
        for kind, pool in self.pools.items():
            pool.look(now_s)
            counts |= {f"{kind}_{name}": count for name, count in pool.counts.items()}
            counts |= {f"{kind}_idle_s": round(pool.idle_s(now_s)), f"{kind}_waited_s": round(pool.waited_s)}
        return counts

    def outcomes(self) -> RunOutcomes:
        runs = self._runs.runs
        began_s = np.array([each.began_s for each in runs])
        return RunOutcomes(
            names=[each.name for each in self._runs.applications],
            application=np.array([each.application for each in runs], np.int64),
            began_s=began_s,
            due_s=began_s + [each.due_in_s for each in runs],
            ended_s=self.ended_s,
            abandoned=self.abandoned,
        )


def _produced(world: World, wanted: list[int] | None = None) -> "defaultdict[int, int]":
    """Return the output tokens of each request that an instance has, of *wanted* ones alone if these are given.

    The fleet arrays must be up to date.
    """
    engines, produced = world.engines, defaultdict[int, int](int)
    sequences: Any = engines.sequences
    at = sequences_in_use(engines)
    if wanted is not None:
        at = at[np.isin(sequences["request"][at], wanted)]
        if not at.size:
            return produced
    these: Any = sequences[at]
    engine: Any = engines.instances[these["instance"]]
    iteration = engine["iteration"] + np.where(engine["phase"] == SEGMENT, engine["counted"], 0)
    tokens = np.where(these["decoding"] != 0, iteration + these["offset"], these["produced_tokens"])
    produced.update(zip(these["request"].tolist(), np.where(these["streaming"] != 0, tokens, 0).tolist(), strict=True))
    return produced
