"""One long system prompt that most requests share makes no instance hot, and cancelled streams leave no load behind."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.dispatch.port import Left
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch import test_twin
from tests.dispatch.test_leaving import World
from tests.dispatch.test_twin import NEVER, Live

INSTANCES, PER_S, SECONDS, BLOCK, SYSTEM_TOKENS = 6, 60, 6, 128, 20_000
PROFILE = Profile(0.02, 0.005, 3e-5, 2e-10, 0.008, 5e-5, 2e-8)
"""Of an 8B model on an H100: the system prompt takes 0.7 s."""


class Cancelled(Live):
    """Thirty streams are closed at once, at *cancel_s*."""

    cancel_s = SECONDS / 2

    def change_s(self):
        return self.cancel_s

    def change(self):
        self.cancel_s = NEVER
        running = [one for one in self.dispatcher.requests.values() if one.replica is not None][:30]
        assert len(running) == 30
        for request in running:
            self.engines[request.replica.slot].abort(request.asked.request_id)
            self.dispatcher.take(Left(request.asked.number))


@pytest.mark.parametrize("routing", ["least_delay", "join_shortest_queue"])
def test_a_shared_prompt_makes_no_instance_hot_and_cancelled_streams_leave_no_load(routing, monkeypatch):
    monkeypatch.setattr(test_twin, "BLOCK_TOKENS", BLOCK)
    random, count = np.random.default_rng(3), PER_S * SECONDS
    shared, output = random.random(count) < 0.8, np.clip(random.geometric(1 / 60, count), 1, 400)
    prompt = np.where(shared, SYSTEM_TOKENS, 0) + random.integers(300, 2000, count)
    requests = make_requests(np.sort(random.uniform(0.5, SECONDS, count)), prompt, output, predicted_tokens=output)
    engine = EngineConfig(64, 8192, BLOCK, 4000, "fcfs", 32_768, PROFILE, prefix_caching=True)
    specs = [simulated.InstanceSpec("m", "east", engine) for _ in range(INSTANCES)]
    fleet = simulated.Cluster(specs, policies=EndpointPolicy(routing=routing))
    live = Cancelled(fleet)
    system = range(SYSTEM_TOKENS // BLOCK)
    for number in range(count):
        own = iter(random.integers(1000, 1 << 60, int(prompt[number]) // BLOCK).tolist())
        live.hashes[number] = (*(1 + at for at in system if shared[number]), *own)[: int(prompt[number]) // BLOCK]
    live.run(fleet, requests)
    given = Counter(slot for _, _, _, slot in live.dispatcher.decided)
    assert sum(given.values()) == count
    assert not live.refused
    assert max(given.values()) <= 1.5 * count / INSTANCES
    assert min(given.values()) >= count / INSTANCES / 1.5
    assert World.left_behind(SimpleNamespace(dispatcher=live.dispatcher, topology=live.topology)) == {}
