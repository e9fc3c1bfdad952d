"""A region gone dark: what waits and runs there, where requests go, and what its instances are given when it returns."""

import pytest

from controlplane.dispatch import port
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.dark_regions import ANSWERS, DARK, DarkRegions
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.snapshot import Snapshot
from scheduling.control.dark_regions import DOUBLED_S, LOOK_S, RETURN_S
from scheduling.policy import EndpointPolicy

SEQUENCES = 4


class World:
    """Two instances in each of two regions, and one of another model in the west alone."""

    def __init__(self):
        self.now_s, self.placed, self.lost, self.refused, self.count = 1000.0, {}, [], [], 0
        self.topology = Topology()
        self.dispatcher = Dispatcher(self.topology, lambda: self.now_s, deliver=self.deliver)
        policy = EndpointPolicy(requests_ahead_limit=0, queue_bound=100)
        places = [("m", "east"), ("m", "east"), ("m", "west"), ("m", "west"), ("only", "west")]
        self.inventory = Inventory(
            models={name: ModelSpec(name, 4096, 0) for name in ("m", "only")},
            endpoints=tuple(EndpointSpec(model, region, policy) for model, region in dict.fromkeys(places)),
            instances=tuple(
                InstanceSpec(n, f"i{n}", f"http://i{n}", "ready", 0.0, model, region, "", SEQUENCES, 100_000)
                for n, (model, region) in enumerate(places)
            ),
        )
        self.dispatcher.apply_inventory(self.inventory)
        self.regions = DarkRegions(self.dispatcher, lambda: self.now_s)

    def deliver(self, record):
        match record:
            case port.Placed():
                self.placed[record.number] = record.region
            case port.Lost():
                self.lost.append(record.number)
                self.dispatcher.take(port.Left(record.number, again=True, failure=port.SILENT))
            case port.Refused():
                self.refused.append(record)

    def ask(self, region="west", model="m"):
        self.count += 1
        self.dispatcher.take(
            port.Asked(
                self.count, request_id=str(self.count), tenant_id=1, tenant="t", model=model,
                region=region, priority=0, due_s=None, prompt_tokens=20, predicted_tokens=30.0,
                max_tokens=None, sequences=1, streamed=True, slo_class="c", arrived_s=self.now_s, arrived_at=self.now_s,
            )
        )  # fmt: skip
        return self.count

    def watch(self, seconds, silent=()):
        """Let time pass: all but the instances of *silent* regions answer a heartbeat a second."""
        for step in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for one in self.topology.replicas.values():
                if step % round(1 / LOOK_S) == 0:
                    one.health.unanswered_s = min(one.health.unanswered_s, self.now_s)
                if one.spec.region not in silent:
                    one.health.heard(self.now_s)
                    one.reachable = True
                    self.topology.settle(one)
            self.regions.look()

    def accepting(self, region):
        return [
            bool(self.topology.fleet.accepting[one.slot])
            for one in self.topology.replicas.values()
            if one.spec.region == region
        ]

    def notices(self):
        return [(one.kind, one.name) for one in self.topology.notices]


@pytest.fixture
def world():
    world = World()
    world.watch(1.0)
    return world


def test_no_request_goes_there_within_two_seconds_and_what_ran_without_output_is_retried(world):
    begun, silent = world.ask(), world.ask()
    assert {world.placed[begun], world.placed[silent]} == {"west"}
    world.dispatcher.take(port.Advanced(((begun, 3),)))
    world.watch(2.0, silent=["west"])
    assert (world.accepting("west"), world.accepting("east")) == ([False] * 3, [True] * 2)
    assert world.lost == [silent], "a stream that has begun may go on: it is left until its instance is given up"
    assert world.placed[silent] == world.placed[world.ask()] == "east"
    assert world.notices() == [(DARK, "west")], "one event, not one of each instance"


def test_what_waits_there_moves_and_waits_on_where_nobody_else_serves_its_model(world):
    world.topology.fleet.accepting[
        [one.slot for one in world.topology.replicas.values() if one.spec.region == "east"]
    ] = 0
    running = [world.ask() for _ in range(2 * SEQUENCES)]
    world.dispatcher.take(port.Advanced(tuple((number, 1) for number in running)))
    waiting, only = world.ask(), [world.ask(model="only") for _ in range(SEQUENCES + 1)]
    assert waiting not in world.placed
    world.watch(2.0, silent=["west"])
    assert world.placed[waiting] == "east"
    assert not world.refused
    assert only[-1] not in world.placed
    world.watch(RETURN_S + 1.0)
    world.dispatcher.pump_all()
    assert world.placed[only[-1]] == "west"


def test_demand_counts_where_it_is_served_meanwhile(world):
    assert world.topology.own_region("m", "west") == "west"
    world.watch(2.0, silent=["west"])
    assert world.topology.own_region("m", "west") == "east"
    world.watch(RETURN_S + 1.0)
    assert world.topology.own_region("m", "west") == "west"


def test_it_is_given_a_growing_share_when_it_answers(world):
    world.watch(2.0, silent=["west"])
    world.watch(RETURN_S + LOOK_S)
    assert world.notices() == [(DARK, "west"), (ANSWERS, "west")]
    rooms = []
    for _ in range(5):
        world.dispatcher.apply_inventory(world.inventory)  # as it does once a second
        rooms.append(
            {world.topology.at_once(one) for one in world.topology.replicas.values() if one.spec.region == "west"}
        )
        world.watch(DOUBLED_S)
    assert rooms == [{1}, {1}, {1}, {2}, {4}]
    assert all(world.accepting("west"))


def test_the_rows_of_another_owner_are_taken_over(world):
    world.topology.dark_rows = frozenset({"west"})
    world.regions.remember()
    assert not any(world.accepting("west"))
    world.watch(RETURN_S + 1.0)
    assert all(world.accepting("west"))
    assert world.notices() == [(ANSWERS, "west")], "so its row is put right"


def test_one_health_check_that_is_answered_spares_the_region(world):
    """The gateway may be behind with its heartbeats, as with a thousand instances on a busy machine."""
    for _ in range(10):
        world.watch(LOOK_S, silent=["west"])
        for one in world.regions.suspects[:1]:
            one.health.heard(world.now_s)
    assert not world.notices()


def test_a_simulation_that_starts_then_has_it_serve_nothing(world):
    begun = world.ask()
    world.dispatcher.take(port.Advanced(((begun, 3),)))
    world.watch(2.0, silent=["west"])
    observation = Observation(world.topology, lambda each: 0, lambda each: (0, 0.0, 0.0), lambda: world.now_s)
    state = Snapshot(world.dispatcher, observation, dict)()
    assert {(one.region, one.state.value) for one in state.instances} == {("east", "READY"), ("west", "FAILED")}
    assert not state.running
