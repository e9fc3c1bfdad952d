"""260 requests on one real vLLM on an H100, against the simulator with the same arrivals and lengths.

Needs `replay_6_per_s.csv` (PILOTHOUSE_DATA names its folder): vLLM 0.26, Llama 3.1 8B, Poisson arrivals, TTFT and E2E
at the client. The profile is the one that seeds the demo's fleet for this model and GPU, fitted to lone prompts and
equal batches, not to the replay. The aim: E2E p50 and p95 within 5 %, TTFT p95 within 10 %.

Two more scenes, from which the limits of the API process were derived and of which only the means are known
(docs/simulation.md): 2,011 small requests at 110 a second, and 256 equal requests at once.
"""

import argparse
import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.bench.estimator import DATA

SMALL_REQUESTS, PER_S, MEAN_OUTPUT = 2_011, 110.0, 211
"""Scene of the API process: prompts up to 300 tokens, outputs of 211 in the mean."""
MEASURED = {
    "small_tokens_per_s": 7_000,
    "small_e2e_mean_s": 22.2,
    "at_once_tokens_per_s": 18_500,
    "at_once_last_ttft_ms": 854,
}
BLOCK_TOKENS = 16
DEMO = Path(__file__).parents[2] / "controlplane" / "fleet" / "demo.toml"
KV_TOKENS = 449_968  # the server's own report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", type=Path, default=DATA / "h100_vllm" / "replay_6_per_s.csv")


def shipped() -> tuple[Profile, FrontEnd]:
    """The measured profile of Llama 3.1 8B on one H100, and the limits of its API process."""
    rows = tomllib.loads(DEMO.read_text())["profiles"]
    key = ("llama-3.1-8b", "h100-80gb", 1)
    (measured,) = (row for row in rows if (row["model"], row["gpu_type"], row["tensor_parallel"]) == key)
    values = {name: value for name, value in measured.items() if name in Profile.__dataclass_fields__}
    return Profile(**values), FrontEnd(measured["front_end_requests_per_s"], measured["front_end_tokens_per_s"])


def replay(rows: dict[str, Any], profile: Profile, front_end: FrontEnd) -> Any:
    """Return outcomes of the requests of *rows* on one simulated server of *profile* (vLLM's default limits)."""
    engine = EngineConfig(
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=KV_TOKENS // BLOCK_TOKENS - 1,
        policy="fcfs",
        max_model_len=16_384,
        profile=profile,
        front_end=front_end,
    )
    requests = make_requests(
        rows["arrival_s"], rows["prompt_tokens"].astype(np.int64), rows["output_tokens"].astype(np.int64)
    )
    return Simulation(Cluster([InstanceSpec("llama-3.1-8b", "here", engine)]), requests).run().outcomes


def small_requests() -> dict[str, Any]:
    """Return the 2,011 requests, with geometric outputs: only the mean of the real ones is known."""
    random = np.random.default_rng(0)
    return {
        "arrival_s": np.cumsum(random.exponential(1 / PER_S, SMALL_REQUESTS)),
        "prompt_tokens": random.integers(20, 301, SMALL_REQUESTS),
        "output_tokens": random.geometric(1 / MEAN_OUTPUT, SMALL_REQUESTS),
    }


def front_end_scenes(profile: Profile, front_end: FrontEnd) -> dict[str, dict[str, float]]:
    """Return measurements of the API process's scenes, alongside simulations with and without its limits."""
    small = small_requests()
    equal = {
        name: np.full(256, value) for name, value in (("arrival_s", 0.0), ("prompt_tokens", 128), ("output_tokens", 96))
    }
    scenes: dict[str, dict[str, float]] = {name: {"real": real} for name, real in MEASURED.items()}
    for name, limits in (("simulated", front_end), ("engine_alone", NO_LIMIT)):
        outcomes = replay(small, profile, limits)
        ended_s = float((small["arrival_s"] + outcomes["e2e_s"]).max())
        scenes["small_tokens_per_s"][name] = round(float(small["output_tokens"].sum()) / ended_s)
        scenes["small_e2e_mean_s"][name] = round(float(outcomes["e2e_s"].mean()), 1)
        outcomes = replay(equal, profile, limits)
        decoding_s = float((outcomes["e2e_s"] - outcomes["ttft_s"]).min())  # of the last one to start: all decode
        scenes["at_once_last_ttft_ms"][name] = round(1000 * float(outcomes["ttft_s"].max()))
        scenes["at_once_tokens_per_s"][name] = round(256 * 95 / decoding_s)
    return scenes


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not options.replay.is_file():
        return {"skipped": f"no {options.replay} (--replay, PILOTHOUSE_DATA)"}
    with options.replay.open() as lines:
        table = list(csv.DictReader(lines))
    rows = {name: np.array([float(row[name]) for row in table]) for name in table[0]}
    profile, front_end = shipped()
    outcomes = replay(rows, profile, front_end)
    result: dict[str, Any] = {"requests": len(table)}
    for name in ("ttft_s", "e2e_s"):
        for percentile in (50, 95):
            real, simulated = (float(np.percentile(values, percentile)) for values in (rows[name], outcomes[name]))
            result[f"{name.removesuffix('_s')}_p{percentile}"] = {
                "real_ms": round(1000 * real, 1),
                "simulated_ms": round(1000 * simulated, 1),
                "error_pct": round(100 * (simulated / real - 1), 1),
            }
    return result | front_end_scenes(profile, front_end)
