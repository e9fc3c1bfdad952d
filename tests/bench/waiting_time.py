"""Accuracy of the RWT estimator against simulated waits, and the cost of one estimate.

One instance; a burst of so many request groups, each of four average batches, and then as many requests again, at twice
the service rate. Prompts and outputs are lognormal. Each request is estimated on arrival from the knowledge at that
time: the performance profile, the lengths of 2,000 earlier requests and of those ended since, the waiting requests, the
progress of the batch, and earlier waits, including those of one long burst before all others. `r2` is the coefficient
of determination of estimated and actual waits, the mean over seeds; `r2_by_profile` is without the correction by
earlier waits, `below_p99` the share of waits below their estimated 99th percentile, `mean_excess` the overestimate, in
shares of the mean wait. `from_four_groups` is over the bursts of four groups and more, `shorter` over the others,
`steady` over the requests after them. `estimate_us` is a call from Python as the gateway makes it, 300 and 100,000
requests waiting.

`--scenes SEED` judges the whole of it instead, in the simulator: twelve drawn fleets (`_wait_scenes`), one with `--scene N`.
"""

import argparse
import heapq
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.profile import Profile
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.waiting_time import (
    EXPECTED_COLUMNS,
    History,
    Lengths,
    Throughput,
    Wait,
    ahead,
    waiting_time,
    warm_up,
)
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import Requests, make_requests
from tests.bench import _wait_scenes

KEY = ("m", "chat")

DELTA = 4
BURSTS = (1, 2, 4, 8, 16)  # groups
CALIBRATED_BY = 16  # groups of an initial burst, whose waits are learned from and not judged
PROFILES = {  # name: (coefficients, KV tokens, max_num_seqs); the measured ones of Splitwise, and one of ours
    "llama2-70b-a100": (Profile(0.0654, 0.0412, 9.597e-5, 1.09e-8, 0.0444, 2.37e-4, 2.49e-7), 640_000, 128),
    "llama2-70b-h100": (Profile(0.0518, 0.0342, 3.412e-5, 7.97e-9, 0.0297, 2.08e-4, 1.79e-7), 640_000, 128),
    "llama3.1-8b-a100": (Profile(0.0229, 0.0038, 4.73e-5, 2.23e-9, 0.0084, 2.27e-5, 7.2e-8), 180_000, 1024),
    "llama3.1-8b-little-memory": (Profile(0.0229, 0.0038, 4.73e-5, 2.23e-9, 0.0084, 2.27e-5, 7.2e-8), 48_000, 256),
}
PROMPTS, OUTPUTS = (300.0, 1.0), (180.0, 0.8)  # median, sigma of the logarithm
MOST_TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--profile", choices=PROFILES, help="this one alone")
    parser.add_argument("--scenes", type=int, metavar="SEED", help="judge the drawn fleets of this seed instead")
    parser.add_argument("--scene", type=int, choices=range(_wait_scenes.SCENES), help="of these, one alone")


