"""Why this instance: what the decision trace of a request says, by policy."""

import pytest
from channels.db import database_sync_to_async

from controlplane.fleet.models import Deployment, PerformanceProfile
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


async def set_policy(served, policy, *, profile=False):
    def write():
        Deployment.objects.update(routing_policy=policy)
        if profile:
            for row in Deployment.objects.all():
                PerformanceProfile.objects.get_or_create(
                    model=row.model,
                    gpu_type=row.gpu_type,
                    tensor_parallel=row.tensor_parallel,
                    defaults={
                        "prefill_a_s": 0.02,
                        "prefill_b_s_per_token": 1e-4,
                        "decode_a_s": 0.02,
                        "source": "made up",
                    },
                )

    await database_sync_to_async(write)()
    served.gateway.refresh_now()
    topology = served.gateway.topology
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
    fleet = served.gateway.topology.fleet
    await until(lambda: not fleet.running.any())
    assert not fleet.queued_prompt_tokens.any()
    assert not fleet.remaining_tokens.any()


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])
async def test_by_delay_the_second_prompt_goes_where_its_beginning_is(served):
    await set_policy(served, "least_delay", profile=True)
    fleet = served.gateway.topology.fleet
    assert (fleet.profile[:2, 4] == 0.02).all(), "coefficients come from the profile's row"
    beginning = "You are the captain of a container ship and answer in one sentence. " * 60
    for question in ("Where to?", "How far is it?", "And the weather?"):
        await (await served.chat(messages=[{"role": "user", "content": beginning + question}], max_tokens=5)).read()
        await until(lambda: not fleet.running.any())
    rows = await served.rows()
    placed = [next(entry for entry in trace_of(row) if "seen" in entry) for row in rows]
    assert len({each["instance"] for each in placed}) == 1
    names = {"predicted_ttft_ms", "decode_s", "others_s", "memory_s", "affinity_tokens", "peak_kv"}
    for number, each in enumerate(placed):
        chosen, other = sorted(each["seen"], key=lambda seen, each=each: seen["instance"] != each["instance"])
        assert set(chosen["parts"]) == set(other["parts"]) == names
        assert other["parts"]["affinity_tokens"] == 0
        if number == 0:
            assert chosen["parts"]["affinity_tokens"] == 0
        else:  # the scripted servers say that it has seven tokens, of which the last is always computed
            assert chosen["parts"]["affinity_tokens"] == 6
            assert chosen["parts"]["predicted_ttft_ms"] < other["parts"]["predicted_ttft_ms"]
    assert "expected in its cache" in placed[1]["chosen_because"]
    assert "s; next is" in placed[0]["chosen_because"]
