"""The waiting queue: every request that is held, in one waiting set with a heap for each endpoint.

It is the only owner of who waits where. Beside a request stands how its prompt begins, as far as the gateway has said.
"""

import math

from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from controlplane.dispatch.requests.request import Request
from scheduling.lookahead.outlook import waiting_tokens
from scheduling.queueing.ordering import ORDERINGS, queue_key
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot, grow_waiting, in_order, push, remove
from scheduling.routing.prefix_affinity import allocate_affinity, grow_affinity


class WaitingQueue:
    """*began_s* is where the clock of the waiting set begins."""

    def __init__(self, topology: Topology, began_s: float) -> None:
        self.topology = topology
        self.arrays = allocate_waiting(16, 1024)
        self.affinity = allocate_affinity(topology.fleet.endpoint.size, 1024)
        self._began_s = began_s
        self._held: dict[int, Request] = {}  # by slot of the waiting set

    def __len__(self) -> int:
        return len(self._held)

    def count(self, endpoint: Endpoint) -> int:
        """Requests that wait for *endpoint*."""
        return int(self.arrays.size[endpoint.index]) if endpoint.index < self.arrays.size.size else 0

    def prompt_tokens(self, endpoint: Endpoint) -> int:
        """Tokens of the prompts that wait for *endpoint*."""
        return int(waiting_tokens(self.arrays, endpoint.index)) if self.count(endpoint) else 0

    def of(self, endpoint: Endpoint) -> list[Request]:
        """Those that wait for *endpoint*, in any order."""
        slots = self.arrays.heap[endpoint.index, : self.count(endpoint)] if self.count(endpoint) else ()
        return [self._held[int(slot)] for slot in slots]

    def in_order(self, endpoint: Endpoint) -> list[Request]:
        """Those that wait for *endpoint*, in the order in which they would leave."""
        if not self.count(endpoint):
            return []
        return [self._held[slot] for slot in in_order(self.arrays, endpoint.index).tolist()]

    def add(self, request: Request, endpoint: Endpoint) -> None:
        """Let *request* wait for *endpoint*, with a queue key by the ordering there."""
        self.fit()
        asked = request.asked
        arrival_s = asked.arrived_s - self._began_s
        deadline_s = arrival_s + (math.inf if asked.due_s is None else asked.due_s)
        # A prompt that we guessed larger than any instance must not hold up the queue for ever: vLLM knows better.
        room = endpoint.largest_kv_tokens
        prompt, output = asked.prompt_tokens, request.predicted_tokens
        if room and prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        request.expected_tokens, request.counted_tokens = prompt + output, 0
        request.expected_prompt = prompt
        key = _queue_key(endpoint, arrival_s, deadline_s, asked.priority, prompt, output)
        request.queue_key_s = key - arrival_s + asked.arrived_at
        request.slot = enqueue(
            self.arrays,
            endpoint.index,
            key,
            arrival_s,
            deadline_s,
            asked.priority,
            prompt,
            output,
            asked.tenant_id,
            -1,
            -1,
            -1,
        )
        self._held[request.slot] = request
        request.endpoint = endpoint
        self.note_prefix(request)

    def move(self, request: Request, target: Endpoint) -> None:
        """Let *request*, which waits, wait for *target* instead, with the queue key that it has by the ordering there."""
        arrays, slot = self.arrays, request.slot
        remove(arrays, slot)
        arrival_s, deadline_s = float(arrays.arrival_s[slot]), float(arrays.deadline_s[slot])
        prompt, output = int(arrays.prompt_tokens[slot]), int(arrays.output_tokens[slot])
        key = _queue_key(target, arrival_s, deadline_s, request.asked.priority, prompt, output)
        request.queue_key_s = key - arrival_s + request.asked.arrived_at
        push(arrays, target.index, slot, key)
        request.endpoint = target

    def take_out(self, slot: int) -> Request:
        """The request in *slot*, which waits no more, and may have been popped already."""
        request = self._held.pop(slot)
        free_slot(self.arrays, slot)
        request.slot = -1
        return request

    def fit(self) -> None:
        """Let the waiting set have a heap for every endpoint and a slot to spare: kernels index without a check."""
        endpoints, capacity = self.arrays.heap.shape
        if endpoints < len(self.topology.endpoints) or len(self._held) >= capacity:
            self.arrays = grow_waiting(
                self.arrays,
                2 * capacity if len(self._held) >= capacity else capacity,
                max(endpoints, self.topology.arrays.cursor.size),
            )
        instances, slots = self.topology.fleet.endpoint.size, self.arrays.key.size
        if self.affinity.matched.size < instances or self.affinity.noted_count.size < slots:
            self.affinity = grow_affinity(self.affinity, instances, slots)

    def note_prefix(self, request: Request) -> None:
        """Let the router by delay know how the prompt of *request*, which waits, begins; other routers do not look."""
        hashes = request.asked.prefix_hashes
        self.affinity.noted[request.slot, : len(hashes)] = hashes
        self.affinity.noted_count[request.slot] = len(hashes)
        self.affinity.block_tokens[request.slot] = request.asked.block_tokens


def _queue_key(
    endpoint: Endpoint, arrival_s: float, deadline_s: float, priority: int, prompt_tokens: int, output_tokens: int
) -> float:
    """The queue key of a request at *endpoint*, by its ordering and the profile that it goes by."""
    spec = endpoint.spec
    service_s = spec.profile.service_time_s(prompt_tokens, output_tokens)
    return queue_key(ORDERINGS[spec.ordering_policy], arrival_s, deadline_s, priority, service_s, spec.ordering_stretch)
