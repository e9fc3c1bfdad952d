"""What `tests.bench.kv_events` measures, in a process that Django is set up in."""

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import kernels
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.kv_caches import KvCache
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import Asked
from controlplane.dispatch.snapshot import Snapshot
from controlplane.experiments.experiment import Case
from controlplane.experiments.preserve_routing import MOONCAKE_MODEL
from controlplane.experiments.shared.scenes import requests_of, scenario_of
from controlplane.gateway.upstream.tokenizing import TokenBlocks
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.fleet.profile import USUAL
from scheduling.policy import EndpointPolicy
from scheduling.routing.cached_blocks import with_room
from scheduling.routing.prefix_affinity import allocate_affinity, recorded
from scheduling.simulation.workload.columns import Workload
from tests.bench.routing import median_us
from workers.vllm.kv_events import Stream

BLOCK = 16
INSTANCES = 8
INSTRUCTIONS = 2_500
SCENES = ((60_000, 0.25), (60_000, 0.5), (120_000, 0.5), (120_000, 1.0))
"""Tokens of KV memory an instance, and runs a second."""
FORKED, FORKED_INSTANCES, PROMPT_BLOCKS = 1200, 20, 125


class Queue:
    """The part of the waiting queue that has the index."""

    def __init__(self) -> None:
        self.affinity = allocate_affinity(INSTANCES, 1)

    def fit(self) -> None:
        """Keep its size."""

    def fit_blocks(self, more: int) -> None:
        self.affinity = self.affinity._replace(blocks=with_room(self.affinity.blocks, more))


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def stored(count: int, name: int, parent: int | None) -> dict[str, Any]:
    hashes = [(name + at).to_bytes(32, "big") for at in range(count)]
    before = None if parent is None else parent.to_bytes(32, "big")
    token_ids = [(name + at) % 128_000 for at in range(count * BLOCK)]
    more = {"lora_id": None, "lora_name": None, "extra_keys": [None] * count, "group_idx": 0}
    head = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": before, "medium": "GPU"}
    return {**head, "token_ids": token_ids, "block_size": BLOCK, **more}


def costs(options: argparse.Namespace) -> dict[str, float]:
    queue, stream = Queue(), Stream()
    caches = [
        KvCache(queue, SimpleNamespace(slot=slot, metrics=None, spec=SimpleNamespace(kv_events="")))
        for slot in range(INSTANCES)
    ]  # type: ignore[arg-type]
    for cache in caches:
        cache.block_tokens = BLOCK
        cache.known()
    removed = [(1 + at).to_bytes(32, "big") for at in range(256)]
    batches = {
        "prefill": batch(stored(256, 1, None)),
        "decode": batch(*(stored(1, 1000 + each, 256) for each in range(8))),
        "evict": batch({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0}),
    }

    def take(name: str, cache: KvCache = caches[0]) -> None:
        frames = [b"", stream.next.to_bytes(8, "big"), batches[name]]
        cache.take(stream.take(frames) or [])

    def once(name: str) -> float:
        return median_us(lambda: take(name), options.batches, options.calls)

    def store_and_evict() -> None:
        take("prefill")
        take("evict")

    result = {"store_and_evict_us": median_us(store_and_evict, options.batches, options.calls)}
    take("prefill")
    result["decode_us"] = once("decode")
    for cache in caches:
        cache.clear()
        take("prefill", cache)
    tokens, ids = TokenBlocks(lambda: None, lambda: 0.0), [(1 + at) % 128_000 for at in range(32_768)]  # type: ignore[arg-type, return-value]
    for length in (4096, 32_768):
        result[f"cut_{length}_us"] = median_us(
            lambda length=length: tokens._cut(ids[:length], BLOCK, 0),  # type: ignore[misc]
            options.batches,
            options.calls,
        )
    hashes = np.frombuffer(bytearray(tokens._cut([(1 + at) % 128_000 for at in range(4096)], BLOCK, 0)), np.int64)
    fleet, endpoints = allocate_fleet(INSTANCES), allocate_endpoints(1, INSTANCES)
    fleet.endpoint[:] = 0
    index_members(fleet, endpoints)

    def look_up() -> None:
        kernels.know(endpoints, queue.affinity, 0, hashes, 0, hashes.size, BLOCK)

    look_up()
    assert queue.affinity.known.tolist() == [4096] * INSTANCES
    result["look_up_us"] = median_us(look_up, options.batches, options.calls)

    def count() -> None:
        kernels.hold_blocks(queue.affinity.blocks, 0, hashes, 0, hashes.size)
        kernels.drop_blocks(queue.affinity.blocks, 0, hashes, 0, hashes.size)

    result["count_us"] = median_us(count, options.batches, options.calls)
    return result


