"""A fork of a living fleet, simulated with the requests that then came, does what the fleet did: placement for placement.

Both run on virtual clocks, so that the answer is the same on every machine. `test_fork_is_exact` does it in real time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.fleet.models import Deployment, GpuType, Instance, Model, PerformanceProfile
from controlplane.gateway.models import LedgerRow
from controlplane.simulation.whatif.fork import fork_of
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario
from tests.gateway.rows import make_rows
from tests.simulation.whatif.virtual_fleet import Asked, VirtualFleet

import os
BEFORE_S, AFTER_S = float(os.environ.get("BEF","120")), 600.0
INSTANCES, SEQUENCES = 3, 4
PER_S = 2.2
ROUND_TRIP_S = 0.004
PROFILE = {
    "prefill_t0_s": 0.1,
    "prefill_a_s": 0.05,
    "prefill_b_s_per_token": 1e-3,
    "prefill_c_s_per_token2": 0.0,
    "decode_a_s": 0.1,
    "decode_b_s_per_sequence": 0.005,
    "decode_c_s_per_token": 1e-5,
}


def make_fleet(routing: str, ordering: str) -> None:
    servers = [SimpleNamespace(name=f"m-{at}", url=f"http://127.0.0.1:1/m-{at}") for at in range(INSTANCES)]
    make_rows(servers, regions=["east"] * INSTANCES, max_num_seqs=SEQUENCES, queue_bound=1000)
    model = Model.objects.get()
    PerformanceProfile.objects.create(
        model=model, gpu_type=GpuType.objects.get(), tensor_parallel=1, source="test", **PROFILE
    )
    Deployment.objects.update(
        routing_policy=routing,
        ordering_policy=ordering,
        min_instances=INSTANCES,
        max_instances=INSTANCES,
        max_num_batched_tokens=2048,
        requests_ahead_limit=0,
    )
    Instance.objects.update(kv_capacity_tokens=16 * 1024)


def requests(seed: int) -> list[Asked]:
    random = np.random.default_rng(seed)
    asked, at_s = [], 0.0
    while (at_s := at_s + random.exponential(1 / PER_S)) < BEFORE_S + AFTER_S:
        output = int(np.clip(random.lognormal(3.1, 0.6), 2, 200))
        predicted = max(1, int(output * np.exp(0.4 * random.standard_normal())))
        slo_class = "interactive" if random.random() < 0.6 else "flexible"
        asked.append(Asked(round(at_s, 6), "east", slo_class, int(random.integers(20, 400)), output, predicted))
    return asked


def simulate(start: Start) -> Result:
    scenario = Scenario.model_validate(start.scenario)
    return stage_start(start, scenario, 0).run(decisions=True).result


@pytest.mark.parametrize(
    ("routing", "ordering"),
    [
        ("join_shortest_queue", "fcfs"),
        ("join_shortest_queue", "ssjf"),
        ("join_shortest_queue", "qlm"),
        ("preserve", "priority"),
    ],
)
def test_a_fork_does_what_the_fleet_did(db, routing, ordering):
    make_fleet(routing, ordering)
    live = VirtualFleet("m", ROUND_TRIP_S)
    asked = requests(1)
    before = [each for each in asked if each.arrived_s < BEFORE_S]
    live.run(before, BEFORE_S)
    start = Start.model_validate_json(fork_of(live.seen(), AFTER_S).model_dump_json())
    live.run(asked[len(before) :])
    live.write_ledger()
    came = {
        "kind": "ledger",
        "since": start.at.isoformat(),
        "until": (start.at + timedelta(seconds=2 * AFTER_S)).isoformat(),
    }
    result = simulate(start.model_copy(update={"arrivals": came}))
    rows = list(LedgerRow.objects.filter(arrived_at__gte=start.at).order_by("arrived_at", "pk"))
    held = result.requests.count - len(rows)
    assert held == len(start.state["running"]) + len(start.state["waiting"]) >= 0
    outcomes = result.outcomes[held:]
    print(f"\n{routing} {ordering}: {held} held at the fork, {len(rows)} came")
    names = sorted(live.slot_of)
    for name in ("ttft", "queue", "e2e"):
        real = np.array([getattr(row, f"{name}_ms") for row in rows], float)
        simulated = 1000 * outcomes[f"{name}_s"]
        for percentile in (50, 95):
            a, b = np.nanpercentile(real, percentile), np.nanpercentile(simulated, percentile)
            print(f"{name} p{percentile}: {a:8.1f} {b:8.1f} {b / a - 1 if a else 0:+.2%}")
    placed = np.array([names.index(row.instance) for row in rows])
    same = placed == outcomes["instance"]
    print(f"{same.mean():.1%} same; first difference {int(np.argmin(same)) if not same.all() else None}")
