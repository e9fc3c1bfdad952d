"""Prefixes that are warmed in the compiled cache, against the block pool of the reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.block_pool import BlockPool
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.engine.prefix_cache import cached_blocks, warm_prefix
from scheduling.simulation.engine.state import NONE
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import idle_contents

BLOCKS = 8
PREFIXES = ((1, 2, 3), (4, 5), (1, 2, 6, 7), (8,), (9, 10, 11, 12, 13))
PROFILE = Profile(0.0, 0.01, 1e-3, 0.0, 0.01, 0.0, 0.0)


def simulation(arrivals=None, prefixes=PREFIXES):
    config = EngineConfig(8, 64, 4, BLOCKS, "fcfs", 64, PROFILE, prefix_caching=True)
    arrivals = arrivals or [1000.0] * len(prefixes)
    requests = make_requests(arrivals, [4 * len(each) + 1 for each in prefixes], 2, prefix_blocks=prefixes)
    return Simulation(Cluster([InstanceSpec("m", "r", config)]), requests)


def idle_order(engines):
    order, at = [], int(engines.instances["oldest_idle"][0])
    while at != NONE:
        order.append(int(engines.cache.blocks["number"][0, at]))
        at = int(engines.cache.blocks["newer"][0, at])
    return order


def warm(pool, contents):
    """Do what a request of one token does; return how many of *contents* were missing, -1 if there is no room."""
    if len(contents) >= pool.free:
        return -1
    known = pool.find(contents)
    missing = contents[len(known) :]
    pool.share(known)
    if missing:
        assert pool.take(len(missing) + 1)
        pool.give_back(1)
    pool.release(known + [pool.publish(each) for each in missing])
    return len(missing)


@given(chosen=st.lists(st.sampled_from(range(len(PREFIXES))), max_size=20))
def test_the_cache_is_that_of_the_reference(chosen):
    made, pool = simulation(), BlockPool(BLOCKS)
    engines, first = made.world.engines, made.requests.prefix_first
    for at in chosen:
        count = len(PREFIXES[at])
        cached = len(pool.find(PREFIXES[at]))
        assert cached_blocks(engines, 0, first[at], count) == cached
        assert warm_prefix(engines, 0, engines.cache.hashes, first[at], count) == warm(pool, list(PREFIXES[at]))
        assert idle_order(engines) == idle_contents(pool)
    assert engines.instances["free_blocks"][0] == BLOCKS


def test_a_warm_prefix_is_not_computed_again_and_its_prefill_delays_a_busy_instance():
    def ttft_s(warms_at_s):
        made = simulation([0.0, 0.005], PREFIXES[:2])
        made.advance(0.002)
        assert made.world.engines.instances["running"][0] == 1
        if warms_at_s:
            engines = made.world.engines
            assert warm_prefix(engines, 0, engines.cache.hashes, made.requests.prefix_first[1], 2) == 2
        result = made.run()
        return result.outcomes["ttft_s"], result.outcomes["cached_tokens"]

    cold, nothing = ttft_s(warms_at_s=False)
    warmed, cached = ttft_s(warms_at_s=True)
    assert (nothing.tolist(), cached.tolist()) == ([0, 0], [0, 8])
    np.testing.assert_allclose(
        warmed, cold
    )  # its eight tokens are computed in the same step, for the first request as for it
