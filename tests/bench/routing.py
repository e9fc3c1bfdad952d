"""Cost of one routing decision, called from Python as the gateway does, including the call into compiled code.

All instances belong to one endpoint, under a random load that leaves room on about half of them. `decision_us` is the
slowest policy at 240 instances; `plain_us` are the same decisions by the plain Python twins. Predictive policies are
measured with look-ahead maps of twenty to sixty requests an instance, about half of them near or over 80 % of their
memory, and with a prompt whose first 64 noted blocks are on eight instances. `worst_us` is the same with room on every
instance and every one near its limit, where most maps have to be walked.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scheduling.compiled import direct
from scheduling.dispatch import dispatch, warm_up
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet, index_members
from scheduling.lookahead import maps as lookahead
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot
from scheduling.routing.candidates import NO_ROWS
from scheduling.routing.predictive import least_delay, preserve
from scheduling.routing.prefix_affinity import HOLDERS, MOST_NOTED, Affinity, allocate_affinity, covered, learn, note
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, POLICIES, advance, place, release
from tests.kernels import from_python
from tests.oracles import dispatch as reference
from tests.oracles import lookahead as reference_ahead

least_delay, preserve = map(from_python, (least_delay, preserve))

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
KV_CAPACITY_TOKENS, MAX_NUM_SEQS = 400_000, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=200, help="batches timed; the median of their means is reported")
    parser.add_argument("--calls", type=int, default=200, help="calls in a batch")


def busy_fleet(instances: int, seed: int = 0) -> tuple[FleetArrays, EndpointArrays]:
    """Return one endpoint of *instances*, under a random load that leaves room on about half of them."""
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


def busy_maps(fleet: FleetArrays, seed: int = 1, least_use: float = 0.6) -> lookahead.LookAhead:
    """Return maps that fill the fleet's instances from *least_use* to 95 % of their memory."""
    random = np.random.default_rng(seed)
    instances = fleet.endpoint.size
    ahead = lookahead.allocate(instances, 60 * instances)
    for instance in range(instances):
        count = int(random.integers(20, 60))
        each = int(random.uniform(least_use, 0.95) * KV_CAPACITY_TOKENS / count)
        for _ in range(count):
            lookahead.add(ahead, instance, each, int(random.integers(1, 500)), 0)
    fleet.profile[:] = (0.0263, 0.0, 1.2e-4, 1e-9, 0.0263, 1.2e-4, 7.5e-7)
    fleet.profile[::2] *= 0.6
    fleet.queued_prompt_tokens[:] = np.minimum(fleet.remaining_tokens, random.integers(0, 4000, instances))
    return ahead


def known_prefix(fleet: FleetArrays) -> Affinity:
    """Return an index in which HOLDERS instances have the prompt of the request in slot 0."""
    affinity = allocate_affinity(fleet.endpoint.size, 1)
    hashes = np.random.default_rng(2).integers(1, 1 << 60, covered(MOST_NOTED))
    note(affinity, 0, hashes, 0, hashes.size, 16)
    for instance in range(0, min(fleet.endpoint.size, 5 * HOLDERS), 5):
        learn(fleet, affinity, 0, 0, instance)
    return affinity


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


def plain_maps(ahead: lookahead.LookAhead) -> list[reference_ahead.PlainMap]:
    maps = [reference_ahead.PlainMap() for _ in range(ahead.clock.size)]
    for slot in np.flatnonzero(ahead.instance >= 0).tolist():
        prompt, predicted = int(ahead.base[slot]), int(ahead.expected[slot])
        maps[ahead.instance[slot]].enter(slot, prompt, predicted)
    return maps


def median_us(call: Callable[[], object], batches: int, calls: int) -> float:
    """Return the median over *batches* of the mean time of *call* in a batch, in microseconds."""
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

    def predictive_us(fleet: FleetArrays, endpoints: EndpointArrays, least_use: float) -> dict[str, float]:
        ahead, affinity = busy_maps(fleet, least_use=least_use), known_prefix(fleet)
        return {
            name: median_us(
                lambda r=router: r(fleet, endpoints, ahead, affinity, 0, 0, PROMPT_TOKENS, OUTPUT_TOKENS, NO_ROWS),
                batches,
                calls,
            )
            for name, router in {"preserve": direct(preserve), "least_delay": direct(least_delay)}.items()
        }

    def decisions_us(instances: int) -> dict[str, float]:
        fleet, endpoints = busy_fleet(instances)
        return {
            name: median_us(lambda r=router: r(fleet, endpoints, 0, PROMPT_TOKENS, OUTPUT_TOKENS), batches, calls)
            for name, router in ((name, direct(router)) for name, router in POLICIES.items())
        } | predictive_us(fleet, endpoints, 0.6)

    by_policy_us = decisions_us(240)
    fleet, endpoints = busy_fleet(240)
    fleet.running[:] = 0
    worst_us = predictive_us(fleet, endpoints, 0.78)
    fleet, endpoints = busy_fleet(240)
    plain = plain_twin(fleet)
    plain_us = {
        name: median_us(lambda t=twin: t(plain, 0, PROMPT_TOKENS, OUTPUT_TOKENS), max(batches // 10, 1), 10)
        for name, twin in reference.POLICIES.items()
    }
    sight = reference_ahead.Sight(plain_maps(busy_maps(fleet)))
    for slot, instance in enumerate(plain.instances):
        instance.profile = tuple(fleet.profile[slot].tolist())
    for name, ahead_twin in reference_ahead.PREDICTIVE.items():
        plain_us[name] = median_us(lambda t=ahead_twin: t(plain, sight, 0, PROMPT_TOKENS, OUTPUT_TOKENS), 1, 1)
    worst = max(by_policy_us, key=by_policy_us.__getitem__)
    waiting = allocate_waiting(1, 1024)
    expected_tokens = PROMPT_TOKENS + OUTPUT_TOKENS

    queued, decided, freed, released = direct(enqueue), direct(dispatch), direct(free_slot), direct(release)
    placed, advanced = direct(place), direct(advance)

    def queue_dispatch_release() -> None:
        queued(waiting, 0, 0.0, 0.0, 60.0, 0, PROMPT_TOKENS, OUTPUT_TOKENS, 1, -1, -1, -1)
        slot, instance = decided(fleet, endpoints, waiting, 0, JOIN_SHORTEST_QUEUE, NO_ROWS)
        freed(waiting, slot)
        released(fleet, instance, expected_tokens, 0)

    def place_release() -> None:
        placed(fleet, endpoints, 0, PROMPT_TOKENS, OUTPUT_TOKENS)
        released(fleet, 0, expected_tokens, 0)

    return {
        "decision_us": by_policy_us[worst],
        "slowest_policy": worst,
        "by_policy_us": by_policy_us,
        "worst_us": worst_us,
        "by_policy_60_instances_us": decisions_us(60),
        "by_policy_1000_instances_us": decisions_us(1000),
        "plain_us": plain_us,
        "plain_ratio": {name: round(plain_us[name] / by_policy_us[name], 1) for name in plain_us},
        "advance_us": median_us(lambda: advanced(fleet, 0, expected_tokens, expected_tokens - 1, 0), batches, calls),
        "place_and_release_us": median_us(place_release, batches, calls),
        "queue_dispatch_release_us": median_us(queue_dispatch_release, batches, calls),
    }
