"""Counterfactuals of a recorded window against what happens when the policy is really changed.

The window is that of `run_orders`, with system prompts that calls share, served first come, first served. It is replayed
with other orders and routers as plain requests at their recorded times (`open`), and as runs that share prefixes
(`closed`); `true` is the same traffic under that policy from the start. By policy, means over seeds: `run_s`, the mean
completion time of runs that end, `ttft_s`, and `unended`, the share of those that do not; `run` and `ttft`, their changes
against the recorded policy by the same method.
"""

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.suite import SUITE
from scheduling.routing.prefix_affinity import recorded
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario, load_scenario
from scheduling.simulation.staging import Stage, stage
from scheduling.simulation.workload.columns import Coded, Workload, calls_of
from scheduling.simulation.workload.prefix_groups import BLOCK_TOKENS, as_text, prefixes_of
from tests.bench import run_orders

RECORDED = {"ordering": "fcfs", "routing": "join_shortest_queue"}
POLICIES = {
    "recorded": RECORDED,
    "hermes": RECORDED | {"ordering": "hermes"},
    "prefixes": RECORDED | {"routing": "least_delay"},
    "both": {"ordering": "hermes", "routing": "least_delay"},
}
GRAPH_RUNS, GRAPH_SEED = 200, 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=140, help="runs of each class, in twelve minutes")
    parser.add_argument("--seeds", type=int, default=3)


def scenario_of(folder: Path, policies: dict[str, str], runs: int) -> Scenario:
    path = folder / "scenario.toml"
    text = run_orders.SCENARIO.replace("max_num_seqs = 16", "max_num_seqs = 16\nprefix_caching = true")
    lines = "\n".join(f'{name} = "{value}"' for name, value in policies.items())
    tables = (run_orders.RUNS.format(slo_class=each, runs=runs) for each in ("interactive", "flexible"))
    path.write_text(text.format(policies=lines) + "".join(f"{table}prompts = 10\n" for table in tables))
    return load_scenario(path)


@cache
def graph(tenant: str, name: str) -> DemandGraph:
    """Return what runs before the window have taught of an application."""
    random = np.random.default_rng(GRAPH_SEED)
    return DemandGraph(name, SUITE[name].backends("m"), [SUITE[name].run(random) for _ in range(GRAPH_RUNS)])


def ledger(staged: Stage, result: Result) -> Workload:
    """Return the requests of *result* as the ledger keeps them."""
    requests, runs = result.requests, staged.runs
    order = np.argsort(requests.arrival_s, kind="stable")
    names, units = [""] * requests.count, [""] * requests.count
    fresh = iter(np.argsort(staged.requests.run, kind="stable").tolist())  # calls are in the order of runs and steps
    for run in runs.runs:
        application = runs.applications[run.application]
        for step in run.record.steps:
            for _ in range(step.parallelism if application.units[step.unit].kind == "llm" else 0):
                row = next(fresh)
                names[row], units[row] = application.name, step.unit
    first, hashes = requests.prefix_first, requests.prefix_hashes
    groups = [as_text(recorded(hashes[first[row] : first[row + 1]]), BLOCK_TOKENS) for row in order]
    tenants, scenario = [staged.tenants[code] for code in requests.tenant[order]], staged.scenario
    shared = prefixes_of(groups)
    return Workload(
        requests.arrival_s[order], requests.prompt_tokens[order], requests.output_tokens[order],
        *(Coded(np.zeros(order.size, np.int32), [name]) for name in ("m", "east")),
        Coded(requests.slo_class[order].astype(np.int32), list(scenario.classes)), Coded.of(tenants),
        prefix_first=shared[0], prefix_hashes=shared[1], prefix_block_tokens=BLOCK_TOKENS,
        calls=calls_of(
            tenants, [names[row] for row in order], [str(staged.requests.run[row]) for row in order],
            [units[row] for row in order], [None] * order.size, 1000 * result.outcomes["e2e_s"][order],
            ["done"] * order.size,
        ),
    )  # fmt: skip


def measured(result: Result, run: Any) -> list[float]:
    """Return the mean completion time of runs, from first call to last, the mean TTFT, and the share of runs that do not
    end; *run* by request.
    """
    began_s, ended_s = np.full(run.max() + 1, np.inf), np.zeros(run.max() + 1)
    np.minimum.at(began_s, run, result.requests.arrival_s)
    with np.errstate(invalid="ignore"):
        np.maximum.at(ended_s, run, result.requests.arrival_s + result.outcomes["e2e_s"])
    means = np.nanmean(ended_s - began_s), np.nanmean(result.outcomes["ttft_s"]), np.isnan(ended_s).mean()
    return [float(each) for each in means]


def rows(folder: Path, runs: int, seed: int) -> dict[str, list[list[float]]]:
    """Return `measured` by policy: open, closed, true."""
    made: dict[str, list[list[float]]] = {}
    window = None
    for name, policies in POLICIES.items():
        scenario = scenario_of(folder, policies, runs)
        staged = stage(scenario, folder / "scenario.toml", seed)
        own, true = staged.requests.run.copy(), staged.run()
        window = window or ledger(staged, true)
        plain = scenario.model_copy(update={"applications": []})
        opened = replace(window, calls=None, prefix_first=None, prefix_hashes=None)
        replays = [stage(plain, workload=each, graphs=graph).run() for each in (opened, window)]
        made[name] = [*(measured(each, window.calls.run) for each in replays), measured(true, own)]
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        seeds = [rows(Path(folder), options.runs, seed) for seed in range(options.seeds)]
    means = {name: np.mean([each[name] for each in seeds], axis=0) for name in POLICIES}
    return {
        name: {
            method: {"run_s": value[0], "ttft_s": value[1], "unended": value[2]}
            | dict(zip(("run", "ttft"), value[:2] / means["recorded"][at][:2] - 1, strict=True))
            for at, (method, value) in enumerate(zip(("open", "closed", "true"), means[name], strict=True))
        }
        for name in POLICIES
    }
