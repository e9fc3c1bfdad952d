"""What one real vLLM on an H100 did with 260 requests, beside what the simulator does with the same arrivals and lengths.

Needs `replay_6_per_s.csv` (PILOTHOUSE_DATA names its folder): vLLM 0.26, Llama 3.1 8B, Poisson arrivals, TTFT and E2E at the
client. The profile is the one that the demo's fleet is seeded with for this model and GPU, fitted to lone prompts and equal
batches; nothing of the replay is in it. The aim: E2E p50 and p95 within 5 %, TTFT p95 within 10 %.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.bench.estimator import DATA

BLOCK_TOKENS = 16
KV_TOKENS = 449_968  # the server's own report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", type=Path, default=DATA / "h100_vllm" / "replay_6_per_s.csv")


def shipped() -> Profile:
    """The measured profile of Llama 3.1 8B on one H100."""
    import django

    django.setup()
    from controlplane.fleet.demo import PROFILES

    key = ("llama-3.1-8b", "h100-80gb", 1)
    (measured,) = (row for row in PROFILES if (row.model, row.gpu_type, row.tensor_parallel) == key)
    return Profile(**{name: value for name, value in measured.values().items() if name in Profile.__dataclass_fields__})


def replay(rows: dict[str, Any], profile: Profile) -> Any:
    """Outcomes of the requests of *rows* on one simulated server of *profile* (vLLM's default limits)."""
    engine = EngineConfig(
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=KV_TOKENS // BLOCK_TOKENS - 1,
        policy="fcfs",
        max_model_len=16_384,
        profile=profile,
    )
    requests = make_requests(
        rows["arrival_s"], rows["prompt_tokens"].astype(np.int64), rows["output_tokens"].astype(np.int64)
    )
    return Simulation(Cluster([InstanceSpec("llama-3.1-8b", "here", engine)]), requests).run().outcomes


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not options.replay.is_file():
        return {"skipped": f"no {options.replay} (--replay, PILOTHOUSE_DATA)"}
    with options.replay.open() as lines:
        table = list(csv.DictReader(lines))
    rows = {name: np.array([float(row[name]) for row in table]) for name in table[0]}
    outcomes = replay(rows, shipped())
    result: dict[str, Any] = {"requests": len(table)}
    for name in ("ttft_s", "e2e_s"):
        for percentile in (50, 95):
            real, simulated = (float(np.percentile(values, percentile)) for values in (rows[name], outcomes[name]))
            result[f"{name.removesuffix('_s')}_p{percentile}"] = {
                "real_ms": round(1000 * real, 1),
                "simulated_ms": round(1000 * simulated, 1),
                "error_pct": round(100 * (simulated / real - 1), 1),
            }
    return result
