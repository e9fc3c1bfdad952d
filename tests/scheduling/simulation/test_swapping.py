"""Swaps by queue beside swaps on demand, in whole simulations of two models that share the GPUs of one instance."""

import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.scaling.swapping import LOOK_S
from scheduling.simulation.cluster.description import Sharing
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.swapping import Swapping
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

ENGINE = config(
    max_num_seqs=16, kv_blocks=4000, block_size_tokens=16, max_num_batched_tokens=2048,
    profile=Profile(0.02, 0.0, 1e-4, 0.0, 0.02, 1e-4, 0.0),
)  # fmt: skip
FOR_S = 400.0


def simulated(per_s, slo_s, *, seed, by_queue=True, ordering="qlm"):
    """Two models, asked for *per_s* times a second, due within *slo_s*: outcomes, who was in time, and swaps."""
    random = np.random.default_rng(seed)
    arrival_s = [random.uniform(0.0, FOR_S, random.poisson(rate * FOR_S)) for rate in per_s]
    model = np.repeat([0, 1], [each.size for each in arrival_s])
    arrival_s = np.concatenate(arrival_s)
    order = np.argsort(arrival_s)
    arrival_s, model = arrival_s[order], model[order]
    deadline_s = np.array(slo_s)[model]
    requests = make_requests(
        arrival_s, 100, random.integers(20, 180, arrival_s.size), model=model, predicted_tokens=np.full(model.size, 100),
        deadline_s=deadline_s,
    )  # fmt: skip
    specs = [
        instance(name, engine=ENGINE, state=state, sharing=Sharing("pair", 1.0, 2.0, 20.0, 1.0))
        for name, state in (("a", State.READY), ("b", State.ASLEEP))
    ]
    simulation = Simulation(cluster(*specs, ordering=ordering, sweeps=True), requests)
    result = simulation.run(Swapping(simulation, by_queue=by_queue), LOOK_S, until_s=4 * FOR_S)
    done = result.outcomes["state"] == Outcome.DONE
    assert done.all(), "somebody was lost"
    return result.outcomes, result.outcomes["ttft_s"] <= deadline_s, int(result.counters["swaps"])


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("per_s", "slo_s"), [((2.0, 2.0), (30.0, 300.0)), ((2.5, 2.5), (60.0, 120.0)), ((2.2, 2.2), (90.0, 90.0))]
)
def test_swaps_by_queue_are_fewer_and_keep_no_fewer_in_time(per_s, slo_s, seed):
    _, in_time, swaps = simulated(per_s, slo_s, seed=seed)
    _, on_demand, swaps_on_demand = simulated(per_s, slo_s, seed=seed, by_queue=False)
    assert in_time.mean() >= on_demand.mean()
    assert 0 < swaps < swaps_on_demand


def test_the_same_again_is_the_same():
    first, *_ = simulated((1.0, 1.0), (30.0, 200.0), seed=3)
    again, *_ = simulated((1.0, 1.0), (30.0, 200.0), seed=3)
    assert first.tobytes() == again.tobytes()


def test_orders_without_groups_swap_on_demand_as_before():
    queue = simulated((1.0, 1.0), (30.0, 200.0), seed=1, ordering="deadline")
    demand = simulated((1.0, 1.0), (30.0, 200.0), seed=1, ordering="deadline", by_queue=False)
    assert queue[0].tobytes() == demand[0].tobytes()
    assert queue[2] == demand[2] > 0
