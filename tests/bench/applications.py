"""Ranks, walks and predictions of applications, and the error of predictions on ChatDev's runs.

`ranks_3000_ms`: Gittins ranks of 3,000 runs in ten buckets. `monte_carlo_us`: one walk through a graph of 1,000 runs from
the start. `refine_us`: a prediction after a step, of 400 walks. `error_*`: mean error of the service still needed at each
step of runs that the graph was not learned from, as a share of what was needed; by the graph with correlations, without, and
by the mean of a whole run less what it has had. Only with the data.
"""

import argparse
import csv
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scheduling.applications.demand_graph import (
    Backend,
    DemandGraph,
    RunRecord,
    ServiceRate,
    Step,
    demand,
    step_service_s,
)
from scheduling.applications.gittins import buckets, gittins_ranks
from scheduling.applications.remaining import UNKNOWN, Position, build, remaining_s

DATA = Path(os.environ.get("PILOTHOUSE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CHATDEV = DATA / "chatdev_workflows" / "calls.csv"
RATE = ServiceRate(0.01, 2e-5, 0.012)
FOLDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=50, help="timed calls; medians are reported")


def median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def synthetic(runs: int, model: str = "llama") -> DemandGraph:
    """A graph of plan, one to three maps at once, and a loop of checks."""
    random = np.random.default_rng(1)
    graph = DemandGraph("synthetic", {name: Backend("llm", model) for name in ("plan", "map", "check")})
    for _ in range(runs):
        given = random.uniform(50, 400)
        steps = [Step("plan", -1, random.uniform(100, 900), given)]
        steps.append(Step("map", 0, 2 * given, random.uniform(50, 300), 0.0, int(random.integers(1, 4))))
        checks = int(random.integers(1, 4))
        steps += [Step("check", at + 1, given, random.uniform(10, 60)) for at in range(checks)]
        graph.add(RunRecord(tuple(steps)))
    return graph


def at_step(graph: DemandGraph, record: RunRecord, at: int) -> Position:
    """Position of a run whose step *at* was served just now."""
    index = {name: number for number, name in enumerate(graph.units)}
    visits = np.zeros(len(index), np.int64)
    for step in record.steps[:at]:
        visits[index[step.unit]] += 1
    step = record.steps[at]
    before = np.array([len(index)])
    known = np.array([demand(step, graph.units[step.unit])])
    return Position(np.array([index[step.unit]]), before, known, np.zeros((1, 3)), visits)


def chatdev() -> DemandGraph | None:
    if not CHATDEV.exists():
        return None
    calls = defaultdict(list)
    with CHATDEV.open() as lines:
        for row in csv.DictReader(lines):
            calls[row["run_id"]].append(row)
    records = [
        RunRecord(
            tuple(
                Step(row["phase"], at - 1, float(row["prompt_tokens"]), float(row["completion_tokens"]))
                for at, row in enumerate(sorted(rows, key=lambda row: int(row["seq"])))
            )
        )
        for rows in calls.values()
    ]
    units = {step.unit: Backend("llm", "gpt") for record in records for step in record.steps}
    return DemandGraph("chatdev", units, records)


def errors(graph: DemandGraph) -> dict[str, float]:
    """Mean errors over `FOLDS` parts, each predicted by the others, as shares of what was needed."""
    rates, sums = dict.fromkeys(graph.units, RATE), defaultdict(float)
    order = np.random.default_rng(0).permutation(len(graph.records))
    for fold in range(FOLDS):
        judged = [graph.records[number] for number in order[fold::FOLDS]]
        known = [graph.records[number] for at, number in enumerate(order) if at % FOLDS != fold]
        learned = DemandGraph(graph.application, graph.units, known)
        arrays = {"refined": build(learned, rates), "marginal": build(learned, rates, refined=False)}
        whole_s = float(np.mean([graph.service_s(record, rates) for record in known]))
        for record in judged:
            service = [step_service_s(step, graph.units[step.unit], RATE) for step in record.steps]
            for at in range(len(service) - 1):
                needed = sum(service[at + 1 :])
                sums["needed"] += needed
                sums["mean_run"] += abs(max(0.0, whole_s - sum(service[: at + 1])) - needed)
                for name, each in arrays.items():
                    mean_s = remaining_s(each, at_step(learned, record, at), 400, at + 1).mean() - service[at]
                    sums[name] += abs(mean_s - needed)
    return {f"error_{name}": sums[name] / sums["needed"] for name in ("refined", "marginal", "mean_run")}


def run(options: argparse.Namespace) -> dict[str, Any]:
    random = np.random.default_rng(0)
    held = np.stack([buckets(random.lognormal(2.0, 1.0, 200)) for _ in range(3_000)])
    attained, weight = random.uniform(0, 10, 3_000), np.ones(3_000)
    rank, refresh = np.empty(3_000), np.empty(3_000)
    graph = synthetic(1_000)
    rates = dict.fromkeys(graph.units, RATE)
    arrays = build(graph, rates)
    start = Position(
        np.array([0]), np.array([3]), np.full((1, 3), UNKNOWN), np.zeros((1, 3)), np.zeros(3, np.int64)
    )  # fmt: skip
    after = at_step(graph, graph.records[0], 1)
    result: dict[str, Any] = {
        "ranks_3000_ms": 1e3 * median_s(lambda: gittins_ranks(held, attained, weight, rank, refresh), options.repeats),
        "monte_carlo_us": 1e3 * median_s(lambda: remaining_s(arrays, start, 1_000, 1), options.repeats),
        "refine_us": 1e6 * median_s(lambda: remaining_s(arrays, after, 400, 1), options.repeats),
        "build_1000_ms": 1e3 * median_s(lambda: build(graph, rates), 3),
    }
    if real := chatdev():
        result |= errors(real)
    return result
