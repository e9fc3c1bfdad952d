"""What instances have of endpoints with request groups, as the global scheduler sees it."""

import math
from typing import Any, Final

from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.requests.request import Request
from controlplane.dispatch.requests.waiting_queue import WaitingQueue, first_due_of
from scheduling.fleet.profile import Profile
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.queueing.running import Running, running_of

LEAVING_S: Final = 5.0
"""After which one that was to be evicted is taken to stay: it had begun to emit what cannot be gone on with."""


def running_in(topology: Topology, queue: WaitingQueue, clock_s: float) -> Running:
    """*clock_s* is that of the dispatcher."""
    return running_of(
        _row(request, replica.slot, replica.endpoint.spec.profile, queue, clock_s)
        for replica in topology.replicas.values()
        if queue.grouped(replica.endpoint)
        for request in replica.requests
    )


def _row(request: Request, slot: int, profile: Profile, queue: WaitingQueue, clock_s: float) -> tuple[Any, ...]:
    """As the fields of `Running`. What an answer that is not streamed has emitted is not known, so it stays."""
    asked, arrival_s = request.asked, queue.now_s(request.asked.arrived_s)
    goes_on = asked.evictable or not request.output_tokens
    output = request.expected_tokens - request.expected_prompt
    due_s = first_due_of(profile, asked, request.expected_prompt, output)
    return (
        asked.number,
        slot,
        arrival_s + (due_s if due_s < math.inf else NO_DEADLINE_S),
        asked.allowed_s,
        asked.priority,
        asked.prompt_tokens,
        request.output_tokens,
        request.expected_tokens,
        request.evictions,
        goes_on and asked.streamed and asked.sequences == 1,
        request.evicting_s is not None and clock_s - request.evicting_s < LEAVING_S,
    )