def lengths(random: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    drawn = (random.lognormal(np.log(median), sigma, count) for median, sigma in (PROMPTS, OUTPUTS))
    prompts, outputs = (np.clip(each, 4, MOST_TOKENS).astype(np.int64) for each in drawn)
    return prompts, outputs


@dataclass
class Seen:
    """Estimates and actual waits of each request."""

    estimated_s: list[float]
    p99_s: list[float]
    by_profile_s: list[float]
    actual_s: list[float]
    in_burst: list[bool]


def simulate(requests: Requests, profile: Profile, kv_tokens: int, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (begin, end) of each request in seconds."""
    engine = EngineConfig(
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        block_size_tokens=16,
        kv_blocks=kv_tokens // 16 * 11 // 10,  # the dispatcher relies on predictions; give the engine some slack
        policy="fcfs",
        max_model_len=16384,
        profile=profile,
    )
    cluster = Cluster([InstanceSpec("m", "here", engine, dispatch_kv_tokens=kv_tokens)])
    outcomes = Simulation(cluster, requests).run().outcomes
    return requests.arrival_s + outcomes["queue_s"], requests.arrival_s + outcomes["e2e_s"]


def wait(
    throughput: Throughput,
    known: Lengths,
    requests_ahead: int,
    tokens: list[float],
    in_flight_tokens: float,
    sequences: int,
) -> Wait:
    mean_s, variance_s2 = waiting_time(
        float(requests_ahead), *tokens, in_flight_tokens, float(sequences), known.output_mean, known.output_variance,
        throughput.batch, throughput.tokens_per_s, throughput.relative_variance,
    )  # fmt: skip
    return Wait(mean_s, variance_s2)


def estimate(name: str, groups: int, seed: int, correction: Correction) -> Seen:
    """Return a burst of *groups*, and as many requests again over the time in which half of them could be served."""
    profile, kv_tokens, most = PROFILES[name]
    random = np.random.default_rng([seed, groups, len(name)])
    history = History()
    for prompt, output in zip(*lengths(random, 2000), strict=True):
        history.learn(KEY, int(prompt), int(output), 0.0)
    known = history.lengths(KEY)
    throughput = Throughput.of(profile, kv_tokens, most, known)
    count = round(DELTA * throughput.batch * groups) + round(throughput.batch)
    prompts, outputs = lengths(random, 2 * count)
    spread_s = 0.5 * count * known.output_mean / throughput.tokens_per_s
    arrivals = np.concatenate([np.sort(random.uniform(0, 0.05, count)), np.sort(random.uniform(0.05, spread_s, count))])
    mean = round(known.output_mean)
    requests = make_requests(arrivals, prompts, outputs, predicted_tokens=np.full(2 * count, mean))
    begin_s, end_s = simulate(requests, profile, kv_tokens, most)

    seen = Seen([], [], [], [], [])
    running: list[tuple[float, int]] = []
    waiting: list[int] = []
    first = 0
    expected = np.zeros((2 * count, EXPECTED_COLUMNS))
    by_profile: dict[int, float] = {}
    for request, now_s in enumerate(arrivals):
        while first < len(waiting) and begin_s[waiting[first]] <= now_s:  # dispatched meanwhile, in order of arrival
            other = waiting[first]
            first += 1
            heapq.heappush(running, (end_s[other], other))
            if other in by_profile:
                correction.learn(by_profile[other], begin_s[other] - arrivals[other], throughput.batch)
        while running and running[0][0] <= now_s:
            _, other = heapq.heappop(running)
            history.learn(KEY, int(prompts[other]), int(outputs[other]), 0.0)
        if begin_s[request] - now_s < 1e-9:
            heapq.heappush(running, (end_s[request], request))
            continue
        known = history.lengths(KEY)
        weight = known.weight(float(prompts[request])) if throughput.batch < most else 1.0
        expected[request] = np.array(history.expected(KEY, float(mean))) * (weight, weight * weight, weight)
        produced = sum(
            int((now_s - begin_s[other]) / (end_s[other] - begin_s[other]) * outputs[other]) for _, other in running
        )
        requests_ahead = len(waiting) - first
        tokens = expected[waiting[first:]].sum(axis=0).tolist()

        in_flight = known.in_flight(len(running), produced)
        raw = wait(throughput, known, requests_ahead, tokens, in_flight, len(running))
        now = throughput.corrected(correction.factor, correction.relative_variance)
        corrected = wait(now, known, requests_ahead, tokens, in_flight, len(running))
        if requests_ahead >= throughput.batch:
            by_profile[request] = raw.mean_s
        waiting.append(request)
        seen.estimated_s.append(corrected.mean_s)
        seen.p99_s.append(corrected.quantile_s())
        seen.by_profile_s.append(raw.mean_s)
        seen.actual_s.append(begin_s[request] - now_s)
        seen.in_burst.append(request < count)
    return seen


def r2(estimated: NDArray[Any], actual: NDArray[Any]) -> float:
    return float(1.0 - ((actual - estimated) ** 2).sum() / ((actual - actual.mean()) ** 2).sum())


def summary(seen: list[Seen], *, burst: bool = True) -> dict[str, float]:
    """Summarise the bursts of *seen*, or the requests after them; R2 within each simulation, then the mean."""
    fits, plain, below, excess = [], [], [], []
    for each in seen:
        chosen = np.array(each.in_burst) == burst
        actual, estimated = np.array(each.actual_s)[chosen], np.array(each.estimated_s)[chosen]
        fits.append(r2(estimated, actual))
        plain.append(r2(np.array(each.by_profile_s)[chosen], actual))
        below.append(float((actual <= np.array(each.p99_s)[chosen]).mean()))
        excess.append(float(estimated.mean() / actual.mean() - 1.0))
    return {
        "r2": float(np.mean(fits)),
        "r2_by_profile": float(np.mean(plain)),
        "below_p99": float(np.mean(below)),
        "mean_excess": float(np.mean(excess)),
    }


def estimate_us(waiting: int) -> float:
    """Return the microseconds of one estimate from Python: the median of batches."""
    random = np.random.default_rng(0)
    keys = np.sort(random.random(waiting))
    arrays = (
        np.arange(waiting, dtype=np.int32),
        waiting,
        keys,
        np.arange(waiting),
        np.ones((waiting, EXPECTED_COLUMNS)),
    )
    throughput, times = Throughput(128.0, 2000.0), []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(100):
            counts = ahead(*arrays, waiting - 1)
            waiting_time(*counts, 1e4, 128.0, 250.0, 6e4, throughput.batch, throughput.tokens_per_s, 0.01)
        times.append((time.perf_counter() - began) * 1e4)
    return float(np.median(times))


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.scenes is not None:
        return _wait_scenes.run(options.scenes, options.scene)
    warm_up()
    result: dict[str, Any] = {}
    for name in [options.profile] if options.profile else PROFILES:
        correction = Correction()
        estimate(name, CALIBRATED_BY, options.seeds, correction)
        seen = {
            groups: [estimate(name, groups, seed, correction) for seed in range(options.seeds)] for groups in BURSTS
        }
        result[name] = {
            "r2_by_groups": {str(groups): summary(each)["r2"] for groups, each in seen.items()},
            "from_four_groups": summary(seen[4] + seen[8] + seen[16]),
            "shorter": summary(seen[1] + seen[2]),
            "steady": summary(seen[8] + seen[16], burst=False),
        }
    result["estimate_us"] = {str(count): estimate_us(count) for count in (300, 100_000)}
    return result
