"""Errors of what runs are expected to need still, by how many earlier runs of their application are known.

Runs of the workload suite, cut to the demo's context, and ChatDev's, are followed call by call as the process that owns the
queues does; at each LLM call what is expected is compared with what comes. By rule and number of earlier runs: `error`, the
sum of errors over the sum of what came, as the pages have it, and `bias`, the same with signs. Rules: `mean` of earlier
runs less what the run has had; `stage`, the mean left in earlier runs at that execution of the unit; `open`, what the
open calls take, their lengths known exactly; `graph`; `marginal`, the graph without correlations; `as_seen`, the graph with
each step taken to have the calls that have come.

`demo`: the applications of the demo in its mix. `others`: means over the suite's other ones, and ChatDev with the data.
"""

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from scheduling.applications import standings
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, step_service_s
from scheduling.applications.standings import KnownGraph, RunCall, Standings
from scheduling.applications.suite import MIX, SUITE
from tests.bench.applications import CHATDEV, REAL, chatdev

RATE = ServiceRate(0.0158, 8.4e-5, 0.0294)
"""Of the demo's Llama 2 70B, on four H100."""
CONTEXT_TOKENS = 4096
DEMO = [name for name, each in SUITE.items() if each.size in ("small", "medium")]
SHARES = {name: MIX[SUITE[name].size] / sum(SUITE[name].size == SUITE[one].size for one in DEMO) for name in DEMO}
"""Of the demo's runs."""
OTHERS = [name for name in SUITE if name not in DEMO]
SEED = 7
Rates = Mapping[str, ServiceRate]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--known", type=int, nargs="*", default=[1, 3, 5, 10, 30, 100], help="earlier runs")
    parser.add_argument("--repeats", type=int, default=10, help="sets of earlier runs for each of these")
    parser.add_argument("--judged", type=int, default=16, help="runs of each application that are judged by each set")


