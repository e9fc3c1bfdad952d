"""Orders of runs of applications on a simulated fleet of one model: `qlm` by arrival, by length and by rank, and others.

The mix of Hermes' suite, half of the runs interactive (first token within 5 s) and half that may wait ten minutes, with
deadlines at two and three times what a run takes alone. By order, means over seeds: `mean_s` and `p95_s` of completion
times, `runs_in_time`, and `first_tokens_in_time` of interactive requests.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scheduling.simulation.scenario import load_scenario
from scheduling.simulation.staging import stage

ORDERS = {
    "priority": {"ordering": "priority"},
    "qlm_arrival": {"ordering": "qlm"},
    "qlm_length": {"ordering": "qlm", "group_order": "length"},
    "qlm_hermes": {"ordering": "qlm", "group_order": "hermes"},
    "hermes": {"ordering": "hermes"},
}
SCENARIO = """
[models.m]
context_tokens = 8192
[gpus.g]
usd_per_hour = 2
[regions.east]
[[profiles]]
model = "m"
gpu = "g"
prefill = {{ a_s = 0.02, b_s_per_token = 7.5e-5 }}
decode = {{ a_s = 0.018, b_s_per_sequence = 1.2e-4, c_s_per_token = 4e-7 }}
[[fleet]]
model = "m"
regions = ["east"]
gpu = "g"
instances = 2
kv_tokens = 60000
max_num_seqs = 16
[classes.interactive]
ttft_ms = 5000
[classes.flexible]
ttft_ms = 600000
priority = 1
[policies]
{policies}
[demand]
duration_h = 0.2
too_long = "clip"
"""
RUNS = """
[[applications]]
model = "m"
suite = "mix"
slo_class = "{slo_class}"
tenant = "{slo_class}"
runs = {runs}
deadline_factor = [2, 3]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=140, help="runs of each class, in twelve minutes")
    parser.add_argument("--seeds", type=int, default=3)


def row(path: Path, policies: dict[str, str], runs: int, seed: int) -> list[float]:
    lines = "\n".join(f'{name} = "{value}"' for name, value in policies.items())
    tables = "".join(RUNS.format(slo_class=each, runs=runs) for each in ("interactive", "flexible"))
    path.write_text(SCENARIO.format(policies=lines) + tables)
    result = stage(load_scenario(path), path, seed).run()
    assert result.runs is not None
    completion_s, due_s = result.runs.completion_s, result.runs.due_s
    ttft_s = result.outcomes["ttft_s"][result.requests.deadline_s < 60.0]
    return [
        float(np.nanmean(completion_s)),
        float(np.nanpercentile(completion_s, 95)),
        float((result.runs.ended_s <= due_s).mean()),
        float((ttft_s <= 5.0).mean()),
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = ("mean_s", "p95_s", "runs_in_time", "first_tokens_in_time")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.toml"
        return {
            order: dict(zip(names, np.mean(
                [row(path, policies, options.runs, seed) for seed in range(options.seeds)], axis=0
            ).tolist(), strict=True))
            for order, policies in ORDERS.items()
        }  # fmt: skip
