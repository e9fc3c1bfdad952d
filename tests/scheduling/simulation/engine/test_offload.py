"""KV in CPU memory: the compiled engine does what the reference does, and a link decides what it is worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.simulation.cluster.description import NO_LIMITS
from scheduling.simulation.engine.reference import EngineRequest
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.oracles.single_instance import serve
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

NEVER_S = 1e9


def drawn(seed, count=40):
    """Requests of four kinds that begin alike, more than the memory of the engine holds."""
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(0.7, count))
    prompt, output = random.integers(1, 60, count), random.integers(1, 30, count)
    shared = random.integers(0, prompt // 4 + 1)
    blocks = [
        [1000 * int(kind) + at for at in range(each)]
        for kind, each in zip(random.integers(1, 5, count), shared, strict=True)
    ]
    return arrival_s, prompt, output, blocks


def simulated(engine, arrival_s, prompt, output, blocks):
    requests = make_requests(arrival_s, prompt, output, prefix_blocks=blocks)
    result = Simulation(cluster(instance(engine=engine, **NO_LIMITS), ordering="fcfs"), requests).run()
    return result.outcomes["ttft_s"], result.outcomes["e2e_s"], result.counters


def small(**more):
    return config(prefix_caching=True, max_num_seqs=4, max_num_batched_tokens=32, **more)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000), kv_blocks=st.integers(30, 60), offload_blocks=st.integers(0, 150),
    restore_s=st.sampled_from([0.0, 0.05, 0.5]), per_token_s=st.sampled_from([0.0, 0.002, 0.05]),
)  # fmt: skip
def test_compiled_and_reference_agree(seed, kv_blocks, offload_blocks, restore_s, per_token_s):
    engine = small(
        kv_blocks=kv_blocks, offload_blocks=offload_blocks, restore_s=restore_s, restore_s_per_token=per_token_s
    )
    arrival_s, prompt, output, blocks = drawn(seed)
    ttft_s, e2e_s, _ = simulated(engine, arrival_s, prompt, output, blocks)
    requests = [
        EngineRequest(str(at), int(prompt[at]), int(output[at]), 0, float(arrival_s[at]), tuple(blocks[at]))
        for at in range(arrival_s.size)
    ]
    timelines = serve(engine, requests)
    assert ttft_s == pytest.approx([timelines[str(at)].ttft_s for at in range(arrival_s.size)], abs=1e-6)
    assert e2e_s == pytest.approx([timelines[str(at)].e2e_s for at in range(arrival_s.size)], abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), kv_blocks=st.integers(30, 60))
def test_an_endlessly_slow_link_is_as_none(seed, kv_blocks):
    requests = drawn(seed)
    slow = small(kv_blocks=kv_blocks, offload_blocks=500, restore_s_per_token=NEVER_S)
    *with_it, counters = simulated(slow, *requests)
    *without, _ = simulated(small(kv_blocks=kv_blocks), *requests)
    assert np.array_equal(with_it, without)
    assert counters["restored_tokens"] == 0


def test_over_an_endlessly_fast_link_a_prefix_that_returns_costs_nothing():
    """The prompt comes again after others have pushed it off the GPU: as with a GPU that had room for all of them."""
    prompts = [[1000 * kind + at for at in range(20)] for kind in (1, 2, 3, 4, 1)]
    requests = np.arange(5) * 100.0, np.full(5, 81), np.full(5, 2), prompts
    fast = simulated(small(kv_blocks=30, offload_blocks=500, restore_s=0.0), *requests)
    roomy, pushed_off = simulated(small(kv_blocks=500), *requests), simulated(small(kv_blocks=30), *requests)
    assert np.array_equal(fast[0], roomy[0])
    assert fast[2]["restored_tokens"] == 80
    assert pushed_off[0][4] > 2 * fast[0][4]