def drawn(name: str, units: Mapping[str, Backend], count: int, random: np.random.Generator) -> list[RunRecord]:
    """Draw runs as the demo's traffic sends them."""
    records = []
    for _ in range(count):
        steps = []
        for step in SUITE[name].run(random).steps:
            output = min(step.output_tokens, CONTEXT_TOKENS // 3)
            fits = {"output_tokens": output, "input_tokens": min(step.input_tokens, CONTEXT_TOKENS - output)}
            steps.append(msgspec.structs.replace(step, **fits) if units[step.unit].kind == "llm" else step)
        records.append(RunRecord(tuple(steps)))
    return records


def moments(record: RunRecord, takes_s: list[float]) -> Iterator[tuple[float, bool, int, int]]:
    """Yield (moment, whether a call comes or ends, step, number of the call): steps begin as those before them end."""
    children, order, heap = record.children(), 0, list[tuple[float, int, bool, int, int]]()
    open_calls = [step.parallelism for step in record.steps]

    def begin(at: int, now_s: float) -> None:
        nonlocal order
        for moment_s, comes in ((now_s, True), (now_s + takes_s[at], False)):
            for number in range(record.steps[at].parallelism):
                heapq.heappush(heap, (moment_s, order, comes, at, number))
                order += 1

    for at, step in enumerate(record.steps):
        if step.parent < 0:
            begin(at, 0.0)
    while heap:
        moment_s, _, comes, at, number = heapq.heappop(heap)
        yield moment_s, comes, at, number
        open_calls[at] -= not comes
        if not comes and not open_calls[at]:
            for child in children[at]:
                begin(child, moment_s + 0.01)


def followed(
    record: RunRecord, units: Mapping[str, Backend], rates: Rates, graph: KnownGraph | None, number: int
) -> Iterator[tuple[int, float, float, float]]:
    """Yield at each LLM call (step, needed, had, expected), in seconds of service."""
    service_s = [step_service_s(step, units[step.unit], rates[step.unit]) for step in record.steps]
    runs = Standings({} if graph is None else {"": graph})
    takes_s = [each / step.parallelism for each, step in zip(service_s, record.steps, strict=True)]
    for now_s, comes, at, call in moments(record, takes_s):
        step, request = record.steps[at], 1_000 * at + call
        is_llm = units[step.unit].kind == "llm"
        if not comes:
            runs.end(request, step.output_tokens if is_llm else step.duration_s, now_s)
            continue
        tokens = round(step.input_tokens), round(step.output_tokens)
        run = runs.arrive(RunCall(request, "", f"{number}", step.unit, *tokens, rates[step.unit]), now_s)
        run.number = number  # seeds its walks
        if is_llm:
            standing = runs.refreshed(run, now_s)
            yield at, max(0.0, sum(service_s) - standing.attained_s), standing.attained_s, standing.mean_s


def stages(graph: DemandGraph, rates: Rates) -> dict[tuple[str, int], list[float]]:
    """Return what was left in each run when a unit began, by its executions before; -1 for all of them."""
    left_s = defaultdict(list)
    for record in graph.records:
        service_s = [step_service_s(each, graph.units[each.unit], rates[each.unit]) for each in record.steps]
        visits: dict[str, int] = defaultdict(int)
        for at, step in enumerate(record.steps):
            for key in (visits[step.unit], -1):
                left_s[step.unit, key].append(sum(service_s[at:]))
            visits[step.unit] += 1
    return left_s


class Sums:
    """What was needed at all calls, and the errors of each rule, in seconds."""

    def __init__(self) -> None:
        self.needed_s = 0.0
        self.error_s: dict[str, float] = defaultdict(float)
        self.bias_s: dict[str, float] = defaultdict(float)

    def add(self, rule: str, expected_s: float, needed_s: float) -> None:
        self.error_s[rule] += abs(expected_s - needed_s)
        self.bias_s[rule] += expected_s - needed_s

    def take(self, other: "Sums", weight: float) -> None:
        self.needed_s += weight * other.needed_s
        for rule in other.error_s:
            self.error_s[rule] += weight * other.error_s[rule]
            self.bias_s[rule] += weight * other.bias_s[rule]

    def shares(self) -> dict[str, dict[str, float]]:
        return {
            rule: {"error": error_s / self.needed_s, "bias": self.bias_s[rule] / self.needed_s}
            for rule, error_s in self.error_s.items()
        }


def judge(known: DemandGraph, judged: list[RunRecord], rates: Rates, sums: Sums) -> None:
    """Add the errors of each rule at the calls of *judged* runs to *sums*."""
    mean_s, left_s = float(np.mean([known.service_s(each, rates) for each in known.records])), stages(known, rates)
    graphs = {"graph": KnownGraph.of(known, rates), "marginal": KnownGraph.of(known, rates, refined=False)}
    for number, record in enumerate(judged):
        counted: dict[int, int] = {}
        visits: dict[str, int] = defaultdict(int)
        for at, needed_s, had_s, open_s in followed(record, known.units, rates, None, number):
            unit = record.steps[at].unit
            if at not in counted:
                counted[at] = visits[unit]
                visits[unit] += 1
            mean_left_s = max(0.0, mean_s - had_s)
            here = left_s.get((unit, counted[at])) or left_s.get((unit, -1))
            sums.needed_s += needed_s
            sums.add("mean", mean_left_s, needed_s)
            sums.add("stage", float(np.mean(here)) if here else mean_left_s, needed_s)
            sums.add("open", open_s, needed_s)
        for rule, graph in graphs.items():
            for _, needed_s, _, expected_s in followed(record, known.units, rates, graph, number):
                sums.add(rule, expected_s, needed_s)
        with mock.patch.object(standings, "GATHERS_S", 0.0):
            for _, needed_s, _, expected_s in followed(record, known.units, rates, graphs["graph"], number):
                sums.add("as_seen", expected_s, needed_s)


def records_of(name: str, count: int, judged: int, random: np.random.Generator) -> tuple[DemandGraph, list[RunRecord]]:
    """Return the graph of *count* runs of an application, and other ones to be judged; ChatDev has 70 in all."""
    if name not in SUITE:
        real = chatdev()
        assert real is not None
        order = random.permutation(len(real.records)).tolist()
        known, left_out = ([real.records[at] for at in part] for part in (order[judged:][:count], order[:judged]))
        return DemandGraph(name, real.units, known), left_out
    units = SUITE[name].backends("m")
    return DemandGraph(name, units, drawn(name, units, count, random)), drawn(name, units, judged, random)


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    others = [*OTHERS, REAL] if CHATDEV.exists() else OTHERS
    for count in options.known:
        mix, each_of = Sums(), {name: Sums() for name in [*DEMO, *others]}
        for name, sums in each_of.items():
            for repeat in range(options.repeats):
                random = np.random.default_rng([SEED, count, repeat])
                judged = options.judged if name in DEMO else max(1, options.judged // 5)
                known, left_out = records_of(name, count, judged, random)
                rates = {unit: RATE if one.kind == "llm" else ServiceRate() for unit, one in known.units.items()}
                judge(known, left_out, rates, sums)
            mix.take(sums, SHARES.get(name, 0.0))
        shares = {name: sums.shares() for name, sums in each_of.items()}
        rows[f"{count}"] = {
            "demo": mix.shares(),
            "others": {
                rule: {
                    what: float(np.mean([shares[name][rule][what] for name in others])) for what in ("error", "bias")
                }
                for rule in shares[DEMO[0]]
            },
            **shares,
        }
    return rows
