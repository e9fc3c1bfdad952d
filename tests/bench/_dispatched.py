"""A dispatcher with one instance and some running requests; imported once Django is set up."""

import time

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Asked, Finished, OfRequest, Placed, ServedModels
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.policy import EndpointPolicy

RUNNING = 31


class Served:
    def __init__(self, routing: str, ordering: str) -> None:
        self.placed = self.number = 0
        self.dispatcher = Dispatcher(Topology(), time.monotonic, deliver=self.take)
        self.dispatcher.apply_inventory(
            Inventory(
                models={"m": ModelSpec("m", 4096, 0)},
                endpoints=(EndpointSpec("m", "east", EndpointPolicy(routing=routing, ordering=ordering, queue_bound=4096)),),
                instances=(
                    InstanceSpec(1, "i1", "http://127.0.0.1:1", InstanceState.READY, 0.0, "m", "east", "", 2048, 1_000_000),
                ),
            )
        )  # fmt: skip
        self.dispatcher.pump_all()
        for _ in range(RUNNING):
            self.submit()

    def take(self, record: OfRequest | ServedModels) -> None:
        self.placed += isinstance(record, Placed)

    def submit(self) -> int:
        self.number += 1
        now_s = time.monotonic()
        self.dispatcher.take(
            Asked(self.number, str(self.number), "m", "east", 1, 0, 10.0, now_s, now_s, 30, 50.0, 64, 1, False,
                   slo_class="standard")
        )  # fmt: skip
        return self.number

    def batch_us(self, requests: int) -> float:
        began_s = time.perf_counter()
        for _ in range(requests):
            self.dispatcher.take(Finished(self.submit(), 40))
        return (time.perf_counter() - began_s) * 1e6 / requests
