"""When work that makes no progress is given up, by the profile of what runs there, and which requests are suspected."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.port import Advanced
from scheduling.fleet.profile import Profile
from tests.dispatch.test_leaving import SUSPECT, World
from workers.vllm.metrics import VllmMetrics

GPU = Profile(0.02, 0.0, 1e-4, 0.0, 0.02, 0.0, 0.0)
CPU = Profile(0.1, 0.0, 2e-3, 0.0, 0.2, 0.01, 0.0)
"""A prompt of 20,000 tokens is prefilled in 40 s."""
BEFORE, FIRST = VllmMetrics(running=1, prompt_tokens_total=9.0, generation_tokens_total=9.0), VllmMetrics(running=1)


@pytest.mark.parametrize(
    ("profile", "metrics", "prompt_tokens", "tokens", "limit_s", "suspected"),
    [
        (GPU, BEFORE, 20_000, 0, 30, True),
        (CPU, BEFORE, 20_000, 0, 120, True),
        (CPU, BEFORE, 100, 0, 30, True),
        (CPU, BEFORE, 20_000, 3, 30, True),
        (CPU, BEFORE, 900_000, 0, 300, True),
        (CPU, FIRST, 20_000, 0, 300, False),
        (GPU, FIRST, 20_000, 0, 300, False),
        (None, BEFORE, 20_000, 0, 300, False),
    ],
    ids=[
        "a fast prefill",
        "a prefill of 40 s",
        "a short prompt on the same server",
        "its prefill is over",
        "no more than fits a context of 50,000 tokens at once",
        "it may have to compile first",
        "a GPU too",
        "its profile is not measured",
    ],
)
async def test_an_iteration_may_take_as_long_as_its_profile_says_and_not_much_longer(
    profile, metrics, prompt_tokens, tokens, limit_s, suspected
):
    world = World()
    models = {name: replace(spec, context_tokens=50_000) for name, spec in world.inventory.models.items()}
    instances = tuple(replace(one, profile=profile, kv_capacity_tokens=2_000_000) for one in world.inventory.instances)
    world.apply(replace(world.inventory, models=models, instances=instances))
    number = world.submit(prompt_tokens=prompt_tokens, fingerprint=SUSPECT)
    if tokens:
        world.send(Advanced(((number, tokens),)))
    replica = world.dispatcher.requests[number].replica
    heartbeats = Heartbeats(world.dispatcher, None, session=None, refresh=None, job=None)
    began_s = world.now_s

    async def look(after_s):
        world.now_s = began_s + after_s
        await heartbeats._look_at_work(replica, metrics, world.now_s)
        return bool(replica.wedged)

    assert not await look(0.0)
    assert not await look(limit_s - 1.0)
    assert await look(limit_s + 2.0), "one that is stuck is found"
    assert "no iteration ended" in replica.wedged
    assert world.dispatcher.suspects.is_suspect(SimpleNamespace(fingerprint=SUSPECT)) is suspected
