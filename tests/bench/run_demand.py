"""What runs are predicted to need still, by recorded agent workflows that are left out.

Runs of ChatDev (GPT-3.5 and 4) and tau-bench's airline (GPT-4o), call by call. Tasks are dealt into `FOLDS` parts for each
seed; each part is judged by what was learned from the others. `r2` and `rank` (Spearman) compare, at each call as it
comes, what was predicted with what came, by the knob `run_demand`.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph, RunCall, Standings
from scheduling.policy import RUN_DEMANDS
from tests.bench.estimator import DATA

RATE = ServiceRate(0.01, 2e-5, 0.012)
FOLDS = 5
Tasks = dict[str, list[RunRecord]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sources", nargs="*", default=list(SOURCES))


def _chained(calls: list[tuple[str, float, float]]) -> RunRecord:
    return RunRecord(tuple(Step(unit, at - 1, taken, max(1.0, given)) for at, (unit, taken, given) in enumerate(calls)))


def _rows(file: str) -> Iterator[dict[str, str]]:
    with (DATA / file).open() as lines:
        yield from csv.DictReader(lines)


def chatdev() -> Tasks:
    task_of = {row["run_id"]: row["task"] for row in _rows("chatdev_workflows/runs.csv")}
    calls, tasks = defaultdict(list), defaultdict(list)
    for row in _rows("chatdev_workflows/calls.csv"):
        calls[row["run_id"]].append(row)
    for run, rows in calls.items():
        rows.sort(key=lambda row: int(row["seq"]))
        steps = [(row["phase"], float(row["prompt_tokens"]), float(row["completion_tokens"])) for row in rows]
        tasks[task_of[run]].append(_chained(steps))
    return tasks


def taubench() -> Tasks:
    """A call's unit is what it follows, as of an agent's session."""
    calls, tasks = defaultdict(list), defaultdict(list)
    for row in _rows("taubench_gpt4o_airline/calls.csv"):
        calls[row["task_id"], row["trial"]].append(row)
    for (task, _), rows in calls.items():
        rows.sort(key=lambda row: int(row["seq"]))
        units = ["first", *("after-user" if row["action"] == "respond" else "after-tool" for row in rows)]
        # The system prompt and the schema of tools, which the data leaves out, have 2,500 tokens.
        steps = [
            (unit, 2_500 + float(row["prompt_tokens_approx"]), float(row["completion_tokens_approx"]))
            for unit, row in zip(units, rows, strict=False)
        ]
        tasks[task].append(_chained(steps))
    return tasks


SOURCES = {"chatdev": chatdev, "taubench": taubench}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation, 0 where either is constant; equal values share their mean rank."""
    one, other = (_ranks(each) for each in (a, b))
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[at])


def folds(tasks: Tasks, seed: int) -> Iterator[tuple[list[RunRecord], list[RunRecord]]]:
    """Yield the runs to learn from and those to judge."""
    names = sorted(tasks)
    part = np.random.default_rng(seed).permutation(len(names)) % FOLDS
    for fold in range(FOLDS):
        learned = [run for name, of in zip(names, part, strict=True) if of != fold for run in tasks[name]]
        yield learned, [run for name, of in zip(names, part, strict=True) if of == fold for run in tasks[name]]


def predicted(known: KnownGraph, record: RunRecord) -> Iterator[dict[str, float]]:
    """Yield at each call what comes still, and what each knob predicts."""
    takes_s = [RATE.service_s(step.input_tokens, step.output_tokens) for step in record.steps]
    runs = Standings({"": known})
    for at, step in enumerate(record.steps):
        run = runs.arrive(RunCall(at, "", "", step.unit, round(step.input_tokens), 0, RATE), float(at))
        yield {"": sum(takes_s[at:])} | {by: runs.refreshed(run, at, by=by).mean_s for by in RUN_DEMANDS}
        runs.end(at, step.output_tokens, at + 0.5)


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in options.sources:
        tasks = SOURCES[name]()
        units = {step.unit: Backend("llm", "m") for runs in tasks.values() for each in runs for step in each.steps}
        scores, weights = defaultdict(list), []
        for seed in range(options.seeds):
            seen: dict[str, list[float]] = defaultdict(list)
            for learned, judged in folds(tasks, seed):
                graph = DemandGraph("agents", units, learned)
                known = KnownGraph.of(graph, dict.fromkeys(units, RATE))
                assert known.predictor is not None
                weights.append(known.predictor.weights)
                for record in judged:
                    for moment in predicted(known, record):
                        for by, seconds in moment.items():
                            seen[by].append(seconds)
            came = np.array(seen.pop(""))
            for by, values in seen.items():
                error = ((np.array(values) - came) ** 2).sum() / ((came - came.mean()) ** 2).sum()
                scores[by].append((1.0 - error, rank_correlation(np.array(values), came)))
        rows[name] = {
            "weights": np.mean(weights, axis=0).round(2).tolist(),
            **{
                by: dict(zip(("r2", "rank"), np.mean(each, axis=0).round(3).tolist(), strict=True))
                for by, each in scores.items()
            },
        }
    return rows
