"""Every way in which a request leaves the dispatcher, from every state that it can be in: nothing of it is left behind."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from controlplane.dispatch import port
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import AdapterSpec, EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.kv_caches import KvCache
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.process import all_of
from controlplane.dispatch.queues.operations import QueueOperations, RunAction
from controlplane.dispatch.queues.view import QueuesView
from scheduling.lookahead.maps import FREE
from scheduling.policy import EndpointPolicy
from scheduling.queueing.release_rule import AT_ONCE, ReleaseRule
from scheduling.routing.cached_blocks import USED

RUN = (1, "app"), "run"
SUSPECT = 7


class World:
    """A dispatcher, its fleet, and a gateway that answers as the real one does: *open* are its requests."""

    def __init__(self, ordering="priority"):
        self.now_s, self.answers, self.open, self.placed, self.held = 1000.0, [], set(), {}, set()
        self.count, self.fillers, self.refused, self.refusals = 0, [], {}, {}
        self.inventory = Inventory(
            models={name: ModelSpec(name, 4096, 0, fallback="f" if name == "m" else "") for name in ("m", "f", "g")},
            endpoints=tuple(
                EndpointSpec(
                    model, region, EndpointPolicy(ordering=ordering, requests_ahead_limit=0), max_num_seqs=1,
                    max_loras=1,
                )
                for model, region in [("m", "east"), ("f", "east"), *(("g", f"r{at}") for at in range(13))]
            ),
            instances=tuple(
                InstanceSpec(
                    number, f"i{number}", f"http://127.0.0.1:1/{number}", state, 0.0, model, "east", "", 1, 1000,
                    adapter_slots=(1, 1),
                )
                for number, (model, state) in enumerate(
                    [("m", "ready"), ("m", "ready"), ("f", "ready"), ("m", "donated"), ("f", "ready")]
                )
            ),
            adapters=(AdapterSpec("a", "m", "/a", 0),),
        )  # fmt: skip
        self.begin(self.inventory)

    def begin(self, inventory):
        self.topology = Topology(instances=5, endpoints=16)  # full: the next of either makes it grow
        self.dispatcher = Dispatcher(self.topology, lambda: self.now_s, deliver=self.deliver)
        self.apply(inventory)

    def taken_over(self):
        """Go on with another dispatcher, which gets what is open as relays register it; nothing is left in the last one."""
        requests = list(self.dispatcher.requests.values())
        opened = [
            port.Open(
                structs.replace(one.asked, prompt_tokens=one.asked.prompt_tokens - one.kept_tokens),
                self.placed.get(one.asked.number),
                one.output_tokens + one.kept_tokens,
                one.kept_tokens,
                one.attempts,
                one.evictions,
                released=one.released_s is not None,
            )
            for one in requests
        ]
        self.dispatcher.forget(requests)
        assert self.left_behind() == {}
        self.begin(self.applied)
        for one in sorted(opened, key=lambda each: each.placed is None):
            self.send(one)
        assert set(self.dispatcher.requests) == self.open

    def apply(self, inventory):
        self.applied = inventory
        self.dispatcher.apply_inventory(inventory)
        self.dispatcher.pump_all()
        self.answer()

    def without_m(self, *, instances: bool):
        """Return the inventory after the model was retired, or only its endpoint withdrawn."""
        endpoints = tuple(one for one in self.inventory.endpoints if one.model != "m")
        kept = tuple(one for one in self.inventory.instances if one.model != "m" or not instances)
        models = {name: spec for name, spec in self.inventory.models.items() if name != "m" or not instances}
        return replace(self.inventory, models=models, endpoints=endpoints, instances=kept, adapters=())

    def deliver(self, record):
        if isinstance(record, port.ServedModels | port.Warm | port.WarmPrefix):
            return
        number = record.number
        assert number in self.open, f"{record} of a request that has left"
        match record:
            case port.Placed():
                self.placed[number] = record
            case port.Held():
                self.held.add(number)
            case port.Refused():
                self.open.discard(number)
                self.refused[number], self.refusals[number] = record.code, record
            case port.Evict():
                self.answers.append(port.Left(number, again=True, evicted=True))
            case port.Lost():
                ends = record.stopped or record.reclaimed
                self.answers.append(port.Left(number, again=not ends, failure="" if ends else port.SILENT))

    def answer(self):
        while self.answers:
            self.send(self.answers.pop(0))

    def send(self, record):
        if isinstance(record, port.Finished) or (isinstance(record, port.Left) and not record.again):
            self.open.discard(record.number)
        if isinstance(record, port.Left):
            self.placed.pop(record.number, None)
        self.dispatcher.take(record)
        self.answer()

    def submit(self, **fields) -> int:
        number, self.count = self.count, self.count + 1
        self.open.add(number)
        given = {
            "model": "m",
            "priority": 0,
            "due_s": None,
            "prompt_tokens": 20,
            "predicted_tokens": 30.0,
            "max_tokens": None,
        }
        given |= {"sequences": 1, "streamed": True, "slo_class": "c"}
        submitted = port.Asked(
            number=number, request_id=f"r{number}", region="east", tenant_id=1, arrived_at=self.now_s,
            arrived_s=self.now_s, **given | {"application": "app", "run": "run", "unit": "u"} | fields,
        )  # fmt: skip
        self.send(submitted)
        return number

    def fill(self):
        """Let other requests take all instances of the model."""
        while int(self.topology.fleet.running[:2].sum()) < 2:
            self.fillers.append(self.submit(application="", run=""))

    def empty(self):
        for number in self.fillers:
            if number in self.open:
                self.send(port.Finished(number, 5))

    def pass_time(self, seconds=1.0):
        self.now_s += seconds
        self.dispatcher.sweep()
        self.answer()
        self.dispatcher.holding.release_due()
        self.answer()

    def left_behind(self) -> dict[str, object]:
        """Return everything that is counted of requests and is not zero."""
        it, fleet, queue = self.dispatcher, self.topology.fleet, self.dispatcher.queue
        maps = it.accounts.maps
        counted = {
            "requests": len(it.requests),
            "places": int(fleet.running.sum()),
            "kv tokens": int(fleet.kv_tokens.sum()),
            "remaining tokens": int(fleet.remaining_tokens.sum()),
            "queued prompt tokens": int(fleet.queued_prompt_tokens.sum()),
            "adapters in use": int(fleet.adapter_requests.sum()),
            "at instances": sum(len(one.requests) for one in self.topology.replicas.values()),
            "sequences": sum(abs(one.running_sequences) for one in self.topology.endpoints),
            "output": sum(abs(one.running_output_tokens) for one in self.topology.endpoints),
            "in maps": int(maps.instance.size - maps.counters[FREE]) + int(maps.active.sum()),
            "tokens in maps": int(maps.base_sum.sum()) + int(maps.ending.sum()),
            "waiting": len(queue) + int(queue.arrays.size.sum()) + queue.by_tenant.total(),
            "groups": queue.group_count,
            "held": len(it.holding) + len(it.holding.work) + it.holding.by_tenant.total(),
            "held by model": it.holding.work.waiting.total(),
            "calls of runs": len(it.runs.standings._of_call),
            "blocks": int(queue.affinity.blocks.counters[USED]),
        }
        return {name: count for name, count in counted.items() if count}


# States


def queued(world):
    world.fill()
    return world.submit()


def held(world):
    world.fill()
    number = world.submit(interactive=False, deadline_s=5000.0, end_s=5000.0, priority=1)
    assert number in world.held
    assert len(world.dispatcher.holding) == 1
    return number


def opportunistic_held(world):
    world.submit(interactive=False, opportunistic=True)  # on the donated instance
    world.fill()
    return world.submit(interactive=False, opportunistic=True, priority=2)


def placed(world):
    number = world.submit()
    assert number in world.placed
    return number


def with_tokens(world):
    number = placed(world)
    world.send(port.Advanced(((number, 1),)))
    world.send(port.Advanced(((number, 45),)))  # more than was predicted
    return number


def whole(world):
    return world.submit(streamed=False, sequences=3)


def evicted(world):
    number = with_tokens(world)
    world.fill()
    world.fillers.append(world.submit(application="", run=""))  # takes its place
    world.send(port.Left(number, again=True, evicted=True, kept_tokens=45))
    assert number not in world.placed
    return number


def on_spot(world):
    number = world.submit(interactive=False, opportunistic=True, evictable=True)
    assert world.placed[number].instance == "i3"
    world.send(port.Advanced(((number, 3),)))
    return number


def with_adapter(world):
    number = world.submit(adapter="a")
    assert world.topology.fleet.adapter_requests.sum() == 1
    return number


def for_an_adapter(world):
    world.fill()
    return world.submit(adapter="a")


def in_a_fallback(world):
    """It waits for the fallback of its model, which a request of that model occupies."""
    world.apply(replace(world.inventory, instances=world.inventory.instances[2:3]))
    world.fillers.append(world.submit(model="f"))
    number = world.submit(fallback="f")
    assert world.dispatcher.requests[number].asked.model == "f"
    return number


def known_blocks(world):
    for replica in world.topology.replicas.values():
        cache = KvCache(world.dispatcher.queue, replica)
        cache.block_tokens = 4
        cache.known()
    blocks = np.arange(1, 6, dtype=np.int64).tobytes()
    return world.submit(token_blocks=blocks, token_block_size=4)


STATES = [
    queued, held, opportunistic_held, placed, with_tokens,
    whole, evicted, on_spot, with_adapter, for_an_adapter, in_a_fallback, known_blocks,
]  # fmt: skip

# Exits


def finished(world, number):
    world.empty()
    for _ in range(30):
        if number in world.placed or number not in world.open:
            break
        world.pass_time()
    assert number in world.placed
    world.send(port.Finished(number, 9))


def disconnected(world, number):
    """Also when its key is revoked, or it is refused by its instance."""
    world.send(port.Left(number))


def failed(world, number):
    world.send(port.Left(number, failure=port.ERROR, adapter_failed=True))


def failed_everywhere(world, number):
    world.empty()
    for _ in range(30):
        if number in world.placed:
            world.send(port.Left(number, again=True, failure=port.ERROR))
        world.pass_time()
    assert number not in world.open


def deadline_passed(world, number):
    world.pass_time(20_000.0)


def instances_lost(world, number):
    for replica in list(world.topology.replicas.values()):
        replica.reachable = False
        world.topology.settle(replica)
        world.dispatcher.lose(replica)
        world.answer()
    world.apply(replace(world.inventory, instances=()))
    world.pass_time()


def engine_died(world, number):
    replica = world.dispatcher.requests[number].replica
    if replica is not None:
        world.dispatcher.suspects.died(replica)
        world.dispatcher.lose(replica)
        world.answer()
    world.pass_time(11.0)


def run_stopped(world, number):
    calls = world.dispatcher.calls_of(*RUN)
    assert QueueOperations(world.dispatcher).act_on_run(*RUN, RunAction.STOP) == len(calls)
    world.answer()
    assert number not in world.open
    later = world.submit()
    assert world.refused[later] == "run_stopped"


def waits_no_longer(world, number):
    for _ in range(20):
        world.pass_time()
    assert number in world.placed or number not in world.open


def model_retired(world, number):
    world.apply(world.without_m(instances=True))
    waits_no_longer(world, number)


def endpoint_withdrawn(world, number):
    world.apply(world.without_m(instances=False))
    waits_no_longer(world, number)


def asked_back(world, number):
    world.dispatcher.evict(number)
    world.answer()


def reclaimed(world, number):
    for replica in world.topology.replicas.values():
        if replica.endpoint.is_spot:
            world.dispatcher.spot.reclaim(replica, late=False)
            world.answer()
            world.dispatcher.spot.reclaim(replica, late=True)
            world.answer()


def adapters_off(world, number):
    endpoints = tuple(replace(one, max_loras=0) for one in world.inventory.endpoints)
    world.apply(replace(world.inventory, endpoints=endpoints, adapters=()))
    world.pass_time()


EXITS = [
    finished, disconnected, failed, failed_everywhere, deadline_passed, instances_lost, engine_died, run_stopped,
    model_retired, endpoint_withdrawn, asked_back, reclaimed, adapters_off,
]  # fmt: skip


@pytest.mark.parametrize("ordering", ["priority", "qlm", "hermes", "vtc"])
@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_nothing_of_a_request_is_left_behind(state, ordering, subtests):
    for exit_by in EXITS:
        with subtests.test(exit=exit_by.__name__):
            world = World(ordering)
            number = state(world)
            assert number in world.open
            exit_by(world, number)
            assert set(world.dispatcher.requests) == world.open, "both sides know the same requests"
            for other in sorted(world.open):
                world.send(port.Left(other))
            for _ in range(3):
                world.pass_time(20.0)
            assert world.left_behind() == {}


@pytest.mark.parametrize("ordering", ["priority", "qlm"])
@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_a_request_is_where_it_was_after_a_takeover_and_leaves_as_any_other(state, ordering, subtests):
    for exit_by in EXITS:
        with subtests.test(exit=exit_by.__name__):
            world = World(ordering)
            number = state(world)
            before = world.placed.get(number)
            world.taken_over()
            assert world.placed.get(number) is before
            exit_by(world, number)
            assert set(world.dispatcher.requests) == world.open
            for other in sorted(world.open):
                world.send(port.Left(other))
            for _ in range(3):
                world.pass_time(20.0)
            assert world.left_behind() == {}


@pytest.mark.parametrize(
    ("state", "stays"),
    [("ready", True), ("draining", True), ("sleeping", False), ("failed", False), ("loading", False)],
)
def test_a_stream_goes_on_over_a_takeover_where_its_instance_serves_still(state, stays):
    world = World()
    number = placed(world)
    before = world.placed[number]
    instances = [
        replace(one, state=state, state_changed_at=9.0) if one.name == before.instance else one
        for one in world.inventory.instances
    ]
    world.applied = replace(world.inventory, instances=tuple(instances))
    world.taken_over()
    assert (world.placed[number] is before) is stays


def test_a_request_with_a_system_prompt_is_placed_by_the_fallback_of_its_model():
    world = World()
    world.apply(replace(world.inventory, instances=world.inventory.instances[2:3]))
    number = world.submit(fallback="f", prefix_hashes=(1, 2, 3), block_tokens=4, system_blocks=2)
    assert world.placed[number].instance == "i2"


# Stages


def enabled_by(**changes):
    """Return the names of the stages that an inventory with *changes* enables in a new dispatcher."""
    world = World()
    bare = replace(
        world.inventory, adapters=(), models={"m": ModelSpec("m", 4096, 0)}, instances=(),
        endpoints=(EndpointSpec("m", "east", EndpointPolicy(niw=ReleaseRule(by=AT_ONCE))),),
    )  # fmt: skip
    dispatcher = Dispatcher(Topology(), lambda: 0.0, deliver=lambda record: None)
    dispatcher.apply_inventory(replace(bare, **changes))
    return {type(each).__name__ for each in dispatcher.stages}


def test_the_inventory_enables_stages():
    """An adapter that no endpoint serves has to be refused, so that it is known is enough."""
    off = {"Adapters", "ModelFallbacks", "HeldRequests", "Spot", "ReorderedQueues"}
    assert not off & enabled_by()
    assert off & enabled_by(adapters=(AdapterSpec("a", "m", "/a", 0),)) == {"Adapters"}
    models = {"m": ModelSpec("m", 4096, 0, fallback="f"), "f": ModelSpec("f", 4096, 0)}
    assert off & enabled_by(models=models) == {"ModelFallbacks"}
    assert off & enabled_by(endpoints=(EndpointSpec("m", "east", EndpointPolicy()),)) == {"HeldRequests"}
    grouped = EndpointSpec("m", "east", EndpointPolicy(ordering="qlm", niw=ReleaseRule(by=AT_ONCE)))
    assert off & enabled_by(endpoints=(grouped,)) == {"ReorderedQueues"}
    donated = InstanceSpec(1, "i", "http://127.0.0.1:1/i", "donated", 0.0, "m", "east", "", 1, 1000)
    assert off & enabled_by(instances=(donated,)) == {"Spot"}


@pytest.mark.parametrize("at", range(len(World().dispatcher.features)))
def test_without_a_stage_the_others_serve(at):
    world = World()
    dispatcher = world.dispatcher
    without = dispatcher.features[at]
    if without is dispatcher.accounts:
        return  # the core's own: it counts what runs where
    dispatcher.run_stages([each for each in dispatcher.features if each is not without])
    numbers = [world.submit() for _ in range(3)]
    dispatcher.sweep()
    assert numbers[2] not in world.placed, "it waits for room"
    for number in numbers:
        assert number in world.placed
        world.send(port.Finished(number, 9))
    assert world.left_behind() == {}


# Errors of one request


def enqueue_fails(world, monkeypatch, number):
    """As a request is queued for an endpoint, for one request."""
    add = world.dispatcher.queue.add

    def fails(request, endpoint):
        if request.asked.number == number:
            raise KeyError(number)
        add(request, endpoint)

    monkeypatch.setattr(world.dispatcher.queue, "add", fails)


def test_an_error_of_one_held_request_ends_it_alone(monkeypatch):
    world = World()
    world.fill()
    numbers = [world.submit(interactive=False, deadline_s=5000.0, end_s=5000.0, priority=1) for _ in range(3)]
    enqueue_fails(world, monkeypatch, numbers[0])
    world.empty()
    world.pass_time(4999.0)
    assert world.refused == {numbers[0]: "internal_error"}
    assert set(numbers[1:]) <= set(world.placed)
    for number in numbers[1:]:
        world.send(port.Finished(number, 9))
    assert world.left_behind() == {}


def test_an_error_of_one_waiting_request_ends_it_alone(monkeypatch):
    world = World()
    world.fill()
    numbers = [world.submit() for _ in range(3)]
    end, row = world.dispatcher.runs.standings.end, world.dispatcher.requests[numbers[0]].row
    failed = []

    def fails(ended, output_tokens, now_s):
        if ended == row and not failed:
            failed.append(ended)
            raise KeyError(ended)
        end(ended, output_tokens, now_s)

    monkeypatch.setattr(world.dispatcher.runs.standings, "end", fails)
    world.pass_time(20_000.0)
    assert failed
    assert set(world.refused) == set(numbers)


def test_a_request_that_only_the_gateway_knows_is_refused_when_it_is_to_be_placed_again():
    world = World()
    number = placed(world)
    world.dispatcher.end(world.dispatcher.requests[number])
    world.send(port.Left(number, again=True))
    assert world.refused == {number: "model_unavailable"}
    for unknown in (
        port.Left(99),
        port.Finished(99, 3),
        port.Advanced(((99, 3),), ((99, 0.1),)),
    ):
        world.send(unknown)
    assert world.left_behind() == {}


async def test_an_error_of_one_part_of_a_sweep_leaves_out_no_other():
    done = []

    def fails():
        raise IndexError("17")

    with pytest.raises(IndexError, match="17"):
        await all_of((fails, lambda: done.append("then")))
    assert done == ["then"]


# Growth


def more_endpoints(world):
    spec = replace(world.inventory.endpoints[0], region="west")
    world.dispatcher.apply_inventory(replace(world.inventory, endpoints=(*world.inventory.endpoints, spec)))


def donated(world):
    """A donated instance of another model: it gets an endpoint of its own."""
    specs = [replace(one, state="donated") if one.name == "i4" else one for one in world.inventory.instances]
    world.dispatcher.apply_inventory(replace(world.inventory, instances=tuple(specs)))


def more_instances(world):
    spec = replace(world.inventory.instances[0], instance_id=9, name="i9", url="http://127.0.0.1:1/9")
    world.dispatcher.apply_inventory(replace(world.inventory, instances=(*world.inventory.instances, spec)))


def more_adapters(world):
    for at in range(100):
        world.topology.adapter_number(f"b{at}")


CALLS = {
    "submit": lambda world: world.submit(),
    "submit, held": lambda world: world.submit(interactive=False, priority=1),
    "submit, with an adapter": lambda world: world.submit(adapter="a"),
    "progress": lambda world: world.send(port.Advanced(((0, 2),))),
    "finished": lambda world: world.send(port.Finished(0, 5)),
    "left": lambda world: world.send(port.Left(0)),
    "again": lambda world: world.send(port.Left(0, again=True)),
    "sweep": lambda world: world.pass_time(),
    "prewarm_on": lambda world: world.dispatcher.prewarming.control.refresh_likely(),
    "pump": lambda world: world.dispatcher.pump_all(),
    "rank": lambda world: world.dispatcher.runs.sweep(),
    "move first": lambda world: world.dispatcher.runs.move_first(*RUN),
    "waiting": lambda world: list(world.dispatcher.waiting_now(9)),
    "queues": lambda world: QueuesView(world.dispatcher)(),
    "outlook": lambda world: [world.dispatcher.outlook(one) for one in world.topology.endpoints],
    "wait": lambda world: [world.dispatcher.estimated_wait_s(one) for one in world.topology.endpoints],
}


@pytest.mark.parametrize("ordering", ["priority", "qlm", "hermes"])
@pytest.mark.parametrize("more", [more_endpoints, donated, more_instances, more_adapters], ids=lambda one: one.__name__)
def test_the_fleet_may_grow_between_any_two_calls(more, ordering, subtests):
    for name, call in CALLS.items():
        with subtests.test(call=name):
            world = World(ordering)
            world.fill()
            for fields in ({}, {"interactive": False, "priority": 1}, {"adapter": "a"}):
                world.submit(**fields)
            more(world)
            endpoints, instances = len(world.topology.endpoints), len(world.topology.replicas)
            queue, maps = world.dispatcher.queue, world.dispatcher.accounts.maps
            assert min(queue.arrays.heap.shape[0], queue.arrays.shares.ordering.size) >= endpoints
            assert min(queue.arrays.groups.queues.size, queue.affinity.matched.size, maps.clock.size) >= instances
            call(world)
            for number in sorted(world.open):
                world.send(port.Left(number))
            assert world.left_behind() == {}
