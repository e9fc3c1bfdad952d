"""Application runs in a simulation: their calls arrive once the steps before them have ended."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from scheduling.applications.demand_graph import Backend, ServiceRate, step_service_s
from scheduling.applications.standings import KnownGraph, RunCall
from scheduling.applications.warm_pool import WarmBackend, WarmPool
from scheduling.control.prewarming import Prewarming
from scheduling.control.runs import REFRESH_S, Runs
from scheduling.control.system_prompts import Prompt
from scheduling.routing.adapters import ON_GPU, tier_of
from scheduling.routing.prefix_affinity import recorded
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.engine.prefix_cache import cached_blocks
from scheduling.simulation.simulated_fleet import SimulatedFleet
from scheduling.simulation.workload.runs import NOT_ENDED, RunOutcomes, RunsToCome


class ReleasedCalls:
    """Call `release_next` at `next_s`, `record_completions` when requests have ended, and `refresh_ranks` at `refresh_s`.

    An application is its number and a version of its system prompts. Raises ValueError if *runs* do not match the requests
    of *fleet*.
    """

    def __init__(self, fleet: SimulatedFleet, runs: RunsToCome) -> None:
        self._fleet, self._runs, self._requests = fleet, runs, fleet.requests
        self._cluster, requests = fleet.simulation.cluster, fleet.requests
        versions = {(each.application, each.prompts) for each in runs.runs}
        graphs: dict[Hashable, KnownGraph] = {key: one for key in versions if (one := runs.applications[key[0]].graph)}
        self.control = Runs(fleet, graphs, runs.reading)
        self.prewarming = Prewarming(fleet, self.control, self._cluster.prewarming)
        self.by_run = bool(self.control.by_run().any())
        """Whether any endpoint orders by run."""
        self._rates = [ServiceRate.of(endpoint.profile) for endpoint in fleet.endpoints]
        rows: dict[int, list[int]] = defaultdict(list)
        for row in np.flatnonzero(requests.run >= 0).tolist():
            rows[int(requests.run[row])].append(row)
        self._rows = [self._rows_of_steps(number, rows[number]) for number in range(len(runs.runs))]
        self._step_of = {
            row: (run, at) for run, steps in enumerate(self._rows) for at, each in steps.items() for row in each
        }
        self._followers: list[list[list[int]]] = []
        self._awaited: list[list[int]] = []
        """By run and step: steps that have not ended and must before it begins."""
        self._open: list[dict[int, int]] = [{} for _ in runs.runs]
        """By run: open requests of each step that has begun."""
        self._steps_left = [len(each.record.steps) for each in runs.runs]
        self._due: list[tuple[float, int, int, int]] = []
        """Heap of later steps, (moment, order, run, step)."""
        self._pushed = 0
        count = len(runs.runs)
        self.ended_s, self.abandoned = np.full(count, NOT_ENDED), np.zeros(count, np.bool_)
        self._arriving: list[int] = []
        """Requests that arrive now, last first."""
        self.pools = {
            kind: WarmPool(terms.capacity, terms.keep_alive_s, shared=kind == "dnn")
            for kind, terms in self._cluster.backends.items()
        }
        """Non-LLM backends (containers, DNN models), by kind; those of a kind without a pool are always warm."""
        self.prompts: dict[tuple[str, int], int] = {}
        """A request with each system prompt that calls share, by the prompt and its version."""
        self._block_tokens = min(self._cluster.cached_block_sizes(), default=0)
        shares = bool(requests.prefix_first.size and self._block_tokens)
        # Of recorded calls it is not known how much of a prefix is the system prompt.
        drawn = np.array([each.after is None for each in runs.runs])[requests.run] & (requests.run >= 0)
        self._shares = drawn & (np.diff(requests.prefix_first) > 0) if shares else None
        for row in np.flatnonzero(self._shares).tolist() if self._shares is not None else ():
            self.prompts.setdefault(self._prompt_of(row), row)
        self._arrived: Counter[str] = Counter()
        """Calls that need an adapter or share a system prompt, and those that had it warm when they arrived."""
        self._others: dict[tuple[int, int], list[tuple[int, WarmBackend | None]]] = {}
        """Calls of steps in progress whose units are no LLM, with their backends."""
        self._other_calls = 0
        for number, run in enumerate(runs.runs):
            followers: list[list[int]] = [[] for _ in run.record.steps]
            for at, before in enumerate(run.follows):
                for each in before:
                    followers[each].append(at)
            self._followers.append(followers)
            self._awaited.append([len(before) for before in run.follows])
            self._begin_steps(number, [at for at, before in enumerate(run.follows) if not before], run.began_s)

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

    def next_s(self) -> float:
        """Return when the next request arrives, or the next other unit begins or ends; infinity for never."""
        return -math.inf if self._arriving else self._due[0][0] if self._due else math.inf

    def refresh_s(self, now_s: float) -> float:
        """Return when ranks are refreshed next; infinity while there are none."""
        active = self.by_run and self.control.standings.any_open
        return (now_s // REFRESH_S + 1) * REFRESH_S if active else math.inf

    def refresh_ranks(self) -> list[int]:
        """Refresh the ranks of runs that wait; return the endpoints whose order may have changed."""
        return self.control.refresh_ranks(self._runs.reading)

    def _begin_steps(self, run: int, steps: list[int], now_s: float) -> None:
        gap_s = self._runs.runs[run].gap_s
        for at in steps:
            self._push(now_s + gap_s[at] if gap_s else now_s, run, at)

    def _push(self, moment_s: float, run: int, at: int) -> None:
        heapq.heappush(self._due, (moment_s, self._pushed, run, at))
        self._pushed += 1

    def release_next(self, world: World, now_s: float, arrive: Callable[[int], None]) -> None:
        """Release one request that is due, or begin or end one other unit."""
        if not self._arriving:
            _, _, run, at = heapq.heappop(self._due)
            if at not in self._rows[run]:
                self._other_step(run, at, now_s)
                return
            if self.abandoned[run]:
                return
            rows = self._rows[run][at]
            self._open[run][at] = len(rows)
            self._arriving = rows[::-1]
        row = self._arriving.pop()
        number, at = self._step_of[row]
        adapter, endpoint = int(self._requests.adapter[row]), self._endpoint(row)
        if adapter >= 0 or self.prompts:
            self._count_warm(world, row, adapter, endpoint)
            self._record_prompt(row, adapter)
        call = self._call(number, at)._replace(
            request=row,
            prompt_tokens=int(self._requests.prompt_tokens[row]),
            predicted_tokens=int(self._requests.predicted_tokens[row]),
            rate=self._rates[endpoint],
            adapter=adapter,
            endpoint=endpoint,
        )
        self._requests.run[row] = self.control.arrive(call, now_s).number
        arrive(row)

    def _count_warm(self, world: World, row: int, adapter: int, endpoint: int) -> None:
        """Count whether the request of *row*, which arrives, has its adapter on a GPU and its system prompt in a cache."""
        members = world.endpoints.members[slice(*world.endpoints.first[endpoint : endpoint + 2])].tolist()
        if adapter >= 0:
            self._arrived["adapter_came"] += 1
            self._arrived["adapter_came_warm"] += any(tier_of(world.fleet, at, adapter) == ON_GPU for at in members)
        if self.system_prompt(row) is not None:
            first, last = self._requests.prefix_first[row : row + 2].tolist()
            cached = (cached_blocks(world.engines, at, first, last - first) for at in members)
            self._arrived["prefix_came"] += 1
            self._arrived["prefix_came_warm"] += any(each == last - first for each in cached)

    def _record_prompt(self, row: int, adapter: int) -> None:
        if (known := self.prompts.get(name := self._prompt_of(row))) is None:
            return
        number, at = self._step_of[row]
        run, (first, last) = self._runs.runs[number], self._requests.prefix_first[known : known + 2]
        if blocks := recorded(self._requests.prefix_hashes[first:last]):
            model = self._fleet.models[int(self._requests.model[row])]
            unit = (run.application, run.prompts), run.record.steps[at].unit
            self.prewarming.prompts.record(name, Prompt(blocks, self._block_tokens, model, adapter), unit)

    def end_other_units(self, until_s: float) -> None:
        """End the units that are no LLM and end before *until_s*, once there is no further request."""
        while self._due and self._due[0][0] < until_s:
            moment_s, _, run, at = heapq.heappop(self._due)
            self._other_step(run, at, moment_s)

    def _other_step(self, run: int, at: int, now_s: float) -> None:
        """Begin or end a step of a unit that is no LLM, as its tenant would report it: after its cold start, if any."""
        record, standings = self._runs.runs[run], self.control.standings
        step = record.record.steps[at]
        backend = self._runs.applications[record.application].units[step.unit]
        pool = self.pools.get(backend.kind)
        if (calls := self._others.pop((run, at), None)) is not None:
            for number, taken in calls:
                standings.end(number, step.duration_s, now_s)
                if pool is not None and taken is not None:
                    pool.release(taken, now_s)
            if not self.abandoned[run]:
                self._end_step(run, at, now_s)
            return
        if self.abandoned[run]:
            return
        self._open[run][at] = 0
        calls, ready_s, call = [], now_s, self._call(run, at)
        for _ in range(step.parallelism):
            self._other_calls += 1
            standings.arrive(call._replace(request=-self._other_calls), now_s)
            taken = None
            if pool is not None:
                taken = pool.use(backend.name, self._cluster.backends[backend.kind].warm_s(backend.name), now_s)
                ready_s = max(ready_s, taken.ready_s)
            calls.append((-self._other_calls, taken))
        self._others[run, at] = calls
        self._push(ready_s + step.duration_s, run, at)

    def _call(self, run: int, at: int) -> RunCall:
        """Return a call of the unit of step *at* of *run*, with what is known of that: when it is due, its weight, and to an
        oracle its service.
        """
        record, requests, weights = self._runs.runs[run], self._requests, self._cluster.tenant_weights
        call = RunCall(
            0, (record.application, record.prompts), run, record.record.steps[at].unit, 0, 0, ServiceRate(), record.due_in_s
        )  # fmt: skip
        row = next((rows[0] for rows in self._rows[run].values()), None)
        if row is None:
            return call
        tenant, total_s = int(requests.tenant[row]), None
        if self._runs.exact:
            units, region = self._runs.applications[record.application].units, int(requests.region[row])
            total_s = sum(
                step_service_s(step, unit, self._rate(unit, region))
                for step in record.record.steps
                for unit in (units[step.unit],)
            )
        return call._replace(weight=weights[tenant] if tenant < len(weights) else 1.0, total_s=total_s)

    def _rate(self, unit: Backend, region: int) -> ServiceRate:
        """Return the rate at which *unit* is served for callers in *region*."""
        if unit.kind != "llm":
            return ServiceRate()
        return self._rates[self._fleet.preferred(unit.name, self._cluster.regions[region])]

    def _endpoint(self, row: int) -> int:
        """Return the endpoint that the caller of the request of *row* prefers."""
        model, region = int(self._requests.model[row]), int(self._requests.region[row])
        return self._fleet.preferred(self._fleet.models[model], self._cluster.regions[region])

    def record_completions(self, world: World, now_s: float) -> int:
        """Record the requests that ended; return how many requests will never arrive, of runs that are abandoned by it."""
        run_state: Any = world.run_state[0]
        ended = world.ended_in_runs[run_state.seen_in_runs : run_state.ended_in_runs].tolist()
        run_state.seen_in_runs = run_state.ended_in_runs
        dropped = 0
        for request in ended:
            run, at = self._step_of[request]
            done = world.outcomes[request]["state"] == Outcome.DONE
            self.control.end(request, int(self._requests.output_tokens[request]) if done else None)
            if not done and not (at in self._runs.runs[run].failed and self._followers[run][at]):
                dropped += self._abandon(world, run)
            elif not self.abandoned[run]:
                self._open[run][at] -= 1
                if not self._open[run][at]:
                    self._end_step(run, at, now_s)
        return dropped

    def _end_step(self, run: int, at: int, now_s: float) -> None:
        self._steps_left[run] -= 1
        for each in self._followers[run][at]:
            self._awaited[run][each] -= 1
        self._begin_steps(run, [each for each in self._followers[run][at] if not self._awaited[run][each]], now_s)
        if not self._steps_left[run]:
            self.ended_s[run] = now_s

    def _abandon(self, world: World, run: int) -> int:
        """Give up *run*: the steps that have not begun never arrive. Return their requests."""
        if self.abandoned[run]:
            return 0
        self.abandoned[run] = True
        later = [row for at, rows in self._rows[run].items() if at not in self._open[run] for row in rows]
        later += [row for row in self._arriving if self._step_of[row][0] == run]
        self._arriving = [row for row in self._arriving if self._step_of[row][0] != run]
        world.outcomes["state"][later] = Outcome.REFUSED
        return len(later)

    def system_prompt(self, row: int) -> tuple[str, int] | None:
        """Return the system prompt of the request of *row*, and its version; None for one that no calls share."""
        return self._prompt_of(row) if self._shares is not None and self._shares[row] else None

    def _prompt_of(self, row: int) -> tuple[str, int]:
        number, at = self._step_of[row]
        run = self._runs.runs[number]
        return self._runs.applications[run.application].units[run.record.steps[at].unit].prompt, run.prompts

    def counters(self, now_s: float) -> dict[str, int]:
        """Return warm hits of calls, and outcomes of prewarmed containers and DNN models."""
        counts = dict(self._arrived)
        for kind, pool in self.pools.items():
            pool.expire(now_s)
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
