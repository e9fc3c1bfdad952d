"""LoRA adapters under two clocks: dispatcher and simulator route, load and evict them alike."""

from dataclasses import replace

import numpy as np
import pytest

from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.standings import KnownGraph
from scheduling.routing.adapters import TIERS
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.dispatch.test_runs_twin import RATES, RUNS, UNITS, RunsLive, drawn_record, rows_of
from tests.dispatch.test_twin import NEVER, Live, assert_alike, serve_both, simulated_fleet
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


async def test_both_clocks_prewarm_adapters_alike():
    random = np.random.default_rng(11)
    fleet = simulated_fleet(random, "join_shortest_queue", "application")
    fleet.prewarming = "hermes"
    fleet.instances = [
        replace(spec, engine=replace(spec.engine, max_loras=2, max_cpu_loras=4)) for spec in fleet.instances
    ]
    records = [drawn_record(random, 6) for _ in range(40)]
    graph = KnownGraph.of(DemandGraph("a0", UNITS, records), RATES)
    began_s = np.cumsum(random.exponential(0.3, RUNS))
    runs = RunsToCome(
        [ApplicationToCome("a0", UNITS, graph)],
        [RunToCome(0, float(began), NEVER, drawn_record(random, 6)) for began in began_s],
    )
    run_of, arrival_s, prompt, output = rows_of(runs)
    region, adapter = (random.integers(0, most, RUNS)[run_of] for most in (3, 12))
    requests = make_requests(arrival_s, prompt, output, region=region, run=run_of, adapter=adapter)
    live = RunsLive(fleet)
    live.dispatcher.runs.graphs[1, "a0"] = graph
    live.serve(fleet, requests, runs)
    result = Simulation(fleet, requests, decisions=True, runs=runs).run()
    assert_alike(live, result)
    counts = live.dispatcher.prewarming.counts["adapter"]
    assert live.warmed == counts["warmed"]
    assert {name: result.counters[f"prewarmed_{name}"] for name in counts} == dict(counts)
    assert min(counts["used"], counts["wasted"]) > 0
