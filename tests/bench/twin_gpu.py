"""Requests on one real vLLM on an H100, against the simulator with the same arrivals and lengths.

Needs `replay_6_per_s.csv` (PILOTHOUSE_DATA names its folder): vLLM 0.26, Llama 3.1 8B, Poisson arrivals, TTFT and E2E
at the client. The profile is the one that seeds the demo's fleet for this model and GPU, fitted to lone prompts and
equal batches, not to the replay. The aim: E2E p50 and p95 within 5 %, TTFT p95 within 10 %.

Two more scenes, to which the limits of the API process were fitted and of which only the means are known
(docs/plan/simulation.md): 256 equal requests at once, and a burst of 2,011 small requests at 110 a second, also with the
shortest first by the engine's priorities, to which nothing was fitted. The burst is drawn again as it was for the
measurement, from the lengths in *--burst-lengths*.
"""

import argparse
import csv
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import NO_LIMITS, Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.bench.estimator import DATA

PER_S, BURST_S, BURST_SEED, MAX_PROMPT = 110.0, 18.0, 77, 300
MEASURED = {
    "burst_tokens_per_s": 7_000,
    "burst_e2e_mean_s": 22.2,
    "burst_shortest_first_e2e_mean_s": 23.8,
    "at_once_tokens_per_s": 18_500,
    "at_once_last_ttft_ms": 854,
}
BLOCK_TOKENS = 16
DEMO = Path(__file__).parents[2] / "controlplane" / "fleet" / "demo.toml"
KV_TOKENS = 449_968  # the server's own report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", type=Path, default=DATA / "h100_vllm" / "replay_6_per_s.csv")
    parser.add_argument(
        "--burst-lengths",
        type=Path,
        default=DATA.parent / "gpu" / "lengths.json",
        help="JSON whose `chat` has (prompt, output) tokens that the burst is drawn from; without it, no burst",
    )


def shipped() -> tuple[Profile, FrontEnd]:
    """The measured profile of Llama 3.1 8B on one H100, and the limits of its API process."""
    rows = tomllib.loads(DEMO.read_text())["profiles"]
    key = ("llama-3.1-8b", "h100-80gb", 1)
    (measured,) = (row for row in rows if (row["model"], row["gpu_type"], row["tensor_parallel"]) == key)
    values = {name: value for name, value in measured.items() if name in Profile.__dataclass_fields__}
    return Profile(**values), FrontEnd(measured["front_end_requests_per_s"], measured["front_end_tokens_per_s"])


def replay(rows: dict[str, Any], profile: Profile, front_end: FrontEnd, *, shortest_first: bool = False) -> Any:
    """Return outcomes of the requests of *rows* on one simulated server of *profile* (vLLM's default limits)."""
    engine = EngineConfig(
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=KV_TOKENS // BLOCK_TOKENS - 1,
        policy="priority" if shortest_first else "fcfs",
        max_model_len=16_384,
        profile=profile,
        front_end=front_end,
    )
    output_tokens = rows["output_tokens"].astype(np.int64)
    requests = make_requests(
        rows["arrival_s"],
        rows["prompt_tokens"].astype(np.int64),
        output_tokens,
        priority=output_tokens if shortest_first else 0,
    )
    # As in the measurements, clients send to the server itself: no room of a dispatcher holds them back.
    spec = InstanceSpec("llama-3.1-8b", "here", engine, **NO_LIMITS)
    return Simulation(Cluster([spec]), requests).run().outcomes


def burst(lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the requests of the burst."""
    dice, at_s, rows = random.Random(BURST_SEED), 0.0, []
    while (at_s := at_s + dice.expovariate(PER_S)) < BURST_S:
        prompt, output = dice.choice(lengths)
        rows.append((at_s, min(prompt, MAX_PROMPT), max(2, min(output, 2_000))))
    return dict(zip(("arrival_s", "prompt_tokens", "output_tokens"), np.array(rows).T, strict=True))


def front_end_scenes(
    profile: Profile, front_end: FrontEnd, lengths: list[tuple[int, int]]
) -> dict[str, dict[str, float]]:
    """Return measurements of the API process's scenes, alongside simulations with and without its limits."""
    equal = {
        name: np.full(256, value) for name, value in (("arrival_s", 0.0), ("prompt_tokens", 128), ("output_tokens", 96))
    }
    scenes: dict[str, dict[str, float]] = {
        name: {"real": real} for name, real in MEASURED.items() if lengths or not name.startswith("burst")
    }
    for name, limits in (("simulated", front_end), ("engine_alone", NO_LIMIT)):
        if lengths:
            small = burst(lengths)
            outcomes = replay(small, profile, limits)
            ended_s = float((small["arrival_s"] + outcomes["e2e_s"]).max())
            scenes["burst_tokens_per_s"][name] = round(float(small["output_tokens"].sum()) / ended_s)
            scenes["burst_e2e_mean_s"][name] = round(float(outcomes["e2e_s"].mean()), 1)
            outcomes = replay(small, profile, limits, shortest_first=True)
            scenes["burst_shortest_first_e2e_mean_s"][name] = round(float(outcomes["e2e_s"].mean()), 1)
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
    has_burst = options.burst_lengths.is_file()
    lengths = json.loads(options.burst_lengths.read_text())["chat"] if has_burst else []
    return result | front_end_scenes(profile, front_end, lengths)
