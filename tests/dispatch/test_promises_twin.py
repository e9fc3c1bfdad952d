"""Promises at the door under both clocks: the same rule on nearly the same estimate refuses nearly the same share."""

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.dispatch.port import Submit
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.promises import REFUSE, ClassTerms
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import NEVER, Live

COUNT = 1200
DUE_S = 6.0


class Refusing(Live):
    """The dispatcher with a class that refuses what is unreachable."""

    def __init__(self, fleet):
        super().__init__(fleet, max_hold_s=NEVER)
        take = self.dispatcher.take

        def submit(record):
            take(replace(record, if_unreachable=REFUSE) if isinstance(record, Submit) else record)

        self.dispatcher.take = submit


def fleet_of():
    engine = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=1024, block_size_tokens=16, kv_blocks=4000, policy="fcfs",
        max_model_len=4096, profile=Profile(0.02, 0.01, 1e-4, 0.0, 0.02, 4e-4, 1e-7),
    )  # fmt: skip
    return simulated.Cluster(
        [simulated.InstanceSpec("m", "east", engine) for _ in range(2)],
        policies=EndpointPolicy(ordering="fcfs"),
        classes=(ClassTerms("chat", due_s=DUE_S, if_unreachable=REFUSE),),
    )


def demand():
    random = np.random.default_rng(5)
    output = np.maximum(1, random.lognormal(4.5, 0.7, COUNT)).astype(np.int32)
    return make_requests(
        np.sort(random.uniform(0.0, COUNT / 9.0, COUNT)), random.integers(50, 400, COUNT), output,
        predicted_tokens=np.maximum(1, output * random.lognormal(0.0, 0.3, COUNT)).astype(np.int32),
        deadline_s=DUE_S, judged=np.ones(COUNT, np.int8), priority=np.zeros(COUNT, np.int32),
    )  # fmt: skip


@pytest.mark.asyncio
async def test_the_dispatcher_and_the_simulator_refuse_alike():
    fleet, requests = fleet_of(), demand()
    live = Refusing(fleet)
    live.run(fleet, requests)
    result = Simulation(fleet, requests).run()
    by_live = np.zeros(COUNT, bool)
    by_live[[number for number, code in live.refused if code == "deadline_unreachable"]] = True
    by_simulator = result.refused_at_door
    assert (result.outcomes["state"][~by_simulator] == Outcome.DONE).all()
    assert 0.1 < by_live.mean() < 0.6
    assert abs(by_live.mean() - by_simulator.mean()) < 0.05
    late = result.outcomes["ttft_s"][~by_simulator] > DUE_S
    assert late.mean() < 0.1
