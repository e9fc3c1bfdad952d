"""LoRA adapters under two clocks: dispatcher and simulator route, load and evict them alike."""

from dataclasses import replace

import numpy as np
import pytest

from scheduling.routing.adapters import TIERS
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import Live, serve_both, simulated_fleet
from tests.examples import at_night_but

REQUESTS = 200
CASES = [
    *((routing, "fcfs", 0.0) for routing in ("round_robin", "minimum_use", "preserve", "least_delay")),
    ("join_shortest_queue", "priority", 0.0),
    ("least_request", "ssjf", 0.3),
    ("join_shortest_queue", "fcfs", 0.3),
]


@pytest.mark.parametrize(
    ("routing", "ordering", "round_trip_s"),
    at_night_but([CASES[3], CASES[4], CASES[5]], CASES),
)
async def test_both_clocks_place_adapters_alike(routing, ordering, round_trip_s):
    random = np.random.default_rng([3, len(routing), len(ordering)])
    fleet = simulated_fleet(random, routing, ordering, round_trip_s)
    fleet.instances = [
        replace(spec, engine=replace(spec.engine, max_loras=int(random.integers(1, 3)), max_cpu_loras=4))
        for spec in fleet.instances
    ]
    output = np.clip(random.geometric(1 / 12, REQUESTS), 1, 60)
    adapter = random.integers(-1, 8, REQUESTS)
    requests = make_requests(
        np.cumsum(random.exponential(1 / 12, REQUESTS)),
        random.integers(1, 55, REQUESTS),
        output,
        model=random.integers(0, 2, REQUESTS),
        region=random.integers(0, 3, REQUESTS),
        priority=random.integers(0, 3, REQUESTS),
        adapter=adapter,
    )
    live = Live(fleet)
    result = serve_both(live, fleet, requests)
    decided = [each.asked.number for _, each, _, _ in live.dispatcher.decided]
    assert (result.outcomes["state"] == Outcome.DONE).sum() + len(live.refused) == REQUESTS
    counted = [result.counters[f"adapter_{name}"] for name in ("not_loaded", "in_memory", "on_gpu")]
    assert counted == [live.dispatcher.adapters.tiers[tier] for tier in TIERS]
    assert min(counted) > 0
    assert sum(counted) == (adapter[decided] >= 0).sum()