def agents(data: Path, runs_per_s: float, runs: int) -> Workload:
    """Return calls of agents (tau-bench, airline): each prompt has the one before, its answer and what followed.

    All begin with the same instructions. Between two calls pass the time of an answer and 8 s in the mean.
    """
    recorded_runs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    with (data / "taubench_gpt4o_airline" / "calls.csv").open() as file:
        for row in csv.DictReader(file):
            call = int(row["prompt_tokens_approx"]) + INSTRUCTIONS, max(1, int(row["completion_tokens_approx"]))
            recorded_runs.setdefault((row["task_id"], row["trial"]), []).append(call)
    random, calls = np.random.default_rng(1), list[tuple[float, int, int, NDArray[np.int64]]]()
    for number, began_s in enumerate(np.cumsum(random.exponential(1 / runs_per_s, runs)), 1):
        at_s = float(began_s)
        for prompt, output in random.choice(np.array([*recorded_runs.values()], object)):
            hashes = np.arange(prompt // BLOCK) + (np.arange(prompt // BLOCK) >= INSTRUCTIONS // BLOCK) * 10**6 * number
            calls.append((at_s, prompt, output, hashes))
            at_s += 1.0 + 0.02 * output + random.exponential(8.0)
    arrival_s, prompts, outputs, blocks = zip(*sorted(calls, key=lambda call: call[0]), strict=True)
    return requests_of(
        np.array(arrival_s),
        np.array(prompts),
        np.array(outputs),
        models=[MOONCAKE_MODEL.name],
        prefix_first=np.cumsum([0, *map(len, blocks)]),
        prefix_hashes=np.concatenate(blocks),
        prefix_block_tokens=BLOCK,
    )


def simulated(trace: Workload, kv_tokens: int, *, kv_events: bool) -> dict[str, float]:
    """Simulate *trace* on four instances of short memory, by estimate or by KV events."""
    small = replace(MOONCAKE_MODEL, kv_tokens=kv_tokens, context_tokens=32_768, block_tokens=BLOCK)
    policies = {"routing": "least_delay", "follow_kv_events": kv_events}
    run = Case({}, lambda seed: (scenario_of([small.group(instances=4)], policies=policies), trace)).simulate(0)
    outcomes = run.result.outcomes
    ttft_ms = 1000 * outcomes["ttft_s"]
    return {
        "cached_ratio": round(float(outcomes["cached_tokens"].sum() / run.result.requests.prompt_tokens.sum()), 4),
        "ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 1),
        "ttft_p95_ms": round(float(np.percentile(ttft_ms, 95)), 1),
    }


def fork(known: str) -> dict[str, float]:
    """Take the state of a fleet with requests of different prompts, of which sixty each begin with the same ten blocks.

    *known* of them is "nothing", the "text", or the "tokens" too.
    """
    policy = EndpointPolicy(routing="least_delay", follow_kv_events=known == "tokens", queue_bound=FORKED)
    instances = tuple(
        InstanceSpec(number, f"i{number}", "", "ready", 1.0, "m", "here", "gpu", 16, 400_000, profile=USUAL)
        for number in range(FORKED_INSTANCES)
    )
    models, endpoints = {"m": ModelSpec("m", 8192, 0)}, (EndpointSpec("m", "here", policy),)
    dispatcher = Dispatcher(Topology(), lambda: 100.0, deliver=lambda record: None)
    dispatcher.apply_inventory(Inventory(models, endpoints, instances))
    fleet, random = dispatcher.topology.fleet, np.random.default_rng(1)
    for slot in dispatcher.topology.by_slot:
        fleet.accepting[slot] = 1
        if known == "tokens":
            dispatcher.queue.affinity.blocks.block_tokens[slot] = BLOCK
    for number in range(FORKED):
        hashes = random.integers(-(2**62), 2**62, PROMPT_BLOCKS)
        hashes[:10] = 1000 * (number % 20) + np.arange(10)
        prompt = {} if known == "nothing" else {"prefix_hashes": recorded(hashes), "block_tokens": 64}
        if known == "tokens":
            prompt |= {"token_blocks": hashes.tobytes(), "token_block_size": BLOCK}
        about = {"tenant_id": 1, "priority": 0, "due_s": None, "arrived_at": 100.0, "arrived_s": 100.0}
        lengths = {"prompt_tokens": 2000, "predicted_tokens": 50, "max_tokens": None, "sequences": 1, "streamed": True}
        dispatcher.take(Asked(number, str(number), "m", "here", **about, **lengths, **prompt))
    observation = Observation(
        dispatcher.topology, dispatcher.queue.count, dispatcher.outlook, dispatcher.clock, wall_clock=lambda: 0.0
    )
    snapshot = Snapshot(dispatcher, observation, dict, wall_clock=lambda: 0.0)
    return {
        "ms": round(median_us(snapshot, 9, 1) / 1000, 1),
        "kb": round(len(msgspec.json.encode(snapshot())) / 1000),
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"cost": costs(options)}
    result["fork"] = {known: fork(known) for known in ("nothing", "text", "tokens")}
    for kv_tokens, per_s in SCENES if options.data else ():
        trace = agents(options.data, per_s, options.runs)
        for kv_events in (False, True):
            name = f"agents_{kv_tokens}_tokens_{per_s:g}_per_s_{'kv_events' if kv_events else 'estimate'}"
            result[name] = simulated(trace, kv_tokens, kv_events=kv_events)
    return result
