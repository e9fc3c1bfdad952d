"""One long system prompt that most requests share makes no instance hot, and cancelled streams leave no load behind."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.clocks.both import Scenario, live_fleet
from tests.dispatch.test_leaving import World

INSTANCES, PER_S, SECONDS, BLOCK, SYSTEM_TOKENS = 6, 60, 6, 128, 20_000
PROFILE = Profile(0.02, 0.005, 3e-5, 2e-10, 0.008, 5e-5, 2e-8)
"""Of an 8B model on an H100: the system prompt takes 0.7 s."""


@pytest.mark.parametrize("routing", ["least_delay", "join_shortest_queue"])
def test_a_shared_prompt_makes_no_instance_hot_and_cancelled_streams_leave_no_load(routing):
    random, count = np.random.default_rng(3), PER_S * SECONDS
    shared, output = random.random(count) < 0.8, np.clip(random.geometric(1 / 60, count), 1, 400)
    prompt = np.where(shared, SYSTEM_TOKENS, 0) + random.integers(300, 2000, count)
    requests = make_requests(np.sort(random.uniform(0.5, SECONDS, count)), prompt, output, predicted_tokens=output)
    engine = EngineConfig(64, 8192, BLOCK, 4000, "fcfs", 32_768, PROFILE, prefix_caching=True)
    specs = [simulated.InstanceSpec("m", "east", engine) for _ in range(INSTANCES)]
    fleet = simulated.Cluster(specs, policies=EndpointPolicy(routing=routing))
    blocks, system = [], range(SYSTEM_TOKENS // BLOCK)
    for number in range(count):
        own = iter(random.integers(1000, 1 << 60, int(prompt[number]) // BLOCK).tolist())
        blocks.append([*(1 + at for at in system if shared[number]), *own][: int(prompt[number]) // BLOCK])
    live, _ = live_fleet(Scenario(fleet, requests, blocks))
    live.run(SECONDS / 2)
    running = [number for number, course in live.courses.items() if course.number >= 0][:30]
    assert len(running) == 30
    for number in running:
        live.cancel(number)
    live.run()
    given = Counter(slot for *_, slot in live.decisions)
    assert sum(given.values()) == count
    assert not any(course.refused for course in live.courses.values())
    assert max(given.values()) <= 1.5 * count / INSTANCES
    assert min(given.values()) >= count / INSTANCES / 1.5
    assert World.left_behind(SimpleNamespace(dispatcher=live.dispatcher, topology=live.topology)) == {}
