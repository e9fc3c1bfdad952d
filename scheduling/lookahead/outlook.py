"""What is coming to the instances of an endpoint in their next iterations (PreServe 4.3.2), as both clocks count it.

What decodes on an instance is projected: from its look-ahead map live (`maps.project`), from its sequences in a simulation.
What has not begun to decode is queued, and adds the tokens of its prompt to every iteration: what the instance was given
and has not prefilled, and its part of what waits for the endpoint. (PreServe gives requests to instances at once;
Pilothouse holds the queue, and what waits there is an overload all the same.) Output that is predicted of queued requests is
left out: a request that began now would have produced little of it by then.
"""

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import FleetArrays, memory_tokens
from scheduling.lookahead.rule import OVERLOAD_ABOVE, OVERLOAD_SHARE
from scheduling.queueing.waiting_set import WaitingArrays


@compiled
def waiting_tokens(waiting: WaitingArrays, endpoint: int) -> int:
    """Tokens of the prompts that wait for *endpoint*."""
    tokens = 0
    for at in range(waiting.size[endpoint]):
        tokens += waiting.prompt_tokens[waiting.heap[endpoint, at]]
    return int(tokens)


@compiled
def look(fleet: FleetArrays, instance: int, tokens: NDArray[np.int64], waits: float) -> tuple[bool, float]:
    """Whether *instance* is potentially overloaded, and its highest KV use, in the iterations that *tokens* projects, as
    many as its `LookAheadRule` says.

    *waits* are the tokens that wait for its endpoint, by its instances that accept work.
    """
    capacity = memory_tokens(fleet, instance)
    if capacity == 0:
        return False, 0.0  # not known yet
    queued = fleet.queued_prompt_tokens[instance] + waits
    above, peak, limit = 0, 0.0, fleet.look_ahead[instance, OVERLOAD_ABOVE] * capacity
    for at in range(tokens.size):
        held = tokens[at] + queued
        above += held > limit
        peak = max(peak, held)
    return above > fleet.look_ahead[instance, OVERLOAD_SHARE] * tokens.size, peak / capacity
