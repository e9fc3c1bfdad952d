"""Why this instance: what the decision trace of a request says, by policy."""

import pytest
from channels.db import database_sync_to_async

from controlplane.fleet.models import Deployment
from controlplane.gateway.explanation import trace_of
from scheduling.routing.routers import POLICY_CODES
from tests.gateway.conftest import until

PARTS = {
    "round_robin": set(),
    "least_request": {"requests"},
    "minimum_use": {"kv_use"},
    "join_shortest_queue": {"prefill_tokens", "decode_tokens"},
    "preserve": {"prefill_tokens", "decode_tokens", "memory_tokens", "peak_kv"},
    "least_delay": {"prefill_tokens", "decode_tokens", "memory_tokens", "peak_kv", "affinity_tokens"},
}


async def set_policy(served, policy):
    await database_sync_to_async(Deployment.objects.update)(routing_policy=policy)
    served.gateway.dispatching.refresh_now()
    topology = served.gateway.dispatching.topology
    await until(lambda: all(each.spec.policy.routing == policy for each in topology.endpoints))


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east", "east"]}])
async def test_a_placement_says_what_was_weighed(served):
    for policy in POLICY_CODES:
        await set_policy(served, policy)
        await weighed(served, policy)


async def weighed(served, policy: str) -> None:
    """Ask, and look at what the trace says of the placement."""
    await (await served.chat(max_tokens=5)).read()
    *_, row = await served.rows()
    (placed,) = [entry for entry in trace_of(row) if "seen" in entry]
    assert placed["policy"] == policy
    assert placed["chosen_because"].endswith(".")
    assert [set(each["parts"]) for each in placed["seen"]] == [PARTS[policy]] * 3
    assert [each["room"] for each in placed["seen"]] == [True] * 3
    # Loads are those before the request came, and all were idle.
    assert [(each["running"], each["remaining_tokens"], each["kv_tokens"]) for each in placed["seen"]] == [
        (0, 0, 0)
    ] * 3
    scores = [each["score"] for each in placed["seen"]]
    if policy == "round_robin":
        assert scores == [None] * 3
    else:
        chosen = next(each for each in placed["seen"] if each["instance"] == placed["instance"])
        assert chosen["score"] == min(scores)
    fleet = served.gateway.dispatching.topology.fleet
    await until(lambda: not fleet.running.any())
    assert not fleet.queued_prompt_tokens.any()
    assert not fleet.remaining_tokens.any()
