"""Which region a request goes to: by the latencies of the inventory, as in a simulation, and again when they change."""

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as struct_replace

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import FIRST, Forward
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Region
from controlplane.fleet.selectors import near_zones
from controlplane.fleet.shards import in_zone
from controlplane.gateway.admission.keys import Words
from controlplane.gateway.dispatchers import Dispatchers
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.routing.regions import latency_ms
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from tests.dispatch.test_port import RECORDS

ASKED = struct_replace(RECORDS[0], prefix_hashes=(), arrived_s=0.0, sequences=1)
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


ZONES = {"east": "", "north": "", "west": "eu"}
FORWARDED = [
    # instances in west, what it runs, its region is dark; elsewhere: serves, has room; whether it is forwarded
    (1, 0, False, True, True, False),
    (1, 2, False, True, True, True),
    (1, 2, False, True, False, False),
    (1, 0, True, True, False, True),
    (1, 0, True, False, False, False),
    (0, 0, False, True, False, True),
    (0, 0, False, False, False, False),
]


@pytest.mark.parametrize(("instances", "running", "dark", "serves", "room", "forwarded"), FORWARDED)
def test_a_zone_forwards_what_it_does_not_serve_or_has_no_room_for(instances, running, dark, serves, room, forwarded):
    heard, topology = [], Topology()
    dispatcher = Dispatcher(topology, lambda: 0.0, deliver=heard.append)
    west = [
        inventory.InstanceSpec(1, "w", "http://w", InstanceState.READY, 0.0, "m", "west", "", 2, 100_000)
    ] * instances
    dispatcher.apply_inventory(replace(fleet({}), instances=tuple(west), zones=ZONES))
    for number in range(running):
        dispatcher.take(struct_replace(ASKED, number=number, zones=("eu",), region=""))
    topology.shares = {"west": 0.0} if dark else {}
    topology.settle_regions({"west"})
    dispatcher.elsewhere = lambda model, zones, with_room, regions: "" if (room if with_room else serves) else None
    heard.clear()
    dispatcher.take(struct_replace(ASKED, number=7, zones=("eu",), region=""))
    assert [type(each) for each in heard if isinstance(each, Forward)] == [Forward] * forwarded
    assert (7 in dispatcher.requests) == (not forwarded and bool(instances))
    dispatcher.elsewhere = lambda model, zones, with_room, regions: "" if zones == ("eu",) else None
    dispatcher.sweep()
    waits = not forwarded and instances and (running or dark)
    assert [each.number for each in heard if isinstance(each, Forward)] == [7] * (forwarded or bool(waits))


def test_no_decision_crosses_zones():
    topology = Topology()
    topology.apply(replace(fleet({("north", "west"): 10.0}), zones=ZONES))
    assert [preferred(topology, region) for region in REGIONS] == [["east", "north"], ["north", "east"], ["west"]]
    for zone, region, within in (
        ("eu", "north", "west"),
        ("", "west", "north"),
        ("eu", "west", "west"),
        ("us", "west", "?"),
    ):
        asked = topology.within(struct_replace(ASKED, zones=(zone,), region=region))
        assert asked.region == within
    assert preferred(topology, "?") == []


def test_the_nearest_zone_is_the_one_with_the_nearest_region(db):
    for name, zone, far in (
        ("a", "", {"b": 30, "c": 60}),
        ("b", "eu", {}),
        ("c", "us", {"b": 5}),
        ("d", "us", {}),
    ):
        Region.objects.create(name=name, title=name, zone=zone, latency_ms=far)
    near = near_zones(dict(Region.objects.values_list("name", "zone")))
    assert near == {"": ("eu", "us"), "eu": ("us", ""), "us": ("eu", "")}


@pytest.mark.parametrize(
    ("zone", "regions", "serving", "asked_in", "forwarded_to"),
    [
        ("", (), ("", "eu", "asia"), "", "eu"),
        ("", ("berlin",), ("", "eu", "asia"), "eu", None),
        ("eu", ("berlin", "tokyo"), ("", "eu", "asia"), "eu", "asia"),
        ("", ("berlin", "tokyo"), ("", "asia"), "asia", None),
        ("", ("berlin",), ("", "asia"), "eu", None),  # refused or held there
        ("", (), ("asia",), "asia", None),
        ("asia", ("east",), ("", "eu", "asia"), "", None),
    ],
)
def test_a_request_comes_only_to_zones_that_have_a_region_of_its_tenants(
    zone, regions, serving, asked_in, forwarded_to
):
    near = {"": ("eu", "asia"), "eu": ("", "asia"), "asia": ("", "eu")}
    words = Words(regions={"east": "", "berlin": "eu", "paris": "eu", "tokyo": "asia"}, near=near)
    relay = Dispatchers.__new__(Dispatchers)
    roles = {in_zone(FIRST, each): each for each in serving}
    relay.zone, relay.near, relay._has_zones, relay._shards, relay._gone = "", words.zones, True, {}, set()
    relay.lease, relay.routes, relay.rooms = SimpleNamespace(roles=roles), roles, {role: {"m": 5} for role in roles}
    zones = relay.zones_for("m", zone, regions)
    assert zones == (asked_in,)
    assert relay.elsewhere("m", zones, True, regions) == forwarded_to
    assert relay.elsewhere("m", ("", "eu", "asia"), True, regions) is None


@pytest.mark.django_db
def test_the_rows_are_read_with_the_inventory():
    Region.objects.create(name="east", title="east", latency_ms={"west": 33.0})
    assert inventory.read().latency_ms == {("east", "west"): 33.0}
