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


PAIR = (Sharing("pair", SLEEP_S, WAKE_S, 20.0, 1.0),) * 2


def simulated(
    per_s, slo_s, *, seed, by_queue=True, ordering="qlm", alternating=False, sharing=PAIR, swapping=Swapping, for_s=FOR_S,
    later_per_s=None,
):  # fmt: skip
    """Run models with *per_s* requests per second, *later_per_s* in the second half, due within *slo_s*; return outcomes,
    which were in time, and swaps. With *alternating* those of two models come one by one, evenly.
    """
    random = np.random.default_rng(seed)
    until_s = for_s / 2 if later_per_s else for_s
    arrival_s = [random.uniform(0.0, until_s, random.poisson(rate * until_s)) for rate in per_s]
    for at, rate in enumerate(later_per_s or ()):
        arrival_s[at] = np.append(arrival_s[at], random.uniform(until_s, for_s, random.poisson(rate * until_s)))
    if alternating:
        arrival_s = [np.arange(number / 2 / rate, for_s, 1.0 / rate) for number, rate in enumerate(per_s)]
    model = np.repeat(np.arange(len(per_s)), [each.size for each in arrival_s])
    arrival_s = np.concatenate(arrival_s)
    order = np.argsort(arrival_s)
    arrival_s, model = arrival_s[order], model[order]
    deadline_s = np.array(slo_s)[model]
    requests = make_requests(
        arrival_s, 100, random.integers(20, 180, arrival_s.size), model=model, predicted_tokens=np.full(model.size, 100),
        deadline_s=deadline_s,
    )  # fmt: skip
    specs = [
        instance(f"m{at}", engine=ENGINE, state=State.ASLEEP if at else State.READY, sharing=each)
        for at, each in enumerate(sharing)
    ]
    simulation = Simulation(cluster(*specs, ordering=ordering, sweeps=True, swap_by_queue=by_queue), requests)
    result = simulation.run(swapping(simulation), EVERY_S, until_s=10 * for_s)
    done = result.outcomes["state"] == Outcome.DONE
    assert done.all(), "somebody was lost"
    return result.outcomes, result.outcomes["ttft_s"] <= deadline_s, int(result.counters["swaps"])
