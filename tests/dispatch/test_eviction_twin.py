"""Eviction by the global scheduler under both clocks: who leaves which instance, when, and what becomes of it."""

import msgspec
import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import BLOCK_TOKENS, NEVER, Live, serve_both

REQUESTS = 200


def fleet_of(random, routing="join_shortest_queue", **policies):
    """Two models in two regions, one or two instances of a few sequences each."""
    specs = []
    for model in "mn":
        for region in ("east", "west"):
            for _ in range(int(random.integers(1, 3))):
                engine = EngineConfig(
                    max_num_seqs=int(random.integers(3, 6)),
                    max_num_batched_tokens=64,
                    block_size_tokens=BLOCK_TOKENS,
                    kv_blocks=int(random.integers(200, 300)),
                    policy="priority",
                    max_model_len=400,
                    profile=Profile(0.02, 0.01, 2e-4, 0.0, 0.04, 0.002, 1e-5),
                )
                specs.append(simulated.InstanceSpec(model, region, engine))
    return simulated.Cluster(
        specs, policies=EndpointPolicy(routing=routing, ordering="qlm", queue_bound=200, **policies)
    )


def mixed(random, load_per_s):
    """Long answers that may wait for minutes fill every instance; a quarter of what comes is short and due in seconds."""
    interactive = random.random(REQUESTS) < 0.25
    output = np.where(interactive, random.integers(1, 15, REQUESTS), random.integers(80, 200, REQUESTS))
    return make_requests(
        np.cumsum(random.exponential(1 / load_per_s, REQUESTS)),
        random.integers(1, 50, REQUESTS),
        output,
        predicted_tokens=np.clip(output + random.integers(-20, 20, REQUESTS), 1, None),
        model=random.integers(0, 2, REQUESTS),
        region=random.integers(0, 2, REQUESTS),
        priority=np.where(interactive, 0, 1),
        deadline_s=np.where(
            interactive, random.integers(1, 3, REQUESTS), np.where(random.random(REQUESTS) < 0.5, 600, NEVER)
        ),
    )


@pytest.mark.parametrize(
    ("routing", "policies"),
    [
        ("join_shortest_queue", {}),
        pytest.param("least_request", {"group_order": "length", "group_batches": 1.0}, marks=pytest.mark.nightly),
        pytest.param("minimum_use", {"dispatch_round_trip_ms": 300.0}, marks=pytest.mark.nightly),
        pytest.param("preserve", {}, marks=pytest.mark.nightly),
    ],
)
async def test_both_clocks_evict_alike(routing, policies):
    random = np.random.default_rng([11, len(routing)])
    fleet = fleet_of(random, routing, eviction_limit=2, **policies)
    requests = mixed(random, 8.0)
    live = Live(fleet)
    result = serve_both(live, fleet, requests)
    assert result.counters["evictions"] == live.evicted
    assert live.evicted >= 5
    assert result.outcomes["evictions"].max() <= 2
    done = result.outcomes["state"] == Outcome.DONE
    refused = [number for number, _ in live.refused]
    assert np.flatnonzero(~done).tolist() == sorted(refused)
    assert (result.outcomes["evictions"][requests.deadline_s == 1] == 0).all(), (
        "there is no class that these could leave for"
    )
    # Every token came once, wherever it was computed.
    assert all(live.came[number] == live.output[number] for number in np.flatnonzero(done).tolist())
    assert sum(one.evicted_requests for one in live.dispatcher.reordering.evicted) > 0


async def test_eviction_keeps_in_time_what_would_be_late():
    """The same trace with and without evictions: more first tokens are in time, and every request is served."""
    shares = []
    for limit in (0, 2):
        random = np.random.default_rng(5)
        fleet = fleet_of(random, eviction_limit=limit)
        requests = mixed(random, 6.0)
        outcomes = Simulation(fleet, requests).run().outcomes
        mine = (requests.priority == 0) & (outcomes["state"] == Outcome.DONE)
        shares.append(float((outcomes["ttft_s"][mine] <= requests.deadline_s[mine]).mean()))
        assert (outcomes["state"] != Outcome.FAILED).all()
    assert shares[1] > shares[0] + 0.1


@pytest.mark.parametrize("ordering", ["qlm", "deadline"])
async def test_an_instance_that_fails_loses_no_stream_that_can_continue(ordering):
    random = np.random.default_rng(6)
    fleet = fleet_of(random, eviction_limit=2)
    fleet.policies = msgspec.structs.replace(fleet.policies, ordering=ordering)
    requests = mixed(random, 6.0)
    simulation = Simulation(fleet, requests)
    for at_s, instance in ((6.0, 0), (9.0, 1), (12.0, 0)):
        simulation.advance(at_s)
        simulation.fail(instance, repair_s=1.0)
    result = simulation.run()
    states = result.outcomes["state"]
    assert (result.counters["failed"] == 0) == (ordering == "qlm")
    assert (states == Outcome.DONE).sum() + result.counters["failed"] + result.counters["refused"] == REQUESTS
    if ordering == "qlm":
        assert result.counters["requeued"] > 0
        assert simulation.world.kept_tokens.sum() > 0
        groups = simulation.waiting.groups
        assert (groups.groups["endpoint"] < 0).all(), "every group is gone"
        assert not simulation.fleet.running.any()
