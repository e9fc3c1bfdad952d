"""Service of whole runs of each application of Hermes' suite on Llama-2-7B, beside what the paper says.

The paper's numbers are few: bounds of sizes (section 5.1), the shares of runs in progress that complete within nine seconds
(figure 7), and when two applications end alone (section 2.2: 52.8 and 40.3 s on average of both in either order).
"""

import argparse
from typing import Any, Final

import numpy as np

from controlplane.experiments import experiment
from controlplane.experiments.hermes import LLAMA_7B, QUANTILES
from scheduling.applications.demand_graph import DemandGraph, ServiceRate, step_service_s
from scheduling.applications.suite import SUITE

SOON_S: Final = 9.0
SIZES: Final = {"small": "less than 60", "medium": "60 to 600", "large": "600 and more", "other": ""}
PAPER: Final[dict[str, dict[str, float]]] = {
    "KBQAV": {"paper_soon": 0.003, "paper_path_s": 18.5},
    "CG": {"paper_soon": 0.16},
    "DM": {"paper_path_s": 43.5},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1_000, help="of each application")


def row_of(name: str, runs: int) -> dict[str, Any]:
    application, random = SUITE[name], np.random.default_rng(1)
    units, rate = application.backends(LLAMA_7B.name), ServiceRate.of(LLAMA_7B.profile)
    graph = DemandGraph(name, units, [application.run(random) for _ in range(runs)])
    rates = {unit: rate if each.kind == "llm" else ServiceRate() for unit, each in units.items()}
    takes_s = [
        [step_service_s(step, units[step.unit], rates[step.unit]) for step in record.steps] for record in graph.records
    ]
    whole_s = np.array([sum(each) for each in takes_s])
    left_s = np.concatenate([np.cumsum(each[::-1]) for each in takes_s])
    return {
        "cv": float(whole_s.std() / whole_s.mean()),
        **{f"p{percent}_s": float(np.percentile(whole_s, percent)) for percent in (5, 50, 95)},
        "path_s": float(np.median([graph.path_s(each, rates) for each in graph.records])),
        "soon": float((whole_s <= SOON_S).mean()),
        "soon_left": float((left_s <= SOON_S).mean()),
        "quantiles_s": np.percentile(whole_s, QUANTILES).tolist(),
        "paper_s": SIZES[application.size],
        "paper_soon": "",
        "paper_path_s": "",
        **PAPER.get(name, {}),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    return experiment.rounded({"service": {name: row_of(name, options.runs) for name in SUITE}})
