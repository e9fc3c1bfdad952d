"""A gateway whose queues are full of calls of application runs; imported once Django is set up."""

import time
from collections.abc import Callable

import orjson

from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.monitoring.summary import waiting_requests
from controlplane.dispatch.port import Asked
from controlplane.dispatch.snapshot import Snapshot
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop
from scheduling.applications.demand_graph import ServiceRate
from scheduling.applications.standings import KnownGraph
from scheduling.fleet.profile import USUAL
from scheduling.policy import EndpointPolicy
from tests.bench.applications import synthetic

POLICIES = {
    "groups": EndpointPolicy(routing="least_delay", ordering="qlm", group_order="hermes", queue_bound=100_000),
    "runs": EndpointPolicy(routing="least_delay", ordering="hermes", queue_bound=100_000),
}
UNITS = ("plan", "map", "check")
AT_ONCE = 64
TENANTS = 20


class WaitingGateway:
    def __init__(self, runs: int, waiting: int, instances: int) -> None:
        self.gateway = Gateway(ScalingLoop)
        self.dispatcher = self.gateway.dispatching.dispatcher
        self.dispatcher.placement.places = lambda shard: True  # without the database
        self.dispatcher.reordering.background = None  # answers come at once
        self.gateway.requests.on_event = lambda record: None  # nobody waits for the answers
        self.inventory = Inventory(
            models={name: ModelSpec(name, 32_768, 0) for name in POLICIES},
            endpoints=tuple(EndpointSpec(name, "east", policy) for name, policy in POLICIES.items()),
            instances=tuple(
                InstanceSpec(
                    at, f"i{at}", f"http://127.0.0.1:{at + 1}", InstanceState.READY, 0.0, model, "east", "", AT_ONCE, 600_000
                )
                for at, model in enumerate(name for name in POLICIES for _ in range(instances))
            ),
        )  # fmt: skip
        self.dispatcher.apply_inventory(self.inventory)
        self.dispatcher.pump_all()
        graph = synthetic(200, next(iter(POLICIES)))
        known = KnownGraph.of(graph, dict.fromkeys(graph.units, ServiceRate.of(USUAL)))
        self.dispatcher.runs.graphs.update({(tenant, "app"): known for tenant in range(1, TENANTS + 1)})
        self.number = 0
        while self.waiting < waiting:
            self.submit(self.number % runs)

    @property
    def waiting(self) -> int:
        return sum(self.dispatcher.queue.count(endpoint) for endpoint in self.dispatcher.topology.endpoints)

    @property
    def runs(self) -> int:
        return len(self.dispatcher.runs.standings.runs)

    def submit(self, run: int) -> None:
        self.number += 1
        now_s, unit = time.monotonic(), UNITS[self.number % len(UNITS)]
        self.dispatcher.take(
            Asked(
                self.number, str(self.number), list(POLICIES)[run % 2], "east", 1 + run % TENANTS, 0, 60.0, now_s, now_s,
                800, 200.0, 400, 1, True, slo_class="standard", application="app", run=f"run{run}", unit=unit,
                prefix_hashes=tuple(hash((unit, at)) for at in range(8)), block_tokens=64, system_blocks=4,
            )
        )  # fmt: skip

    def jobs(self) -> dict[str, Callable[[], object]]:
        """Return the jobs of the loop by name, coroutines where other work runs between their parts."""
        gateway, dispatcher = self.gateway, self.dispatcher
        return {
            "sweep_queues": gateway._sweep,
            "count_tokens": gateway._count,
            "release_held_work": dispatcher.holding.release_due,
            "publish_summary": lambda: orjson.dumps(gateway.publisher.summary.snapshot()),
            "publish_waiting": lambda: waiting_requests(dispatcher),
            "read_inventory": lambda: dispatcher.apply_inventory(self.inventory),
            "pump_all": dispatcher.pump_all,
            "monitor": gateway.monitor.report,
            "snapshot_for_a_fork": Snapshot(dispatcher, gateway.dispatching.observation, gateway.requests.last_heard),
        }
