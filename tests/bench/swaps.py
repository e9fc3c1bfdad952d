"""Two models on one instance: swaps in the order of the virtual queue against swaps on demand, over seeds.

16 sequences, a swap of 3 s, Poisson arrivals for 400 s: `tests/scheduling/simulation/shared_gpus.py`. `in_time` is the
share with a first token within the time allowed, by seed, and `swaps` their number.
"""

import argparse
from typing import Any

from tests.scheduling.simulation.shared_gpus import simulated

WORKLOADS = (
    ((1.0, 1.0), (30.0, 200.0)),
    ((2.0, 2.0), (30.0, 300.0)),
    ((2.5, 2.5), (30.0, 300.0)),
    ((2.5, 2.5), (60.0, 120.0)),
    ((2.2, 2.2), (90.0, 90.0)),
    ((2.0, 0.5), (20.0, 400.0)),
)
"""Requests a second of each model, and its TTFT target in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 up to this one")


def run(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for per_s, slo_s in WORKLOADS:
        for name, by_queue in (("by_queue", True), ("on_demand", False)):
            came = [simulated(per_s, slo_s, seed=seed, by_queue=by_queue) for seed in range(1, options.seeds + 1)]
            asked = f"{per_s[0]:g} and {per_s[1]:g} a second within {slo_s[0]:g} and {slo_s[1]:g} s"
            shares = [round(float(in_time.mean()), 4) for _, in_time, _ in came]
            result.setdefault(asked, {})[name] = {"in_time": shares, "swaps": [swaps for *_, swaps in came]}
    return result
