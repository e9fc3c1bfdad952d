"""What a dispatch round trip costs in a simulation, and what requests ahead win back of it."""

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

SLOTS = 16
COUNT = 600
ENGINE = config(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=512,
    kv_blocks=10_000,
    policy="priority",
    max_model_len=4096,
    profile=Profile(0.01, 0.0, 1e-5, 0.0, 0.01, 2e-4, 0.0),
)


def run(round_trip_s: float, limit: int | None, ordering: str = "fcfs"):
    """Run all requests at once on one instance; return the result, and output tokens per second."""
    random = np.random.default_rng(5)
    output = random.integers(10, 90, COUNT)
    requests = make_requests(np.zeros(COUNT), np.full(COUNT, 8), output, predicted_tokens=output)
    fleet = cluster(
        instance(engine=ENGINE),
        dispatch_round_trip_ms=1000 * round_trip_s,
        requests_ahead_limit=limit,
        ordering=ordering,
    )
    result = Simulation(fleet, requests, decisions=True).run()
    assert (result.outcomes["state"] == Outcome.DONE).all()
    return result, float(output.sum() / np.nanmax(result.outcomes["e2e_s"]))


def test_slots_idle_for_a_round_trip_cost_throughput_and_requests_ahead_recover_it():
    _, at_once = run(0.0, None)
    _, strict = run(0.3, 0)
    _, one = run(0.3, 1)
    _, measured = run(0.3, None)
    assert strict < 0.75 * at_once
    assert strict < one
    assert measured > 0.96 * at_once
