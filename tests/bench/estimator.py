"""Error of estimated profiles against steps measured with vLLM, leaving out one GPU and one model at a time.

Needs `silicon_sample.csv` of NVIDIA's aiconfigurator and the grid that we measured on an H100 (PILOTHOUSE_DATA names
their folder). The constants are fitted to times between tokens; each series (model, GPU, precision, GPUs of an
instance) has equal weight. Errors are those of the profile, linear in the batch, on data left out of the fit. `shipped`
is `FITTED`. Those of the first token (`_ttft`) are of prefills of up to 16,384 tokens; three constants of mixtures are
fitted to them, none of dense models.

Excluded: series with data parallel attention (their batch is not the clients), more than 256 clients (not all of them
run), 8-bit series of Llama 3.1 8B and Qwen3 32B and all of Qwen3 235B (their counts of GPUs cannot be right: 235 GB on
one of 141 GB, more operations than the data sheet has), and 4-bit integers (see `profile_estimate`).
"""

import argparse
import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from scheduling.fleet.profile_estimate import FITTED, GPUS, Costs, GpuFacts, Sizes, estimate
from scheduling.fleet.profile_fitting import DecodePoints, PrefillPoints, predict_decode_s
from scheduling.fleet.published_profiles import read_silicon

DATA = Path(os.environ.get("PILOTHOUSE_DATA", Path(__file__).parents[3] / "shared" / "data"))
MOST_CLIENTS = 256
MAX_PREFILL_TOKENS = 16_384
GPUS_BY_SYSTEM = {
    "h100_sxm": GPUS["h100-80gb"],
    "h200_sxm": GPUS["h200-141gb"],
    "b200_sxm": GPUS["b200-180gb"],
    "b300_sxm": replace(GPUS["b200-180gb"], title="B300 288 GB", bandwidth_bytes_per_s=8e12),
}
BYTES_PER_PARAMETER = {"fp8": 1.0, "fp4": 0.5625, "bf16": 2.0, "unstated": 2.0}
# Parameters, active parameters, layers, experts, experts per token, KV bytes per token: from the models' config.json.
MODELS = {
    "meta-llama/Llama-3.1-70B": (70.6e9, 70.6e9, 80, 0, 0, 327_680),
    "Qwen/Qwen3-32B": (32.8e9, 32.8e9, 64, 0, 0, 262_144),
    "MiniMaxAI/MiniMax-M2.5": (230e9, 10e9, 62, 256, 8, 253_952),
    "openai/gpt-oss-120b": (116.8e9, 5.1e9, 36, 128, 4, 73_728),
    "moonshotai/Kimi-K2.5": (1_040e9, 32e9, 61, 384, 8, 70_272),
}
LLAMA_8B = "Llama 3.1 8B (our grid)"
LLAMA_8B_SIZES = Sizes(16.06e9, 131_072, 8.03e9, 8.03e9, 32)
FREE = ("layer_s", "exchange_s", "choice_s", "sequence_s", "bandwidth_share")
"""The others are of prefills: from the grid's TTFT of lone prompts, and that of the 70B model in 8 bits,"""
FREE_OF_MIXTURES = ("experts_read_share", "experts_compute_share", "experts_exchange")
"""and these."""
STEADY = 20.0
"""Minimum steps per prompt of a grid row: with fewer, the batch was smaller than the row states."""


@dataclass(frozen=True, slots=True)
class Series:
    model: str
    gpu: str
    name: str
    sizes: Sizes
    facts: GpuFacts
    tensor_parallel: int
    points: DecodePoints
    prefills: PrefillPoints

    @property
    def is_mixture(self) -> bool:
        return self.sizes.experts > 0

    def errors(self, costs: Costs) -> Any:
        """Return predicted over measured seconds, less one, of each point."""
        most = int(self.points.batch.max())
        profile = estimate(self.sizes, self.facts, self.tensor_parallel, most, costs)
        return predict_decode_s(profile, self.points) / self.points.seconds - 1.0

    def ttft_errors(self, costs: Costs) -> Any:
        """Return predicted over measured seconds to the first token, less one, of each prefill."""
        profile = estimate(self.sizes, self.facts, self.tensor_parallel, costs=costs)
        predicted_s = np.array([profile.step_time_s(int(tokens), 0, 0) for tokens in self.prefills.tokens])
        return predicted_s / self.prefills.seconds - 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=DATA, help="folder of aiconfigurator_silicon and h100_vllm")


def read(data: Path) -> list[Series]:
    series = [_grid(data / "h100_vllm")]
    for one in read_silicon(data / "aiconfigurator_silicon" / "silicon_sample.csv"):
        engine, precision, *parallel = one.setting.variant.split()
        kept = _up_to(one.decode, MOST_CLIENTS)
        known = one.setting.model in MODELS and one.setting.gpu_type in GPUS_BY_SYSTEM
        if engine != "vllm" or not known or precision not in BYTES_PER_PARAMETER or "DP" in "".join(parallel):
            continue
        if not kept.seconds.size or (one.setting.model == "Qwen/Qwen3-32B" and precision == "fp8"):
            continue
        parameters, active, layers, experts, of_token, kv_bytes = MODELS[one.setting.model]
        sizes = Sizes(
            parameters * BYTES_PER_PARAMETER[precision], kv_bytes, parameters, active, layers, experts, of_token
        )
        series.append(
            Series(
                one.setting.model,
                one.setting.gpu_type,
                str(one.setting),
                sizes,
                GPUS_BY_SYSTEM[one.setting.gpu_type],
                one.setting.tensor_parallel,
                kept,
                _short(one.prefill),
            )
        )
    return series


