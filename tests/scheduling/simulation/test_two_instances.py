"""Two equal instances under one load: how it is divided, with each router that looks at load."""

import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

ENGINE = config(
    max_num_seqs=128, kv_blocks=70_000, block_size_tokens=16, max_num_batched_tokens=16_384, max_model_len=16_384,
    profile=Profile(0.01, 0.0, 2.5e-5, 0.0, 0.01, 1e-4, 1e-8),
)  # fmt: skip


@pytest.mark.parametrize("routing", [EndpointPolicy().routing, "preserve"])
def test_a_bench_of_long_prompts_is_divided_evenly(routing):
    """C76: 8,192 tokens in and 512 out, ten a second; none waits at an instance while the other has room."""
    random = np.random.default_rng(76)
    arrival_s = np.cumsum(random.exponential(0.1, 1000))
    requests = make_requests(arrival_s, 8192, 512, predicted_tokens=np.full(arrival_s.size, 512))
    fleet = cluster(instance(engine=ENGINE), instance(engine=ENGINE), routing=routing)
    outcomes = Simulation(fleet, requests).run().outcomes
    assert (outcomes["state"] == Outcome.DONE).all()
    assert 0.45 <= (outcomes["instance"] == 0).mean() <= 0.55
    starts_s, ends_s = arrival_s + outcomes["queue_s"], arrival_s + outcomes["e2e_s"]
    for number in np.flatnonzero(outcomes["queue_s"] > 0.0).tolist():
        elsewhere = outcomes["instance"] != outcomes["instance"][number]
        middle_s = (arrival_s[number] + starts_s[number]) / 2.0
        running = elsewhere & (starts_s <= middle_s) & (ends_s > middle_s)
        assert running.sum() >= ENGINE.max_num_seqs
