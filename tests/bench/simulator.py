"""Speed of the compiled simulator: a week of requests on four models in three regions, twenty instances each.

Region routing at 70 %, join the shortest queue, the reactive trigger with spot delays, KV blocks that grow with each
token, and preemption when they run out: an instance holds 16,000 tokens, some dozen requests, its dispatcher assumes a
tenth more, and predictions are wrong by up to a third, so about one request in 300 is preempted. Trace generation and
compilation are not timed.

`cpu_s_by_requests` has the same fleet under a tenth and three tenths of the requests as well, `cpu_s_by_instances`
fleets of 60, 240 and 1,000 under a tenth of them, with the same load per instance. Single-threaded: on an idle machine
CPU time equals wall time.
"""

import argparse
import resource
import sys
import time
from typing import Any

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.result import Result
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import Requests, make_requests

MODELS, REGIONS = 4, 3
FLEETS = (60, 240, 1000)
WEEK_S = 7 * 24 * 3600.0
REFERENCE_REQUESTS = 10_000_000  # load that the fleet of 240 is sized for; other sizes scale it
# Llama-2-70B on 8 A100 (Splitwise's measurements), and three that are faster.
SPEEDS = (1.0, 0.8, 0.6, 0.5)
KV_BLOCKS, BLOCK_TOKENS = 1000, 16
COUNTED_ON = 1.1  # KV tokens assumed by the dispatcher, relative to the real ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=240, help="over all endpoints; as 60, 240, 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="without the two tables")


def cluster(instances: int) -> Cluster:
    """Return twelve endpoints with *instances* in all, spread as evenly as possible."""
    specs = []
    for model, speed in enumerate(SPEEDS):
        engine = EngineConfig(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=KV_BLOCKS,
            policy="fcfs",
            max_model_len=16384,
            profile=Profile(*(speed * each for each in (0.0654, 0.0412, 9.597e-5, 1.09e-8, 0.0444, 2.37e-4, 2.49e-7))),
        )
        for region in range(REGIONS):
            share = instances // (MODELS * REGIONS)
            counted_on = round(COUNTED_ON * engine.kv_capacity_tokens)
            spec = InstanceSpec(f"model-{model}", f"region-{region}", engine, dispatch_kv_tokens=counted_on)
            specs += [spec] * share
    reactive = Reactive(max_instances=max(2, instances // (MODELS * REGIONS)))
    return Cluster(specs, reactive=reactive)


def trace(requests: int, instances: int, seed: int) -> Requests:
    """Return arrivals with a daily swing that peaks at another hour in each region, lengths as in Azure's
    conversations.
    """
    random = np.random.default_rng(seed)
    span_s = WEEK_S * requests / REFERENCE_REQUESTS * 240 / instances
    # A daily swing in arrivals by thinning uniform moments.
    arrival_s = random.random(requests)
    arrival_s.sort()
    arrival_s *= span_s
    region = random.integers(0, REGIONS, requests, np.int16)
    swing = np.sin((arrival_s / 86400.0 + region / REGIONS) * 2 * np.pi)
    region[random.random(requests) > 0.55 + 0.45 * swing] += 1
    region %= REGIONS
    del swing
    prompt = np.clip(random.lognormal(6.5, 1.0, requests), 1, 8000).astype(np.int32)
    output = np.clip(random.lognormal(5.0, 0.7, requests), 1, 1500).astype(np.int32)
    predicted = np.maximum(1, output * random.uniform(0.67, 1.33, requests)).astype(np.int32)
    return make_requests(
        arrival_s,
        prompt,
        output,
        predicted_tokens=predicted,
        model=random.integers(0, MODELS, requests, np.int16),
        region=region,
    )


def measured(requests: int, instances: int, seed: int) -> tuple[float, float, Result]:
    """Return wall and CPU time of a run, including setup."""
    fleet, work = cluster(instances), trace(requests, instances, seed)
    started_s, spent_s = time.perf_counter(), time.process_time()
    result = Simulation(fleet, work, seed=seed).run()
    return time.perf_counter() - started_s, time.process_time() - spent_s, result


def run(options: argparse.Namespace) -> dict[str, Any]:
    measured(2000, 60, options.seed)  # compile, or load the compiled code
    wall_s, cpu_s, result = measured(options.requests, options.instances, options.seed)
    counters = result.counters
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hours = result.state_s.sum(axis=0) / 3600
    figures = {
        "requests": options.requests,
        "instances": options.instances,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "requests_per_s": round(options.requests / wall_s),
        "events_per_request": round((counters["events"] + counters["arrived"]) / options.requests, 2),
        "peak_rss_mb": round(peak / (1024 if sys.platform == "linux" else 1024 * 1024)),
        "simulated_days": round(result.end_s / 86400, 2),
        "ttft_p95_s": round(float(np.nanpercentile(result.outcomes["ttft_s"], 95)), 3),
        "e2e_p95_s": round(float(np.nanpercentile(result.outcomes["e2e_s"], 95)), 3),
        "preemptions": counters["preemptions"],
        "forwarded": counters["forwarded"],
        "scale_outs": counters["scale_outs"],
        "scale_ins": counters["scale_ins"],
        "ready_hours": round(float(hours[State.READY])),
        "spot_hours": round(float(hours[State.SPOT])),
    }
    del result
    if not options.alone:
        tenth = max(1, options.requests // 10)
        sizes = [(tenth, options.instances), (3 * tenth, options.instances), *((tenth, count) for count in FLEETS)]
        spent_s = {size: round(measured(*size, options.seed)[1], 3) for size in dict.fromkeys(sizes)}
        spent_s[options.requests, options.instances] = figures["cpu_s"]
        figures["cpu_s_by_requests"] = {
            str(count): spent_s[count, options.instances] for count in (tenth, 3 * tenth, options.requests)
        }
        figures["cpu_s_by_instances"] = {f"{count} ({tenth} requests)": spent_s[tenth, count] for count in FLEETS}
    return figures
