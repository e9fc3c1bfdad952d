"""Requests that one instance alone can serve: it holds the response that they continue. Each waits until that has room.

They are not in the queue of their endpoint, but have queue keys as if they were: what is due earlier there leaves earlier,
and one that waits for a full instance holds up nothing that others could serve.
"""

from bisect import insort

from controlplane.dispatch import kernels, port
from controlplane.dispatch.live_fleet.topology import Endpoint, Estimate, Replica, Request, Topology
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import InstanceState


class Pinned:
    """Pinned requests that wait, by instance; first the one that is due first."""

    def __init__(self, topology: Topology, queue: WaitingQueue) -> None:
        self.topology, self.queue = topology, queue
        self._lines: dict[str, list[tuple[float, int, Request]]] = {}

    def replica_of(self, asked: port.Submit) -> Replica | None:
        """Return the instance that *asked* is pinned to; None if it is gone, stops, or serves another model."""
        for replica in self.topology.replicas.values():
            if replica.name == asked.instance:
                serves = replica.spec.model == asked.model and self.topology.serves(replica.endpoint)
                return replica if serves and replica.spec.state == InstanceState.READY and not replica.lost else None
        return None

    def add(self, request: Request, endpoint: Endpoint) -> int:
        """Let *request* wait for its instance, one of *endpoint*; return its position there, from 1."""
        request.endpoint = endpoint
        line = self._lines.setdefault(request.asked.instance, [])
        waits = (self.queue.key_of_new(request, endpoint), request.asked.number, request)
        insort(line, waits)
        return line.index(waits) + 1

    def drop(self, request: Request) -> None:
        """Forget *request*; does nothing if it does not wait."""
        line = self._lines.get(request.asked.instance)
        if line is not None and request.asked.instance:
            self._lines[request.asked.instance] = line = [each for each in line if each[2] is not request]
            if not line:
                del self._lines[request.asked.instance]

    def of(self, endpoint: Endpoint) -> list[tuple[Request, Estimate]]:
        """Return the pinned requests that wait for instances of *endpoint*, with their positions there."""
        return [
            (request, Estimate(endpoint, at))
            for line in self._lines.values()
            for at, (_, _, request) in enumerate(line, 1)
            if request.endpoint is endpoint
        ]

    def count(self, endpoint: Endpoint) -> int:
        return len(self.of(endpoint)) if self._lines else 0

    def all(self) -> list[Request]:
        return [request for line in self._lines.values() for _, _, request in line]

    def next(self, endpoint: Endpoint) -> tuple[Request, Replica] | None:
        """Return the pinned request that is due first of those whose instances of *endpoint* have room, and the instance.

        None while the first in the queue of *endpoint* is due before it.
        """
        if not self._lines:
            return None
        first: tuple[float, int, Request] | None = None
        for line in self._lines.values():
            request = line[0][2]
            if request.endpoint is endpoint and (first is None or line[0] < first) and self._has_room(request):
                first = line[0]
        if first is None or self.queue.is_due_before(endpoint, first[0]):
            return None
        replica = self.replica_of(first[2].asked)
        return None if replica is None else (first[2], replica)

    def _has_room(self, request: Request) -> bool:
        replica = self.replica_of(request.asked)
        if replica is None:
            return False
        fleet, prompt, output = self.topology.fleet, request.asked.prompt_tokens, request.predicted_tokens
        most = int(fleet.kv_capacity_tokens[replica.slot])
        prompt = min(prompt, max(0, most - 1))  # what is estimated larger than its instance does not wait for ever
        return bool(kernels.has_room(fleet, replica.slot, prompt, min(output, most - prompt)))


def gone(asked: port.Submit, own_region: str = "") -> port.Refused:
    """Return the refusal of a request whose instance serves no longer."""
    return port.Refused(
        asked.number,
        404,
        "previous_response_not_found",
        "The instance that made the previous response does not serve any longer, and the response went with it: send the "
        "whole conversation as `input`.",
        retry_after_s=None,
        own_region=own_region,
    )
