"""Which region a request goes to: by the latencies of the inventory, as in a simulation, and again when they change."""

from itertools import permutations

import pytest

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.fleet.models import Region
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.routing.regions import latency_ms
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig

REGIONS = ["east", "north", "west"]
ENGINE = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=64, block_size_tokens=4, kv_blocks=64, max_model_len=200,
    policy="fcfs", profile=Profile(0.02, 0.004, 0.0003, 0.0, 0.01, 0.0005, 0.0),
)  # fmt: skip


def fleet(latencies_ms):
    """Endpoints of one model in three regions, without an instance."""
    endpoints = tuple(EndpointSpec("m", region, EndpointPolicy(queue_bound=3)) for region in REGIONS)
    return Inventory({"m": ModelSpec("m", 4096, 0)}, endpoints, (), latency_ms=latencies_ms)


def preferred(topology, region):
    return [topology.endpoints[at].region for at in topology.candidates("m", region)]


def test_the_nearest_comes_first_and_a_new_reading_is_gone_by_at_once():
    topology = Topology()
    dispatcher = Dispatcher(topology, lambda: 0.0, deliver=lambda record: None)
    dispatcher.apply_inventory(fleet({}))
    assert preferred(topology, "west") == ["west", "east", "north"]
    dispatcher.apply_inventory(fleet({("north", "west"): 10.0}))
    assert preferred(topology, "west") == ["west", "north", "east"]
    assert preferred(topology, "nowhere") == REGIONS
    assert topology.own_region("m", "west") == "west"


@pytest.mark.parametrize("far_ms", [*permutations([10.0, 60.0, 60.0])])
def test_both_clocks_prefer_alike(far_ms):
    pairs = [("east", "north"), ("north", "west"), ("west", "east")]
    given_ms = dict(zip(pairs, far_ms, strict=True))
    topology = Topology()
    topology.apply(fleet(given_ms))
    matrix = [[latency_ms(given_ms, origin, target) / 1000 for target in REGIONS] for origin in REGIONS]
    cluster = Cluster([InstanceSpec("m", region, ENGINE) for region in REGIONS], regions=REGIONS, latency_s=matrix)
    for region in REGIONS:
        assert [cluster.endpoints[at][1] for at in cluster.candidates("m", region)] == preferred(topology, region)


@pytest.mark.django_db
def test_the_rows_are_read_with_the_inventory():
    Region.objects.create(name="east", title="east", latency_ms={"west": 33.0})
    assert inventory.read().latency_ms == {("east", "west"): 33.0}