def _up_to(points: DecodePoints, clients: int) -> DecodePoints:
    chosen = points.batch <= clients
    return DecodePoints(
        points.batch[chosen],
        points.context_tokens[chosen],
        points.seconds[chosen],
        points.prefill_share[chosen],
        points.prefill_tokens[chosen],
        points.configuration[chosen],
    )


def _short(points: PrefillPoints) -> PrefillPoints:
    chosen = points.tokens <= MAX_PREFILL_TOKENS
    return PrefillPoints(points.tokens[chosen], points.seconds[chosen], points.configuration[chosen])


def _grid(folder: Path) -> Series:
    with (folder / "prefill.csv").open() as lines:
        alone = [(float(row["prompt_tokens"]), float(row["ttft_ms"]) / 1000) for row in csv.DictReader(lines)]
    tokens, first_s = np.array(alone).T
    prefills = _short(PrefillPoints(tokens, first_s, np.arange(tokens.size)))
    with (folder / "decode.csv").open() as lines:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(lines)]
    rows = [row for row in rows if row["ttft_max_ms"] < STEADY * row["itl_ms_all_decoding"]]
    batch = np.array([row["batch"] for row in rows])
    context = batch * np.array([row["prompt_tokens"] + row["output_tokens"] / 2 for row in rows])
    none = np.zeros(len(rows))
    seconds = np.array([row["itl_ms_all_decoding"] for row in rows]) / 1000
    points = DecodePoints(batch, context, seconds, none, none, np.arange(len(rows)))
    return Series(LLAMA_8B, "h100_sxm", LLAMA_8B, LLAMA_8B_SIZES, GPUS["h100-80gb"], 1, points, prefills)


def fit(series: Iterable[Series]) -> Costs:
    """Return the costs with the least robust error in the logarithm: of steps, and of the prefills of mixtures."""
    chosen = list(series)
    most = [1.0 / FITTED.bandwidth_share if name == "bandwidth_share" else 4.0 for name in FREE]
    costs = _fit(FITTED, FREE, most, [(one.errors, one.points.batch.size) for one in chosen])
    prefills = [
        (one.ttft_errors, one.prefills.tokens.size) for one in chosen if one.is_mixture and one.prefills.tokens.size
    ]
    return _fit(costs, FREE_OF_MIXTURES, [4.0] * len(FREE_OF_MIXTURES), prefills)


def _fit(costs: Costs, free: tuple[str, ...], most: list[float], series: list[tuple[Any, int]]) -> Costs:
    """Fit the *free* ones of *costs*, up to *most* times `FITTED`, to (errors, count) of each of *series*."""
    first = np.array([getattr(FITTED, name) for name in free])

    def costs_of(scaled: Any) -> Costs:
        return replace(costs, **dict(zip(free, (scaled * first).tolist(), strict=True)))

    def residuals(scaled: Any) -> Any:
        tried = costs_of(scaled)
        return np.concatenate([np.log1p(errors(tried)) / count**0.5 for errors, count in series])

    solved = least_squares(residuals, np.ones(first.size), bounds=(0.01, most), loss="soft_l1", f_scale=0.1)
    return costs_of(solved.x)


def summary(series: Iterable[Series], costs: Costs) -> dict[str, Any]:
    """Return median and mean error in percent, of dense models and of mixtures of experts."""
    shown: dict[str, Any] = {}
    chosen = list(series)
    for kind, is_mixture in (("dense", False), ("experts", True)):
        of_kind = [one for one in chosen if one.is_mixture == is_mixture]
        if of_kind:
            percent = 100 * np.concatenate([np.abs(one.errors(costs)) for one in of_kind])
            shown[f"{kind}_median_pct"] = round(float(np.median(percent)), 1)
            shown[f"{kind}_mean_pct"] = round(float(percent.mean()), 1)
            shown[f"{kind}_points"] = percent.size
            percent = 100 * np.concatenate([np.abs(one.ttft_errors(costs)) for one in of_kind])
            shown[f"{kind}_ttft_median_pct"] = round(float(np.median(percent)), 1)
            shown[f"{kind}_ttft_mean_pct"] = round(float(percent.mean()), 1)
            shown[f"{kind}_ttft_points"] = percent.size
    return shown


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not (options.data / "h100_vllm").is_dir():
        return {"skipped": f"no h100_vllm and aiconfigurator_silicon below {options.data} (--data, PILOTHOUSE_DATA)"}
    series = read(options.data)
    costs = fit(series)
    result: dict[str, Any] = {
        "fitted": {name: getattr(costs, name) for name in FREE + FREE_OF_MIXTURES},
        "shipped": summary(series, FITTED),
        "in_sample": summary(series, costs),
    }
    for key in ("gpu", "model"):
        for value in sorted({getattr(one, key) for one in series}):
            others = [one for one in series if getattr(one, key) != value]
            result[f"without {value}"] = summary((one for one in series if getattr(one, key) == value), fit(others))
    return result
