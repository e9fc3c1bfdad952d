"""Ranks, walks and predictions of applications, and the error of predictions on ChatDev's runs.

`ranks_3000_ms`: Gittins ranks of 3,000 runs in ten buckets. `monte_carlo_us`: one walk through a graph of 1,000 runs from
the start. `refine_us`: a prediction after a step, of 400 walks. `error_*`: mean error of the service still needed at each
step of runs that the graph was not learned from, as a share of what was needed; by the graph with correlations, without, and
by the mean of a whole run less what it has had. Only with the data.

`worth`: completion times by the mean left of recorded runs that had as much service, and by the true service, against
those by Gittins rank: runs of the workload suite, of ChatDev, or of both by halves come to a server of one place at load
0.85, and of twenty at load 2, as in the evaluation. With the share of the variance of the logarithm of service that names
explain.
"""

import argparse
import csv
import heapq
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
from scheduling.applications.remaining import UNKNOWN, Position, build, remaining
from scheduling.applications.suite import SUITE, mixed

DATA = Path(os.environ.get("PILOTHOUSE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CHATDEV = DATA / "chatdev_workflows" / "calls.csv"
RATE = ServiceRate(0.01, 2e-5, 0.012)
FOLDS = 5
RUNS, SEEDS = 150, 6
LOADS = {1: 0.85, 20: 2.0}
REAL = "ChatDev"


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
                    mean_s = remaining(each, at_step(learned, record, at), 400, at + 1).service_s.mean() - service[at]
                    sums[name] += abs(mean_s - needed)
    return {f"error_{name}": sums[name] / sums["needed"] for name in ("refined", "marginal", "mean_run")}


def services_s(name: str, count: int, seed: int) -> np.ndarray:
    """Service of *count* runs of an application of the suite."""
    random, units = np.random.default_rng(seed), SUITE[name].backends("llama")
    rates = {"llm": RATE}
    return np.array(
        [
            sum(
                step_service_s(step, units[step.unit], rates.get(units[step.unit].kind, ServiceRate()))
                for step in SUITE[name].run(random).steps
            )
            for _ in range(count)
        ]
    )


def explained(names: list[str], sizes_s: np.ndarray) -> float:
    """Share of the variance of the logarithm of service that is between applications."""
    logs, of = np.log(sizes_s), np.array(names)
    within = sum(((logs[of == name] - logs[of == name].mean()) ** 2).sum() for name in set(names))
    return float(1 - within / ((logs - logs.mean()) ** 2).sum())


def completion_s(places: int, step_s: float, key: Callable[[int, float], float], begins_s: Any, sizes_s: Any) -> float:
    """Mean completion time where the *places* runs of the least keys, by number and attained service, are served at once."""
    had_s, ended_s, here, coming, now_s = np.zeros(len(sizes_s)), np.full(len(sizes_s), np.nan), [], 0, 0.0
    while np.isnan(ended_s).any():
        while coming < len(sizes_s) and begins_s[coming] <= now_s:
            here.append(coming)
            coming += 1
        if not here:
            now_s = begins_s[coming]
        for _, one in heapq.nsmallest(places, ((key(one, had_s[one]), one) for one in here)):
            had_s[one] += step_s
            if had_s[one] >= sizes_s[one]:
                ended_s[one] = now_s + step_s
                here.remove(one)
        now_s += step_s
    return float((ended_s - begins_s).mean())


def worth(real: DemandGraph) -> list[dict[str, Any]]:
    """A row for each mix of runs and number of places."""
    rates = dict.fromkeys(real.units, RATE)
    chatdev_s = np.array([real.service_s(record, rates) for record in real.records])
    known = {REAL: np.sort(chatdev_s)} | {name: np.sort(services_s(name, 1_000, 1)) for name in SUITE}

    def drawn(share: float, seed: int) -> tuple[list[str], np.ndarray]:
        random = np.random.default_rng(100 + seed)
        names = [REAL if random.random() < share else name for name in mixed(RUNS, random)]
        pools = {name: services_s(name, 400, 1_000 + seed) for name in set(names) - {REAL}} | {REAL: chatdev_s}
        return names, np.array([random.choice(pools[name]) for name in names])

    rows = []
    for title, share in (("suite", 0.0), ("suite and ChatDev", 0.5), ("ChatDev", 1.0)):
        for places, load in LOADS.items():
            times_s, shares = [], []
            for seed in range(SEEDS):
                names, sizes_s = drawn(share, seed)
                step_s = float(np.median(sizes_s)) / 20
                gaps_s = np.random.default_rng(200 + seed).exponential(sizes_s.mean() / load / places, RUNS)
                attained_s = np.arange(0.0, 1.5 * max(each[-1] for each in known.values()), step_s)
                ranks = {name: np.empty((2, attained_s.size)) for name in set(names)}
                for name, into in ranks.items():
                    held = np.repeat(buckets(known[name])[None], attained_s.size, 0)
                    gittins_ranks(held, attained_s, np.ones(attained_s.size), into[0], into[1])

                def gittins(
                    one: int, had_s: float, names: Any = names, ranks: Any = ranks, step_s: float = step_s
                ) -> float:
                    return float(ranks[names[one]][0, min(round(had_s / step_s), ranks[names[one]].shape[1] - 1)])

                def mean_left(one: int, had_s: float, names: Any = names) -> float:
                    left_s = known[names[one]][np.searchsorted(known[names[one]], had_s, "right") :]
                    return float(left_s.mean() - had_s) if left_s.size else had_s

                def true(one: int, had_s: float, sizes_s: Any = sizes_s) -> float:
                    return float(sizes_s[one] - had_s)

                times_s.append(
                    [
                        completion_s(places, step_s, key, np.cumsum(gaps_s), sizes_s)
                        for key in (gittins, mean_left, true)
                    ]
                )
                shares.append(explained(names, sizes_s))
            hermes_s, mean_s, true_s = np.array(times_s).T
            row = {
                "runs": title,
                "places": places,
                "named": float(np.mean(shares)),
                "gittins_s": float(hermes_s.mean()),
            }
            for name, other_s in (("mean_left", mean_s), ("true", true_s)):
                changes = other_s / hermes_s - 1
                row |= {name: float(changes.mean()), f"{name}_half": float(1.96 * changes.std(ddof=1) / SEEDS**0.5)}
            rows.append(row)
    return rows


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
        "monte_carlo_us": 1e3 * median_s(lambda: remaining(arrays, start, 1_000, 1), options.repeats),
        "refine_us": 1e6 * median_s(lambda: remaining(arrays, after, 400, 1), options.repeats),
        "build_1000_ms": 1e3 * median_s(lambda: build(graph, rates), 3),
    }
    if real := chatdev():
        result |= errors(real) | {"worth": worth(real)}
    return result
