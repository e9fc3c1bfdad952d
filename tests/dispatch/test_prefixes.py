"""How prompts begin is known of requests that wait, also where a policy comes to consider it only then."""

from dataclasses import replace

from msgspec import structs

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from scheduling.policy import EndpointPolicy
from tests.dispatch.test_ordering import asked

HERE = EndpointSpec("m", "here", EndpointPolicy(queue_bound=10))
INVENTORY = Inventory(models={"m": ModelSpec("m", 1000, 0)}, endpoints=(HERE,), instances=())


def test_a_request_that_waits_and_moves_keeps_its_prefix():
    topology = Topology()
    topology.apply(INVENTORY)
    topology.endpoints[0].can_start = True
    dispatcher = Dispatcher(topology, lambda: 0.0, deliver=lambda record: None)
    dispatcher.take(structs.replace(asked(40), prefix_hashes=(11, 12), block_tokens=64))
    by_delay = replace(HERE, policy=EndpointPolicy(routing="least_delay", queue_bound=10))
    topology.apply(replace(INVENTORY, endpoints=(by_delay,)))
    dispatcher.pump_all()
    queue = dispatcher.queue
    (request,) = queue.of(topology.endpoints[0])
    for _ in range(2):
        count = queue.affinity.noted_count[request.slot]
        assert queue.affinity.noted[request.slot, :count].tolist() == [11, 12]
        assert queue.affinity.block_tokens[request.slot] == 64
        queue.move(request, request.endpoint)
