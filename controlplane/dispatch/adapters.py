"""LoRA adapters of requests: which endpoints serve them, and which are loaded at each instance."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import port
from controlplane.dispatch.kernels import drop_adapter, end_use, tier_of, use_adapter
from controlplane.dispatch.live_fleet.topology import Replica, Request, Topology
from controlplane.dispatch.stages import Arrival, Stage
from scheduling.routing.adapters import TIERS


class Adapters(Stage):
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.tiers: Counter[str] = Counter()
        """Requests with an adapter, by where it was: a name of `routing.adapters.TIERS`."""

    def is_wanted(self) -> bool:
        """An adapter that no endpoint serves is refused, too."""
        return bool(self.topology.adapters) or any(endpoint.spec.max_loras for endpoint in self.topology.endpoints)

    def candidates(self, asked: port.Asked, endpoints: NDArray[np.int32]) -> NDArray[np.int32]:
        if not asked.adapter:
            return endpoints
        topology = self.topology
        return np.array([at for at in endpoints.tolist() if topology.serves_adapters(topology.endpoints[at])], np.int32)

    def admit(self, arrival: Arrival) -> port.Refused | None:
        endpoint = arrival.endpoint
        if not arrival.asked.adapter or arrival.own is None or arrival.hold:
            return None
        return None if endpoint is not None and self.topology.serves_adapters(endpoint) else no_adapters(arrival.asked)

    def placed(self, request: Request, replica: Replica) -> None:
        fleet, adapter = self.topology.fleet, request.adapter
        request.unload = ()
        if adapter >= 0:
            request.adapter_tier = tier_of(fleet, replica.slot, adapter)
            leaves = use_adapter(fleet, replica.slot, adapter, 1)
            self.tiers[TIERS[request.adapter_tier]] += 1
            request.unload = (self.topology.adapter_names[leaves],) if leaves >= 0 else ()

    def failed(self, request: Request, replica: Replica, left: port.Left) -> None:
        if left.adapter_failed:
            drop_adapter(self.topology.fleet, replica.slot, request.adapter)

    def withdrawn(self, request: Request) -> None:
        if request.adapter >= 0 and request.replica is not None:
            end_use(self.topology.fleet, request.replica.slot, request.adapter)


def no_adapters(asked: port.Asked) -> port.Refused:
    return port.Refused(
        asked.number,
        503,
        "adapters_unavailable",
        f"No instance of {asked.model!r} serves adapters now, so {asked.adapter!r} is not available: its deployments have "
        "max_loras = 0, or their instances were started before it was set.",
        retry_after_s=15,
    )
