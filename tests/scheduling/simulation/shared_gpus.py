"""A workload of two models that share the GPUs of one instance, for the test of swaps and the bench."""

import numpy as np

from scheduling.control.swaps import EVERY_S
from scheduling.fleet.profile import Profile
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
SLEEP_S, WAKE_S = 1.0, 2.0
SWAP_S = SLEEP_S + WAKE_S


def simulated(per_s, slo_s, *, seed, by_queue=True, ordering="qlm", alternating=False):
    """Run two models with *per_s* requests per second, due within *slo_s*; return
    outcomes, which were in time, and swaps. With *alternating* they come one by one, evenly.
    """
    random = np.random.default_rng(seed)
    arrival_s = [random.uniform(0.0, FOR_S, random.poisson(rate * FOR_S)) for rate in per_s]
    if alternating:
        arrival_s = [np.arange(number / 2 / rate, FOR_S, 1.0 / rate) for number, rate in enumerate(per_s)]
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
        instance(name, engine=ENGINE, state=state, sharing=Sharing("pair", SLEEP_S, WAKE_S, 20.0, 1.0))
        for name, state in (("a", State.READY), ("b", State.ASLEEP))
    ]
    simulation = Simulation(cluster(*specs, ordering=ordering, sweeps=True, swap_by_queue=by_queue), requests)
    result = simulation.run(Swapping(simulation), EVERY_S, until_s=4 * FOR_S)
    done = result.outcomes["state"] == Outcome.DONE
    assert done.all(), "somebody was lost"
    return result.outcomes, result.outcomes["ttft_s"] <= deadline_s, int(result.counters["swaps"])
