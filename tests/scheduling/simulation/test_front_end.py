"""Requests wait in a server's API process before its engine sees them, so the engine's priorities do not order them."""

import math

import numpy as np
import pytest

from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import NO_LIMITS, Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests

H100 = Profile(0.0176, 0.012, 20.7e-6, 0.62e-9, 6.38e-3, 17.8e-6, 3.14e-8)


def mean_e2e_s(policy, front_end, count=2_000):
    """Return the mean E2E of a burst that one server gets at 110 requests a second, by *policy* of its engine."""
    dice = np.random.default_rng(2)
    output = dice.integers(2, 400, count)
    engine = EngineConfig(
        max_num_seqs=256, max_num_batched_tokens=8_192, block_size_tokens=16, kv_blocks=20_000, policy=policy,
        max_model_len=4_096, profile=H100, front_end=front_end,
    )  # fmt: skip
    requests = make_requests(
        np.cumsum(dice.exponential(1 / 110, count)), dice.integers(20, 300, count), output, priority=output
    )
    outcomes = Simulation(Cluster([InstanceSpec("m", "here", engine, **NO_LIMITS)]), requests).run().outcomes
    return float(outcomes["e2e_s"].mean())


@pytest.mark.parametrize(("requests_per_s", "gains"), [(math.inf, True), (63.0, False)])
def test_shortest_first_by_the_engine_gains_only_if_requests_wait_there(requests_per_s, gains):
    front_end = FrontEnd(requests_per_s, 18_500.0)
    fcfs, shortest = (mean_e2e_s(policy, front_end) for policy in ("fcfs", "priority"))
    assert (shortest < 0.85 * fcfs) if gains else shortest == pytest.approx(fcfs, rel=0.02)
