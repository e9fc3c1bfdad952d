"""How prompts begin, for the router by delay: known of requests that wait too, when a policy changes to it."""

from dataclasses import replace

from msgspec import structs

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Prefix, PrefixWanted, Queued, Waiting
from scheduling.policy import EndpointPolicy
from tests.dispatch.test_ordering import asked

HERE = EndpointSpec("m", "here", EndpointPolicy(queue_bound=10))
INVENTORY = Inventory(models={"m": ModelSpec("m", 1000, 0)}, endpoints=(HERE,), instances=())


def by(policy: str) -> Inventory:
    return replace(INVENTORY, endpoints=(replace(HERE, policy=EndpointPolicy(routing=policy, queue_bound=10)),))


def waiting(*submitted):
    """Return a dispatcher without instances, in which *submitted* wait, and the list of its later deliveries."""
    topology, delivered = Topology(), []
    topology.apply(INVENTORY)
    topology.endpoints[0].can_start = True
    dispatcher = Dispatcher(topology, lambda: 0.0, deliver=delivered.append)
    for record in submitted:
        dispatcher.take(record)
    assert {type(record) for record in delivered} == {Queued, Waiting}
    delivered.clear()
    return dispatcher, delivered


def noted(dispatcher):
    """Return (hashes, tokens per block) by number of the request."""
    queue = dispatcher.queue
    return {
        request.asked.number: (
            queue.affinity.noted[request.slot, : queue.affinity.noted_count[request.slot]].tolist(),
            int(queue.affinity.block_tokens[request.slot]),
        )
        for request in queue.of(dispatcher.topology.endpoints[0])
    }


def test_the_gateway_is_asked_for_those_of_requests_that_wait():
    dispatcher, delivered = waiting(structs.replace(asked(40), number=1), structs.replace(asked(40), number=2))
    dispatcher.topology.apply(by("least_delay"))
    dispatcher.pump_all()
    assert sorted(delivered, key=lambda record: record.number) == [PrefixWanted(1), PrefixWanted(2)]
    dispatcher.take(Prefix(2, (11, 12), 64))
    assert noted(dispatcher) == {1: ([], 0), 2: ([11, 12], 64)}


def test_it_is_asked_once_for_each_change():
    dispatcher, delivered = waiting(asked(40))
    for policy, times in (("least_delay", 1), ("preserve", 1), ("least_delay", 2)):
        dispatcher.topology.apply(by(policy))
        dispatcher.pump_all()
        dispatcher.pump_all()
        assert delivered == [PrefixWanted(1)] * times


def test_those_that_are_known_already_are_not_asked_for():
    """Requests of a model with a router by delay in another region."""
    dispatcher, delivered = waiting(structs.replace(asked(40), prefix_hashes=(7,), block_tokens=32))
    dispatcher.topology.apply(by("least_delay"))
    dispatcher.pump_all()
    assert delivered == []
    assert noted(dispatcher) == {1: ([7], 32)}


def test_they_may_come_too_late():
    dispatcher, _ = waiting(asked(40))
    dispatcher.take(Prefix(9, (1,), 64))
    assert noted(dispatcher) == {1: ([], 0)}


def test_a_request_that_moves_keeps_them():
    dispatcher, _ = waiting(asked(40))
    dispatcher.take(Prefix(1, (11, 12), 64))
    (request,) = dispatcher.queue.of(dispatcher.topology.endpoints[0])
    dispatcher.queue.move(request, request.endpoint)
    assert noted(dispatcher) == {1: ([11, 12], 64)}
