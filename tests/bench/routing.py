"""What one routing decision costs, called from Python as the gateway does, crossing into compiled code included.

All instances belong to one endpoint, under a random load that leaves room on about half of them. `decision_us` is the
slowest policy at 240 instances; `plain_us` are the same decisions by the plain Python twins.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scheduling import reference
from scheduling.dispatch import dispatch, warm_up
from scheduling.fleet import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet, index_members
from scheduling.ordering import allocate_waiting, enqueue, free_slot
from scheduling.routing import JOIN_SHORTEST_QUEUE, POLICIES, advance, place, release

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
KV_CAPACITY_TOKENS, MAX_NUM_SEQS = 400_000, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=200, help="batches timed; the median of their means is reported")
    parser.add_argument("--calls", type=int, default=200, help="calls in a batch")


def busy_fleet(instances: int, seed: int = 0) -> tuple[FleetArrays, EndpointArrays]:
    """One endpoint of *instances*, under a random load that leaves room on about half of them."""
    random = np.random.default_rng(seed)
    fleet, endpoints = allocate_fleet(instances), allocate_endpoints(1, instances)
    fleet.endpoint[:], fleet.accepting[:] = 0, 1
    fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = MAX_NUM_SEQS, KV_CAPACITY_TOKENS
    full = random.random(instances) < 0.5
    fleet.running[:] = np.where(full, MAX_NUM_SEQS, random.integers(0, MAX_NUM_SEQS, instances))
    fleet.kv_tokens[:] = random.integers(0, KV_CAPACITY_TOKENS - PROMPT_TOKENS - OUTPUT_TOKENS, instances)
    fleet.remaining_tokens[:] = random.integers(0, KV_CAPACITY_TOKENS, instances)
    index_members(fleet, endpoints)
    return fleet, endpoints


def plain_twin(fleet: FleetArrays) -> reference.PlainFleet:
    return reference.PlainFleet(
        [
            reference.PlainInstance(
                endpoint=int(fleet.endpoint[slot]),
                accepting=bool(fleet.accepting[slot]),
                running=int(fleet.running[slot]),
                max_num_seqs=int(fleet.max_num_seqs[slot]),
                kv_tokens=int(fleet.kv_tokens[slot]),
                kv_capacity_tokens=int(fleet.kv_capacity_tokens[slot]),
                remaining_tokens=int(fleet.remaining_tokens[slot]),
            )
            for slot in range(fleet.endpoint.size)
        ]
    )


def median_us(call: Callable[[], object], batches: int, calls: int) -> float:
    """Median over *batches* of the mean time of *call* in a batch, microseconds."""
    means = []
    for _ in range(batches):
        started_ns = time.perf_counter_ns()
        for _ in range(calls):
            call()
        means.append((time.perf_counter_ns() - started_ns) / calls / 1000)
    return round(statistics.median(means), 3)


def run(options: argparse.Namespace) -> dict[str, Any]:
    warm_up()
    batches, calls = options.batches, options.calls

    def decisions_us(instances: int) -> dict[str, float]:
        fleet, endpoints = busy_fleet(instances)
        return {
            name: median_us(lambda r=router: r(fleet, endpoints, 0, PROMPT_TOKENS, OUTPUT_TOKENS), batches, calls)
            for name, router in POLICIES.items()
        }

    by_policy_us = decisions_us(240)
    fleet, endpoints = busy_fleet(240)
    plain = plain_twin(fleet)
    plain_us = {
        name: median_us(lambda t=twin: t(plain, 0, PROMPT_TOKENS, OUTPUT_TOKENS), max(batches // 10, 1), 10)
        for name, twin in reference.POLICIES.items()
    }
    worst = max(by_policy_us, key=by_policy_us.__getitem__)
    waiting = allocate_waiting(1, 1024)
    expected_tokens = PROMPT_TOKENS + OUTPUT_TOKENS

    def queue_dispatch_release() -> None:
        enqueue(waiting, 0, 0.0, 0.0, 60.0, 0, PROMPT_TOKENS, OUTPUT_TOKENS, 1, -1, -1, -1)
        slot, instance = dispatch(fleet, endpoints, waiting, 0, JOIN_SHORTEST_QUEUE)
        free_slot(waiting, slot)
        release(fleet, instance, expected_tokens, 0)

    def place_release() -> None:
        place(fleet, endpoints, 0, PROMPT_TOKENS, OUTPUT_TOKENS)
        release(fleet, 0, expected_tokens, 0)

    return {
        "decision_us": by_policy_us[worst],
        "slowest_policy": worst,
        "by_policy_us": by_policy_us,
        "by_policy_60_instances_us": decisions_us(60),
        "by_policy_1000_instances_us": decisions_us(1000),
        "plain_us": plain_us,
        "plain_ratio": {name: round(plain_us[name] / by_policy_us[name], 1) for name in POLICIES},
        "advance_us": median_us(lambda: advance(fleet, 0, expected_tokens, expected_tokens - 1, 0), batches, calls),
        "place_and_release_us": median_us(place_release, batches, calls),
        "queue_dispatch_release_us": median_us(queue_dispatch_release, batches, calls),
    }
