"""Application runs in a simulation: requests come once the steps before them have ended, and runs are ranked as live."""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np

from scheduling.applications.demand_graph import ServiceRate, step_service_s
from scheduling.applications.prewarming import LikelyCall, likely_calls
from scheduling.applications.standings import KnownGraph, RunCall, Standings, follows_runs, rekey_run, runs_waiting
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.engine.state import SEGMENT, sequences_in_use
from scheduling.simulation.workload.requests import Requests
from scheduling.simulation.workload.runs import NOT_ENDED, RunOutcomes, RunsToCome

LOOK_S: Final = 1.0
"""Ranks are refreshed as often as live queues are swept."""


class ApplicationRuns:
    """Call `come` at `next_s`, `note_ends` when requests have ended, and `look` every `LOOK_S`."""

    def __init__(self, cluster: Cluster, requests: Requests, runs: RunsToCome, world: World) -> None:
        self._cluster, self._requests, self._runs = cluster, requests, runs
        graphs: dict[Hashable, KnownGraph] = {at: one.graph for at, one in enumerate(runs.applications) if one.graph}
        self._standings = Standings(graphs, runs.buckets)
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

    def come(self, world: World, now_s: float, arrive: Callable[[int], None]) -> None:
        """Let one request come that is due, or begin or end one other unit."""
        if not self._coming:
            _, _, run, at = heapq.heappop(self._due)
            if self.abandoned[run]:
                return
            if at in self._open[run]:  # a unit that is no LLM has ended
                self._end_step(run, at, now_s)
                return
            step, rows = self._runs.runs[run].record.steps[at], self._rows[run].get(at)
            self._open[run][at] = len(rows or ())
            if not rows:
                heapq.heappush(self._due, (now_s + step.duration_s, self._pushed, run, at))
                self._pushed += 1
                return
            self._coming = rows[::-1]
        request = self._coming.pop()
        self._stand(world, request, now_s)
        arrive(request)

    def end_other_units(self, until_s: float) -> None:
        """End the units that are no LLM and end before *until_s*, once there is no further request."""
        while self._due and self._due[0][0] < until_s:
            moment_s, _, run, at = heapq.heappop(self._due)
            if self.abandoned[run]:
                continue
            if at in self._open[run]:
                self._end_step(run, at, moment_s)
                continue
            self._open[run][at] = 0
            heapq.heappush(
                self._due, (moment_s + self._runs.runs[run].record.steps[at].duration_s, self._pushed, run, at)
            )
            self._pushed += 1

    def _stand(self, world: World, request: int, now_s: float) -> None:
        """Write where the run of *request*, which comes now, stands; its other waiting requests follow."""
        requests, (number, at) = self._requests, self._step_of[request]
        to_come = self._runs.runs[number]
        units = self._runs.applications[to_come.application].units
        weights, tenant = self._cluster.tenant_weights, int(requests.tenant[request])
        rate = self._rates[self._usual[requests.model[request]][requests.region[request]]]
        total_s = None
        if self._runs.exact:
            steps = [step for step in to_come.record.steps if units[step.unit].kind == "llm"]
            total_s = sum(step_service_s(step, units[step.unit], rate) for step in steps)
        call = RunCall(
            request,
            to_come.application,
            number,
            to_come.record.steps[at].unit,
            int(requests.prompt_tokens[request]),
            int(requests.predicted_tokens[request]),
            rate,
            to_come.due_in_s,
            weights[tenant] if tenant < len(weights) else 1.0,
            total_s,
            int(requests.adapter[request]),
            self._usual[requests.model[request]][requests.region[request]],
        )
        run = self._standings.come(call, now_s)
        if not self.by_run:
            return
        standing = self._standings.stand(run, _produced(world, list(run.calls)).__getitem__)
        world.standings[request] = standing[:5]
        rekey_run(world.waiting, number, standing, self._orderings, self._stretches)

    def note_ends(self, world: World, now_s: float) -> int:
        """Take in the requests that ended; return how many requests will never come, of runs that are abandoned by it."""
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

    def look(self, world: World, now_s: float) -> list[int]:
        """Refresh the ranks of runs that wait; return the endpoints whose order may have changed."""
        self._standings.forget(now_s)
        if not self.by_run:
            return []
        produced, changed = _produced(world).__getitem__, False
        for number in runs_waiting(world.waiting, self._at_run_order):
            run = self._standings.runs[self._runs.runs[number].application, number]
            if self._standings.is_stale(run, produced):
                standing = self._standings.stand(run, produced)
                changed |= rekey_run(world.waiting, number, standing, self._orderings, self._stretches) > 0
        return np.flatnonzero(self._at_run_order & (world.waiting.size > 0)).tolist() if changed else []

    def likely_calls(self, world: World, warm_s: Callable[[int], float], k: float, now_s: float) -> list[LikelyCall]:
        """Return the calls with adapters that runs will probably make next (`prewarming.likely_calls`)."""
        return likely_calls(self._standings, _produced(world).__getitem__, warm_s, k, now_s)

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
