"""The compiled engine against the reference engine, one iteration at a time, on scenarios that Hypothesis makes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.traces import load_trace
from tests.examples import at_night_but, costly
from tests.scheduling.simulation.cluster.agreeing import agree
from tests.scheduling.simulation.cluster.drawn import LOADS, Drawn, scenarios
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

FEW = settings(costly(50, 120), suppress_health_check=list(HealthCheck))
MANY = settings(costly(100), suppress_health_check=list(HealthCheck), print_blob=True)

HOLDS = {
    "light": [],
    "memory": ["preemptions"],
    "overload": ["queued", "refused"],
    "priorities": ["preemptions"],
    "chunked": ["chunked"],
    "prefixes": ["prefix_hit_tokens"],
    "cached_and_preempted": ["prefix_hit_tokens", "preemptions"],
    "batches": ["batched"],
    "lives": ["changes", "swaps", "forwarded"],
    "evictions": ["evictions", "kept_tokens", "preemptions"],
    "scaling": ["scale_outs", "scale_ins"],
    "everything": ["prefix_hit_tokens", "preemptions", "changes", "evictions"],
}
"""What the scenarios of a kind must hold between them, or agreeing on them would say little."""


def full_queue() -> Drawn:
    """Return eight requests at once for an instance that runs one and lets two wait: drawn scenarios may refuse none."""
    one = instance(engine=config(max_num_seqs=1))
    return Drawn(cluster(one, queue_bound=2), make_requests([0.0] * 8, [20] * 8, [5] * 8), (), 0)


def every_one_agrees(kind: str, how: settings) -> None:
    held: Counter[str] = Counter()

    @how
    @given(scenarios(kind))
    @example(full_queue())
    def of_kind(drawn: Drawn):
        fleet, result = agree(drawn)
        held.update(result.counters)
        budgets = np.array([spec.engine.max_num_batched_tokens for spec in drawn.cluster.instances])
        outcomes = result.outcomes
        done = outcomes["state"] == Outcome.DONE
        held["queued"] += int((outcomes["queue_s"] > 0).sum())
        held["changes"] += len(result.changes)
        held["kept_tokens"] += sum(fleet.kept_tokens.values())
        held["chunked"] += int((drawn.requests.prompt_tokens[done] > budgets[outcomes["instance"][done]]).sum())
        if drawn.cluster.policy(drawn.cluster.endpoints[0]).batching.mode == "dynamic":
            held["batched"] += int(done.sum())

    of_kind()
    for name in HOLDS[kind]:
        assert held[name] > 0, f"no scenario has {name}"


@pytest.mark.parametrize("kind", at_night_but(("everything", "evictions"), LOADS))
def test_every_latency_and_decision_agrees(kind):
    every_one_agrees(kind, FEW)


MOONCAKE = Path(__file__).parents[5] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not here")
def test_prefixes_of_real_conversations_agree():
    """The first requests of Mooncake's trace, on caches that hold a few conversations each."""
    trace = load_trace(MOONCAKE, "mooncake", limit=100)
    block = 128
    blocks = [
        [4 * int(number) + part for number in numbers for part in range(4)][: prompt // block]
        for numbers, prompt in zip(
            np.split(trace.prefix_hashes, trace.prefix_first[1:-1]), trace.prompt_tokens, strict=True
        )
    ]
    engine = config(
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        block_size_tokens=block,
        kv_blocks=1200,
        max_model_len=140_000,
        prefix_caching=True,
        profile=Profile(0.02, 0.004, 5e-5, 2e-9, 0.008, 2e-5, 7e-8),
    )
    outputs = np.minimum(trace.output_tokens, 60)
    requests = make_requests(trace.arrival_s, trace.prompt_tokens, outputs, prefix_blocks=blocks)
    _, result = agree(Drawn(cluster(instance(engine=engine), instance(engine=engine)), requests, (), 0))
    assert result.counters["prefix_hit_tokens"] > 20_000


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LOADS)
def test_every_latency_and_decision_agrees_on_many_more(kind):
    every_one_agrees(kind, MANY)
